// The tail form: the readers of decode.cuh, and its kernel.

// Sums of N values (a power of two) over a warp, in the order of warp_sum; lane l gets value l * N / 32.
template <int N> __device__ __forceinline__ float warp_sums(float (&x)[N]) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 16, n = N; step > 0; step >>= 1) {
    if (n > 1) {
      n /= 2;
#pragma unroll
      for (int j = 0; j < N / 2; ++j) {
        if (j < n) {
          float mine = lane & step ? x[j + n] : x[j], other = lane & step ? x[j] : x[j + n];
          x[j] = mine + __shfl_xor_sync(0xffffffffu, other, step);
        }
      }
    } else {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], step);
    }
  }
  return x[0];
}

__host__ __device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// k and q of every token against two entries of a unit (this warp's), into `score`.
__device__ __forceinline__ void score_unit(const Prepared &from, const Tail &tail, const RING *keys,
                                           const float *logs, int b, int live, float (*score)[TOKENS][BLOCK],
                                           int warp, int channel) {
  constexpr int N = power_of_two(4 * TOKENS);
  float sums[N];
#pragma unroll
  for (int j = 0; j < N; ++j) sums[j] = 0.f;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    int entry = 2 * warp + e;
    if (entry < live) {
      float4 key = load4(keys + entry * DIM + channel);
      float4 each = SAFE ? key : load4(logs + entry * DIM + channel);
#pragma unroll
      for (int i = 0; i < TOKENS; ++i) {
        float4 to = load4(tail.away[i][b] + channel);
        float4 x = times(key, SAFE ? to : exp4(minus(to, each), 0.f));
        sums[(2 * e + 0) * TOKENS + i] = dot(x, load4(from.k[i] + channel));
        sums[(2 * e + 1) * TOKENS + i] = dot(x, load4(from.q[i] + channel));
      }
    }
  }
  float sum = warp_sums(sums);
  int lane = channel / 4, j = lane * N / 32, i = j % TOKENS, which = j / TOKENS;
  if (lane % (32 / N) == 0 && j < 4 * TOKENS) score[which & 1][i][2 * warp + (which >> 1)] = sum;
}

// Scores among the new tokens: token i against token j < i, as if j had been read from the ring.
__device__ __forceinline__ void score_drafts(const Prepared &from, Tail &tail, int warp, int channel) {
  const RING *kind = nullptr;
  int pair = 0;
#pragma unroll 1
  for (int i = 1; i < TOKENS; ++i) {
#pragma unroll 1
    for (int j = 0; j < i; ++j, ++pair) {
      if (pair % READERS != warp) continue;
      float4 scale = load4(tail.scale[j] + channel);
      float4 to = load4(tail.away[i][(from.ticket.count + j) / BLOCK] + channel);
      float4 key = load4(from.k[j] + channel);
      float4 x = SAFE ? times(rounded4(times(key, scale), kind), to)
                      : times(rounded4(key, kind), exp4(minus(to, scale), 0.f));
      float by_k = warp_sum(dot(x, load4(from.k[i] + channel)));
      float by_q = warp_sum(dot(x, load4(from.q[i] + channel)));
      if (channel == 0) tail.drafts[0][i][j] = by_k, tail.drafts[1][i][j] = by_q;
    }
  }
}

