// Paged latent attention on Hopper: one block holds ROWS query rows (drafts x heads) of a sequence against one split of
// its context. All heads share the cached rows: the CLUSTER blocks of a cluster hold other query rows against the same
// split, each fetches a part of every tile, and all get it.
//
// The products are transposed: S^T = K Q^T and O^T = V^T P^T. ROWS is then the width of a wgmma, and O^T of 512 x ROWS
// lies in the registers of two warpgroups, 256 columns of the values each.
//
// The two warpgroups take turns: a tile of 64 cached rows has S^T, softmax and P^T made by one of them while the other
// multiplies. Each then adds its columns of V^T P^T. Weights are relative to a score that is near the largest one of a
// row's first tile; where a later score lies more than ROOM (in base 2) above, the warpgroup raises it.
//
// A tile comes as nine chunks of 64 rows x 64 columns (8 KB) through a ring in shared memory: first the key-only one,
// then the columns of the warpgroup that makes the scores, then the other one's, in the order in which they are free
// again. Rows in fp8 e4m3 (EIGHT) come through a second ring of RAW chunks of 4 KB, which three warps widen to bf16.
//
// Compiled behind wgmma.cuh and cluster.cuh with ROWS (16, 32 or 48), CLUSTER (1 or 2), RING (chunks), EIGHT (0 or 1) and
// RAW.

constexpr int TILE = 64, CHUNKS = 9, CHUNK_BYTES = 64 * 128, WIDTH = 576, VALUES = 512, NUMBERS = ROWS / 2;
constexpr int Q_CHUNK = ROWS * 128, P_AT = CHUNKS * Q_CHUNK;  // P^T of even and of odd tiles, [ROWS][64 keys]
constexpr int RING_AT = P_AT + 2 * ROWS * 128;
constexpr int RAW_AT = RING_AT + RING * CHUNK_BYTES, RAW_BYTES = 64 * 64;
constexpr int SMALL_AT = RAW_AT + RAW * RAW_BYTES;
constexpr int SLOTS = EIGHT ? RAW : RING, SLOT_BYTES = EIGHT ? RAW_BYTES : CHUNK_BYTES, SLOTS_AT = EIGHT ? RAW_AT : RING_AT;
constexpr int WIDENERS = 3, BOX = TILE / CLUSTER;
constexpr int BETWEEN = 8;                // chunks of a tile that meet q before the last tile's values are added
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f, ROOM = 8.0f, NONE = -1e30f;
#define NOTHING __int_as_float(0xff800000)
// Scores of a tile are made before the last tile's values are added; and a warpgroup that waits for a chunk must have
// seen the one before it in the same slot, which is one of its own last tile then.
static_assert(RING >= 2 * CHUNKS, "the ring is too short");

struct Arguments {
    TensorMap rows;                       // the pages as [pages * tokens, 576], boxes of BOX x 64
    const u16 *q;
    const int *table, *lengths;
    u16 *o;
    float *lse, *part, *part_lse;
    int table_width, heads, drafts, blocks, splits, size, page;  // page: tokens of a page, a multiple of 64
    float scale, row_scale;
};

struct Small {
    float shift[ROWS];                    // what a row's weights are relative to, in base 2; NONE before its first key
    float shrink[2][ROWS];                // of even and of odd tiles: what O^T is multiplied by before the tile
    int raised[2];                        // whether that is anything but ones
    u64 full[RING], empty[RING], raw_full[RAW + 1], raw_empty[RAW + 1], p_full[2];
};

static_assert(SMALL_AT + sizeof(Small) <= 232448, "shared memory is too small");

// What a thread knows of its place.
struct Here {
    Small *s;
    unsigned char *memory;                // shared memory
    u32 base;                             // its address
    int group, thread, warp, lane;        // warpgroup; thread and warp in it
    int start, end, tiles;                // positions of the split, its tiles
    int first, rank;                      // the block's first query row, its number in the cluster
};

