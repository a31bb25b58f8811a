// Many rows through MXFP4 weights on Hopper: a tile is 128 weight rows by HEIGHT rows of one expert.
//
// The copy engine brings rows, and weights as their codes, in steps of 128 of the inner dimension. Two warpgroups have
// 64 weight rows each and decode 32 columns into the registers of the left operand (packed.cuh) while the tensor cores
// multiply the 32 before them. The order of sums is that of a product of bf16 weights.
//
// Compiled behind wgmma.cuh and cluster.cuh of perilune/ops/mla, packed_wgmma.cuh and packed.cuh, with
//   K inner dimension, a multiple of 128; HEIGHT: 64, 128, 160, 192 or 240; STAGES of the ring; CLUSTER 1.

constexpr int THREADS_ALL = 384, G_TILE = 128, STEP = 128, STEPS = K / STEP;
constexpr int ROWS_BOX = HEIGHT * 128, CODES_BOX = G_TILE * STEP / 2, STAGE = 2 * ROWS_BOX + CODES_BOX;
constexpr int TURNED = 144, OUT_AT = STAGES * STAGE, OUT = 2 * 16 * TURNED;  // a token's 64 outputs, padded
constexpr int SMALL_AT = OUT_AT + 2 * OUT, WORDS_AT = SMALL_AT + 128;
static_assert(K % STEP == 0 && STAGES <= 8, "not a supported size");

struct Arguments {
  TensorMap x, codes;          // [R, K] bf16, boxes of HEIGHT x 64; [E G, K/2] bytes, boxes of 128 x 64
  const u8 *scales;            // [E G, K/32]
  u16 *y;                      // [R, G]
  const int *ends;             // [E]
  int experts, outputs;        // G, a multiple of 128
};

struct Small { u64 full[STAGES], empty[STAGES]; };

struct Tile { int expert, column, row, rows; };

__device__ __forceinline__ Tile locate(const Arguments &a, const int *words, int at) {
  const int columns = a.outputs / G_TILE, *tiles = words + a.experts;
  const int expert = expert_of(tiles, a.experts, at / columns), before = expert ? tiles[expert - 1] : 0;
  const int high = tiles[expert] - before, within = at - before * columns;
  const int row = (expert ? words[expert - 1] : 0) + within % high * HEIGHT;
  return {expert, within / high * G_TILE, row, min(HEIGHT, words[expert] - row)};
}

__device__ __forceinline__ void produce(const Arguments &a, Small *s, const int *words, u32 base, int tiles) {
  int stage = 0;
  u32 parity = 1;
  for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
    const Tile tile = locate(a, words, at);
    for (int c = 0; c < STEPS; ++c) {
      wait(&s->empty[stage], parity);
      expect(&s->full[stage], STAGE);
      const u32 to = base + stage * STAGE;
      copy(a.x, to, c * STEP, tile.row, &s->full[stage]);
      copy(a.x, to + ROWS_BOX, c * STEP + 64, tile.row, &s->full[stage]);
      copy(a.codes, to + 2 * ROWS_BOX, c * STEP / 2, tile.expert * a.outputs + tile.column, &s->full[stage]);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}

// Bytes of x and y by four nibbles; a nibble past 7 gives the sign of byte nibble - 8, eight times.
__device__ __forceinline__ u32 choose(u32 x, u32 y, u32 which) {
  u32 z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(which));
  return z;
}

// Of 16 bytes of a row, 32 columns, byte `mine` of each word: columns 8 w + 2 mine + {0, 1} for words w, in [w].
template <bool GREAT>
__device__ __forceinline__ void decode_row(const u32 (&word)[4], u32 mine, u32 scale, u32 (&pair)[4]) {
  const u32 which = mine | (4 + mine) << 4;
  const u32 bytes = choose(choose(word[0], word[1], which), choose(word[2], word[3], which), 0x5410);
  const u32 even = bytes & 0x0f0f0f0fu, odd = bytes >> 4 & 0x0f0f0f0fu;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    // Nibbles have no sign, so that "the sign of" one is a zero byte.
    pair[w] = choose(even, odd, 0xc480u + 0x1111u * w) * 0x1040u & 0x81c081c0u;
    if (GREAT) pair[w] = times(pair[w], 0x7e807e80u);
    pair[w] = times(pair[w], scale);
  }
}

