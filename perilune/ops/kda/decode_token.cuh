// A token's way in and out: the preparers and the finisher of decode.cuh.

// A head's convolution weights, gate bias and rate, a channel a thread.
__device__ __forceinline__ void take_weights(const Arguments &a, Shared &shared, int head, int t) {
  static_assert(32 * PREPARERS == DIM, "a thread for each channel");
  const int channel = head * DIM + t;
  const i64 at = 4 * static_cast<i64>(channel);
  const float4 taps[3] = {load4(a.conv_q + at), load4(a.conv_k + at), load4(a.conv_v + at)};
  const float bias = a.dt_bias[channel], rate = a.A_log[head];
  meet_preparers();  // all are through with the last ones
#pragma unroll
  for (int part = 0; part < 3; ++part) store4(shared.taps[part][t], taps[part]);
  shared.bias[t] = bias;
  if (t == 0) shared.rate = __expf(rate);
  meet_preparers();
}

// Four channels of pre-convolution row `row`: a token of this launch, or row + 3 of the window if negative.
__device__ __forceinline__ float4 history(const Vectors &from, int part, int row, int channel) {
  if (row < 0) return load4(from.window[row + 3][part] + channel);
  const WINDOW *kind = nullptr;
  return rounded4(load4(from.x[row][part] + channel), kind);
}

// q, k or v (part) of token i: convolution, SiLU, norm; four channels a lane.
__device__ __forceinline__ void convolve(const Vectors &from, const Shared &shared, Prepared &to, int part, int i,
                                         int channel) {
  float4 p0 = history(from, part, i - 3, channel), p1 = history(from, part, i - 2, channel);
  float4 p2 = history(from, part, i - 1, channel), p3 = load4(from.x[i][part] + channel);
  float out[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float4 w = load4(shared.taps[part][channel + c]);
    float y = fmaf(at(p3, c), w.w, fmaf(at(p2, c), w.z, fmaf(at(p1, c), w.y, at(p0, c) * w.x)));
    out[c] = y * sigmoid(y);
  }
  float4 x = make_float4(out[0], out[1], out[2], out[3]);
  if (part != 2) x = times(x, rsqrtf(warp_sum(dot(x, x)) + 1e-6f) * (part == 0 ? 0.08838834764831845f : 1.f));
  store4((part == 0 ? to.q[i] : part == 1 ? to.k[i] : to.v[i]) + channel, x);
}

__device__ __forceinline__ float log_decay(const Arguments &a, float x, float rate) {
  if (SAFE) return __fmul_rn(a.lower_bound, sigmoid(rate * x));
  return __fmul_rn(-rate, fmaxf(x, 0.f) + log1pf(__expf(-fabsf(x))));
}

__device__ __forceinline__ float4 gate(const Arguments &a, const Vectors &from, const Shared &shared, int i,
                                       int channel) {
  float4 x = load4(from.x[i][3] + channel);
  add(x, load4(shared.bias + channel));
  float rate = shared.rate;
  return make_float4(log_decay(a, x.x, rate), log_decay(a, x.y, rate), log_decay(a, x.z, rate),
                     log_decay(a, x.w, rate));
}

// Log decays of the new tokens, what they make of the keys of the tail's blocks, and the g entries.
__device__ __forceinline__ void decay_tail(const Arguments &a, const Vectors &from, const Shared &shared, Prepared &to,
                                           Tail &tail, float *g_ring, int channel) {
  int length = from.ticket.count, done = -1;
  float4 local = load4(from.last + channel), full = local;
#pragma unroll 1
  for (int i = 0; i < TOKENS; ++i) {
    int entry = length + i, own = entry / BLOCK;
    float4 g = gate(a, from, shared, i, channel);
    if (entry % BLOCK) add(g, local);
    local = g;
    store4(g_ring + entry * DIM + channel, local);
    store4(tail.scale[i] + channel, SAFE ? exp4(times(local, -1.f), -CENTRE) : local);
    store4(tail.away[i][own] + channel, SAFE ? exp4(local, CENTRE) : local);
    float4 run = local;
    for (int b = own - 1; b >= 0; --b) {
      add(run, b == done ? full : load4(from.ends[b] + channel));
      store4(tail.away[i][b] + channel, SAFE ? exp4(run, CENTRE) : run);
    }
    store4(to.decay[i] + channel, exp4(run, 0.f));
    if (entry % BLOCK == BLOCK - 1) done = own, full = local;
  }
}

// Move the window past `count` tokens: a third of its rows by each of three warps.
__device__ __forceinline__ void shift(const Arguments &a, const Vectors &from, int head, int count, int part,
                                      int channel) {
  i64 inner = static_cast<i64>(a.heads) * DIM;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    WINDOW *to = a.window + (3 * static_cast<i64>(from.ticket.slot) + j) * (3 * inner) + part * inner + head * DIM;
    store4(to + channel, history(from, part, count + j - 3, channel));
  }
}