// The columns of chunk `position` of tile t, in chunks.
__device__ __forceinline__ int columns(int t, int position) {
    return position == 0 ? CHUNKS - 1 : (position - 1) ^ (t % 2 * 4);
}

// Which time a ring of n barriers is at `chunk` goes round: the parity to wait for.
template <int N> __device__ __forceinline__ u32 turn(int chunk) { return chunk / N & 1; }

// Starts the copies of this block's part of all tiles, each as soon as all blocks of the cluster are done with its slot.
__device__ __forceinline__ void fetch(const Arguments &a, const Here &h) {
    u64 *full = EIGHT ? h.s->raw_full : h.s->full, *empty = EIGHT ? h.s->raw_empty : h.s->empty;
    const int *table = a.table + (u64)blockIdx.y * a.table_width;
    int next = h.start, page = h.tiles > 0 ? __ldg(table + next / a.page) : 0;
    for (int t = 0; t < h.tiles; t++) {
        const int row = page * a.page + next % a.page + h.rank * BOX;
        next += TILE;
        if (t + 1 < h.tiles) page = __ldg(table + next / a.page);
        for (int position = 0; position < CHUNKS; position++) {
            const int chunk = t * CHUNKS + position, slot = chunk % SLOTS;
            if (chunk >= SLOTS) wait(&empty[slot], turn<SLOTS>(chunk) ^ 1);
            expect(&full[slot], SLOT_BYTES);
            const u32 to = h.base + SLOTS_AT + slot * SLOT_BYTES + h.rank * (SLOT_BYTES / CLUSTER);
            copy_to_all(a.rows, to, columns(t, position) * 64, row, &full[slot]);
        }
    }
}

// Four e4m3 to bf16, but for NaN. Shifted into place a number is 2^120 too small, subnormals included.
__device__ __forceinline__ void widen(u32 x, u32 &low, u32 &high) {
    const u32 a = __byte_perm(x, 0, 0x1404), b = __byte_perm(x, 0, 0x3424), scale = 0x7b807b80;
    low = times((a & 0x7f007f00) >> 4 | a & 0x80008000, scale);
    high = times((b & 0x7f007f00) >> 4 | b & 0x80008000, scale);
}

// Marks the bytes of x that are NaN: 0x7f but for the sign.
__device__ __forceinline__ u32 nan_bytes(u32 x) { return (x & 0x7f7f7f7f) + 0x01010101 & 0x80808080; }

__device__ __forceinline__ void put_nan(u32 marks, u32 &low, u32 &high) {
    if (marks & 0x80) low |= 0x7fff;
    if (marks & 0x8000) low |= 0x7fff0000;
    if (marks & 0x800000) high |= 0x7fff;
    if (marks & 0x80000000) high |= 0x7fff0000;
}

// Raw chunks to chunks of the ring, by WIDENERS warps; zeros behind the last row of the split.
__device__ __forceinline__ void widen_all(const Here &h) {
    constexpr int UNITS = RAW_BYTES / 16, EACH = (UNITS + 32 * WIDENERS - 1) / (32 * WIDENERS);
    const int thread = h.thread - 32;
    for (int chunk = 0; chunk < h.tiles * CHUNKS; chunk++) {
        const int from = chunk % (RAW + !EIGHT), to = chunk % RING, valid = h.end - h.start - chunk / CHUNKS * TILE;
        u32 x[EACH][4];
        wait(&h.s->raw_full[from], turn<RAW + !EIGHT>(chunk));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = thread + 32 * WIDENERS * i;
            if (unit < UNITS) load16(h.base + RAW_AT + from * RAW_BYTES + unit * 16, x[i]);
        }
        __syncwarp();
        if (h.lane < CLUSTER) arrive_at(&h.s->raw_empty[from], h.lane);
        if (chunk >= RING) wait(&h.s->empty[to], turn<RING>(chunk) ^ 1);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int unit = thread + 32 * WIDENERS * i, row = unit / 4;
            if (unit >= UNITS) break;
            u32 y[8], marks = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (row >= valid) x[i][k] = 0;
                widen(x[i][k], y[2 * k], y[2 * k + 1]);
                marks |= nan_bytes(x[i][k]);
            }
            if (marks)
