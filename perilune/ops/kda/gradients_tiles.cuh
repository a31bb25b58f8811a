// gradients.cu, first part: what the kernel is given, where it keeps it, and how it gets there.
//
// One block a multiprocessor walks over (chunk, head) pairs. While it works on one, the tiles of the next arrive in
// shared memory, each as soon as its place is free.

constexpr int DIM = 128, TOKENS = 64, WARPS = 8, THREADS = 32 * WARPS;
constexpr int ROW = HEADS * DIM;                    // elements from token to token in d_o and the outputs
constexpr int WIDE = DIM + 8, SQUARE = TOKENS + 8;  // row pitch of tiles: eight rows lie in different banks

struct Arguments {
  const bf16 *q, *k, *g;
  const BETA *beta;
  const float *A_log, *dt_bias;
  const i64 *table;
  const float *norms;
  const bf16 *A, *S, *dS, *U, *dU, *d_o;
  bf16 *dq, *dk, *dg, *dv;
  BETA *d_beta;
  float *d_bias, *d_A;
  i64 count;                                         // pairs (chunk, head)
  i64 q_head, k_head, g_head, beta_head, beta_token;  // strides in elements
  float scale, lower_bound;
};

struct Shared {
  bf16 A[TOKENS * SQUARE], M[TOKENS * SQUARE], dP[TOKENS * SQUARE];
  bf16 U[TOKENS * WIDE], dU[TOKENS * WIDE], dv[TOKENS * WIDE];  // dv: negated
  bf16 q[TOKENS * WIDE], k[TOKENS * WIDE], g[TOKENS * WIDE];
  bf16 d_o[TOKENS * WIDE];                  // from the middle on dq
  bf16 S[DIM * WIDE], dS[DIM * WIDE];       // S: at the end dk and dg
  float norms[2][2][TOKENS];                // of two pairs in turn; of k, of q
  float diagonal[TOKENS];                   // of dP
  float part[3][WARPS][TOKENS];             // sums over one warp's channels
};

// A row of the table of chunks: token of row 0, first token and end of the sequence.
struct Row {
  i64 base, begin, end;
  __device__ __forceinline__ Row(const Arguments &a, i64 pair) {
    const i64 *row = a.table + 3 * (min(pair, a.count - 1) / HEADS);
    base = row[0], begin = row[1], end = row[2];
  }
};

// One pair: its number, head, token of row 0, and the rows first .. end - 1 that lie in the sequence.
struct Pair {
  i64 number, base;
  int head, first, end;
  __device__ __forceinline__ Pair(i64 pair, const Row &row)
      : number(pair), base(row.base), head(static_cast<int>(pair % HEADS)) {
    first = static_cast<int>(max(row.begin - base, 0ll));
    end = static_cast<int>(min(row.end - base, static_cast<i64>(TOKENS)));
  }
  __device__ __forceinline__ bool has(int row) const { return row >= first && row < end; }
};

struct Place {
  int tid, lane, warp, r, c;
  int line, piece, slot;        // copies by all threads: 16 rows of 16 pieces of 8 elements at a time; slot: in a tile
  int wide, across;             // where this lane's row of four [8, 8] tiles begins, tiles of a column in turn
  int square, square_across;    // across: tiles of a row in turn
  int own;                      // as across, in this warp's channels
  float before[2], after[2];    // 1 where the neighbour 1 or 2 lanes on is before this lane in its quad, or after it
  __device__ __forceinline__ Place() {
    tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, r = lane >> 2, c = lane & 3;
    line = tid >> 4, piece = (tid & 15) * 8, slot = line * WIDE + piece;
    int down = (lane & 15), right = (lane >> 4) * 8;
    wide = down * WIDE + right, square = down * SQUARE + right;
    down = (lane >> 4) * 8 + (lane & 7), right = (lane >> 3 & 1) * 8;
    across = down * WIDE + right, square_across = down * SQUARE + right;
    own = across + 16 * warp;
    before[0] = c & 1, before[1] = c >> 1, after[0] = 1.f - before[0], after[1] = 1.f - before[1];
  }
};

// Copies by all threads, 16 rows at a time.

template <int LINES>
__device__ __forceinline__ void fetch(bf16 *tile, const bf16 *from, const Place &at) {
#pragma unroll
  for (int i = 0; i < LINES; i += 16)
    copy16(tile + at.slot + i * WIDE, from + 8 * at.tid + i * DIM, true);
}

// Rows outside the sequence become zeros.
template <int TOKEN>
__device__ __forceinline__ void fetch_rows(bf16 *tile, const bf16 *x, const Pair &pair, i64 head_stride,
                                           const Place &at) {
  const bf16 *from = x + pair.head * head_stride + (pair.base + at.line) * TOKEN + at.piece;
#pragma unroll
  for (int i = 0; i < TOKENS; i += 16)
    copy16(tile + at.slot + i * WIDE, from + static_cast<i64>(i) * TOKEN, pair.has(at.line + i));
}

__device__ __forceinline__ void write_rows(bf16 *out, const bf16 *tile, const Pair &pair, u32 flip, const Place &at) {
  bf16 *to = out + ((pair.base + at.line) * HEADS + pair.head) * DIM + at.piece;
#pragma unroll
  for (int i = 0; i < TOKENS; i += 16) {
    uint4 x = *reinterpret_cast<const uint4 *>(tile + at.slot + i * WIDE);
    x = make_uint4(x.x ^ flip, x.y ^ flip, x.z ^ flip, x.w ^ flip);
    if (pair.has(at.line + i)) *reinterpret_cast<uint4 *>(to + static_cast<i64>(i) * ROW) = x;
  }
}

// What a pair needs, in the order in which it is started; each is one group of asynchronous copies.
enum Needs { FOR_DV, FIRST, SECOND, STATE, NEXT_STATE };

template <Needs WHAT>
__device__ __forceinline__ void start(Shared &shared, const Arguments &a, const Pair &pair, int turn, bool real,
                                      const Place &at) {
  const i64 n = pair.number;
  if (real) {
    if (WHAT == FOR_DV) {
#pragma unroll
      for (int i = 0; i < TOKENS; i += 32)
        copy16(shared.A + (at.tid >> 3) * SQUARE + (at.tid & 7) * 8 + i * SQUARE,
               a.A + n * (TOKENS * TOKENS) + 8 * at.tid + i * TOKENS, true);
      fetch<TOKENS>(shared.dU, a.dU + n * (TOKENS * DIM), at);
    } else if (WHAT == FIRST) {
      fetch<TOKENS>(shared.U, a.U + n * (TOKENS * DIM), at);
      fetch_rows<G_TOKEN>(shared.g, a.g, pair, a.g_head, at);
      if (at.tid < 32) copy16(&shared.norms[turn & 1][0][4 * at.tid], a.norms + n * (2 * TOKENS) + 4 * at.tid, true);
    } else if (WHAT == SECOND) {
      fetch_rows<K_TOKEN>(shared.k, a.k, pair, a.k_head, at);
      fetch_rows<ROW>(shared.d_o, a.d_o, pair, DIM, at);
    } else if (WHAT == STATE) {
      fetch_rows<Q_TOKEN>(shared.q, a.q, pair, a.q_head, at);
      fetch<DIM>(shared.S, a.S + n * (DIM * DIM), at);
    } else {
      fetch<DIM>(shared.dS, a.dS + n * (DIM * DIM), at);
    }
  }
  commit_copies();
}
