// KDA decode on Hopper: what decode.py specifies, for K = V = 128, one block of four warps a (head, sequence).
//
// The matrix of a head (64 KB) comes into shared memory by four bulk copies, 32 rows each, while the warps prepare the
// token: warp 0 q, warp 1 k, warp 2 the gate, warp 3 v, four channels a lane. Then every warp reads its 32 rows, four
// columns a lane. All sums have one fixed order and one token's instructions do not depend on how many tokens a launch
// has: a verification of n drafts equals n decode steps bit for bit. Compiled by NVRTC (decode_cuda.py), which defines
//   X inputs and output, B beta logits, W convolution weights, P norm weight, WINDOW, RING: float or bf16;
//   SAFE: the gate is bounded.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};

constexpr int DIM = 128;
constexpr int ROWS = 32;       // rows of the matrix a warp
constexpr int CAPACITY = 71;   // tail entries a slot
constexpr int GRID = 64;       // tokens between two matrices
constexpr int BLOCK = 16;      // entries with a common decay origin
constexpr float CENTRE = 40.f; // nats

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }
__device__ __forceinline__ float4 load4(const bf16 *p) {
  uint2 raw = *reinterpret_cast<const uint2 *>(p);
  return make_float4(wide(raw.x & 0xffff), wide(raw.x >> 16), wide(raw.y & 0xffff), wide(raw.y >> 16));
}
__device__ __forceinline__ float load1(const float *p) { return *p; }
__device__ __forceinline__ float load1(const bf16 *p) { return wide(p->bits); }
__device__ __forceinline__ void store4(float *p, float4 x) { *reinterpret_cast<float4 *>(p) = x; }
__device__ __forceinline__ void store4(bf16 *p, float4 x) {
  *reinterpret_cast<uint2 *>(p) = make_uint2(narrow(x.x, x.y), narrow(x.z, x.w));
}
__device__ __forceinline__ void store1(float *p, float x) { *p = x; }
__device__ __forceinline__ void store1(bf16 *p, float x) { p->bits = static_cast<u16>(narrow(x, 0.f)); }
__device__ __forceinline__ float rounded(float x, const float *) { return x; }
__device__ __forceinline__ float rounded(float x, const bf16 *) { return wide(narrow(x, 0.f) & 0xffff); }

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float dot(float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}
__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 times(float4 a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
__device__ __forceinline__ void add(float4 &a, float4 b) {
  a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
}
__device__ __forceinline__ void add(float4 &a, float4 b, float by) {
  a.x = fmaf(b.x, by, a.x), a.y = fmaf(b.y, by, a.y), a.z = fmaf(b.z, by, a.z), a.w = fmaf(b.w, by, a.w);
}
__device__ __forceinline__ float4 exp4(float4 x, float plus) {
  return make_float4(__expf(x.x + plus), __expf(x.y + plus), __expf(x.z + plus), __expf(x.w + plus));
}

struct Arguments {
  const X *q, *k, *v, *g_raw, *out_gate;
  const B *beta_logit;
  const W *conv_q, *conv_k, *conv_v;
  const float *A_log, *dt_bias;
  const P *norm;
  float *matrix;
  WINDOW *window;
  const int *slots, *counts, *targets;  // counts: accepted tokens (in-place form, or null), or entries in the tail
  RING *k_ring, *u_ring;
  float *g_ring;
  X *o;
  i64 q_stride, k_stride, v_stride, g_stride, gate_stride, beta_stride;
  int heads, tokens, store;
  float eps, lower_bound;
};

struct Shared {
  union {
    struct {
      float part[2][4][DIM];        // each warp's share of S^T k and S^T q
      float k_read[DIM], q_read[DIM];  // k and q as the matrix meets them
    };
    struct {
      float keys[DIM][8], values[8][DIM];  // fold
    };
  };
  float q[DIM], k[DIM], decay[DIM], v[DIM], u[DIM];
  float squares[4], beta;
  alignas(8) u64 arrived[4];
};

__device__ __forceinline__ u32 address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Thread 0: start the four copies of a head's matrix.
__device__ __forceinline__ void fetch(float *S, const float *matrix, Shared &shared) {
  for (int i = 0; i < 4; ++i) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&shared.arrived[i])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  for (int i = 0; i < 4; ++i) {
    u32 barrier = address(&shared.arrived[i]);
    constexpr int bytes = ROWS * DIM * 4;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(S + i * ROWS * DIM)),
                 "l"(matrix + i * ROWS * DIM), "r"(bytes), "r"(barrier)
                 : "memory");
  }
}

