// The fetchers of decode.cuh.

// The items of this block: its number, then whatever is next, from the counter if there is one. `next` is asked for an
// item early, since the answer takes a while.
struct Claims {
  int next, items;
  __device__ __forceinline__ Claims(const Given &given) {
    items = given.layers * given.layer(0).heads * given.layer(0).sequences, next = blockIdx.x;
  }
  __device__ __forceinline__ int claim(const Given &given) {
    int item = next;
    if (item >= items) return -1;
    next = gridDim.x + (given.counter ? atomicAdd(given.counter, 1) : item);
    return item;
  }
};

// What is loaded for an item before there is room for it.
struct Claimed {
  Ticket ticket;
  float beta;
  template <bool TAIL> __device__ __forceinline__ void take(const Given &given, Claims &claims) {
    int lane = threadIdx.x & 31, item = 0;
    if (lane == 0) item = claims.claim(given);
    item = __shfl_sync(0xffffffffu, item, 0);
    ticket = {-1, 0, 0, -1, 0, 0}, beta = 0.f;
    if (item < 0) return;
    place(ticket, given, item);
    const Arguments &a = given.layer(ticket.layer);
    ticket.slot = a.slots[ticket.n], ticket.home = a.matrices[ticket.n];
    ticket.count = a.counts ? a.counts[ticket.n] : TOKENS;
    if (lane < TOKENS)
      beta = load1(a.beta_logit + (static_cast<i64>(ticket.n) * TOKENS + lane) * a.beta_stride + ticket.head);
    if (!TAIL && ticket.count == 0) ticket.slot = -1;
  }
};

// A ticket for each item, and its vectors. `now` is the first item.
template <bool TAIL>
__device__ void fetch_vectors(const Given &given, Shared &shared, Claims &claims, const Claimed &first_claimed) {
  int lane = threadIdx.x & 31;
  Cursor<VECTORS> vector;
  Cursor<TICKETS> at_ticket;
  constexpr int row = DIM * sizeof(X) / 16, past = DIM * sizeof(WINDOW) / 16;  // 16-byte pieces
  Claimed now = first_claimed;
  for (bool more = true; more; vector.next(), at_ticket.next()) {
    Ticket ticket = now.ticket;
    float beta = now.beta;
    more = ticket.n >= 0;
    wait_free(shared.ticket_free, at_ticket);
    if (lane == 0) shared.tickets[at_ticket.index] = ticket, arrive(shared.ticket_full[at_ticket.index]);
    if (more) now.take<TAIL>(given, claims);  // on its way while this item waits for room

    const Arguments &a = given.layer(ticket.layer);
    int heads = given.layer(0).heads;
    i64 first = static_cast<i64>(ticket.n) * TOKENS;
    Vectors &to = shared.vectors[vector.index];
    wait_free(shared.vectors_free, vector);
    if (lane < TOKENS) to.beta[lane] = sigmoid(beta);
    if (lane == 0) to.ticket = ticket;
    if (ticket.slot >= 0) {
      const X *x = a.q;
      i64 stride = a.q_stride;
#pragma unroll
      for (int kind = 0; kind < 5; ++kind) {
        if (kind == 1) x = a.k, stride = a.k_stride;
        if (kind == 2) x = a.v, stride = a.v_stride;
        if (kind == 3) x = a.g_raw, stride = a.g_stride;
        if (kind == 4) x = a.out_gate, stride = a.gate_stride;
        for (int c = lane; c < TOKENS * row; c += 32) {
          int i = c / row, piece = (c - i * row) * (16 / sizeof(X));
          copy16(to.x[i][kind] + piece, x + (first + i) * stride + ticket.head * DIM + piece);
        }
      }
      i64 inner = static_cast<i64>(heads) * DIM;
      const WINDOW *window = a.window + static_cast<i64>(ticket.slot) * 9 * inner + ticket.head * DIM;
      for (int c = lane; c < 9 * past; c += 32) {
        int r = c / past, piece = (c - r * past) * (16 / sizeof(WINDOW));
        copy16(to.window[r / 3][r % 3] + piece, window + r * inner + piece);
      }
      if (TAIL) {
        const float *g_ring =
            a.g_ring + (static_cast<i64>(ticket.slot) * heads + ticket.head) * (CAPACITY * DIM) + 4 * lane;
        for (int b = 0; b < ticket.count / BLOCK; ++b)
          copy16(to.ends[b] + 4 * lane, g_ring + (b * BLOCK + BLOCK - 1) * DIM);
        if (ticket.count % BLOCK) copy16(to.last + 4 * lane, g_ring + (ticket.count - 1) * DIM);
      }
    }
    arrive_copied(shared.vectors_full[vector.index]);
    __syncwarp();
    if (lane == 0) arrive(shared.vectors_full[vector.index]);
  }
}

// One thread: for each ticket the units of its tail (if TAIL), then those of its matrix.
template <bool TAIL, int UNITS> __device__ void fetch_units(const Given &given, Shared &shared, unsigned char *units) {
  Cursor<TICKETS> at_ticket;
  Cursor<UNITS> unit;
  int heads = given.layer(0).heads;
  for (;; at_ticket.next()) {
    wait_full(shared.ticket_full, at_ticket);
    Ticket ticket = shared.tickets[at_ticket.index];
    arrive(shared.ticket_free[at_ticket.index]);
    if (ticket.n < 0) return;
    if (ticket.slot < 0) continue;
    const Arguments &a = given.layer(ticket.layer);
    if (TAIL) {
      i64 entry = (static_cast<i64>(ticket.slot) * heads + ticket.head) * (CAPACITY * DIM);
      for (int left = ticket.count; left > 0; left -= BLOCK, entry += BLOCK * DIM, unit.next()) {
        int bytes = min(BLOCK, left) * DIM * static_cast<int>(sizeof(RING));
        unsigned char *to = units + unit.index * UNIT;
        if (unit.round) wait(shared.unit_free[unit.index], (unit.round - 1) & 1);
        expect(shared.unit_full[unit.index], 2 * bytes);
        copy(to, a.k_ring + entry, bytes, shared.unit_full[unit.index]);
        copy(to + UNIT / 2, a.u_ring + entry, bytes, shared.unit_full[unit.index]);
      }
    }
    const float *matrix = a.matrix + (static_cast<i64>(ticket.home) * heads + ticket.head) * (DIM * DIM);
#pragma unroll 1
    for (int u = 0; u < 4; ++u, unit.next()) {
      if (unit.round) wait(shared.unit_free[unit.index], (unit.round - 1) & 1);
      expect(shared.unit_full[unit.index], UNIT);
      copy(units + unit.index * UNIT, matrix + u * (ROWS * DIM), UNIT, shared.unit_full[unit.index]);
    }
  }
}
