// Paged latent attention on Hopper: one block holds ROWS query rows (drafts x heads) of a sequence against one split of
// its context. All heads share the cached rows, so a row is read once from memory and used ROWS times.
//
// The products are transposed: S^T = K Q^T and O^T = V^T P^T. ROWS is then the width of a wgmma (96 heads fill it; in
// the usual order 96 rows would be padded to 128), and O^T of 512 x ROWS lies in the registers of two warpgroups.
//
// A tile of 64 cached rows comes as nine chunks of 64 rows x 64 columns (8 KB) through a ring in shared memory. A chunk
// is read by the S^T products and, but for the key-only one, by the O^T products, and is then free again. Warpgroup 2
// makes S^T and the softmax, one half of the rows after the other; warpgroups 0 and 1 make O^T of a half each, so that
// the first half's values meet its weights while the second half's scores are made. Whoever frees a slot of the ring
// last starts the copy that fills it again.
//
// Rows in fp8 e4m3 (EIGHT) come through a second ring of RAW chunks of 4 KB, which warpgroup 2 widens to bf16.
//
// Compiled behind wgmma.cuh with ROWS (32, 64 or 96), RING (chunks), EIGHT (0 or 1) and RAW.

constexpr int HALF = ROWS / 2;            // S^T is made for half of the rows at a time, for the sake of registers
constexpr int TILE = 64, CHUNKS = 9, CHUNK_BYTES = 64 * 128, WIDTH = 576, VALUES = 512;
constexpr int Q_AT = 0, Q_CHUNK = ROWS * 128;
constexpr int P_AT = CHUNKS * Q_CHUNK;    // P^T, [ROWS][64 keys]
constexpr int RING_AT = P_AT + ROWS * 128;
constexpr int RAW_AT = RING_AT + RING * CHUNK_BYTES, RAW_BYTES = 64 * 64;
constexpr int SMALL_AT = RAW_AT + RAW * RAW_BYTES;
constexpr int SLOTS = EIGHT ? RAW : RING, SLOT_BYTES = EIGHT ? RAW_BYTES : CHUNK_BYTES, SLOTS_AT = EIGHT ? RAW_AT : RING_AT;
#define NOTHING __int_as_float(0xff800000)
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct Arguments {
    TensorMap rows;                       // the pages as [pages * tokens, 576], boxes of 64 x 64
    const u16 *q;
    const int *table, *lengths;
    u16 *o;
    float *lse, *part, *part_lse;
    int table_width, heads, drafts, blocks, splits, size, page;  // page: tokens of a page, a multiple of 64
    float scale, row_scale;
};

struct Small {
    float peak[4][HALF], mass[4][HALF];   // of each warp's keys: a row's largest score, its sum of weights
    float shift[HALF];                    // what a row's weights are relative to, in base 2
    float shrink[ROWS];                   // what O^T is multiplied by before this tile
    float top[ROWS], sum[ROWS];           // at the end: score that the weights are relative to, sum of weights
    int limit[ROWS];                      // last position that a row sees
    int row[8];                           // first row of tiles t - 1 .. t + 4 in the pages
    u64 copied[SLOTS], empty[RING], p_full[2], p_empty[2];  // of P^T's halves
};

// Chunk `position` of a tile holds the columns of this chunk of q.
__device__ __forceinline__ int q_chunk(int position) {
    return position == 0 ? CHUNKS - 1 : position - 1;
}

// Where tile t of a split begins in the pages.
__device__ __forceinline__ int first_row(const Arguments &a, int start, int t) {
    const int at = start + t * TILE;
    return __ldg(a.table + (u64)blockIdx.y * a.table_width + at / a.page) * a.page + at % a.page;
}

// Starts the copy of the split's chunk number `chunk` to its slot; there is none behind the last tile.
__device__ __forceinline__ void refill(const Arguments &a, Small *s, u32 base, int chunk, int tiles) {
    if (chunk >= tiles * CHUNKS) return;
    const int slot = chunk % SLOTS;
    expect(&s->copied[slot], SLOT_BYTES);
    copy(a.rows, base + SLOTS_AT + slot * SLOT_BYTES, q_chunk(chunk % CHUNKS) * 64, s->row[chunk / CHUNKS % 8], &s->copied[slot]);
}