__device__ __forceinline__ void wait(Shared &shared, int chunk) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(address(&shared.arrived[chunk]))
        : "memory");
}

// Four channels of pre-convolution row `row`: a token of this launch, or row + 3 of the window if negative.
__device__ __forceinline__ float4 history(const X *x, i64 stride, const WINDOW *window, i64 window_stride, int row) {
  if (row < 0) return load4(window + (row + 3) * window_stride);
  float4 a = load4(x + row * stride);
  const WINDOW *kind = nullptr;
  return make_float4(rounded(a.x, kind), rounded(a.y, kind), rounded(a.z, kind), rounded(a.w, kind));
}

// SiLU of the convolution at token i, four channels; all pointers are at the lane's first channel.
__device__ __forceinline__ float4 convolve(const X *x, i64 stride, const WINDOW *window, i64 window_stride,
                                           const W *taps, int i) {
  float4 past[3];
#pragma unroll
  for (int j = 0; j < 3; ++j) past[j] = history(x, stride, window, window_stride, i + j - 3);
  float4 now = load4(x + i * stride);
  float out[4];
  const float *p0 = &past[0].x, *p1 = &past[1].x, *p2 = &past[2].x, *p3 = &now.x;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float4 w = load4(taps + 4 * c);
    float y = fmaf(p3[c], w.w, fmaf(p2[c], w.z, fmaf(p1[c], w.y, p0[c] * w.x)));
    out[c] = y * sigmoid(y);
  }
  return make_float4(out[0], out[1], out[2], out[3]);
}

__device__ __forceinline__ void shift(const X *x, i64 stride, WINDOW *window, i64 window_stride, int count) {
  float4 rows[3];
#pragma unroll
  for (int j = 0; j < 3; ++j) rows[j] = history(x, stride, window, window_stride, count + j - 3);
#pragma unroll
  for (int j = 0; j < 3; ++j) store4(window + j * window_stride, rows[j]);
}

__device__ __forceinline__ float log_decay(const Arguments &a, float x, float rate) {
  if (SAFE) return a.lower_bound * sigmoid(rate * x);
  return -rate * (fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x))));
}

// One block's place in the problem.
struct Place {
  int lane, warp, head, sequence, channel;
  i64 slab, first, window_stride;
  const X *x;         // this warp's convolved input at its first token (warps 0, 1, 3)
  i64 x_stride;
  WINDOW *window;
  const W *taps;

  __device__ __forceinline__ Place(const Arguments &a, int slot) {
    lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x, sequence = blockIdx.y, channel = 4 * lane;
    slab = static_cast<i64>(slot) * a.heads + head;
    first = static_cast<i64>(sequence) * a.tokens;
    i64 inner = static_cast<i64>(a.heads) * DIM;
    window_stride = 3 * inner;
    int part = warp == 3 ? 2 : warp;  // the window's order is q, k, v
    i64 at = head * DIM + channel;
    window = a.window + 3 * window_stride * slot + part * inner + at;
    x_stride = warp == 0 ? a.q_stride : warp == 1 ? a.k_stride : a.v_stride;
    x = (warp == 0 ? a.q : warp == 1 ? a.k : a.v) + first * x_stride + at;
    taps = (warp == 0 ? a.conv_q : warp == 1 ? a.conv_k : a.conv_v) + at * 4;
  }
};

// Zero outputs of tokens from .. tokens - 1.
__device__ __forceinline__ void blank(const Arguments &a, int from) {
  for (int i = from; i < a.tokens; ++i)
    store1(a.o + ((static_cast<i64>(blockIdx.y) * a.tokens + i) * a.heads + blockIdx.x) * DIM + threadIdx.x, 0.f);
}

