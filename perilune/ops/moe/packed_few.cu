// Few rows through MXFP4 weights: a stream of weights, each of which leaves device memory as its 4.25 bits.
//
// A unit is 16 weight rows, for the gated product eight of the gate and the eight of the same features of up. A block
// takes a run of units in order, so that an expert's rows are loaded once or twice. A producer warp copies units' codes
// and scales into a ring; 16 warps share the inner dimension in chunks of 128, decode (packed.cuh) and multiply, with
// the weights as left operand and 8 or 16 rows as right one, which stays in registers; finishers add the 16 warps' sums
// in their order, apply the activation and store. A row's bits depend on that row alone.
//
// Inside a chunk lane t of four has values 32 t to 32 t + 31, one block of a scale. Pair i of word w is values
// 32 t + 8 w + i and + 4, on both sides of the product: its order of sums is not that of the values.
//
// Compiled behind packed_hopper.cuh and packed.cuh by NVRTC (packed_cuda.py), which defines
//   K inner dimension, a multiple of 128; HEIGHT 8 or 16 rows of a tile; STAGES of the ring;
//   GLU: 0 plain product, 1 gate and up with SwiGLU, 2 with SiTU.

constexpr int WARPS = 16, FINISHERS = 2, THREADS = 32 * (WARPS + 1 + FINISHERS);
constexpr int CHUNKS = K / 128, MINE = (CHUNKS + WARPS - 1) / WARPS, TILES = HEIGHT / 8;
constexpr int CODES = K / 2, SCALES = K / 32, STAGE = 16 * (CODES + SCALES);  // bytes of a weight row, of a unit
constexpr int COLUMN = 20;                                   // numbers between two rows' sums
constexpr int PART = HEIGHT * COLUMN;
static_assert(K % 128 == 0, "chunks are 128 values");

struct Arguments {
  const u16 *x;                        // [R, K] bf16
  const u8 *codes, *scales;            // [E, G, K/2], [E, G, K/32]
  const float *weights;                // [R], or null
  u16 *y;                              // [R, G], or [R, G/2] gated
  const int *ends;                     // [E]
  int experts, outputs;                // outputs: G, or G/2 gated
  float beta, linear_beta;
};

struct Shared {
  u64 full[STAGES], empty[STAGES], summed[2], taken[2];
  float part[2][WARPS][PART];
};

// A tile of an expert's rows, and the expert's numbers.
struct Tile {
  int expert, row, rows;
};

// A block's run of units: `left` of them from unit `place` of a tile of rows on.
struct Walk {
  const int *tiles, *ends;             // [E]: row tiles up to and with each expert; ends of rows
  int experts, per_tile, left, tile, place;

  __device__ __forceinline__ void step() {
    --left;
    if (++place == per_tile) place = 0, ++tile;
  }
  __device__ __forceinline__ Tile find() const {
    const int low = expert_of(tiles, experts, tile);
    const int before = low ? tiles[low - 1] : 0, first = (low ? ends[low - 1] : 0) + (tile - before) * HEIGHT;
    return {low, first, min(HEIGHT, ends[low] - first)};
  }
};

