// gradients.cu, fourth part: decays and pairs inside a chunk.
//
// Tokens are taken in groups of 16. With G the cumulative log2 decay inside a group, up = 2^(G + 58) and 1 / up fit
// float32 where G >= -115.5, and decay[J] = 2^(G at the end of group J) is one number a channel. Sums over earlier
// groups then are a Horner scheme: scale the accumulator by decay[J], add the product of the next group.
// A warp with a group and channel below that is steep: gradients_steep.cuh does its pairs.

constexpr float HALF = 58.f, TINY = 0x1p-58f, LARGE = 0x1p58f, LOWEST = -115.5f;

struct Decays {
  Values up;  // steep: log2 decays of single tokens; behind steep_later what to_end returns
  float decay[4][2];
  bool steep;
  // To the end of the token's group.
  __device__ __forceinline__ float to_end(int n, int e) const {
    const float mild = decay[n / 2][e >> 1] * LARGE * reciprocal(up[n][e]);
    return !BOUNDED && steep ? up[n][e] : mild;
  }
};

__device__ __forceinline__ void set_decays(Decays &d, const Shared &shared, const Pair &pair, const Gate &gate,
                                           const Arguments &a, const Place &at) {
  bool fits = true;
#pragma unroll
  for (int J = 0; J < 4; ++J) {
    log2_decays(d.up, J, shared, pair, gate, a, at);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float end = cumulate(d.up, J, i, HALF, at);
      fits = fits && end >= LOWEST + HALF;
#pragma unroll
      for (int n = 2 * J; n < 2 * J + 2; ++n)
        d.up[n][2 * i] = power_of_two(d.up[n][2 * i]), d.up[n][2 * i + 1] = power_of_two(d.up[n][2 * i + 1]);
      d.decay[J][i] = power_of_two(end) * TINY;
    }
  }
  if constexpr (!BOUNDED) {
    d.steep = any_of_warp(!fits);
    if (d.steep) {
#pragma unroll
      for (int J = 0; J < 4; ++J) log2_decays(d.up, J, shared, pair, gate, a, at);
    }
  }
}

// x_i = e^(G from the chunk's start) x_i + sum_(j < i) pairs_ij k_j e^(G_i - G_j), and change_i += row_i x_i. Makes the
// rows' operands, row e^G, and with q's also the keys' k e^-G.
// Here and in from_later `change` takes rows and keys as the products round them: then what a pair adds at its row and
// what it takes off at its column are equal numbers, and cancel in sums that contain both.
template <bool OF_KEYS>
__device__ __forceinline__ void add_earlier(Values &x, Values &change, Operand (&rows)[4], Operand (&keys)[4],
                                            const Shared &shared, const float (&norms)[2][TOKENS], const Decays &d,
                                            const Place &at) {
  const bf16 *pairs = OF_KEYS ? shared.M : shared.dP;
#pragma unroll
  for (int J = 0; J < 4; ++J) {
    float k[2][4], own[2][4];
    u32 b[4];
    unit(k, shared.k, norms[0], J, at);
    if (OF_KEYS) {
#pragma unroll
      for (int e = 0; e < 8; ++e) own[e >> 2][e & 3] = k[e >> 2][e & 3];
    } else {
      unit(own, shared.q, norms[1], J, at);
#pragma unroll
      for (int e = 0; e < 8; ++e) k[e >> 2][e & 3] *= reciprocal(d.up[2 * J + (e >> 2)][e & 3]);
      packed(keys[J], k);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) own[e >> 2][e & 3] *= d.up[2 * J + (e >> 2)][e & 3];
    packed(rows[J], own);
    spread(own, rows[J]);
#pragma unroll
    for (int I = J; I < 4; ++I) {
      scale_group(x, I, J ? d.decay[J - 1][0] : TINY, J ? d.decay[J - 1][1] : TINY);
      load_tiles(b, pairs + at.square_across + 16 * I * SQUARE + 16 * J);
      multiply_pair(x, I, keys[J], b);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      change[2 * J + (e >> 2)][e & 3] += own[e >> 2][e & 3] * x[2 * J + (e >> 2)][e & 3];
      x[2 * J + (e >> 2)][e & 3] *= d.up[2 * J + (e >> 2)][e & 3];
    }
  }
}

// x_j = sum_(i > j) (M_ij k_i + dP_ij q_i) e^(G_i - G_j), and change_j -= k_j x_j.
__device__ __forceinline__ void from_later(Values &x, Values &change, const Operand (&of_q)[4],
                                           const Operand (&of_k)[4], const Operand (&keys)[4], const Shared &shared,
                                           const float (&norms)[2][TOKENS], const Decays &d, const Place &at) {
  clear(x);
#pragma unroll
  for (int I = 3; I >= 0; --I) {
    u32 b[4];
#pragma unroll
    for (int J = I; J >= 0; --J) {
      if (I < 3) scale_group(x, J, d.decay[I][0], d.decay[I][1]);
      load_tiles_transposed(b, shared.M + at.square + 16 * I * SQUARE + 16 * J);
      multiply_pair(x, J, of_k[I], b);
      load_tiles_transposed(b, shared.dP + at.square + 16 * I * SQUARE + 16 * J);
      multiply_pair(x, J, of_q[I], b);
    }
    float k[2][4];
    spread(k, keys[I]);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      change[2 * I + (e >> 2)][e & 3] -= k[e >> 2][e & 3] * x[2 * I + (e >> 2)][e & 3];
      x[2 * I + (e >> 2)][e & 3] *= reciprocal(d.up[2 * I + (e >> 2)][e & 3]);
    }
  }
}