// Warps 0, 1, 3: q, k, v of token i into shared memory. Warp 2: returns its four log decays.
__device__ __forceinline__ float4 prepare(const Arguments &a, const Place &at, Shared &shared, int i) {
  if (at.warp == 2) {
    float rate = __expf(a.A_log[at.head]);
    float4 x = load4(a.g_raw + (at.first + i) * a.g_stride + at.head * DIM + at.channel);
    add(x, load4(a.dt_bias + at.head * DIM + at.channel));
    if (at.lane == 0) shared.beta = sigmoid(load1(a.beta_logit + (at.first + i) * a.beta_stride + at.head));
    return make_float4(log_decay(a, x.x, rate), log_decay(a, x.y, rate), log_decay(a, x.z, rate),
                       log_decay(a, x.w, rate));
  }
  float4 x = convolve(at.x, at.x_stride, at.window, at.window_stride, at.taps, i);
  if (at.warp != 3) x = times(x, rsqrtf(warp_sum(dot(x, x)) + 1e-6f) * (at.warp == 0 ? 0.08838834764831845f : 1.f));
  store4((at.warp == 0 ? shared.q : at.warp == 1 ? shared.k : shared.v) + at.channel, x);
  return x;
}

// Add this warp's rows of S^T k and S^T q (k, q decayed to the token) to its shares, and pass them to the block.
__device__ __forceinline__ void read_matrix(const float *S, const Place &at, Shared &shared, float4 by_k, float4 by_q) {
  int row = at.warp * ROWS + at.lane;
  shared.k_read[row] = shared.k[row] * shared.decay[row];
  shared.q_read[row] = shared.q[row] * shared.decay[row];
  __syncwarp();
#pragma unroll 4
  for (int c = at.warp * ROWS; c < at.warp * ROWS + ROWS; c += 4) {
    float4 k4 = load4(shared.k_read + c), q4 = load4(shared.q_read + c);
    float4 s;
    s = load4(S + (c + 0) * DIM + at.channel), add(by_k, s, k4.x), add(by_q, s, q4.x);
    s = load4(S + (c + 1) * DIM + at.channel), add(by_k, s, k4.y), add(by_q, s, q4.y);
    s = load4(S + (c + 2) * DIM + at.channel), add(by_k, s, k4.z), add(by_q, s, q4.z);
    s = load4(S + (c + 3) * DIM + at.channel), add(by_k, s, k4.w), add(by_q, s, q4.w);
  }
  store4(shared.part[0][at.warp] + at.channel, by_k);
  store4(shared.part[1][at.warp] + at.channel, by_q);
}

// u and the normalised, gated output of token i; a thread a column. Between two barriers of the block.
__device__ __forceinline__ float finish(const Arguments &a, const Place &at, Shared &shared, int i) {
  int t = threadIdx.x;
  i64 token = at.first + i;
  float gate = load1(a.out_gate + token * a.gate_stride + at.head * DIM + t), norm = load1(a.norm + t);
  float along = warp_sum(dot(load4(shared.q + at.channel), load4(shared.k + at.channel)));
  __syncthreads();
  float(*r)[DIM] = shared.part[0], (*o)[DIM] = shared.part[1];
  float u = shared.beta * (shared.v[t] - ((r[0][t] + r[1][t]) + (r[2][t] + r[3][t])));
  float y = fmaf(along, u, (o[0][t] + o[1][t]) + (o[2][t] + o[3][t]));
  shared.u[t] = u;
  float squares = warp_sum(y * y);
  if (at.lane == 0) shared.squares[at.warp] = squares;
  __syncthreads();
  squares = (shared.squares[0] + shared.squares[1]) + (shared.squares[2] + shared.squares[3]);
  y = y * rsqrtf(squares * (1.f / DIM) + a.eps) * norm * sigmoid(gate);
  store1(a.o + (token * a.heads + at.head) * DIM + t, y);
  return u;
}

extern "C" __global__ void __launch_bounds__(128, 3) step(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) float S[];
  __shared__ Shared shared;
  int slot = a.slots[blockIdx.y];
  int count = slot < 0 ? 0 : a.counts ? a.counts[blockIdx.y] : a.tokens;
  if (count == 0) return blank(a, 0);
  Place at(a, slot);
  float *matrix = a.matrix + at.slab * DIM * DIM;
  if (threadIdx.x == 0) fetch(S, matrix, shared);
  for (int i = 0; i < count; ++i) {
    float4 g = prepare(a, at, shared, i);
    if (at.warp == 2) store4(shared.decay + at.channel, exp4(g, 0.f));
    __syncthreads();
    if (i == 0) wait(shared, at.warp);
    read_matrix(S, at, shared, make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0));
    finish(a, at, shared, i);
    bool last = i + 1 == count;
    if (!last || a.store) {
      float4 u = load4(shared.u + at.channel);
#pragma unroll 2
      for (int c = at.warp * ROWS; c < at.warp * ROWS + ROWS; c += 4) {
        float4 k4 = load4(shared.k + c), d4 = load4(shared.decay + c);
        const float *k = &k4.x, *d = &d4.x;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          i64 where = (c + j) * DIM + at.channel;
          float4 s = times(load4(S + where), d[j]);
          add(s, u, k[j]);
          if (last)
            __stcs(reinterpret_cast<float4 *>(matrix + where), s);
          else
            store4(S + where, s);
        }
      }
    }
    __syncthreads();
  }
  if (a.store && at.warp != 2) shift(at.x, at.x_stride, at.window, at.window_stride, count);
  blank(a, count);
}