#pragma unroll
                for (int k = 0; k < 4; k++) put_nan(nan_bytes(x[i][k]), y[2 * k], y[2 * k + 1]);
            const u32 ring = h.base + RING_AT + to * CHUNK_BYTES + row * 128;
#pragma unroll
            for (int k = 0; k < 2; k++)
                store16(ring + ((unit % 4 * 2 + k ^ row % 8) << 4), y[4 * k], y[4 * k + 1], y[4 * k + 2], y[4 * k + 3]);
        }
        proxy_fence();
        __syncwarp();
        if (h.lane == 0) arrive(&h.s->full[to]);
    }
}

// This warp is done with a chunk of the ring: whoever fills it again is told, in all blocks where each fetches for all.
__device__ __forceinline__ void release(const Here &h, int chunk) {
    if (EIGHT || CLUSTER == 1) {
        if (h.lane == 0) arrive(&h.s->empty[chunk % RING]);
    } else if (h.lane < CLUSTER) {
        arrive_at(&h.s->empty[chunk % RING], h.lane);
    }
}

// What lies behind the last row of tile t may be anything, NaN too: zeros instead.
__device__ __forceinline__ void clear_tail(const Here &h, int t, int valid) {
#pragma unroll 1
    for (int chunk = t * CHUNKS; chunk < (t + 1) * CHUNKS; chunk++) {
        wait(&h.s->full[chunk % RING], turn<RING>(chunk));
#pragma unroll 1
        for (int j = valid * 8 + h.thread; j < TILE * 8; j += 128)
            store16(h.base + RING_AT + chunk % RING * CHUNK_BYTES + j * 16, 0, 0, 0, 0);
    }
    proxy_fence();
    meet<128>(1 + h.group);
}

// x = S^T of tile t: what its chunks FROM .. TO - 1 add.
template <int FROM, int TO> __device__ __forceinline__ void scores(const Here &h, int t, float (&x)[NUMBERS]) {
#pragma unroll
    for (int position = FROM; position < TO; position++) {
        const int chunk = t * CHUNKS + position;
        wait(&h.s->full[chunk % RING], turn<RING>(chunk));
        mma_fence();
        const u32 rows = low_word<16>(h.base + RING_AT) + chunk % RING * (CHUNK_BYTES / 16);
        const u32 q = low_word<16>(h.base) + columns(h.group, position) * (Q_CHUNK / 16);
#pragma unroll
        for (int k = 0; k < 4; k++) mma_s(x, matrix(rows + 2 * k), matrix(q + 2 * k), position + k);
    }
    mma_commit();
}

// Adds tile t's values to O^T, a group of products for each chunk; `first` is the first of this warpgroup's four chunks.
// O^T and the sums are made relative to the tile's scores before.
__device__ __forceinline__ void values(const Here &h, int t, int first, float (&o)[4][NUMBERS], float (&sum)[ROWS / 4]) {
    if (h.s->raised[t % 2]) {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            const float2 f = *(const float2 *)&h.s->shrink[t % 2][8 * j + h.lane % 4 * 2];
            sum[2 * j] *= f.x; sum[2 * j + 1] *= f.y;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                o[m][4 * j] *= f.x; o[m][4 * j + 1] *= f.y;
                o[m][4 * j + 2] *= f.x; o[m][4 * j + 3] *= f.y;
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) hold(o[m]);
    mma_fence();
    const u32 p = low_word<16>(h.base + P_AT) + t % 2 * (ROWS * 128 / 16);
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const u32 rows = low_word<16>(h.base + RING_AT) + (t * CHUNKS + first + m) % RING * (CHUNK_BYTES / 16);
#pragma unroll
        for (int k = 0; k < 4; k++) mma_o(o[m], matrix(rows + 128 * k), matrix(p + 2 * k), 1);
        mma_commit();
    }
}