// What a tail that this token fills adds to its matrix: 16 rows, four columns a lane, in the layout of the readers.
struct Folded {
  float4 S[4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int u = 0; u < 4; ++u)
#pragma unroll
      for (int r = 0; r < 4; ++r) S[u][r] = make_float4(0, 0, 0, 0);
  }
  // The entries of a unit: a warp decays its rows of the keys to the token, then adds.
  __device__ __forceinline__ void add_entries(const Tail &tail, float (*decayed)[BLOCK], const RING *keys,
                                              const RING *values, const float *logs, int b, int live, int warp,
                                              int channel) {
    int lane = channel / 4, u = lane % 4, row = u * ROWS + 4 * warp;
    float4 to = load4(tail.away[0][b] + row);
    for (int e = lane / 4; e < live; e += 8)
      store4(decayed[e] + 4 * u, times(load4(keys + e * DIM + row),
                                       SAFE ? to : exp4(minus(to, load4(logs + e * DIM + row)), 0.f)));
    __syncwarp();
#pragma unroll 1
    for (int e = 0; e < live; ++e) {
      float4 value = load4(values + e * DIM + channel);
#pragma unroll
      for (int u = 0; u < 4; ++u) add_row(u, load4(decayed[e] + 4 * u), value);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void add_row(int u, float4 k4, float4 value) {
    add(S[u][0], value, k4.x), add(S[u][1], value, k4.y), add(S[u][2], value, k4.z), add(S[u][3], value, k4.w);
  }
};

// The reads of the tail: of each unit of 16 entries the scores, then each thread its column.
template <bool FOLD>
__device__ __forceinline__ void read_entries(Shared &shared, const Prepared &from, Tail &tail, Scratch &scratch,
                                             const unsigned char *units, Cursor<TAIL_UNITS> &unit, int &turn,
                                             const float *g_ring, Folded &folded, int warp, int channel) {
  int column = threadIdx.x & 127, which = threadIdx.x >> 7;  // a column, read with k or with q
  float sums[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) sums[i] = 0.f;
  for (int b = 0, left = from.ticket.count; left > 0; ++b, left -= BLOCK, unit.next(), turn ^= 1) {
    int live = min(BLOCK, left);
    const RING *keys = reinterpret_cast<const RING *>(units + unit.index * UNIT);
    const RING *values = reinterpret_cast<const RING *>(units + unit.index * UNIT + UNIT / 2);
    const float *logs = g_ring + b * BLOCK * DIM;
    wait(shared.unit_full[unit.index], unit.round & 1);
    score_unit(from, tail, keys, logs, b, live, scratch.score[turn], warp, channel);
    if (FOLD) folded.add_entries(tail, scratch.decayed[warp], keys, values, logs, b, live, warp, channel);
    meet();
#pragma unroll
    for (int e = 0; e < BLOCK; e += 4) {
      if (e >= live) break;
      float u[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) u[j] = e + j < live ? load1(values + (e + j) * DIM + column) : 0.f;
#pragma unroll
      for (int i = 0; i < TOKENS; ++i) {
        float4 s = load4(scratch.score[turn][which][i] + e);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (e + j < live) sums[i] = fmaf(u[j], at(s, j), sums[i]);
      }
    }
    warp_arrive(shared.unit_free[unit.index]);
  }
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) tail.past[i][which][column] = sums[i];
}

// One item: its entries, then its matrix in one pass for all tokens. FOLD: `target` gets the next matrix.
template <bool FOLD>
__device__ __forceinline__ void read_item(Shared &shared, const Prepared &from, Tail &tail, Scratch &scratch,
                                          const unsigned char *units, Cursor<TAIL_UNITS> &unit, Cursor<2> &part,
                                          int &turn, const float *g_ring, float *target, int warp, int channel) {
  Folded folded;
  if (FOLD) folded.clear();
  read_entries<FOLD>(shared, from, tail, scratch, units, unit, turn, g_ring, folded, warp, channel);
  float4 by_k[TOKENS], by_q[TOKENS];
#pragma unroll
  for (int j = 0; j < TOKENS; ++j) by_k[j] = by_q[j] = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int u = 0; u < 4; ++u, unit.next()) {
    const float *rows = reinterpret_cast<const float *>(units + unit.index * UNIT) + 4 * warp * DIM + channel;
    wait(shared.unit_full[unit.index], unit.round & 1);
    float4 S[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) S[r] = load4(rows + r * DIM);
    warp_arrive(shared.unit_free[unit.index]);
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) {
      float4 k4 = load4(scratch.read[warp][j][0] + 4 * u), q4 = load4(scratch.read[warp][j][1] + 4 * u);
#pragma unroll
      for (int r = 0; r < 4; ++r) add(by_k[j], S[r], at(k4, r)), add(by_q[j], S[r], at(q4, r));
    }
    if (FOLD) {
      float4 d4 = load4(from.decay[0] + u * ROWS + 4 * warp);
#pragma unroll
      for (int r = 0; r < 4; ++r) add(folded.S[u][r], S[r], at(d4, r));
    }
  }
