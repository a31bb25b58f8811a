// Attention residuals on Hopper: the mixture of N sources and the RMSNorm behind it, forward and backward.
//
// Blocks stay and take every gridDim.x-th token. A producer warp streams rows into a ring in shared memory by bulk
// copies, a token's rows one after the other, so that every row leaves device memory once; the consumer warps pass over
// a token's rows two or three times there, while the rows of the next token arrive. A lane has two vectors of eight
// numbers of each row. A token's sums have one order: bitwise-batch. Compiled by NVRTC (cuda.py), which defines
//   N sources; WIDTH numbers of a row, a multiple of 8 up to 8192; W type of the weights: float or bf16;
//   BLOCKS: blocks that share a multiprocessor; LATER: gradients of later uses are added;
//   FORWARD, BACKWARD, COMPLETED or MERGE: the kernel that is wanted.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};

constexpr int MOST = 9;                        // sources
constexpr int MIXERS = 24;                     // of one call
constexpr int GROUP = 4;                       // mixers that are worked on together
constexpr int VECTORS = WIDTH / 8;             // of a row
constexpr int WARPS = (VECTORS + 63) / 64;     // consumers
constexpr int LANES = 32 * WARPS;
constexpr int ROW = 2 * WIDTH;                 // bytes
constexpr int FIXED = 8192;                    // bytes in front of the ring
constexpr int SHARED_BYTES = BLOCKS == 2 ? 115712 : 232448;
constexpr int SLOTS = (SHARED_BYTES - FIXED) / ROW < 15 ? (SHARED_BYTES - FIXED) / ROW : 15;
constexpr int PADDED = N <= 1 ? 1 : N <= 2 ? 2 : N <= 4 ? 4 : N <= 8 ? 8 : 16;
constexpr u32 ALL = 0xffffffffu;
static_assert(WIDTH % 8 == 0 && WARPS <= 16 && N <= MOST && SLOTS >= N + 2, "not a supported size");

struct Arguments {
  const bf16 *sources[MOST], *later[MOST];
  bf16 *d_sources[MOST];
  const W *norm_w, *query_w, *out_w;
  bf16 *y;          // forward
  const bf16 *d_y;  // backward
  float *s, *r, *r_out, *d_w, *d_out_w;
  const W *norms[MIXERS], *queries[MIXERS];  // completed: each mixer's weights
  bf16 *h;                                   // completed: [mixers, tokens, WIDTH]; merge: [tokens, WIDTH]
  float *lse;                                // [mixers, tokens]
  i64 tokens;
  int mixers;
  float eps, out_eps;
};

struct Shared {
  u64 full[SLOTS], free[SLOTS];
  float part[2][WARPS][32];  // the warps' shares of a sum; the next sum has the other half
  float last[WARPS];
};
static_assert(sizeof(Shared) <= FIXED, "the ring would overlap");

// -- numbers ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float load1(const float *p) { return *p; }
__device__ __forceinline__ float load1(const bf16 *p) { return low(p->bits); }

// What a lane has of a row: numbers 8 (lane + LANES j) + i at [8 j + i].
struct Half {
  u32 pair[8];
};
__device__ __forceinline__ bool inside(int j) {
  return VECTORS == 2 * LANES || static_cast<int>(threadIdx.x) + LANES * j < VECTORS;
}
__device__ __forceinline__ Half load(const bf16 *row) {
  Half x;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside(j)) v = reinterpret_cast<const uint4 *>(row)[threadIdx.x + LANES * j];
    x.pair[4 * j] = v.x, x.pair[4 * j + 1] = v.y, x.pair[4 * j + 2] = v.z, x.pair[4 * j + 3] = v.w;
  }
  return x;
}
__device__ __forceinline__ void store(bf16 *row, const Half &x) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
    if (inside(j))
      reinterpret_cast<uint4 *>(row)[threadIdx.x + LANES * j] =
          make_uint4(x.pair[4 * j], x.pair[4 * j + 1], x.pair[4 * j + 2], x.pair[4 * j + 3]);
}
__device__ __forceinline__ float at(const Half &x, int i) { return i & 1 ? high(x.pair[i / 2]) : low(x.pair[i / 2]); }
__device__ __forceinline__ int place(int i) { return 8 * (threadIdx.x + LANES * (i / 8)) + i % 8; }