// Four e4m3 to bf16. Shifted into place a number is 2^120 too small, subnormals included; 0x7f alone is NaN.
__device__ __forceinline__ void widen(u32 x, u32 &low, u32 &high) {
    const u32 a = __byte_perm(x, 0, 0x1404), b = __byte_perm(x, 0, 0x3424), scale = 0x7b807b80;
    low = (a & 0x7f007f00) >> 4 | a & 0x80008000;
    high = (b & 0x7f007f00) >> 4 | b & 0x80008000;
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(low) : "r"(scale));
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(high) : "r"(scale));
    const u32 nan = (x & 0x7f7f7f7f) + 0x01010101 & 0x80808080;
    if (nan) {
        if (nan & 0x80) low |= 0x7fff;
        if (nan & 0x8000) low |= 0x7fff0000;
        if (nan & 0x800000) high |= 0x7fff;
        if (nan & 0x80000000) high |= 0x7fff0000;
    }
}

// A raw chunk to a chunk of the ring; zeros behind the last valid row.
__device__ __forceinline__ void widen(u32 raw, u32 chunk, int thread, int valid) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int unit = thread + 128 * i, row = unit / 4;
        u32 x[4], y[8];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(raw + unit * 16));
#pragma unroll
        for (int k = 0; k < 4; k++) widen(row < valid ? x[k] : 0, y[2 * k], y[2 * k + 1]);
#pragma unroll
        for (int k = 0; k < 2; k++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                         :: "r"(chunk + row * 128 + ((unit % 4 * 2 + k ^ row % 8) << 4)), "r"(y[4 * k]), "r"(y[4 * k + 1]), "r"(y[4 * k + 2]), "r"(y[4 * k + 3])
                         : "memory");
    }
}

// What lies behind the last row of a tile may be anything, NaN too: zeros instead, in all chunks from `slot` on.
__device__ __forceinline__ void clear_tail(Small *s, u32 ring, int slot, u32 parity, int thread, int valid) {
#pragma unroll 1
    for (int i = 0; i < CHUNKS; i++) {
        wait(&s->copied[slot], parity);
#pragma unroll 1
        for (int j = valid * 8 + thread; j < TILE * 8; j += 128)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(ring + slot * CHUNK_BYTES + j * 16), "r"(0) : "memory");
        if (++slot == RING) { slot = 0; parity ^= 1; }
    }
    proxy_fence();
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

