// gradients.cu, fifth part: pairs of a steep warp, whose decays inside a group of 16 tokens have no common anchor.
//
// Pairs of different groups meet at the end of the earlier one. Inside a group token i meets j at the end of the left
// half of the smallest aligned block of 2, 4, 8 or 16 tokens that holds both. Every exponent is a sum of log decays,
// none a difference: nothing overflows or cancels. Rows, keys and `change` are as in gradients_pairs.cuh.
//
// A loop over groups keeps this code short and its registers few: turned by one group a round, `Values` has the group
// in hand always at the same place, 0.

typedef float Tile[2][4];  // one group of Values

// Log2 decays of the group at 0, summed inside aligned blocks, of 1 token at first: from the block's start to a token,
// it included, and from behind a token to the block's end.
struct Blocks {
  Tile before, after;
  float total[2][2];

  __device__ __forceinline__ Blocks(const Values &logs) {
#pragma unroll
    for (int e = 0; e < 8; ++e) before[e >> 2][e & 3] = logs[e >> 2][e & 3], after[e >> 2][e & 3] = 0.f;
  }

  // Whether a token's block of 2^LEVEL tokens is the right half of the next larger one.
  template <int LEVEL>
  __device__ __forceinline__ static bool right(int half, int e, const Place &at) {
    return LEVEL == 0 ? e & 1 : LEVEL == 1 ? at.c & 1 : LEVEL == 2 ? at.c >> 1 : half;
  }

  // Decay between a token and the border of the two halves.
  template <int LEVEL>
  __device__ __forceinline__ void to_border(Tile &f, const Place &at) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 4; ++e) f[h][e] = power_of_two(right<LEVEL>(h, e, at) ? before[h][e] : after[h][e]);
  }

  // Two blocks of 2^LEVEL tokens become one.
  template <int LEVEL>
  __device__ __forceinline__ void merge(const Place &at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left = total[0][i], right_one = total[1][i];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sums[2];  // of the other block, for the lane's two tokens
        if (LEVEL == 0)
          sums[0] = before[h][2 * i + 1], sums[1] = before[h][2 * i], total[h][i] = sums[0] + sums[1];
        else if (LEVEL == 3)
          sums[0] = sums[1] = h ? left : right_one;
        else
          sums[0] = sums[1] = shuffle_xor(total[h][i], LEVEL), total[h][i] += sums[0];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool of_right = right<LEVEL>(h, e, at);
          before[h][2 * i + e] += of_right ? sums[e] : 0.f, after[h][2 * i + e] += of_right ? 0.f : sums[e];
        }
      }
    }
  }
};

__device__ __forceinline__ void powers(Tile &f, const Tile &x) {
#pragma unroll
  for (int e = 0; e < 8; ++e) f[e >> 2][e & 3] = power_of_two(x[e >> 2][e & 3]);
}

__device__ __forceinline__ void packed_product(u32 (&a)[4], const Tile &x, const Tile &f) {
  Tile y;
#pragma unroll
  for (int e = 0; e < 8; ++e) y[e >> 2][e & 3] = x[e >> 2][e & 3] * f[e >> 2][e & 3];
  packed(a, y);
}

// y += f sum, change += (or -=) operand sum.
template <bool LATER>
__device__ __forceinline__ void add_sum(Tile &y, Values &change, const Tile &f, const Tile &sum,
                                        const u32 (&operand)[4]) {
  Tile x;
  spread(x, operand);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    y[e >> 2][e & 3] += f[e >> 2][e & 3] * sum[e >> 2][e & 3];
    change[e >> 2][e & 3] += (LATER ? -x[e >> 2][e & 3] : x[e >> 2][e & 3]) * sum[e >> 2][e & 3];
  }
}