// Over the 2 STEP lanes that differ in the last bits alone.
template <int STEP = 16> __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = STEP; step > 0; step >>= 1) x += __shfl_xor_sync(ALL, x, step);
  return x;
}
template <int STEP> __device__ __forceinline__ float warp_most(float x) {
#pragma unroll
  for (int step = STEP; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
  return x;
}
// The warp's sums of P values at once: lane l returns that of value l % P.
template <int P, int HALF = P / 2> __device__ __forceinline__ float warp_sums(float (&x)[P]) {
  if constexpr (HALF > 0) {
    bool up = threadIdx.x & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      float other = __shfl_xor_sync(ALL, up ? x[i] : x[i + HALF], HALF);
      x[i] = (up ? x[i + HALF] : x[i]) + other;
    }
    return warp_sums<P, HALF / 2>(x);
  } else {
    float total = x[0];
#pragma unroll
    for (int step = P; step < 32; step <<= 1) total += __shfl_xor_sync(ALL, total, step);
    return total;
  }
}

// -- barriers, copies and the ring ------------------------------------------------------------------------------------

__device__ __forceinline__ u32 address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void wait(u64 &barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(address(&barrier)), "r"(parity)
                 : "memory");
}
__device__ __forceinline__ void arrive(u64 &barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}
__device__ __forceinline__ void expect(u64 &barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy(void *to, const void *from, int bytes, u64 &barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address(to)),
               "l"(from), "r"(bytes), "r"(address(&barrier))
               : "memory");
}
__device__ __forceinline__ void begin(u64 &barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// A barrier of the consumer warps.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(LANES) : "memory"); }

// A place in the stream of rows.
struct Cursor {
  int slot = 0;
  u32 round = 0;
  __device__ __forceinline__ void next() {
    if (++slot == SLOTS) slot = 0, round ^= 1;
  }
};
struct Ring {
  Shared &shared;
  unsigned char *rows;
  __device__ __forceinline__ bf16 *row(int slot) const { return reinterpret_cast<bf16 *>(rows + slot * ROW); }
  __device__ __forceinline__ void fetch(Cursor &c, const bf16 *from) const {  // one thread
    wait(shared.free[c.slot], c.round ^ 1);
    expect(shared.full[c.slot], ROW);
    copy(row(c.slot), from, ROW, shared.full[c.slot]);
    c.next();
  }
  __device__ __forceinline__ Half first(Cursor c) const {
    wait(shared.full[c.slot], c.round);
    return load(row(c.slot));
  }
  __device__ __forceinline__ Half again(Cursor c) const { return load(row(c.slot)); }
  __device__ __forceinline__ void release(Cursor c) const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(shared.free[c.slot]);
  }
};
__device__ __forceinline__ Ring start(unsigned char *memory) {
  Shared &shared = *reinterpret_cast<Shared *>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) begin(shared.full[i], 1), begin(shared.free[i], WARPS);
    publish();
  }
  __syncthreads();
  return {shared, memory + FIXED};
}

// The block's sums of P values: lane l of every warp gets that of value l % P, the warps' shares added in order.
// Two calls without a `meet` between them need different halves.
template <int P> __device__ __forceinline__ float block_sums(Shared &shared, float (&x)[P], int half = 0) {
  int lane = threadIdx.x & 31;
  shared.part[half][threadIdx.x >> 5][lane] = warp_sums(x);
  meet();
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += shared.part[half][w][lane];
  return total;
}
__device__ __forceinline__ float block_sum(Shared &shared, float x) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) shared.last[threadIdx.x >> 5] = x;
  meet();
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += shared.last[w];
  return total;
}