// Combines y over the eight lanes that hold the same rows (lane % 4) and writes the result of each row. y[2j + e] belongs
// to row 8j + 2 (lane % 4) + e. In each of three steps a lane gives away half of its rows, so that few values travel.
template <class Op>
__device__ __forceinline__ void over_keys(float (&y)[ROWS / 4], int lane, float *out, Op op) {
    constexpr int N1 = ROWS / 4, N2 = (N1 + 1) / 2, N3 = (N2 + 1) / 2, N4 = (N3 + 1) / 2;
    auto step = [&](int n, int h, int d) {
#pragma unroll
        for (int k = 0; k < h; k++) {
            const float low = y[k], high = k + h < n ? y[k + h] : y[k];
            const bool upper = lane & d;
            y[k] = op(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, d));
        }
    };
    step(N1, N2, 16);
    step(N2, N3, 8);
    step(N3, N4, 4);
#pragma unroll
    for (int k = 0; k < N4; k++) {
        const int last = k + (lane & 4 ? N4 : 0), i = last + (lane & 8 ? N3 : 0) + (lane & 16 ? N2 : 0);
        if (last < N3) out[i / 2 * 8 + lane % 4 * 2 + i % 2] = y[k];
    }
}

// Rows with a score far above their reference get it as the new one.
__device__ __forceinline__ void raise(const Here &h, int t, const float (&x)[NUMBERS], float base2) {
    Small *s = h.s;
    // Largest scores of each warp's keys, where P^T of this tile will be.
    float *peaks = (float *)(h.memory + P_AT + t % 2 * (ROWS * 128)), y[ROWS / 4];
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) y[i] = fmaxf(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + 2 + i % 2]);
    over_keys(y, h.lane, peaks + h.warp * ROWS, [](float a, float b) { return fmaxf(a, b); });
    meet<128>(1 + h.group);
    if (h.thread < ROWS) {
        const int i = h.thread;
        const float last = s->shift[i];
        const float peak = fmaxf(fmaxf(peaks[i], peaks[ROWS + i]), fmaxf(peaks[2 * ROWS + i], peaks[3 * ROWS + i])) * base2;
        const bool up = peak - last > ROOM;
        s->shrink[t % 2][i] = up ? exp2_(last - peak) : 1.0f;
        if (up) s->shift[i] = peak;
    }
    meet<128>(1 + h.group);
}

// The largest of the scores' exponents, and what they are relative to.
__device__ __forceinline__ float exponents(const Here &h, const float (&x)[NUMBERS], float base2, float (&shift)[ROWS / 4]) {
    float largest = NOTHING;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        const float2 f = *(const float2 *)&h.s->shift[8 * j + h.lane % 4 * 2];
        shift[2 * j] = f.x; shift[2 * j + 1] = f.y;
    }
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) largest = fmaxf(largest, fmaf(x[i], base2, -shift[i / 4 * 2 + i % 2]));
    return largest;
}

// x: the weights of tile t from its scores. x[4j + {0, 1, 2, 3}]: keys k, k, k + 8, k + 8; rows 8j + column + {0, 1, 0, 1}.
__device__ __forceinline__ void weights(const Arguments &a, const Here &h, int t, int length, float (&x)[NUMBERS]) {
    const int at = h.start + t * TILE, column = h.lane % 4 * 2;
    const float base2 = a.scale * a.row_scale * LOG2E;
    if (at + TILE > min(length - a.drafts + 1, h.end)) {
        const int key = at + h.warp * 16 + h.lane / 4;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            const int last = min(length - a.drafts + (h.first + i / 2 * 8 + column + i % 2) / a.heads, h.end - 1);
            if (key > last) x[i / 2 * 4 + i % 2] = NOTHING;
            if (key + 8 > last) x[i / 2 * 4 + 2 + i % 2] = NOTHING;
        }
    }
    float shift[ROWS / 4];
    const bool raised = any_of<128>(1 + h.group, exponents(h, x, base2, shift) > ROOM);
    if (raised) {
        raise(h, t, x, base2);
        exponents(h, x, base2, shift);
    }
    if (h.thread == 0) h.s->raised[t % 2] = raised;