// Combines y over the eight lanes that hold the same rows (lane % 4) and writes the result of each row. y[2j + e] belongs
// to row 8j + 2 (lane % 4) + e. In each of three steps a lane gives away half of its rows, so that few values travel.
template <class Op>
__device__ __forceinline__ void over_keys(float (&y)[HALF / 4], int lane, float *out, Op op) {
    constexpr int N1 = HALF / 4, N2 = (N1 + 1) / 2, N3 = (N2 + 1) / 2, N4 = (N3 + 1) / 2;
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

// A row's books: the score that its weights are relative to, near the largest one, and what a new one shrinks; the other
// half's last weights, which are complete by now.
__device__ __forceinline__ void book(
    Small *s, float peak, float mass, float base2, int row, bool before, float &top, float &shrink, float &other_sum, float other_shrink) {
    const float last = top;
    // Weights may grow to 2^8 before O^T is shrunk: most tiles leave it alone.
    if ((peak - last) * base2 > 8.0f) top = peak;
    const float shift = top == NOTHING ? 0.0f : top * base2;
    shrink = top == last ? 1.0f : exp2_(fmaf(last, base2, -shift));
    s->shift[row % HALF] = shift;
    s->shrink[row] = shrink;
    if (before) other_sum = other_sum * other_shrink + mass;
}

__device__ __forceinline__ void scores(const Arguments &a, Small *s, u32 base, int start, int end, int length, int tiles) {
    const int thread = threadIdx.x - 256, warp = thread / 32, lane = thread % 32;
    const u32 ring = base + RING_AT, ring_low = low_word<16>(ring);
    const float base2 = a.scale * a.row_scale * LOG2E;
    if (thread == 0)
        for (int i = 0; i < SLOTS; i++) refill(a, s, base, i, tiles);
    __syncwarp();
    int slot = 0, raw = 0;                // of the tile's first chunk, of the next raw one
    u32 parity = 0, raw_parity = 0;
    // Threads 0 .. HALF - 1 keep the books of row `thread` of each half: reference score, sum, last shrinking.
    float top[2] = {NOTHING, NOTHING}, sum[2] = {0.0f, 0.0f}, shrink[2] = {1.0f, 1.0f};
    for (int t = 0; t < tiles; t++) {
        const int at = start + t * TILE, valid = end - at;
        const bool masked = at + TILE > length - a.drafts + 1 || valid < TILE;
        for (int half = 0; half < 2; half++) {
            float x[HALF / 2];
            const u32 q_low = low_word<16>(base + Q_AT) + half * HALF * 8;
            int c = slot;
            u32 chunk_parity = parity;
            if (!EIGHT && half == 0 && valid < TILE) clear_tail(s, ring, slot, parity, thread, valid);
            constexpr int GROUP = EIGHT ? 3 : 1;  // chunks that are widened between two barriers
#pragma unroll EIGHT ? 1 : CHUNKS
            for (int first = 0; first < CHUNKS; first += GROUP) {
                if (half == 0 && !EIGHT) wait(&s->copied[c], chunk_parity);
                if (half == 0 && EIGHT) {
                    int d = c;
                    u32 d_parity = chunk_parity;
                    for (int i = 0; i < GROUP; i++) {
                        wait(&s->copied[raw], raw_parity);
                        wait(&s->empty[d], d_parity ^ 1);
                        widen(base + RAW_AT + raw * RAW_BYTES, ring + d * CHUNK_BYTES, thread, valid);
                        if (++raw == RAW) { raw = 0; raw_parity ^= 1; }
                        if (++d == RING) { d = 0; d_parity ^= 1; }
                    }
                    proxy_fence();
                    asm volatile("bar.sync 1, 128;" ::: "memory");
                    if (thread == 0)
                        for (int i = 0; i < GROUP; i++) refill(a, s, base, t * CHUNKS + first + i + RAW, tiles);
                }
                mma_fence();
#pragma unroll
                for (int position = first; position < first + GROUP; position++) {
                    const u32 rows = ring_low + c * (CHUNK_BYTES / 16), q = q_low + q_chunk(position) * (Q_CHUNK / 16);
#pragma unroll
                    for (int k = 0; k < 4; k++) mma_s(x, matrix(rows + 2 * k), matrix(q + 2 * k), position + k);
                    if (++c == RING) { c = 0; chunk_parity ^= 1; }
                }
            }
            mma_commit();
            mma_wait<0>();
            hold(x);
            if (half == 1) {              // the key-only chunk is done
                if (lane < 2) arrive(&s->empty[slot]);
                if (!EIGHT && thread == 0) {
                    wait(&s->empty[slot], parity);
                    refill(a, s, base, t * CHUNKS + RING, tiles);
                }
                slot = c; parity = chunk_parity;
                __syncwarp();
            }

            const int column = half * HALF + lane % 4 * 2;  // x[4j + {0, 1, 2, 3}]: keys k, k, k + 8, k + 8; rows 8j + column + {0, 1, 0, 1}
            if (masked) {
                const int key = at + warp * 16 + lane / 4;
#pragma unroll
                for (int i = 0; i < HALF / 2; i++)
                    if (key + i % 4 / 2 * 8 > s->limit[column + i / 4 * 8 + i % 2]) x[i] = NOTHING;
            }
            float y[HALF / 4];
#pragma unroll
            for (int i = 0; i < HALF / 4; i++) y[i] = fmaxf(x[i / 2 * 4 + i % 2], x[i / 2 * 4 + 2 + i % 2]);
            over_keys(y, lane, s->peak[warp], [](float a, float b) { return fmaxf(a, b); });
            asm volatile("bar.sync 1, 128;" ::: "memory");
            if (t > 0) wait(&s->p_empty[half], (t - 1) & 1);
            if (thread < HALF) {
                const float peak = fmaxf(fmaxf(s->peak[0][thread], s->peak[1][thread]), fmaxf(s->peak[2][thread], s->peak[3][thread]));
                const float mass = s->mass[0][thread] + s->mass[1][thread] + s->mass[2][thread] + s->mass[3][thread];
                if (half == 0) book(s, peak, mass, base2, thread, t > 0, top[0], shrink[0], sum[1], shrink[1]);
                else book(s, peak, mass, base2, HALF + thread, true, top[1], shrink[1], sum[0], shrink[0]);
            }
            asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
            for (int j = 0; j < HALF / 8; j++) {
                const float2 shift = *(const float2 *)&s->shift[lane % 4 * 2 + 8 * j];
                x[4 * j] = exp2_(fmaf(x[4 * j], base2, -shift.x));
                x[4 * j + 1] = exp2_(fmaf(x[4 * j + 1], base2, -shift.y));
                x[4 * j + 2] = exp2_(fmaf(x[4 * j + 2], base2, -shift.x));
                x[4 * j + 3] = exp2_(fmaf(x[4 * j + 3], base2, -shift.y));
            }
#pragma unroll
            for (int i = 0; i < HALF / 4; i++) y[i] = x[i / 2 * 4 + i % 2] + x[i / 2 * 4 + 2 + i % 2];
            over_keys(y, lane, s->mass[warp], [](float a, float b) { return a + b; });
            // Transposed on the way: a row of shared memory holds the 64 keys of one query row.
#pragma unroll
            for (int j = 0; j < HALF / 8; j += 2) {
                u32 z[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z[i]) : "f"(x[4 * j + 2 * i + 1]), "f"(x[4 * j + 2 * i]));
                const int row = half * HALF + (j + lane / 16) * 8 + lane % 8, unit = warp * 2 + lane / 8 % 2;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                             :: "r"(base + P_AT + row * 128 + ((unit ^ (row & 7)) << 4)), "r"(z[0]), "r"(z[1]), "r"(z[2]), "r"(z[3])
                             : "memory");
            }
            if (half == 1 && thread == 127 && t + 5 < tiles) s->row[(t + 5) % 8] = first_row(a, start, t + 5);
            proxy_fence();
            arrive(&s->p_full[half]);
        }
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (thread < HALF) {
        if (tiles > 0) {
            const float mass = s->mass[0][thread] + s->mass[1][thread] + s->mass[2][thread] + s->mass[3][thread];
            sum[1] = sum[1] * shrink[1] + mass;
        }
        s->top[thread] = top[0];
        s->top[HALF + thread] = top[1];
        s->sum[thread] = sum[0];
        s->sum[HALF + thread] = sum[1];
    }
}