template <bool GREAT>
__device__ __forceinline__ void decode_block(u32 codes, u32 low_scale, u32 high_scale, u32 (&a)[2][4]) {
  u32 low[4], high[4], p[4], q[4];
  load16(codes, low), load16(codes + 8 * STEP / 2, high);
  decode_row<GREAT>(low, threadIdx.x & 3, GREAT ? great_factor(low_scale) : factor(low_scale), p);
  decode_row<GREAT>(high, threadIdx.x & 3, GREAT ? great_factor(high_scale) : factor(high_scale), q);
#pragma unroll
  for (int h = 0; h < 2; ++h) a[h][0] = p[2 * h], a[h][1] = q[2 * h], a[h][2] = p[2 * h + 1], a[h][3] = q[2 * h + 1];
}

__device__ __forceinline__ void consume(const Arguments &a, Small *s, const int *words, u32 base, int tiles) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int first = group * 64 + warp * 16 + lane / 4;
  float sum[HEIGHT / 2];
  u32 left[2][2][4];
  int stage = 0;
  u32 parity = 0;
  for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
    const Tile tile = locate(a, words, at);
    const u64 row = (u64)tile.expert * a.outputs + tile.column + first;
    const u32 *scales = reinterpret_cast<const u32 *>(a.scales + row * (K / 32));
    u32 low_next = scales[0], high_next = scales[8 * (K / 128)];
#pragma unroll
    for (int i = 0; i < HEIGHT / 2; ++i) sum[i] = 0.f;
    int before = -1;
    for (int c = 0; c < STEPS; ++c) {
      const u32 low = low_next, high = high_next;
      if (c + 1 < STEPS) low_next = scales[c + 1], high_next = scales[8 * (K / 128) + c + 1];
      const bool great = __any_sync(~0u, ((low | high) & 0x80808080u) != 0);
      const u32 codes = base + stage * STAGE + 2 * ROWS_BOX + first * (STEP / 2);
      const u32 rows = low_word<16>(base + stage * STAGE);
      wait(&s->full[stage], parity);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        mma_wait<1>();  // the product two blocks before has read its registers
        if (b == 1 && before >= 0 && lane == 0) arrive(&s->empty[before]);
        if (great) decode_block<true>(codes + 16 * b, low >> 8 * b & 255, high >> 8 * b & 255, left[b & 1]);
        else decode_block<false>(codes + 16 * b, low >> 8 * b & 255, high >> 8 * b & 255, left[b & 1]);
        mma_fence();
#pragma unroll
        for (int h = 0; h < 2; ++h)
          add_product(sum, left[b & 1][h], matrix(rows + b / 2 * (ROWS_BOX / 16) + b % 2 * 4 + h * 2));
        mma_commit();
      }
      before = stage;
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    mma_wait<0>();
    hold(sum);
    if (lane == 0) arrive(&s->empty[before]);
    // Sixteen tokens at a time through shared memory, two places in turn: outputs of a token lie together there.
    u16 *y = a.y + (u64)tile.row * a.outputs + tile.column + group * 64;
#pragma unroll
    for (int j = 0; j < HEIGHT / 16; ++j) {
      const u32 place = base + OUT_AT + group * OUT + (j & 1) * 16 * TURNED;
      const u32 z[4] = {pair(sum[8 * j], sum[8 * j + 1]), pair(sum[8 * j + 2], sum[8 * j + 3]),
                        pair(sum[8 * j + 4], sum[8 * j + 5]), pair(sum[8 * j + 6], sum[8 * j + 7])};
      store_transposed(place + (lane / 16 * 8 + lane % 8) * TURNED + (warp * 16 + lane / 8 % 2 * 8) * 2, z);
      meet<128>(1 + group);
      const int token = thread / 8, unit = thread % 8;
      if (j * 16 + token < tile.rows) {
        u32 out[4];
        load16(place + token * TURNED + unit * 16, out);
        *reinterpret_cast<uint4 *>(y + (u64)(j * 16 + token) * a.outputs + unit * 8) =
            make_uint4(out[0], out[1], out[2], out[3]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS_ALL, 1) packed_many(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Small *s = reinterpret_cast<Small *>(memory + SMALL_AT);
  int *words = reinterpret_cast<int *>(memory + WORDS_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(&s->full[i], 1), barrier_init(&s->empty[i], 8);
    barriers_ready();
  }
  count_tiles(a.ends, a.experts, HEIGHT, THREADS_ALL, words);
  const int tiles = words[2 * a.experts - 1] * (a.outputs / G_TILE);
  if (threadIdx.x >= 256) {
    fewer_registers<40>();
    if (threadIdx.x == 256) produce(a, s, words, shared_address(memory), tiles);
  } else {
    more_registers<232>();
    consume(a, s, words, shared_address(memory), tiles);
  }
}