// The weights of the first item are there already.
template <bool TAIL> __device__ void prepare(const Given &given, Shared &shared, Tail *tails, const Ticket &first) {
  int t = threadIdx.x - 32 * READERS, warp = t >> 5, channel = 4 * (t & 31);
  int head = first.head, layer = first.layer, heads = given.layer(0).heads;
  Cursor<VECTORS> vector;
  Cursor<AHEAD> ahead;
  for (bool more = true; more; vector.next(), ahead.next()) {
    wait_full(shared.vectors_full, vector);
    const Vectors &from = shared.vectors[vector.index];
    Ticket ticket = from.ticket;
    more = ticket.n >= 0;
    const Arguments &a = given.layer(ticket.layer);
    if (more && (ticket.head != head || ticket.layer != layer)) {
      head = ticket.head, layer = ticket.layer;
      take_weights(a, shared, head, t);
    }
    wait_free(shared.prepared_free, ahead);
    Prepared &to = shared.prepared[ahead.index];
    int slot = ticket.slot, count = TAIL ? TOKENS : ticket.count;
    if (slot >= 0) {
      if (warp < 3) {
#pragma unroll 1
        for (int j = 0; j < count; ++j) convolve(from, shared, to, warp, j, channel);
        if (a.store) shift(a, from, ticket.head, count, warp, channel);
      } else if (TAIL) {
        i64 slab = static_cast<i64>(slot) * heads + ticket.head;
        decay_tail(a, from, shared, to, tails[ahead.index], a.g_ring + slab * (CAPACITY * DIM), channel);
      } else {
        for (int j = 0; j < count; ++j) store4(to.decay[j] + channel, exp4(gate(a, from, shared, j, channel), 0.f));
      }
    }
    if (warp == 3) {
      if (channel == 0) to.ticket = ticket;
      if (channel / 4 < TOKENS) to.beta[channel / 4] = from.beta[channel / 4];
    }
    warp_arrive(shared.prepared_full[ahead.index]);
    warp_arrive(shared.vectors_free[vector.index]);
  }
}

// Sum over the readers of their shares, four columns.
__device__ __forceinline__ float4 total(const float (*part)[DIM], int channel) {
  float4 sum[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    float4 x = load4(part[4 * w] + channel), y = load4(part[4 * w + 2] + channel);
    add(x, load4(part[4 * w + 1] + channel)), add(y, load4(part[4 * w + 3] + channel));
    add(x, y);
    sum[w] = x;
  }
  add(sum[0], sum[1]);
  return sum[0];
}

// u = beta (v - read), the same in every warp that needs it.
__device__ __forceinline__ float4 correction(const Prepared &from, int i, float4 read, int channel) {
  return times(minus(load4(from.v[i] + channel), read), from.beta[i]);
}

// Corrections and u entries (tail form) of the new tokens in order, their normalised, gated outputs.
template <bool TAIL> __device__ void finish(const Given &given, Shared &shared, const Tail *tails) {
  int channel = 4 * (threadIdx.x & 31);
  Cursor<VECTORS> vector;
  Cursor<AHEAD> ahead;
  Cursor<2> part;
  int heads = given.layer(0).heads;
  for (;; vector.next(), ahead.next()) {
    wait_full(shared.vectors_full, vector);
    Ticket ticket = shared.vectors[vector.index].ticket;
    if (ticket.n < 0) return;
    const Arguments &a = given.layer(ticket.layer);
    float4 norm = load4(a.norm + channel);
    wait_full(shared.prepared_full, ahead);
    Prepared &from = shared.prepared[ahead.index];
    const Tail &tail = tails[ahead.index];
    int count = ticket.slot < 0 ? 0 : TAIL ? TOKENS : ticket.count;
    i64 slab = static_cast<i64>(ticket.slot) * heads + ticket.head;
    RING *u_ring = TAIL ? a.u_ring + (slab * CAPACITY + ticket.count) * DIM + channel : nullptr;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      float along = warp_sum(dot(load4(from.q[j] + channel), load4(from.k[j] + channel)));
      float4 open = load4(shared.vectors[vector.index].x[j][4] + channel);
      float4 by_k, by_q;
      wait_full(shared.part_full, part);
      if (TAIL) {
        by_k = load4(tail.past[j][0] + channel), by_q = load4(tail.past[j][1] + channel);
        for (int l = 0; l < j; ++l) {
          float4 past = load4(from.v[l] + channel);  // its u, in the place of its v
          add(by_k, past, tail.drafts[0][j][l]), add(by_q, past, tail.drafts[1][j][l]);
        }
      }
      float4 read = total(shared.part[part.index][0], channel), y = total(shared.part[part.index][1], channel);
      warp_arrive(shared.part_free[part.index]);
      part.next();
      if (TAIL) add(read, by_k), add(y, by_q);
      float4 u = correction(from, j, read, channel);
      if (TAIL) {
        const RING *kind = nullptr;
        if (TOKENS > 1) store4(from.v[j] + channel, rounded4(u, kind));
        store4(u_ring + j * DIM, u);
      }
      if (!a.o) continue;
      add(y, u, along);
      y = times(times(y, rsqrtf(fmaf(warp_sum(dot(y, y)), 1.f / DIM, a.eps))), norm);
      y = times(y, make_float4(sigmoid(open.x), sigmoid(open.y), sigmoid(open.z), sigmoid(open.w)));
      store4(a.o + ((static_cast<i64>(ticket.n) * TOKENS + j) * heads + ticket.head) * DIM + channel, y);
    }
    if (a.o) {
      for (int j = count; j < TOKENS; ++j)
        store4(a.o + ((static_cast<i64>(ticket.n) * TOKENS + j) * heads + ticket.head) * DIM + channel,
               make_float4(0, 0, 0, 0));
    }
    warp_arrive(shared.prepared_free[ahead.index]);
    warp_arrive(shared.vectors_free[vector.index]);
  }
}
