// The in-place form: the readers of decode.cuh keep the matrix in registers from the first token to the last.

__device__ __forceinline__ void read_step(const Given &given, Shared &shared, const unsigned char *units) {
  int warp = threadIdx.x >> 5, channel = 4 * (threadIdx.x & 31);
  Cursor<AHEAD> ahead;
  Cursor<STEP_UNITS> unit;
  Cursor<2> part;
  int heads = given.layer(0).heads;
  for (;; ahead.next()) {
    wait_full(shared.prepared_full, ahead);
    const Prepared &from = shared.prepared[ahead.index];
    if (from.ticket.n < 0) return;
    const Arguments &a = given.layer(from.ticket.layer);
    int slot = from.ticket.slot, count = slot < 0 ? 0 : from.ticket.count;
    float4 S[16];
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      if (count == 0) break;
      const float *rows = reinterpret_cast<const float *>(units + unit.index * UNIT) + 4 * warp * DIM + channel;
      wait(shared.unit_full[unit.index], unit.round & 1);
#pragma unroll
      for (int r = 0; r < 4; ++r) S[4 * u + r] = load4(rows + r * DIM);
      warp_arrive(shared.unit_free[unit.index]);
      unit.next();
    }
    for (int j = 0; j < count; ++j, part.next()) {
      float4 by_k = make_float4(0, 0, 0, 0), by_q = by_k;
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        int row = u * ROWS + 4 * warp;
        float4 k4 = load4(from.k[j] + row), q4 = load4(from.q[j] + row), d4 = load4(from.decay[j] + row);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float4 &s = S[4 * u + r];
          s = times(s, at(d4, r)), add(by_k, s, at(k4, r)), add(by_q, s, at(q4, r));
        }
      }
      wait_free(shared.part_free, part);
      store4(shared.part[part.index][0][warp] + channel, by_k);
      store4(shared.part[part.index][1][warp] + channel, by_q);
      warp_arrive(shared.part_full[part.index]);
      meet();
      bool last = j + 1 == count;
      if (last && !a.store) continue;
      float4 u4 = correction(from, j, total(shared.part[part.index][0], channel), channel);
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        float4 k4 = load4(from.k[j] + u * ROWS + 4 * warp);
#pragma unroll
        for (int r = 0; r < 4; ++r) add(S[4 * u + r], u4, at(k4, r));
      }
      if (last) {
        i64 slab = static_cast<i64>(slot) * heads + from.ticket.head;
        float *to = a.matrix + slab * (DIM * DIM) + 4 * warp * DIM + channel;
#pragma unroll
        for (int r = 0; r < 16; ++r) __stcs(reinterpret_cast<float4 *>(to + (r / 4 * ROWS + r % 4) * DIM), S[r]);
      }
    }
    warp_arrive(shared.prepared_free[ahead.index]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) step(const __grid_constant__ Given given) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared &shared = *reinterpret_cast<Shared *>(memory + STEP_UNITS * UNIT);
  make_barriers(shared);
  follow();
  int warp = threadIdx.x >> 5;
  // What does not wait for anybody, before all meet.
  Claims claims(given);
  Claimed first;
  if (warp == VECTOR_FETCHER) first.take<false>(given, claims);
  if (warp >= READERS && warp < FINISHER) {
    place(first.ticket, given, claims.next);
    take_weights(given.layer(first.ticket.layer), shared, first.ticket.head, threadIdx.x - 32 * READERS);
  }
  __syncthreads();
  if (warp < READERS)
    read_step(given, shared, memory);
  else if (warp < FINISHER)
    prepare<false>(given, shared, nullptr, first.ticket);
  else if (warp == FINISHER)
    finish<false>(given, shared, nullptr);
  else if (warp == VECTOR_FETCHER)
    fetch_vectors<false>(given, shared, claims, first);
  else if (threadIdx.x % 32 == 0)
    fetch_units<false, STEP_UNITS>(given, shared, memory);
}