// O^T of half `half` of the rows.
__device__ __forceinline__ void values(const Arguments &a, Small *s, u32 base, int half, int tiles, float (&o)[8][HALF / 2]) {
    const int lane = threadIdx.x % 32;
    const u32 ring_low = low_word<16>(base + RING_AT), p_low = low_word<16>(base + P_AT) + half * HALF * 8;
    int slot = 1;                         // of the first chunk with values
    for (int t = 0; t < tiles; t++) {
        wait(&s->p_full[half], t & 1);
        bool still = true;
#pragma unroll
        for (int j = 0; j < HALF / 8; j++) {
            const float2 f = *(const float2 *)&s->shrink[half * HALF + 8 * j + lane % 4 * 2];
            still = still && f.x == 1.0f && f.y == 1.0f;
        }
        if (!__all_sync(~0u, still)) {
#pragma unroll
            for (int j = 0; j < HALF / 8; j++) {
                const float2 f = *(const float2 *)&s->shrink[half * HALF + 8 * j + lane % 4 * 2];
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    o[m][4 * j] *= f.x; o[m][4 * j + 1] *= f.y;
                    o[m][4 * j + 2] *= f.x; o[m][4 * j + 3] *= f.y;
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 8; m++) hold(o[m]);
        mma_fence();
        int c = slot;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const u32 rows = ring_low + c * (CHUNK_BYTES / 16);
#pragma unroll
            for (int k = 0; k < 4; k++) mma_o(o[m], matrix(rows + 128 * k), matrix(p_low + 2 * k), 1);
            mma_commit();
            if (++c == RING) c = 0;
        }
        c = slot;
#pragma unroll
        for (int m = 0; m < 8; m += 2) {
            if (m == 0) mma_wait<6>();
            if (m == 2) mma_wait<4>();
            if (m == 4) mma_wait<2>();
            if (m == 6) mma_wait<0>();
            if (m == 6 && lane == 0) arrive(&s->p_empty[half]);
#pragma unroll
            for (int i = m; i < m + 2; i++) {
                if (lane == 0) arrive(&s->empty[c]);
                if (!EIGHT && threadIdx.x == 128) {  // the second half is done last: it fills the slot again
                    const int chunk = t * CHUNKS + 1 + i;
                    wait(&s->empty[c], chunk / RING & 1);
                    refill(a, s, base, chunk + RING, tiles);
                }
                if (++c == RING) c = 0;
            }
            __syncwarp();
        }
#pragma unroll
        for (int m = 0; m < 8; m++) hold(o[m]);
        slot = c + 1 == RING ? 0 : c + 1;  // past the key-only chunk
    }
}