// sum += a times those pairs of a [16, 16] tile whose tokens lie in different halves of a block of 2^(LEVEL + 1).
template <int LEVEL>
__device__ __forceinline__ void multiply_halves(Tile &sum, const u32 (&a)[4], const u32 (&b)[4], const Place &at) {
  if (LEVEL == 3) {
    multiply(sum[0], a, 0u, b[1]);
    multiply(sum[1], a, b[2], 0u);
  } else {
    const int apart = at.r ^ (2 * at.c);
    const u32 pick = (apart >> LEVEL == 1 ? 0xffffu : 0u) | ((apart ^ 1) >> LEVEL == 1 ? 0xffff0000u : 0u);
    multiply(sum[0], a, b[0] & pick, 0u);
    multiply(sum[1], a, 0u, b[3] & pick);
  }
}

// Pairs of the halves of each block, with their earlier tokens: y_i += sum_j pairs_ij k_j e^(G_i - G_j).
template <int LEVEL>
__device__ __forceinline__ void earlier_halves(Tile &y, Values &change, Blocks &blocks, const u32 (&pairs)[4],
                                               const Tile &own, const Tile &k, const Place &at) {
  Tile f, sum = {};
  u32 row[4], key[4];
  blocks.to_border<LEVEL>(f, at);
  packed_product(row, own, f), packed_product(key, k, f);
  multiply_halves<LEVEL>(sum, key, pairs, at);
  add_sum<false>(y, change, f, sum, row);
  blocks.merge<LEVEL>(at);
}

// The same pairs, with their later tokens: y_j += sum_i (M_ij k_i + dP_ij q_i) e^(G_i - G_j).
template <int LEVEL>
__device__ __forceinline__ void later_halves(Tile &y, Values &change, Blocks &blocks, const u32 (&M)[4],
                                             const u32 (&dP)[4], const Tile &q, const Tile &k, const Place &at) {
  Tile f, sum = {};
  u32 of_q[4], of_k[4];
  blocks.to_border<LEVEL>(f, at);
  packed_product(of_q, q, f), packed_product(of_k, k, f);
  multiply_halves<LEVEL>(sum, of_k, M, at);
  multiply_halves<LEVEL>(sum, of_q, dP, at);
  add_sum<true>(y, change, f, sum, of_k);
  blocks.merge<LEVEL>(at);
}

// The group at 0 of x becomes f x + y.
template <bool LATER>
__device__ __forceinline__ void close_group(Values &x, Values &change, const Tile &f, Tile &y,
                                            const u32 (&operand)[4]) {
  const Tile sum = {{x[0][0], x[0][1], x[0][2], x[0][3]}, {x[1][0], x[1][1], x[1][2], x[1][3]}};
  add_sum<LATER>(y, change, f, sum, operand);
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e >> 2][e & 3] = y[e >> 2][e & 3];
}

// Group m to m - BY, the first ones to the end.
template <int BY>
__device__ __forceinline__ void turn_groups(Values &x) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float old[4] = {x[n][e], x[2 + n][e], x[4 + n][e], x[6 + n][e]};
#pragma unroll
      for (int m = 0; m < 4; ++m) x[2 * m + n][e] = old[(m + BY) % 4];
    }
}

template <int BY>
__device__ __forceinline__ void turn_decays(Decays &d) {
  turn_groups<BY>(d.up);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float old[4] = {d.decay[0][i], d.decay[1][i], d.decay[2][i], d.decay[3][i]};
#pragma unroll
    for (int m = 0; m < 4; ++m) d.decay[m][i] = old[(m + BY) % 4];
  }
}