#pragma unroll
  for (int j = 0; j < TOKENS; ++j, part.next()) {
    wait_free(shared.part_free, part);
    store4(shared.part[part.index][0][warp] + channel, by_k[j]);
    store4(shared.part[part.index][1][warp] + channel, by_q[j]);
    warp_arrive(shared.part_full[part.index]);
    if (FOLD) {
      // The new token's own write, as the finisher computes it.
      meet();
      float4 read = total(shared.part[part.index][0], channel);
      add(read, load4(tail.past[j][0] + channel));
      float4 value = correction(from, j, read, channel);
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        folded.add_row(u, load4(from.k[j] + u * ROWS + 4 * warp), value);
        float *to = target + (u * ROWS + 4 * warp) * DIM + channel;
#pragma unroll
        for (int r = 0; r < 4; ++r) __stcs(reinterpret_cast<float4 *>(to + r * DIM), folded.S[u][r]);
      }
      meet();
    }
  }
}

__device__ __forceinline__ void read_tail(const Given &given, Shared &shared, Tail *tails, Scratch &scratch,
                                          const unsigned char *units) {
  int warp = threadIdx.x >> 5, channel = 4 * (threadIdx.x & 31);
  Cursor<AHEAD> ahead;
  Cursor<TAIL_UNITS> unit;
  Cursor<2> part;
  int turn = 0;  // of two buffers for scores
  const Arguments &a = given.layer(0);
  int heads = a.heads;
  for (;; ahead.next()) {
    wait_full(shared.prepared_full, ahead);
    const Prepared &from = shared.prepared[ahead.index];
    if (from.ticket.n < 0) return;
    Tail &tail = tails[ahead.index];
    if (from.ticket.slot >= 0) {
      i64 slab = static_cast<i64>(from.ticket.slot) * heads + from.ticket.head;
      int length = from.ticket.count;
      for (int j = threadIdx.x >> 7; j < TOKENS; j += 2) {
        int c = threadIdx.x & 127;
        float k = from.k[j][c];
        store1(a.k_ring + (slab * CAPACITY + length + j) * DIM + c, SAFE ? __fmul_rn(k, tail.scale[j][c]) : k);
      }
      int lane = channel / 4, row = lane % BLOCK / 4 * ROWS + 4 * warp + lane % 4;
#pragma unroll
      for (int j = 0; j < TOKENS; ++j)
        scratch.read[warp][j][lane / BLOCK][lane % BLOCK] =
            (lane < BLOCK ? from.k[j] : from.q[j])[row] * from.decay[j][row];
      __syncwarp();
      if (TOKENS > 1) score_drafts(from, tail, warp, channel);
      const float *g_ring = a.g_ring + slab * (CAPACITY * DIM);
      if (TOKENS == 1 && a.targets && length + 1 == FULL) {
        i64 next = static_cast<i64>(a.targets[from.ticket.n]) * heads + from.ticket.head;
        float *target = a.matrix + next * (DIM * DIM);
        read_item<true>(shared, from, tail, scratch, units, unit, part, turn, g_ring, target, warp, channel);
      } else {
        read_item<false>(shared, from, tail, scratch, units, unit, part, turn, g_ring, nullptr, warp, channel);
      }
    }
    warp_arrive(shared.prepared_free[ahead.index]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tail_step(const __grid_constant__ Given given) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared &shared = *reinterpret_cast<Shared *>(memory + TAIL_UNITS * UNIT);
  Tail *tails = reinterpret_cast<Tail *>(&shared + 1);
  Scratch &scratch = *reinterpret_cast<Scratch *>(tails + AHEAD);
  make_barriers(shared);
  follow();
  int warp = threadIdx.x >> 5;
  // What does not wait for anybody, before all meet.
  Claims claims(given);
  Claimed first;
  if (warp == VECTOR_FETCHER) first.take<true>(given, claims);
  if (warp >= READERS && warp < FINISHER) {
    place(first.ticket, given, claims.next);
    take_weights(given.layer(first.ticket.layer), shared, first.ticket.head, threadIdx.x - 32 * READERS);
  }
  __syncthreads();
  if (warp < READERS)
    read_tail(given, shared, tails, scratch, memory);
  else if (warp < FINISHER)
    prepare<true>(given, shared, tails, first.ticket);
  else if (warp == FINISHER)
    finish<true>(given, shared, tails);
  else if (warp == VECTOR_FETCHER)
    fetch_vectors<true>(given, shared, claims, first);
  else if (threadIdx.x % 32 == 0)
    fetch_units<true, TAIL_UNITS>(given, shared, memory);
}