__device__ __forceinline__ u16 bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

extern "C" __global__ void __launch_bounds__(384, 1) latent(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int thread = threadIdx.x, block = blockIdx.x % a.blocks, split = blockIdx.x / a.blocks;
    const u64 n = blockIdx.y;
    const int length = a.lengths[n], start = split * a.size;
    if (start >= length && split > 0) return;
    const int end = min(start + a.size, length), tiles = (max(end - start, 0) + TILE - 1) / TILE;
    const int count = a.drafts * a.heads;
    const u32 base = shared_address(memory);
    Small *s = (Small *)(memory + SMALL_AT);

    for (int i = thread; i < ROWS * 72; i += 384) {
        const int row = i / 72, unit = i % 72, r = block * ROWS + row;
        uint4 x = {0, 0, 0, 0};
        if (r < count) x = *(const uint4 *)(a.q + (n * count + r) * WIDTH + unit * 8);
        *(uint4 *)(memory + Q_AT + unit / 8 * Q_CHUNK + row * 128 + ((unit % 8 ^ row % 8) << 4)) = x;
    }
    for (int i = thread; i < ROWS; i += 384) {
        s->limit[i] = min(length - a.drafts + (block * ROWS + i) / a.heads, end - 1);
    }
    if (thread >= 32 && thread < 37 && thread - 32 < tiles) s->row[thread - 32] = first_row(a, start, thread - 32);
    if (thread == 0) {
        for (int i = 0; i < SLOTS; i++) barrier_init(&s->copied[i], 1);
        for (int i = 0; i < RING; i++) barrier_init(&s->empty[i], 8);
        for (int i = 0; i < 2; i++) { barrier_init(&s->p_full[i], 128); barrier_init(&s->p_empty[i], 4); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    proxy_fence();
    __syncthreads();

    const int group = thread / 128;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        scores(a, s, base, start, end, length, tiles);
        asm volatile("bar.sync 2, 384;" ::: "memory");
        const int row = thread - 256, r = block * ROWS + row;
        if (row < ROWS && r < count) {
            const float z = s->sum[row], lse = z > 0.0f ? s->top[row] * a.scale * a.row_scale + log2f(z) * LN2 : NOTHING;
            if (length <= a.size) a.lse[n * count + r] = lse;
            else a.part_lse[(n * a.splits + split) * count + r] = lse;
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        float o[8][HALF / 2];
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int i = 0; i < HALF / 2; i++) o[m][i] = 0.0f;
        values(a, s, base, group, tiles, o);
        asm volatile("bar.sync 2, 384;" ::: "memory");
        const int lane = thread % 32, d = thread % 128 / 32 * 16 + lane / 4;
        const bool whole = length <= a.size;
#pragma unroll
        for (int i = 0; i < HALF / 4; i++) {
            const int row = group * HALF + i / 2 * 8 + lane % 4 * 2 + i % 2, r = block * ROWS + row;
            if (r >= count) continue;
            const float z = s->sum[row];
            const float f = z > 0.0f ? __fdividef(whole ? a.row_scale : 1.0f, z) : 0.0f;
            const u64 out = whole ? n * count + r : (n * a.splits + split) * count + r;
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const float y0 = o[m][i / 2 * 4 + i % 2] * f, y1 = o[m][i / 2 * 4 + 2 + i % 2] * f;
                const u64 at = out * VALUES + d + m * 64;
                if (whole) { a.o[at] = bf16(y0); a.o[at + 8] = bf16(y1); }
                else { a.part[at] = y0; a.part[at + 8] = y1; }
            }
        }
    }
}