// add_earlier, of a steep warp.
template <bool OF_KEYS>
__device__ __forceinline__ void steep_earlier(Values &x, Values &change, const Shared &shared,
                                              const float (&norms)[2][TOKENS], Decays &d, const Place &at) {
#pragma unroll 1
  for (int J = 0; J < 4; ++J) {
    const bf16 *pairs = (OF_KEYS ? shared.M : shared.dP) + at.square_across + 16 * J * SQUARE + 16 * J;
    Tile k, own, f, y = {};
    u32 b[4], row[4], key[4];
    unit(k, shared.k, norms[0], J, at);
    unit(own, OF_KEYS ? shared.k : shared.q, norms[OF_KEYS ? 0 : 1], J, at);
    load_tiles(b, pairs);
    Blocks blocks(d.up);
    earlier_halves<0>(y, change, blocks, b, own, k, at);
    earlier_halves<1>(y, change, blocks, b, own, k, at);
    earlier_halves<2>(y, change, blocks, b, own, k, at);
    earlier_halves<3>(y, change, blocks, b, own, k, at);
    powers(f, blocks.after);
    packed_product(key, k, f);
    powers(f, blocks.before);
    packed_product(row, own, f);
    close_group<false>(x, change, f, y, row);
#pragma unroll
    for (int m = 1; m < 4; ++m)
      if (J + m < 4) {
        scale_group(x, m, d.decay[0][0], d.decay[0][1]);
        load_tiles(b, pairs + 16 * m * SQUARE);
        multiply_pair(x, m, key, b);
      }
    turn_groups<1>(x), turn_groups<1>(change), turn_decays<1>(d);
  }
}

// from_later, of a steep warp. Leaves the decay to the end of a token's group in d.up.
__device__ __forceinline__ void steep_later(Values &x, Values &change, const Shared &shared,
                                            const float (&norms)[2][TOKENS], Decays &d, const Place &at) {
  clear(x);
#pragma unroll 1
  for (int I = 3; I >= 0; --I) {
    turn_groups<3>(x), turn_groups<3>(change), turn_decays<3>(d);
    const int square = at.square + 16 * I * SQUARE + 16 * I;
    Tile k, q, f, y = {};
    u32 M[4], dP[4], of_q[4], of_k[4];
    unit(k, shared.k, norms[0], I, at);
    unit(q, shared.q, norms[1], I, at);
    load_tiles_transposed(M, shared.M + square);
    load_tiles_transposed(dP, shared.dP + square);
    Blocks blocks(d.up);
    later_halves<0>(y, change, blocks, M, dP, q, k, at);
    later_halves<1>(y, change, blocks, M, dP, q, k, at);
    later_halves<2>(y, change, blocks, M, dP, q, k, at);
    later_halves<3>(y, change, blocks, M, dP, q, k, at);
    powers(f, blocks.after);
    packed_product(of_k, k, f);
    close_group<true>(x, change, f, y, of_k);
#pragma unroll
    for (int e = 0; e < 8; ++e) d.up[e >> 2][e & 3] = f[e >> 2][e & 3];
    powers(f, blocks.before);
    packed_product(of_k, k, f), packed_product(of_q, q, f);
#pragma unroll
    for (int m = 1; m < 4; ++m)
      if (m <= I) {
        scale_group(x, 4 - m, d.decay[0][0], d.decay[0][1]);
        load_tiles_transposed(M, shared.M + square - 16 * m);
        multiply_pair(x, 4 - m, of_k, M);
        load_tiles_transposed(dP, shared.dP + square - 16 * m);
        multiply_pair(x, 4 - m, of_q, dP);
      }
  }
}

// Of any warp: pairs of dq with earlier tokens, and of dk with earlier and (in x) later ones.

__device__ __forceinline__ void pairs_of_queries(Values &dq, Values &change, Operand (&of_q)[4], Operand (&keys)[4],
                                                 const Shared &shared, const float (&norms)[2][TOKENS], Decays &d,
                                                 const Place &at) {
  if constexpr (!BOUNDED) {
    if (d.steep) return steep_earlier<false>(dq, change, shared, norms, d, at);
  }
  add_earlier<false>(dq, change, of_q, keys, shared, norms, d, at);
}

__device__ __forceinline__ void pairs_of_keys(Values &dk, Values &x, Values &change, const Operand (&of_q)[4],
                                              Operand (&keys)[4], const Shared &shared,
                                              const float (&norms)[2][TOKENS], Decays &d, const Place &at) {
  if constexpr (!BOUNDED) {
    if (d.steep) {
      steep_earlier<true>(dk, change, shared, norms, d, at);
      return steep_later(x, change, shared, norms, d, at);
    }
  }
  Operand of_k[4];
  add_earlier<true>(dk, change, of_k, keys, shared, norms, d, at);
  from_later(x, change, of_q, of_k, keys, shared, norms, d, at);
}
