// gradients.cu, second part: products and sums over tokens and channels.
//
// A warp owns 16 channels and all 64 tokens, and works on transposed matrices [channel, token]. What it has computed is
// then the left operand of its next product without leaving the registers, sums over tokens stay in the warp, and only
// sums over channels (norms, d beta) meet in shared memory. Lane 4 r + c holds channels r and r + 8 of tokens 8 n + 2 c
// and 8 n + 2 c + 1: x[n] = {channel r: two tokens; channel r + 8: two tokens}.

constexpr int UNROLL = 2;  // steps of the longest products at a time
constexpr float LOG2E = 1.4426950408889634f;

typedef float Values[8][4];
typedef u32 Operand[4];  // 16 tokens as left operand

__device__ __forceinline__ void clear(Values &x) {
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.f;
}

// The warp's channels of 16 rows of a tile, transposed: the left operand [channel, row].
__device__ __forceinline__ void columns(u32 (&a)[4], const bf16 *tile, int group, const Place &at) {
  load_tiles_transposed(a, tile + at.own + 16 * group * WIDE);
}

__device__ __forceinline__ void spread(float (&x)[2][4], const u32 (&a)[4]) {
  x[0][0] = low(a[0]), x[0][1] = high(a[0]), x[0][2] = low(a[1]), x[0][3] = high(a[1]);
  x[1][0] = low(a[2]), x[1][1] = high(a[2]), x[1][2] = low(a[3]), x[1][3] = high(a[3]);
}

__device__ __forceinline__ void packed(u32 (&a)[4], const float (&x)[2][4]) {
  a[0] = pack(x[0][0], x[0][1]), a[1] = pack(x[0][2], x[0][3]);
  a[2] = pack(x[1][0], x[1][1]), a[3] = pack(x[1][2], x[1][3]);
}

// One number a token, for the lane's tokens of tile n.
__device__ __forceinline__ float2 of_tokens(const float *x, int n, const Place &at) {
  return *reinterpret_cast<const float2 *>(x + 8 * n + 2 * at.c);
}

// 16 tokens of q or k, normalised.
__device__ __forceinline__ void unit(float (&x)[2][4], const bf16 *tile, const float *norm, int group,
                                     const Place &at) {
  u32 raw[4];
  columns(raw, tile, group, at);
  spread(x, raw);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2 s = of_tokens(norm, 2 * group + half, at);
    x[half][0] *= s.x, x[half][1] *= s.y, x[half][2] *= s.x, x[half][3] *= s.y;
  }
}

// Multiply group J by one number a channel.
__device__ __forceinline__ void scale_group(Values &x, int J, float first, float second) {
#pragma unroll
  for (int n = 2 * J; n < 2 * J + 2; ++n) x[n][0] *= first, x[n][1] *= first, x[n][2] *= second, x[n][3] *= second;
}

__device__ __forceinline__ void multiply_pair(Values &x, int p, const u32 (&a)[4], const u32 (&b)[4]) {
  multiply(x[2 * p], a, b[0], b[1]);
  multiply(x[2 * p + 1], a, b[2], b[3]);
}

// x^T = state [channel, value] tile^T [value, token].
__device__ __forceinline__ void through_state(Values &x, const bf16 *state, const bf16 *tile, const Place &at) {
  clear(x);
#pragma unroll UNROLL
  for (int s = 0; s < DIM / 16; ++s) {
    u32 a[4], b[4];
    columns(a, state, s, at);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      load_tiles(b, tile + at.across + 16 * p * WIDE + 16 * s);
      multiply_pair(x, p, a, b);
    }
  }
}

// Sums over the tokens of a quad before this lane's (or after it), and of the whole quad.
__device__ __forceinline__ void quad_sums(float own, const float (&pick)[2], float &before, float &total) {
  float other = shuffle_xor(own, 1);
  before = pick[0] * other;
  total = own + other;
  other = shuffle_xor(total, 2);
  before += pick[1] * other;
  total += other;
}

// Cumulative sums over the 16 tokens of group J, of the lane's channel i, from `carry` on; their last.
__device__ __forceinline__ float cumulate(Values &x, int J, int i, float carry, const Place &at) {
#pragma unroll
  for (int n = 2 * J; n < 2 * J + 2; ++n) {
    float *y = &x[n][2 * i], before, total;
    quad_sums(y[0] + y[1], at.before, before, total);
    y[0] += before + carry, y[1] += y[0];
    carry += total;
  }
  return carry;
}

// Sum over the warp's channels of x, one value a token of this lane: tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ float2 channel_sum(float (&x)[8][2], int lane) {
#pragma unroll
  for (int half = 4; half >= 1; half >>= 1) {
    bool upper = lane & (4 * half);
#pragma unroll
    for (int n = 0; n < half; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float keep = upper ? x[n + half][e] : x[n][e], send = upper ? x[n][e] : x[n + half][e];
        x[n][e] = keep + shuffle_xor(send, 4 * half);
      }
  }
  return make_float2(x[0][0], x[0][1]);
}

// The sum over all channels of what every warp put into `part`, for tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ float2 all_channels(const float (&part)[WARPS][TOKENS], int lane) {
  float2 total = make_float2(0.f, 0.f);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    float2 x = *reinterpret_cast<const float2 *>(&part[w][2 * lane]);
    total.x += x.x, total.y += x.y;
  }
  return total;
}