// The 64 entries of a full tail into the matrix in S, then to `target`; entries beyond move to the tail's start.
__device__ void fold_into(const Arguments &a, const Place &at, Shared &shared, float *S, float *target, int length) {
  const RING *k_ring = a.k_ring + at.slab * CAPACITY * DIM, *u_ring = a.u_ring + at.slab * CAPACITY * DIM;
  const float *g_ring = a.g_ring + at.slab * CAPACITY * DIM;
  int t = threadIdx.x;
  float total[4], after = 0.f;
#pragma unroll
  for (int b = 0; b < 4; ++b) total[b] = g_ring[(b * BLOCK + BLOCK - 1) * DIM + t];
  shared.decay[t] = __expf((total[0] + total[1]) + (total[2] + total[3]));
  __syncthreads();
#pragma unroll 4
  for (int c = at.warp * ROWS; c < at.warp * ROWS + ROWS; ++c) {
    float *s = S + c * DIM + at.channel;
    store4(s, times(load4(s), shared.decay[c]));
  }
#pragma unroll 1
  for (int b = 3; b >= 0; --b) {
    float end = b == 3 ? total[3] : b == 2 ? total[2] : b == 1 ? total[1] : total[0];
    float scale = __expf(after);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      int entry = b * BLOCK + half * 8;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float from = SAFE ? -CENTRE : g_ring[(entry + j) * DIM + t];
        shared.keys[t][j] = load1(k_ring + (entry + j) * DIM + t) * __expf(end - from) * scale;
        shared.values[j][t] = load1(u_ring + (entry + j) * DIM + t);
      }
      __syncthreads();
      float4 u[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) u[j] = load4(shared.values[j] + at.channel);
#pragma unroll 4
      for (int c = at.warp * ROWS; c < at.warp * ROWS + ROWS; ++c) {
        float *where = S + c * DIM + at.channel;
        float4 s = load4(where), k0 = load4(shared.keys[c]), k1 = load4(shared.keys[c] + 4);
        add(s, u[0], k0.x), add(s, u[1], k0.y), add(s, u[2], k0.z), add(s, u[3], k0.w);
        add(s, u[4], k1.x), add(s, u[5], k1.y), add(s, u[6], k1.z), add(s, u[7], k1.w);
        store4(where, s);
      }
    }
    after += end;
  }
#pragma unroll 4
  for (int c = at.warp * ROWS; c < at.warp * ROWS + ROWS; ++c)
    __stcs(reinterpret_cast<float4 *>(target + c * DIM + at.channel), load4(S + c * DIM + at.channel));
  __syncthreads();
  i64 ring = at.slab * CAPACITY * DIM + t;
  for (int j = GRID; j < length; ++j) {
    a.k_ring[ring + (j - GRID) * DIM] = a.k_ring[ring + j * DIM];
    a.u_ring[ring + (j - GRID) * DIM] = a.u_ring[ring + j * DIM];
    a.g_ring[ring + (j - GRID) * DIM] = a.g_ring[ring + j * DIM];
  }
}

extern "C" __global__ void __launch_bounds__(128) fold(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) float S[];
  __shared__ Shared shared;
  int slot = a.slots[blockIdx.y], length = a.counts[blockIdx.y];
  if (slot < 0 || length < GRID) return;
  Place at(a, slot);
  if (threadIdx.x == 0) fetch(S, a.matrix + at.slab * DIM * DIM, shared);
  __syncthreads();
  for (int i = 0; i < 4; ++i) wait(shared, i);
  i64 target = static_cast<i64>(a.targets[blockIdx.y]) * a.heads + at.head;
  fold_into(a, at, shared, S, a.matrix + target * DIM * DIM, length);
}

// Four entries of a 16-entry block, one in four going to each warp, and the block's decay.
struct Entries {
  float4 keys[4], values[4], total;
  float4 each[4];

