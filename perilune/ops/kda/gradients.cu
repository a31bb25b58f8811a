// KDA's gradients on Hopper: all of triton_gradients.py (whose docstring has the formulas and letters) in one launch,
// for K = V = 128 in bfloat16. Eight warps; gradients_parts.cuh says how they share the work.
//
// Compiled by NVRTC (gradients_cuda.py) after warp.cuh, gradients_tiles.cuh, gradients_parts.cuh, the gate
// (gradients_bounded.cuh or gradients_softplus.cuh), gradients_pairs.cuh and gradients_steep.cuh, for one layout of the
// inputs: BETA is beta's type, HEADS their number, Q_TOKEN, K_TOKEN and G_TOKEN the elements from token to token.

// dv = (A beta)^T dU into shared memory, negated, and this warp's part of dv . U. The diagonal of A beta is beta; what
// bfloat16 lost of it, the largest error in dv, is put back.
__device__ __forceinline__ void value_gradient(Shared &shared, const Pair &pair, const Gate &gate, const Place &at) {
  Values dv;
  float product[8][2], lost[2];
  clear(dv);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int t = 2 * at.lane + e;
    float beta = reciprocal(1.f + power_of_two(-LOG2E * value_of(gate.logit[e])));
    lost[e] = pair.has(t) ? beta - low(shared.A[t * SQUARE + t].bits) : 0.f;
  }
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    u32 a[4], b[4];
    columns(a, shared.dU, s, at);
#pragma unroll
    for (int p = 0; p <= s; ++p) {
      load_tiles_transposed(b, shared.A + at.square + 16 * s * SQUARE + 16 * p);
      multiply_pair(dv, p, a, b);
    }
    float dU[2][4];
    spread(dU, a);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * s + half;
      float lost0 = shuffle(lost[0], 4 * n + at.c), lost1 = shuffle(lost[1], 4 * n + at.c);
#pragma unroll
      for (int e = 0; e < 4; ++e) dv[n][e] += (e & 1 ? lost1 : lost0) * dU[half][e];
    }
  }
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    u32 a[4];
    float U[2][4];
    columns(a, shared.U, group, at);
    spread(U, a);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int n = 2 * group + half;
      product[n][0] = dv[n][0] * U[half][0] + dv[n][2] * U[half][2];
      product[n][1] = dv[n][1] * U[half][1] + dv[n][3] * U[half][3];
#pragma unroll
      for (int e = 0; e < 4; ++e) U[half][e] = -dv[n][e];
    }
    packed(a, U);
    store_tiles_transposed(shared.dv + at.own + 16 * group * WIDE, a);
  }
  *reinterpret_cast<float2 *>(&shared.part[0][at.warp][2 * at.lane]) = channel_sum(product, at.lane);
}

// x^T = dS' U^T and rowsum(S dS') of the lane's two channels.
__device__ __forceinline__ void through_next_state(Values &x, float (&last)[2], const Shared &shared, const Place &at) {
  float low8[4] = {}, high8[4] = {};  // S dS'^T, for its diagonal: columns 0-7 and 8-15
  clear(x);
#pragma unroll UNROLL
  for (int s = 0; s < DIM / 16; ++s) {
    u32 of_S[4], of_dS[4], b[4];
    columns(of_dS, shared.dS, s, at);
    columns(of_S, shared.S, s, at);
    multiply(low8, of_S, of_dS[0], of_dS[2]);
    multiply(high8, of_S, of_dS[1], of_dS[3]);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      load_tiles(b, shared.U + at.across + 16 * p * WIDE + 16 * s);
      multiply_pair(x, p, of_dS, b);
    }
  }
  // Row r, column r lies in the lane with 2 c or 2 c + 1 = r.
  last[0] = shuffle(at.r & 1 ? low8[1] : low8[0], 4 * at.r + at.r / 2);
  last[1] = shuffle(at.r & 1 ? high8[3] : high8[2], 4 * at.r + at.r / 2);
}

// From dS' U^T in x: dk += what flows through the state after the chunk; x = dg,
// dg_i = sum_(t >= i) change_t + sum_(t < i) (k to_stop)_t + e^(G_C) rowsum(S dS').
__device__ __forceinline__ void gate_gradient(Values &x, Values &dk, const Values &change, const float (&last)[2],
                                              const bf16 *keys, const float *norm, const Decays &d, const Place &at) {
  float rest[2] = {1.f, 1.f};  // decay from the end of a group to the end of the chunk
#pragma unroll
  for (int J = 3; J >= 0; --J) {
    float k[2][4];
    unit(k, keys, norm, J, at);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float &y = x[2 * J + (e >> 2)][e & 3];
      y *= rest[e >> 1 & 1] * d.to_end(2 * J + (e >> 2), e & 3);
      dk[2 * J + (e >> 2)][e & 3] += y;
      y *= k[e >> 2][e & 3];
    }
    rest[0] *= d.decay[J][0], rest[1] *= d.decay[J][1];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float carry = last[i] * rest[i];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float *y = &x[n][2 * i], before, total, first = y[0];
      quad_sums(y[0] + y[1], at.before, before, total);
      y[0] = carry + before, y[1] = y[0] + first;
      carry += total;
    }
    carry = 0.f;
#pragma unroll
    for (int n = 7; n >= 0; --n) {
      float *y = &x[n][2 * i], after, total;
      const float *z = &change[n][2 * i];
      quad_sums(z[0] + z[1], at.after, after, total);
      after += carry;
      y[1] += after + z[1], y[0] += after + z[1] + z[0];
      carry += total;
    }
  }
}

