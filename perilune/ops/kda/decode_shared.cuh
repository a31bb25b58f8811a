// What the warps of decode.cuh hand to each other: shared memory, barriers, the items of a block.

struct Arguments {
  const X *q, *k, *v, *g_raw;
  const B *beta_logit;
  const X *out_gate;
  const W *conv_q, *conv_k, *conv_v;
  const float *A_log, *dt_bias;
  const P *norm;
  float *matrix;
  WINDOW *window;
  const int *slots, *matrices, *counts, *targets;  // counts: accepted tokens (in-place form, or null), or tail entries
  RING *k_ring, *u_ring;
  float *g_ring;
  X *o;  // null: outputs are not wanted
  i64 q_stride, k_stride, v_stride, g_stride, beta_stride, gate_stride;
  int heads, sequences, store;
  float eps, lower_bound;
};

// An item to work on: a head of a sequence, -1 after the last one. slot: -1 for padding.
struct Ticket {
  int n, head, layer, slot, home, count;
};

// What a fetcher brings of one item's tokens.
struct alignas(128) Vectors {
  X x[TOKENS][5][DIM];  // q, k, v, raw gate, output gate
  WINDOW window[3][3][DIM];
  float ends[4][DIM];   // log decays of the last entry of each full block, and of the last entry
  float last[DIM];
  float beta[TOKENS];
  Ticket ticket;
};

// What the preparers make of them.
struct alignas(128) Prepared {
  float q[TOKENS][DIM], k[TOKENS][DIM], v[TOKENS][DIM], decay[TOKENS][DIM];
  float beta[TOKENS];
  Ticket ticket;
};

struct alignas(128) Shared {
  Vectors vectors[VECTORS];
  Prepared prepared[AHEAD];
  Ticket tickets[TICKETS];
  float taps[3][DIM][4], bias[DIM];
  float part[2][2][READERS][DIM];  // of two tokens in turn: each reader's share of S^T k and S^T q
  float rate;
  u64 vectors_full[VECTORS], vectors_free[VECTORS], prepared_full[AHEAD], prepared_free[AHEAD];
  u64 ticket_full[TICKETS], ticket_free[TICKETS], part_full[2], part_free[2];
  u64 unit_full[MAX_UNITS], unit_free[MAX_UNITS];
};

// What the tail form adds to an item.
struct alignas(128) Tail {
  float away[TOKENS][5][DIM];  // decay of a block's keys to the token (its logarithm where the gate is not bounded)
  float scale[TOKENS][DIM];    // what makes k an entry (the log decay in the block where the gate is not bounded)
  float past[TOKENS][2][DIM];  // reads of the tail with k and with q
  float drafts[2][TOKENS][TOKENS];  // k and q against the keys of earlier tokens of the launch
};
struct alignas(128) Scratch {
  float read[READERS][TOKENS][2][BLOCK];  // k and q as each reader's rows of the matrix meet them
  float score[2][2][TOKENS][BLOCK];       // k and q against the entries of a unit, of two units in turn
  float decayed[TOKENS == 1 ? READERS : 1][BLOCK][BLOCK];  // for a fold: each reader's rows of a unit's keys
};

constexpr int SHARED_BYTES = 232448;
constexpr int STEP_FIXED = sizeof(Shared), TAIL_FIXED = sizeof(Shared) + AHEAD * sizeof(Tail) + sizeof(Scratch);
__host__ __device__ constexpr int units_beside(int fixed) {
  return (SHARED_BYTES - fixed) / UNIT < MAX_UNITS ? (SHARED_BYTES - fixed) / UNIT : MAX_UNITS;
}
constexpr int STEP_UNITS = units_beside(STEP_FIXED), TAIL_UNITS = units_beside(TAIL_FIXED);
static_assert(STEP_UNITS >= 3 && TAIL_UNITS >= 3, "too little room to fetch ahead");

__device__ __forceinline__ u32 address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void wait(u64 &barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(address(&barrier)), "r"(parity)
                 : "memory");
}

__device__ __forceinline__ void arrive(u64 &barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(&barrier)) : "memory");
}

__device__ __forceinline__ void expect(u64 &barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(&barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy(void *to, const void *from, int bytes, u64 &barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   address(to)),
               "l"(from), "r"(bytes), "r"(address(&barrier))
               : "memory");
}

// Nothing that the launch before may have written is read, and nothing that it may read is written, before this; the
// launch after may start its blocks at once, as it waits in the same way.
__device__ __forceinline__ void follow() {
  asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory");
}

// A barrier of the readers, and one of the preparers.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ __forceinline__ void meet_preparers() { asm volatile("bar.sync 2, 128;" ::: "memory"); }

__device__ __forceinline__ void init(u64 &barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals));
}
__device__ __forceinline__ void fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One arrival for a warp that is through with a buffer.
__device__ __forceinline__ void warp_arrive(u64 &barrier) {
  __syncwarp();
  if ((threadIdx.x & 31) < VOICES) arrive(barrier);
}

// 16 bytes into shared memory behind the program's back, and the lane's arrival once all of its copies are there.
__device__ __forceinline__ void copy16(void *to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void arrive_copied(u64 &barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(&barrier)) : "memory");
}

// A ring of buffers: which one is next, and how often the ring went round.
template <int N> struct Cursor {
  int index = 0;
  u32 round = 0;
  __device__ __forceinline__ void next() {
    if (++index == N) index = 0, ++round;
  }
};

// Full and free barriers of the buffer under a cursor, for its user and for its maker.
template <int N> __device__ __forceinline__ void wait_full(u64 (&full)[N], const Cursor<N> &at) {
  wait(full[at.index], at.round & 1);
}
template <int N> __device__ __forceinline__ void wait_free(u64 (&free)[N], const Cursor<N> &at) {
  if (at.round) wait(free[at.index], (at.round - 1) & 1);
}

// What a kernel is given: one layer, or (LAYERS) a table of layers with the same heads and sequences; a counter that is
// 0, or null where every block is to start at its number and go on in steps of the grid.
#if LAYERS
struct Given {
  const Arguments *table;
  int *counter;
  int layers;
  __device__ __forceinline__ const Arguments &layer(int i) const { return table[i]; }
};
#else
struct Given {
  Arguments one;
  int *counter;
  static constexpr int layers = 1;
  __device__ __forceinline__ const Arguments &layer(int) const { return one; }
};
#endif

// Where an item lies: layers outermost, then sequences, then heads, so that blocks side by side read and write memory
// side by side.
__device__ __forceinline__ void place(Ticket &ticket, const Given &given, int item) {
  int sequences = given.layer(0).sequences, heads = given.layer(0).heads, group = item / heads;
  ticket.head = item - group * heads, ticket.layer = group / sequences, ticket.n = group - ticket.layer * sequences;
}

// A thread makes a barrier. `shared` is ready after the block's next barrier.
__device__ __forceinline__ void make_barriers(Shared &shared) {
  int t = threadIdx.x;
  if (t < TICKETS) init(shared.ticket_full[t], 1), init(shared.ticket_free[t], 1);
  if (t < VECTORS) init(shared.vectors_full[t], 33), init(shared.vectors_free[t], (PREPARERS + 1) * VOICES);
  if (t < AHEAD)
    init(shared.prepared_full[t], PREPARERS * VOICES), init(shared.prepared_free[t], (READERS + 1) * VOICES);
  if (t < 2) init(shared.part_full[t], READERS * VOICES), init(shared.part_free[t], VOICES);
  if (t < MAX_UNITS) init(shared.unit_full[t], 1), init(shared.unit_free[t], READERS * VOICES);
  if (t < 32) fence();
}