#pragma unroll
    for (int i = 0; i < NUMBERS; i++) x[i] = exp2_(fmaf(x[i], base2, -shift[i / 4 * 2 + i % 2]));
}

// P^T of tile t, transposed on the way: a row of shared memory holds the 64 keys of one query row.
__device__ __forceinline__ void publish(const Here &h, int t, const float (&x)[NUMBERS]) {
    const u32 p = h.base + P_AT + t % 2 * (ROWS * 128);
#pragma unroll
    for (int j = 0; j < ROWS / 8; j += 2) {
        u32 z[4];
#pragma unroll
        for (int i = 0; i < 4; i++) z[i] = pair(x[4 * j + 2 * i], x[4 * j + 2 * i + 1]);
        const int row = (j + h.lane / 16) * 8 + h.lane % 8, unit = h.warp * 2 + h.lane / 8 % 2;
        store_transposed(p + row * 128 + ((unit ^ (row & 7)) << 4), z);
    }
    proxy_fence();
    arrive(&h.s->p_full[t % 2]);
}

// The part of one of the two warpgroups: O^T of 256 columns of the values, unnormalised, and the sums of its own weights.
__device__ __forceinline__ void attend(const Arguments &a, const Here &h, int length, float (&o)[4][NUMBERS], float (&sum)[ROWS / 4]) {
    int t = h.group;
    for (; t < h.tiles; t += 2) {
        float x[NUMBERS];
        const int valid = h.end - h.start - t * TILE;
        if (!EIGHT && valid < TILE) clear_tail(h, t, valid);
        scores<0, BETWEEN>(h, t, x);
        if (t > 0) {
            wait(&h.s->p_full[1 - h.group], (t - 1) / 2 & 1);
            values(h, t - 1, 5, o, sum);
        }
        scores<BETWEEN, CHUNKS>(h, t, x);
        mma_wait<0>();
        hold(x);
#pragma unroll
        for (int m = 0; m < 4; m++) hold(o[m]);
        release(h, t * CHUNKS);
        if (t > 0)
            for (int m = 0; m < 4; m++) release(h, (t - 1) * CHUNKS + 5 + m);
        weights(a, h, t, length, x);
        publish(h, t, x);
        wait(&h.s->p_full[h.group], t / 2 & 1);
        values(h, t, 1, o, sum);
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) sum[i] += x[i / 2 * 4 + i % 2] + x[i / 2 * 4 + 2 + i % 2];
        mma_wait<2>();
        release(h, t * CHUNKS + 1);
        release(h, t * CHUNKS + 2);
        mma_wait<0>();
#pragma unroll
        for (int m = 0; m < 4; m++) hold(o[m]);
        release(h, t * CHUNKS + 3);
        release(h, t * CHUNKS + 4);
    }
    if (t == h.tiles && t > 0) {          // the last tile was the other warpgroup's
        wait(&h.s->p_full[1 - h.group], (t - 1) / 2 & 1);
        values(h, t - 1, 5, o, sum);
        mma_wait<0>();
#pragma unroll
        for (int m = 0; m < 4; m++) hold(o[m]);
    }
}

// The block's query rows to shared memory, zeros for those past the last; references before the first key.
__device__ __forceinline__ void take_queries(const Arguments &a, const Here &h) {
    const int count = a.drafts * a.heads;
    for (int i = threadIdx.x; i < ROWS * 72; i += 256) {
        const int row = i / 72, unit = i % 72, r = h.first + row;
        uint4 x = {0, 0, 0, 0};
        if (r < count) x = *(const uint4 *)(a.q + ((u64)blockIdx.y * count + r) * WIDTH + unit * 8);
        *(uint4 *)(h.memory + unit / 8 * Q_CHUNK + row * 128 + ((unit % 8 ^ row % 8) << 4)) = x;
    }
    if (threadIdx.x < ROWS) h.s->shift[threadIdx.x] = NONE;
    proxy_fence();
    meet<256>(3);
}