// A token's weights from its scores, lane i that of source i; lanes past N get 0.
__device__ __forceinline__ float softmax(float s) {
  bool mine = (threadIdx.x & 31) < N;
  float largest = warp_most<PADDED / 2>(mine ? s : -3.4e38f);
  float e = mine ? __expf(s - largest) : 0.f, sum = warp_sum<PADDED / 2>(e);
  return mine ? e / sum : 0.f;
}
__device__ __forceinline__ float product(const Arguments &a, int i) {
  return inside(i / 8) ? load1(a.norm_w + place(i)) * load1(a.query_w + place(i)) : 0.f;
}
__device__ __forceinline__ float rounded(float x) { return low(narrow(x, 0.f)); }
__device__ __forceinline__ float outer(const Arguments &a, int i) {
  return inside(i / 8) ? load1(a.out_w + place(i)) : 0.f;
}

__device__ __forceinline__ void load8(float (&x)[8], const float *p) {
#pragma unroll
  for (int k = 0; k < 8; k += 4) {
    float4 v = *reinterpret_cast<const float4 *>(p + k);
    x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
  }
}
__device__ __forceinline__ void load8(float (&x)[8], const bf16 *p) {
  uint4 v = *reinterpret_cast<const uint4 *>(p);
  u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) x[2 * k] = low(pairs[k]), x[2 * k + 1] = high(pairs[k]);
}
// Eight numbers of w of one of several mixers.
__device__ __forceinline__ void weights(float (&w)[8], const Arguments &a, int mixer, int j) {
  float query[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) w[k] = 0;
  if (!inside(j)) return;
  load8(w, a.norms[mixer] + place(8 * j)), load8(query, a.queries[mixer] + place(8 * j));
#pragma unroll
  for (int k = 0; k < 8; ++k) w[k] *= query[k];
}

// -- kernels ----------------------------------------------------------------------------------------------------------

#ifdef FORWARD
// y = rms_norm(h; out_w), h = sum_i p_i V_i; s, r [T, N] and r_out [T] are kept.
extern "C" __global__ void __launch_bounds__(LANES + 32, BLOCKS) forward(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  Ring ring = start(memory);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Cursor cursor;
  if (warp == WARPS) {
    if (lane == 0)
      for (i64 t = blockIdx.x; t < a.tokens; t += gridDim.x)
#pragma unroll
        for (int i = 0; i < N; ++i) ring.fetch(cursor, a.sources[i] + t * WIDTH);
    return;
  }
  float w[16];
  Half out_w;
#pragma unroll
  for (int i = 0; i < 16; ++i) w[i] = product(a, i);
#pragma unroll
  for (int i = 0; i < 8; ++i) out_w.pair[i] = narrow(outer(a, 2 * i), outer(a, 2 * i + 1));
  for (i64 t = blockIdx.x; t < a.tokens; t += gridDim.x) {
    float sums[2 * PADDED];  // squares, then products with w
#pragma unroll
    for (int i = 0; i < 2 * PADDED; ++i) sums[i] = 0;
    Cursor c = cursor;
#pragma unroll
    for (int i = 0; i < N; ++i, c.next()) {
      Half x = ring.first(c);
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        sums[i] = fmaf(at(x, k), at(x, k), sums[i]);
        sums[PADDED + i] = fmaf(at(x, k), w[k], sums[PADDED + i]);
      }
    }
    float square = block_sums(ring.shared, sums);
    float dot = __shfl_xor_sync(ALL, square, PADDED);
    float r = rsqrtf(square / WIDTH + a.eps), s = dot * r, p = softmax(s);
    if (warp == 0 && lane < N) a.s[t * N + lane] = s, a.r[t * N + lane] = r;
    float h[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) h[k] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i, cursor.next()) {
      Half x = ring.again(cursor);
      float p_i = __shfl_sync(ALL, p, i);
#pragma unroll
      for (int k = 0; k < 16; ++k) h[k] = fmaf(at(x, k), p_i, h[k]);
      ring.release(cursor);
    }
    float total = 0;