// This warp's share of sum_channels x d, x = q or k normalised, after d += diagonal other.
__device__ __forceinline__ float2 add_diagonal(Values &d, const bf16 *tile, const float *norm, const bf16 *other,
                                               const float *other_norm, const float *diagonal, const Place &at) {
  float sums[8][2];
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    float x[2][4], y[2][4];
    unit(x, tile, norm, group, at);
    unit(y, other, other_norm, group, at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int n = 2 * group + half;
      float2 p = of_tokens(diagonal, n, at);
#pragma unroll
      for (int e = 0; e < 4; ++e) d[n][e] += (e & 1 ? p.y : p.x) * y[half][e];
      sums[n][0] = x[half][0] * d[n][0] + x[half][2] * d[n][2];
      sums[n][1] = x[half][1] * d[n][1] + x[half][3] * d[n][3];
    }
  }
  return channel_sum(sums, at.lane);
}

// The gradient through x -> x s / |x|, norm (d - unit (unit . d) / s^2), into a tile; along = (unit . d) / s^2.
__device__ __forceinline__ void store_through_norm(bf16 *to, const Values &d, const bf16 *tile, const float *norm,
                                                   float2 along, const Place &at) {
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    float x[2][4];
    u32 a[4];
    unit(x, tile, norm, group, at);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int n = 2 * group + half;
      float a0 = shuffle(along.x, 4 * n + at.c), a1 = shuffle(along.y, 4 * n + at.c);
      float2 s = of_tokens(norm, n, at);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[half][e] = (d[n][e] - x[half][e] * (e & 1 ? a1 : a0)) * (e & 1 ? s.y : s.x);
    }
    packed(a, x);
    store_tiles_transposed(to + at.own + 16 * group * WIDE, a);
  }
}

// Numbers of beta's type as they lie in memory.
__device__ __forceinline__ unsigned short bits_of(const bf16 *p) { return p->bits; }
__device__ __forceinline__ float bits_of(const float *p) { return *p; }
__device__ __forceinline__ float value_of(unsigned short bits) { return low(bits); }
__device__ __forceinline__ float value_of(float x) { return x; }
__device__ __forceinline__ void store(bf16 *p, float x) { p->bits = static_cast<unsigned short>(pack(x, 0.f)); }
__device__ __forceinline__ void store(float *p, float x) { *p = x; }

// What one head's gate is made of, and the beta logits of tokens 2 lane and 2 lane + 1.
struct Gate {
  float rate, bias[2];
  decltype(bits_of(static_cast<const BETA *>(nullptr))) logit[2];
  __device__ __forceinline__ Gate(const Arguments &a, const Pair &pair, const Place &at) {
    const int channel = pair.head * DIM + 16 * at.warp + at.r;
    rate = a.A_log[pair.head], bias[0] = a.dt_bias[channel], bias[1] = a.dt_bias[channel + 8];
    const BETA *beta = a.beta + pair.head * a.beta_head + (pair.base + 2 * at.lane) * a.beta_token;
    if (pair.has(2 * at.lane)) logit[0] = bits_of(beta);
    if (pair.has(2 * at.lane + 1)) logit[1] = bits_of(beta + a.beta_token);
  }
  __device__ __forceinline__ void prepare() { rate = power_of_two(rate * LOG2E); }
};

// 16 rows I of stril(rows U^T), groups FROM .. TO - 1 of columns; the diagonal apart, if asked for.
template <int I, int FROM, int TO>
__device__ __forceinline__ void pair_rows(bf16 *to, float *diagonal, const bf16 *rows, const bf16 *U, const Place &at) {
  float x[2 * (TO - FROM)][4] = {};
#pragma unroll
  for (int s = 0; s < DIM / 16; ++s) {
    u32 a[4], b[4];
    load_tiles(a, rows + 16 * I * WIDE + at.wide + 16 * s);
#pragma unroll
    for (int p = FROM; p < TO; ++p) {
      load_tiles(b, U + at.across + 16 * p * WIDE + 16 * s);
      multiply(x[2 * (p - FROM)], a, b[0], b[1]);
      multiply(x[2 * (p - FROM) + 1], a, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 2 * FROM; n < 2 * TO; ++n)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      int i = 16 * I + at.r + 8 * lower, j = 8 * n + 2 * at.c;
      float x0 = x[n - 2 * FROM][2 * lower], x1 = x[n - 2 * FROM][2 * lower + 1];
      if (n >= 2 * I) {
        if (diagonal && i == j) diagonal[i] = x0;
        if (diagonal && i == j + 1) diagonal[i] = x1;
        x0 = i > j ? x0 : 0.f, x1 = i > j + 1 ? x1 : 0.f;
      }
      *reinterpret_cast<u32 *>(to + i * SQUARE + j) = pack(x0, x1);
    }
}

// M = -stril(dv U^T) by four warps, dP = stril(dO U^T) and its diagonal by the other four.
__device__ __forceinline__ void pair_gradients(Shared &shared, const Place &at) {
  const bool of_dP = at.warp >= 4;
  const bf16 *rows = of_dP ? shared.d_o : shared.dv;
  bf16 *to = of_dP ? shared.dP : shared.M;
  float *diagonal = of_dP ? shared.diagonal : nullptr;
  switch (at.warp & 3) {
    case 0:
      pair_rows<3, 0, 2>(to, diagonal, rows, shared.U, at);
      pair_rows<0, 0, 1>(to, diagonal, rows, shared.U, at);
      break;
    case 1: pair_rows<3, 2, 4>(to, diagonal, rows, shared.U, at); break;
    case 2: pair_rows<2, 0, 3>(to, diagonal, rows, shared.U, at); break;
    default: pair_rows<1, 0, 2>(to, diagonal, rows, shared.U, at);
  }
}