// dg in x becomes the gradient of the raw gate, in `out` as left operands; sums over tokens go to d_bias and d_A.
__device__ __forceinline__ void raw_gate_gradient(Operand (&out)[4], const Values &x, const Shared &shared,
                                                  const Arguments &a, const Pair &pair, const Gate &gate,
                                                  const Place &at) {
  float d_bias[2] = {}, d_A = 0.f;
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    float g[2][4];
    columns(out[group], shared.g, group, at);
    spread(g, out[group]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        bool inside = pair.has(16 * group + 8 * half + 2 * at.c + (e & 1));
        float dg = inside ? x[2 * group + half][e] : 0.f, of_A;
        g[half][e] = through_gate(dg, g[half][e], gate.bias[e >> 1], gate, a, of_A);
        d_bias[e >> 1] += g[half][e], d_A += of_A;
      }
    packed(out[group], g);
  }
#pragma unroll
  for (int by = 1; by <= 2; by <<= 1) d_bias[0] += shuffle_xor(d_bias[0], by), d_bias[1] += shuffle_xor(d_bias[1], by);
#pragma unroll
  for (int by = 1; by <= 16; by <<= 1) d_A += shuffle_xor(d_A, by);
  float *to = a.d_bias + pair.number * DIM + 16 * at.warp + at.r;
  if (at.c == 0) to[0] = d_bias[0], to[8] = d_bias[1];
  if (at.lane == 0) a.d_A[pair.number * WARPS + at.warp] = d_A;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gradients(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) unsigned char bytes[];
  Shared &shared = *reinterpret_cast<Shared *>(bytes);
  const Place at;
  Pair pair(blockIdx.x, Row(a, blockIdx.x));
  Row row(a, blockIdx.x + gridDim.x);
  Gate gate(a, pair, at);
  start<FOR_DV>(shared, a, pair, 0, true, at);
  start<FIRST>(shared, a, pair, 0, true, at);
  start<SECOND>(shared, a, pair, 0, true, at);

#pragma unroll 1
  for (int turn = 0;; ++turn) {
    const i64 number = pair.number + gridDim.x;
    const bool more = number < a.count;
    const Pair next(number, row);
    row = Row(a, number + gridDim.x);
    const float(&norms)[2][TOKENS] = shared.norms[turn & 1];
    gate.prepare();

    Decays d;
    Values x, change, dk;
    float last[2];
    wait_copies<1>();  // FOR_DV and FIRST are there; S is free
    __syncthreads();
    start<STATE>(shared, a, pair, turn, true, at);
    set_decays(d, shared, pair, gate, a, at);
    value_gradient(shared, pair, gate, at);
    wait_copies<1>();  // SECOND is there, and dv; A and dU are free
    __syncthreads();
    start<FOR_DV>(shared, a, next, turn + 1, more, at);
    write_rows(a.dv, shared.dv, pair, 0x80008000u, at);
    pair_gradients(shared, at);
    wait_copies<1>();  // STATE is there, M and dP
    __syncthreads();
    if (at.warp == 0) {
      float2 total = all_channels(shared.part[0], at.lane);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (pair.has(2 * at.lane + e)) {
          float odds = power_of_two(-LOG2E * fminf(fmaxf(value_of(gate.logit[e]), -30.f), 30.f));  // (1 - beta) / beta
          store(a.d_beta + (pair.base + 2 * at.lane + e) * HEADS + pair.head, odds * (e ? total.y : total.x));
        }
    }

    // `change` gathers q dq + k (row - column), whose sum over later tokens is dg.
    clear(change);
    start<NEXT_STATE>(shared, a, pair, turn, true, at);
    through_state(x, shared.S, shared.d_o, at);
    Operand of_q[4], keys[4];
    pairs_of_queries(x, change, of_q, keys, shared, norms, d, at);
    float2 along = add_diagonal(x, shared.q, norms[1], shared.k, norms[0], shared.diagonal, at);
    *reinterpret_cast<float2 *>(&shared.part[1][at.warp][2 * at.lane]) = along;
    wait_copies<0>();  // NEXT_STATE is there; d_o is free
    __syncthreads();
    along = all_channels(shared.part[1], at.lane);
    along.x /= a.scale * a.scale, along.y /= a.scale * a.scale;
    store_through_norm(shared.d_o, x, shared.q, norms[1], along, at);

    through_state(dk, shared.S, shared.dv, at);
    pairs_of_keys(dk, x, change, of_q, keys, shared, norms, d, at);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] += x[n][e];
    through_next_state(x, last, shared, at);
    gate_gradient(x, dk, change, last, shared.k, norms[0], d, at);
    Operand dg[4];
    raw_gate_gradient(dg, x, shared, a, pair, gate, at);
    along = add_diagonal(dk, shared.k, norms[0], shared.q, norms[1], shared.diagonal, at);
    *reinterpret_cast<float2 *>(&shared.part[2][at.warp][2 * at.lane]) = along;
    __syncthreads();  // U, g, q, S and dS are free
    start<FIRST>(shared, a, next, turn + 1, more, at);
    gate = Gate(a, next, at);
    bf16 *of_dk = shared.S, *of_dg = shared.S + TOKENS * WIDE;
    store_through_norm(of_dk, dk, shared.k, norms[0], all_channels(shared.part[2], at.lane), at);
#pragma unroll
    for (int group = 0; group < 4; ++group) store_tiles_transposed(of_dg + at.own + 16 * group * WIDE, dg[group]);
    __syncthreads();  // dq, dk and dg are there; k is free
    write_rows(a.dq, shared.d_o, pair, 0, at);
    if (more) start<SECOND>(shared, a, next, turn + 1, more, at);  // a thread overwrites only what it has just read
    write_rows(a.dk, of_dk, pair, 0, at);
    write_rows(a.dg, of_dg, pair, 0, at);
    if (!more) break;
    pair = next;
  }
}