#pragma unroll
    for (int k = 0; k < 16; ++k) h[k] = rounded(h[k]), total = fmaf(h[k], h[k], total);
    float r_out = rsqrtf(block_sum(ring.shared, total) / WIDTH + a.out_eps);
    if (threadIdx.x == 0) a.r_out[t] = r_out;
    Half y;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      // Rounded before the weight, as rms_norm does.
      u32 normal = narrow(h[2 * k] * r_out, h[2 * k + 1] * r_out);
      y.pair[k] = narrow(low(normal) * low(out_w.pair[k]), high(normal) * high(out_w.pair[k]));
    }
    store(a.y + t * WIDTH, y);
  }
}
#endif

#ifdef BACKWARD
// The gradients of the sources, and each block's share of those of w and out_w (d_w, d_out_w [gridDim.x, WIDTH]).
extern "C" __global__ void __launch_bounds__(LANES + 32, 1) backward(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  Ring ring = start(memory);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Cursor cursor;
  if (warp == WARPS) {
    if (lane == 0)
      for (i64 t = blockIdx.x; t < a.tokens; t += gridDim.x) {
        ring.fetch(cursor, a.d_y + t * WIDTH);
#pragma unroll
        for (int i = 0; i < N; ++i) ring.fetch(cursor, a.sources[i] + t * WIDTH);
        if (LATER)
#pragma unroll
          for (int i = 0; i < N; ++i) ring.fetch(cursor, a.later[i] + t * WIDTH);
      }
    return;
  }
  float w[16], d_w[16], d_out_w[16];
  Half out_w;
#pragma unroll
  for (int i = 0; i < 16; ++i) w[i] = product(a, i), d_w[i] = 0, d_out_w[i] = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) out_w.pair[i] = narrow(outer(a, 2 * i), outer(a, 2 * i + 1));
  int mine = lane < N ? lane : 0;
  i64 t = blockIdx.x;
  float s_next = 0, r_next = 0, out_next = 0;
  if (t < a.tokens) s_next = a.s[t * N + mine], r_next = a.r[t * N + mine], out_next = a.r_out[t];
  for (; t < a.tokens; t += gridDim.x) {
    float s = s_next, r = r_next, r_out = out_next;
    i64 after = t + gridDim.x;
    if (after < a.tokens) s_next = a.s[after * N + mine], r_next = a.r[after * N + mine], out_next = a.r_out[after];
    float p = softmax(s);
    float d_h[16], h[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) h[k] = 0;
    Half d = ring.first(cursor);
    ring.release(cursor);
    cursor.next();
    Cursor c = cursor;
#pragma unroll
    for (int i = 0; i < N; ++i, c.next()) {
      Half x = ring.first(c);
      float p_i = __shfl_sync(ALL, p, i);
#pragma unroll
      for (int k = 0; k < 16; ++k) h[k] = fmaf(at(x, k), p_i, h[k]);
    }
    float total = 0;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      h[k] = rounded(h[k]);
      d_out_w[k] = fmaf(at(d, k) * r_out, h[k], d_out_w[k]);
      d_h[k] = at(d, k) * at(out_w, k);
      total = fmaf(d_h[k], h[k], total);
    }
    float on_h = block_sum(ring.shared, total) / WIDTH * r_out * r_out * r_out;
#pragma unroll
    for (int k = 0; k < 16; ++k) d_h[k] = d_h[k] * r_out - h[k] * on_h;
    float sums[PADDED];
#pragma unroll
    for (int i = 0; i < PADDED; ++i) sums[i] = 0;
    c = cursor;
#pragma unroll
    for (int i = 0; i < N; ++i, c.next()) {
      Half x = ring.again(c);
#pragma unroll
      for (int k = 0; k < 16; ++k) sums[i] = fmaf(at(x, k), d_h[k], sums[i]);
    }
    float slope = block_sums(ring.shared, sums);
    // s = r <w, x>, so ds/dx = r w - s r^2 x / D. Lanes past N have p = 0.
    float on_w = (slope - warp_sum(slope * p)) * p * r, on_x = -on_w * r * s / WIDTH;
    Cursor later = c;