// O^T over the sums of weights, and the log-sum-exp: results of a sequence of one split, parts of the others.
__device__ __forceinline__ void write(const Arguments &a, const Here &h, int length, const float (&o)[4][NUMBERS], float (&sum)[ROWS / 4]) {
    float *mass = (float *)(h.memory + P_AT);  // of each warp's keys: a row's sum of weights; P^T is done
    meet<256>(3);
    over_keys(sum, h.lane, mass + (h.group * 4 + h.warp) * ROWS, [](float a, float b) { return a + b; });
    meet<256>(3);
    const bool whole = length <= a.size;
    const int count = a.drafts * a.heads, d = h.group * 256 + h.warp * 16 + h.lane / 4;
    const u64 first = whole ? (u64)blockIdx.y * count : ((u64)blockIdx.y * a.splits + h.start / a.size) * count;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int row = i / 2 * 8 + h.lane % 4 * 2 + i % 2;
        if (h.first + row >= count) continue;
        float z = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++) z += mass[k * ROWS + row];
        const float f = z > 0.0f ? __fdividef(whole ? a.row_scale : 1.0f, z) : 0.0f;
        const u64 out = first + h.first + row;
        if (d == 0) (whole ? a.lse : a.part_lse)[out] = z > 0.0f ? (h.s->shift[row] + log2f(z)) * LN2 : NOTHING;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const float y0 = o[m][i / 2 * 4 + i % 2] * f, y1 = o[m][i / 2 * 4 + 2 + i % 2] * f;
            const u64 at = out * VALUES + d + m * 64;
            if (whole) { a.o[at] = bf16(y0); a.o[at + 8] = bf16(y1); }
            else { a.part[at] = y0; a.part[at + 8] = y1; }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(384, 1) latent(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int thread = threadIdx.x, block = blockIdx.x % a.blocks, split = blockIdx.x / a.blocks;
    const int length = a.lengths[blockIdx.y];
    Here h;
    h.s = (Small *)(memory + SMALL_AT);
    h.memory = memory;
    h.base = shared_address(memory);
    h.group = __shfl_sync(~0u, thread / 128, 0);  // uniform for the compiler: products stay asynchronous
    h.thread = thread % 128; h.warp = h.thread / 32; h.lane = thread % 32;
    h.start = split * a.size;
    if (h.start >= length && split > 0) return;
    h.end = min(h.start + a.size, length);
    h.tiles = (max(h.end - h.start, 0) + TILE - 1) / TILE;
    h.first = block * ROWS;
    h.rank = CLUSTER == 1 ? 0 : cluster_rank();
    Small *s = h.s;

    if (thread == 0) {
        for (int i = 0; i < RING; i++) {
            barrier_init(&s->full[i], EIGHT ? WIDENERS : 1);
            barrier_init(&s->empty[i], EIGHT ? 4 : 4 * CLUSTER);
        }
        for (int i = 0; i < RAW; i++) {
            barrier_init(&s->raw_full[i], 1);
            barrier_init(&s->raw_empty[i], WIDENERS * CLUSTER);
        }
        for (int i = 0; i < 2; i++) barrier_init(&s->p_full[i], 128);
        barriers_ready();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_meet();

    if (h.group == 2) {
        fewer_registers<EIGHT ? 56 : 40>();
        if (thread == 256) fetch(a, h);
        if (EIGHT && h.warp > 0) widen_all(h);
    } else {
        more_registers<EIGHT ? 224 : 232>();
        take_queries(a, h);
        float o[4][NUMBERS], sum[ROWS / 4];
#pragma unroll
        for (int i = 0; i < 4 * NUMBERS; i++) o[i / NUMBERS][i % NUMBERS] = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) sum[i] = 0.0f;
        attend(a, h, length, o, sum);
        write(a, h, length, o, sum);
    }
    if (CLUSTER > 1) cluster_meet();      // no block ends while another still writes to it
}