  __device__ __forceinline__ void load(const Arguments &a, const RING *k, const RING *u, const float *g, int block,
                                       int entry, int warp, int channel, bool own) {
    if (block < 0) return;
    if (!own) total = load4(g + (block * BLOCK + BLOCK - 1) * DIM + channel);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int at = block * BLOCK + 4 * j + warp;
      keys[j] = values[j] = each[j] = make_float4(0, 0, 0, 0);
      if (at < entry) {
        keys[j] = load4(k + at * DIM + channel);
        values[j] = load4(u + at * DIM + channel);
        if (!SAFE) each[j] = load4(g + at * DIM + channel);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(128, 3) tail_step(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) float S[];
  __shared__ Shared shared;
  int slot = a.slots[blockIdx.y];
  if (slot < 0) return blank(a, 0);
  Place at(a, slot);
  float *matrix = a.matrix + at.slab * DIM * DIM;
  if (threadIdx.x == 0) fetch(S, matrix, shared);
  int length = a.counts[blockIdx.y];
  RING *k_ring = a.k_ring + at.slab * CAPACITY * DIM, *u_ring = a.u_ring + at.slab * CAPACITY * DIM;
  float *g_ring = a.g_ring + at.slab * CAPACITY * DIM;
  for (int i = 0; i < a.tokens; ++i) {
    int entry = length + i, own = entry / BLOCK;
    Entries now, next;
    now.load(a, k_ring, u_ring, g_ring, own, entry, at.warp, at.channel, true);
    float4 g = prepare(a, at, shared, i);
    if (at.warp == 2) {
      if (entry % BLOCK) add(g, load4(g_ring + (entry - 1) * DIM + at.channel));
      store4(g_ring + entry * DIM + at.channel, g);
      store4(shared.u + at.channel, g);  // u is not yet there: its place holds the decay within the block
      for (int b = own - 1; b >= 0; --b) add(g, load4(g_ring + (b * BLOCK + BLOCK - 1) * DIM + at.channel));
      store4(shared.decay + at.channel, exp4(g, 0.f));
    }
    __syncthreads();
    float4 local = load4(shared.u + at.channel), run = make_float4(0, 0, 0, 0);
    float4 k = load4(shared.k + at.channel), q = load4(shared.q + at.channel);
    float4 by_k = make_float4(0, 0, 0, 0), by_q = by_k;
    float mine = shared.k[threadIdx.x];
    if (SAFE) mine *= __expf(-CENTRE - shared.u[threadIdx.x]);
    store1(k_ring + entry * DIM + threadIdx.x, mine);
    now.total = local;
#pragma unroll 1
    for (int block = own; block >= 0; --block) {
      next.load(a, k_ring, u_ring, g_ring, block - 1, entry, at.warp, at.channel, false);
      float4 away = exp4(run, 0.f);
      float4 k_away = times(k, away), q_away = times(q, away), centred = exp4(now.total, CENTRE);
      float by[8];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float4 x = now.keys[j];
        if (SAFE) {
          x = times(x, centred);
        } else {
          float4 d = now.total, e = now.each[j];
          x = times(x, exp4(make_float4(d.x - e.x, d.y - e.y, d.z - e.z, d.w - e.w), 0.f));
        }
        by[j] = dot(x, k_away), by[4 + j] = dot(x, q_away);
      }
#pragma unroll
      for (int step = 16; step > 0; step >>= 1)
#pragma unroll
        for (int j = 0; j < 8; ++j) by[j] += __shfl_xor_sync(0xffffffffu, by[j], step);
#pragma unroll
      for (int j = 0; j < 4; ++j) add(by_k, now.values[j], by[j]), add(by_q, now.values[j], by[4 + j]);
      add(run, now.total);
      now = next;
    }
    if (i == 0) wait(shared, at.warp);
    read_matrix(S, at, shared, by_k, by_q);
    float u = finish(a, at, shared, i);
    store1(u_ring + entry * DIM + threadIdx.x, u);
    __syncthreads();
  }
  if (a.store) {
    if (at.warp != 2) shift(at.x, at.x_stride, at.window, at.window_stride, a.tokens);
    int full = length + a.tokens;
    if (full >= GRID && a.targets) {
      i64 target = static_cast<i64>(a.targets[blockIdx.y]) * a.heads + at.head;
      fold_into(a, at, shared, S, a.matrix + target * DIM * DIM, full);
    }
  }
}