#pragma unroll
    for (int i = 0; i < N; ++i, cursor.next()) {
      Half x = ring.again(cursor), add, d_x;
      if (LATER) add = ring.first(later);
      float p_i = __shfl_sync(ALL, p, i), w_i = __shfl_sync(ALL, on_w, i), x_i = __shfl_sync(ALL, on_x, i);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        float both[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          int m = 2 * k + j;
          d_w[m] = fmaf(at(x, m), w_i, d_w[m]);
          both[j] = fmaf(d_h[m], p_i, fmaf(w[m], w_i, fmaf(at(x, m), x_i, LATER ? at(add, m) : 0.f)));
        }
        d_x.pair[k] = narrow(both[0], both[1]);
      }
      ring.release(cursor);
      if (LATER) ring.release(later), later.next();
      store(a.d_sources[i] + t * WIDTH, d_x);
    }
    if (LATER) cursor = later;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (inside(i / 8)) {
      a.d_w[static_cast<i64>(blockIdx.x) * WIDTH + place(i)] = d_w[i];
      a.d_out_w[static_cast<i64>(blockIdx.x) * WIDTH + place(i)] = d_out_w[i];
    }
}
#endif

// -- without gradients: the completed sources once for several mixers, then each mixer with the one that changes -------

#ifdef COMPLETED
// h[m] and lse[m]: the mixture over the sources, and log sum e^s, of every mixer. A block has one group of mixers, whose
// weights stay in registers; the blocks of other groups find a token's rows in the L2 cache.
extern "C" __global__ void __launch_bounds__(LANES + 32, 1) completed(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  static_assert(GROUP * PADDED <= 32, "the completed sources are at most eight");
  Ring ring = start(memory);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int groups = (a.mixers + GROUP - 1) / GROUP, group = blockIdx.x % groups, stride = gridDim.x / groups;
  i64 begin = blockIdx.x / groups;
  Cursor cursor;
  if (warp == WARPS) {
    if (lane == 0)
      for (i64 t = begin; t < a.tokens; t += stride)
#pragma unroll
        for (int i = 0; i < N; ++i) ring.fetch(cursor, a.sources[i] + t * WIDTH);
    return;
  }
  float w[GROUP][2][8];
#pragma unroll
  for (int m = 0; m < GROUP; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j) weights(w[m][j], a, min(group * GROUP + m, a.mixers - 1), j);
  for (i64 t = begin; t < a.tokens; t += stride) {
    float squares[PADDED], dots[GROUP * PADDED];
#pragma unroll
    for (int i = 0; i < PADDED; ++i) squares[i] = 0;
#pragma unroll
    for (int i = 0; i < GROUP * PADDED; ++i) dots[i] = 0;
    Cursor c = cursor;
#pragma unroll
    for (int i = 0; i < N; ++i, c.next()) {
      Half x = ring.first(c);
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        squares[i] = fmaf(at(x, k), at(x, k), squares[i]);
#pragma unroll
        for (int m = 0; m < GROUP; ++m)
          dots[m * PADDED + i] = fmaf(at(x, k), w[m][k / 8][k % 8], dots[m * PADDED + i]);
      }
    }
    float square = block_sums(ring.shared, squares, 0), dot = block_sums(ring.shared, dots, 1);
    // Lane m PADDED + i has source i of mixer m.
    float s = dot * rsqrtf(square / WIDTH + a.eps);
    bool mine = lane % PADDED < N;
    float largest = mine ? s : -3.4e38f;
#pragma unroll
    for (int step = 1; step < PADDED; step <<= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, step));
    float e = mine ? __expf(s - largest) : 0.f, z = e;