__device__ __forceinline__ void produce(const Arguments &a, Shared &s, u8 *ring, Walk w) {
  constexpr int half = GLU ? 8 : 16;  // rows that lie together
  const int rows = GLU ? 2 * a.outputs : a.outputs;
  int stage = 0;
  u32 parity = 1;
  Tile tile = {0, 0, 0};
  int current = -1;
  for (; w.left; w.step()) {
    if (w.tile != current) tile = w.find(), current = w.tile;
    const u64 begins = (u64)tile.expert * rows + w.place * half;
    wait(s.empty[stage], parity);
    expect(s.full[stage], STAGE);
    u8 *codes = ring + stage * STAGE, *scales = codes + 16 * CODES;
#pragma unroll
    for (int i = 0; i < 16; i += half) {
      const u64 row = begins + (i ? a.outputs : 0);
      copy(codes + i * CODES, a.codes + row * CODES, half * CODES, s.full[stage]);
      copy(scales + i * SCALES, a.scales + row * SCALES, half * SCALES, s.full[stage]);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// d += a b of 16 x 16 and 16 x 8.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <bool GREAT>
__device__ __forceinline__ void chunk(const uint4 &low, const uint4 &high, u32 low_byte, u32 high_byte,
                                      const u32 (&b)[TILES][4][4], float (&sum)[TILES][4]) {
  const u32 low_scale = GREAT ? great_factor(low_byte) : factor(low_byte);
  const u32 high_scale = GREAT ? great_factor(high_byte) : factor(high_byte);
  const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    u32 p[4], q[4];
    decode<GREAT>(lows[w], low_scale, p);
    decode<GREAT>(highs[w], high_scale, q);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      multiply(sum[n], p[0], q[0], p[1], q[1], b[n][w][0], b[n][w][1]);
      multiply(sum[n], p[2], q[2], p[3], q[3], b[n][w][2], b[n][w][3]);
    }
  }
}

__device__ __forceinline__ void consume(const Arguments &a, Shared &s, const u8 *ring, Walk w) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  u32 b[MINE][TILES][4][4];
  int stage = 0, current = -1, turn = 0;
  u32 parity = 0;
  for (; w.left; w.step(), ++turn) {
    if (w.tile != current) {
      const Tile tile = w.find();
      current = w.tile;
#pragma unroll
      for (int m = 0; m < MINE; ++m)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int c = m * WARPS + warp, row = n * 8 + g;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (c < CHUNKS && row < tile.rows)
              x = *reinterpret_cast<const uint4 *>(a.x + (u64)(tile.row + row) * K + c * 128 + t * 32 + i * 8);
            b[m][n][i][0] = __byte_perm(x.x, x.z, 0x5410), b[m][n][i][1] = __byte_perm(x.x, x.z, 0x7632);
            b[m][n][i][2] = __byte_perm(x.y, x.w, 0x5410), b[m][n][i][3] = __byte_perm(x.y, x.w, 0x7632);
          }
    }
    float sum[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
    wait(s.full[stage], parity);
    const u8 *codes = ring + stage * STAGE + g * CODES, *scales = ring + stage * STAGE + 16 * CODES + g * SCALES;
#pragma unroll
    for (int m = 0; m < MINE; ++m) {
      const int c = m * WARPS + warp;
      if (CHUNKS % WARPS == 0 || c < CHUNKS) {
        const uint4 low = *reinterpret_cast<const uint4 *>(codes + c * 64 + t * 16);
        const uint4 high = *reinterpret_cast<const uint4 *>(codes + 8 * CODES + c * 64 + t * 16);
        const u32 low_byte = scales[c * 4 + t], high_byte = scales[8 * SCALES + c * 4 + t];
        if (__any_sync(ALL, low_byte > 128 || high_byte > 128))
          chunk<true>(low, high, low_byte, high_byte, b[m], sum);
        else
          chunk<false>(low, high, low_byte, high_byte, b[m], sum);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(s.empty[stage]);
    if (++stage == STAGES) stage = 0, parity ^= 1;
    const int side = turn & 1;
    wait(s.taken[side], turn / 2 + 1 & 1);
    float *part = s.part[side][warp];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[(n * 8 + 2 * t + (i & 1)) * COLUMN + g + (i & 2 ? 8 : 0)] = sum[n][i];
    __syncwarp();
    if (lane == 0) arrive(s.summed[side]);
  }
}

__device__ __forceinline__ float rounded(float x) { return __uint_as_float(narrow(0.f, x) & 0xffff0000u); }
__device__ __forceinline__ float gated(const Arguments &a, float gate, float up) {
  // Rounded as where the product is stored: the backward pass computes it again and reads it so.
  gate = rounded(gate), up = rounded(up);
  const float open = 1.f / (1.f + expf(-gate));
  if (GLU == 1) return gate * open * up;
  return a.beta * tanhf(gate / a.beta) * open * (a.linear_beta * tanhf(up / a.linear_beta));
}

__device__ __forceinline__ void finish(const Arguments &a, Shared &s, Walk w) {
  const int thread = threadIdx.x - 32 * (WARPS + 1), lane = threadIdx.x & 31;
  constexpr int WIDE = GLU ? 8 : 16;   // outputs of a unit
  int current = -1, turn = 0;
  Tile tile = {0, 0, 0};
  for (; w.left; w.step(), ++turn) {
    if (w.tile != current) tile = w.find(), current = w.tile;
    const int side = turn & 1, first = w.place * WIDE;
    wait(s.summed[side], turn / 2 & 1);
    float sum[2][WIDE * HEIGHT / (32 * FINISHERS)];
#pragma unroll
    for (int i = 0; i < WIDE * HEIGHT / (32 * FINISHERS); ++i) {
      const int at = i * 32 * FINISHERS + thread, from = at / WIDE * COLUMN + at % WIDE;
      sum[0][i] = sum[1][i] = 0.f;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) {
        sum[0][i] += s.part[side][warp][from];
        if (GLU) sum[1][i] += s.part[side][warp][from + 8];
      }
    }
    __syncwarp();
    if (lane == 0) arrive(s.taken[side]);
#pragma unroll
    for (int i = 0; i < WIDE * HEIGHT / (32 * FINISHERS); ++i) {
      const int at = i * 32 * FINISHERS + thread, r = at / WIDE;
      if (r < tile.rows) {
        float y = GLU ? gated(a, sum[0][i], sum[1][i]) : sum[0][i];
        if (GLU && a.weights) y *= a.weights[tile.row + r];
        a.y[(u64)(tile.row + r) * a.outputs + first + at % WIDE] = narrow(y, 0.f);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) packed_few(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared &s = *reinterpret_cast<Shared *>(memory + STAGES * STAGE);
  int *words = reinterpret_cast<int *>(memory + STAGES * STAGE + sizeof(Shared));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) begin(s.full[i], 1), begin(s.empty[i], WARPS);
    for (int i = 0; i < 2; ++i) begin(s.summed[i], WARPS), begin(s.taken[i], FINISHERS);
    publish();
  }
  count_tiles(a.ends, a.experts, HEIGHT, THREADS, words);
  const int per_tile = a.outputs / (GLU ? 8 : 16);
  const long long units = (long long)words[2 * a.experts - 1] * per_tile;
  const int begins = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int ends = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  const Walk w = {words + a.experts, words, a.experts, per_tile, ends - begins, begins / per_tile, begins % per_tile};
  const int warp = threadIdx.x >> 5;
  if (warp < WARPS) consume(a, s, memory, w);
  else if (warp > WARPS) finish(a, s, w);
  else if (threadIdx.x % 32 == 0) produce(a, s, memory, w);
}