#pragma unroll
    for (int step = 1; step < PADDED; step <<= 1) z += __shfl_xor_sync(ALL, z, step);
    float p = e / z;
    int mixer = group * GROUP + lane / PADDED;
    if (warp == 0 && lane < GROUP * PADDED && lane % PADDED == 0 && mixer < a.mixers)
      a.lse[mixer * a.tokens + t] = largest + __logf(z);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float h[GROUP][8];
#pragma unroll
      for (int m = 0; m < GROUP; ++m)
#pragma unroll
        for (int k = 0; k < 8; ++k) h[m][k] = 0;
      c = cursor;
#pragma unroll
      for (int i = 0; i < N; ++i, c.next()) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (inside(j)) v = reinterpret_cast<const uint4 *>(ring.row(c.slot))[threadIdx.x + LANES * j];
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int m = 0; m < GROUP; ++m) {
          float p_i = __shfl_sync(ALL, p, m * PADDED + i);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            h[m][2 * k] = fmaf(low(pairs[k]), p_i, h[m][2 * k]);
            h[m][2 * k + 1] = fmaf(high(pairs[k]), p_i, h[m][2 * k + 1]);
          }
        }
        if (j == 1) ring.release(c);
      }
#pragma unroll
      for (int m = 0; m < GROUP; ++m)
        if (inside(j) && group * GROUP + m < a.mixers)
          reinterpret_cast<uint4 *>(a.h + ((group * GROUP + m) * a.tokens + t) * WIDTH)[threadIdx.x + LANES * j] =
              make_uint4(narrow(h[m][0], h[m][1]), narrow(h[m][2], h[m][3]), narrow(h[m][4], h[m][5]),
                         narrow(h[m][6], h[m][7]));
    }
    cursor = c;
  }
}
#endif

#ifdef MERGE
// y = rms_norm(h + p (live - h); out_w), p the weight of the live sum, sources[0], against lse.
extern "C" __global__ void __launch_bounds__(LANES + 32, BLOCKS) merge(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  Ring ring = start(memory);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Cursor cursor;
  if (warp == WARPS) {
    if (lane == 0)
      for (i64 t = blockIdx.x; t < a.tokens; t += gridDim.x)
        ring.fetch(cursor, a.sources[0] + t * WIDTH), ring.fetch(cursor, a.h + t * WIDTH);
    return;
  }
  float w[16];
  Half out_w;
#pragma unroll
  for (int i = 0; i < 16; ++i) w[i] = product(a, i);
#pragma unroll
  for (int i = 0; i < 8; ++i) out_w.pair[i] = narrow(outer(a, 2 * i), outer(a, 2 * i + 1));
  i64 t = blockIdx.x;
  float lse_next = t < a.tokens ? a.lse[t] : 0.f;
  for (; t < a.tokens; t += gridDim.x) {
    float lse = lse_next;
    if (t + gridDim.x < a.tokens) lse_next = a.lse[t + gridDim.x];
    Half live = ring.first(cursor);
    ring.release(cursor), cursor.next();
    float sums[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 16; ++k)
      sums[0] = fmaf(at(live, k), at(live, k), sums[0]), sums[1] = fmaf(at(live, k), w[k], sums[1]);
    float square = block_sums(ring.shared, sums);
    float dot = __shfl_xor_sync(ALL, square, 1);
    float s = dot * rsqrtf(square / WIDTH + a.eps), p = 1.f / (1.f + __expf(lse - s));
    p = __shfl_sync(ALL, p, 0);
    Half x = ring.first(cursor);
    ring.release(cursor), cursor.next();
    float h[16], total = 0;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      h[k] = rounded(fmaf(p, at(live, k) - at(x, k), at(x, k)));
      total = fmaf(h[k], h[k], total);
    }
    float r_out = rsqrtf(block_sum(ring.shared, total) / WIDTH + a.out_eps);
    Half y;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      u32 normal = narrow(h[2 * k] * r_out, h[2 * k + 1] * r_out);
      y.pair[k] = narrow(low(normal) * low(out_w.pair[k]), high(normal) * high(out_w.pair[k]));
    }
    store(a.y + t * WIDTH, y);
  }
}
#endif
