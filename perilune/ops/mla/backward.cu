// Varlen attention backward on Hopper: keys 192 wide, values 128 wide, bf16. `keys` holds 128 keys and walks over the
// queries that see them (dk, dv); `queries` holds 128 queries and walks over their keys (dq). No atomics: gradients repeat
// bit for bit, at the price of two products made twice. Two warpgroups hold 64 rows each, a third one copies tiles of 64
// rows into a ring. Weights and score gradients stay in registers, as the left operand of the next products.
//
// Compiled behind wgmma.cuh.

constexpr int HELD = 128, WALKED = 64, STAGES = 3;
constexpr int HELD_BOX = HELD * 128, BOX = WALKED * 128;  // boxes are rows of 64 bf16
constexpr int A_AT = 0, B_AT = 3 * HELD_BOX, RING_AT = B_AT + 2 * HELD_BOX, STAGE = 5 * BOX, SMALL_AT = RING_AT + STAGES * STAGE;
constexpr float LOG2E = 1.4426950408889634f;

struct Arguments {
    TensorMap q, k, v, d_o;               // [tokens, heads side by side]
    u16 *d_q, *d_k, *d_v;
    const float *lse, *delta;             // [H, T]; delta = sum over values of o d_o
    const int *table;                     // [tiles, 5], see tiles.py: key_tiles or query_tiles
    int tiles, heads, tokens, q_width, k_width, v_width, o_width, causal;
    float scale;
};

struct Small {
    float lse[STAGES][WALKED], delta[STAGES][WALKED];  // of the queries walked over, lse in base 2
    u64 held, full[STAGES], empty[STAGES];
};

// What lies behind the last row of a walked tile may be anything, NaN too: zeros instead.
__device__ __forceinline__ void clear_tail(u32 stage, int valid, int group) {
    for (int i = valid * 8 + threadIdx.x % 128; i < WALKED * 8; i += 128)
#pragma unroll
        for (int box = 0; box < 5; box++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(stage + box * BOX + i * 16), "r"(0) : "memory");
    proxy_fence();
    asm volatile("bar.sync %0, 128;" :: "r"(1 + group) : "memory");
}

// x = a b^T over 192 columns and y over 128, for the 64 rows held by a warpgroup and the 64 walked; not waited for.
// held, walked: low words of the held rows and of a stage of the ring.
__device__ __forceinline__ void wide_product(float (&x)[32], u32 held, u32 walked) {
#pragma unroll
    for (int i = 0; i < 12; i++)
        mma_s(x, matrix(held + (A_AT + i / 4 * HELD_BOX) / 16 + i % 4 * 2), matrix(walked + i / 4 * (BOX / 16) + i % 4 * 2), i);
    mma_commit();
}
__device__ __forceinline__ void narrow_product(float (&y)[32], u32 held, u32 walked) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        mma_s(y, matrix(held + (B_AT + i / 4 * HELD_BOX) / 16 + i % 4 * 2), matrix(walked + (3 + i / 4) * (BOX / 16) + i % 4 * 2), i);
    mma_commit();
}

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

template <int N>
__device__ __forceinline__ void store(u16 *to, const float (&x)[N], float f, bool first, bool second, u64 eight) {
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        if (first) *(u32 *)(to + 8 * j) = pack(x[4 * j] * f, x[4 * j + 1] * f);
        if (second) *(u32 *)(to + eight + 8 * j) = pack(x[4 * j + 2] * f, x[4 * j + 3] * f);
    }
}

__device__ __forceinline__ Small *start(unsigned char *memory) {
    Small *s = (Small *)(memory + SMALL_AT);
    if (threadIdx.x == 0) {
        barrier_init(&s->held, 1);
        for (int i = 0; i < STAGES; i++) { barrier_init(&s->full[i], 33); barrier_init(&s->empty[i], 8); }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    proxy_fence();
    __syncthreads();
    return s;
}

// One warp fills the ring: its first lane starts the copies, all lanes fetch lse and delta where queries are walked over.
template <bool QUERIES>
__device__ __forceinline__ void produce(
    const Arguments &a, Small *s, u32 base, int h, int held_row, int row, int first, int end, int limit) {
    const TensorMap &held_a = QUERIES ? a.k : a.q, &held_b = QUERIES ? a.v : a.d_o;
    const TensorMap &walked_a = QUERIES ? a.q : a.k, &walked_b = QUERIES ? a.d_o : a.v;
    const int k_column = h * a.k_width, v_column = h * a.v_width, q_column = h * a.q_width, o_column = h * a.o_width;
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
        expect(&s->held, 5 * HELD_BOX);
        for (int i = 0; i < 3; i++)
            copy(held_a, base + A_AT + i * HELD_BOX, (QUERIES ? k_column : q_column) + i * 64, held_row, &s->held);
        for (int i = 0; i < 2; i++)
            copy(held_b, base + B_AT + i * HELD_BOX, (QUERIES ? v_column : o_column) + i * 64, held_row, &s->held);
    }
    int stage = 0;
    u32 parity = 1;
    for (; first < end; first += WALKED) {
        wait(&s->empty[stage], parity);
        const u32 to = base + RING_AT + stage * STAGE;
        if (lane == 0) {
            expect(&s->full[stage], 5 * BOX);
            for (int i = 0; i < 3; i++)
                copy(walked_a, to + i * BOX, (QUERIES ? q_column : k_column) + i * 64, row + first, &s->full[stage]);
            for (int i = 0; i < 2; i++)
                copy(walked_b, to + (3 + i) * BOX, (QUERIES ? o_column : v_column) + i * 64, row + first, &s->full[stage]);
        }
        if (QUERIES)
            for (int i = lane; i < WALKED; i += 32) {
                const bool inside = first + i < limit;
                const u64 at = (u64)h * a.tokens + row + first + i;
                s->lse[stage][i] = inside ? a.lse[at] * LOG2E : __int_as_float(0x7f800000);
                s->delta[stage][i] = inside ? a.delta[at] : 0.0f;
            }
        arrive(&s->full[stage]);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) keys(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int h = blockIdx.x / a.tiles, *from = a.table + 5 * (blockIdx.x % a.tiles);
    const int key_row = from[0], count = from[1], index = from[2], row = from[3], queries = from[4], shift = count - queries;
    const int begin = a.causal ? max(index - shift, 0) / WALKED * WALKED : 0;
    const u32 base = shared_address(memory);
    Small *s = start(memory);
    const int group = threadIdx.x / 128;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 288) produce<true>(a, s, base, h, key_row, row, begin, queries, queries);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, own = group * 64 + warp * 16 + lane / 4;
    const u32 held = low_word<16>(base + group * 64 * 128), ring = low_word<BOX>(base + RING_AT);
    const float base2 = a.scale * LOG2E;
    float d_k[96], d_v[64];
#pragma unroll
    for (int i = 0; i < 96; i++) d_k[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; i++) d_v[i] = 0.0f;
    wait(&s->held, 0);
    int stage = 0;
    u32 parity = 0;
    for (int first = begin; first < queries; first += WALKED) {
        const u32 at = base + RING_AT + stage * STAGE, walked = ring + stage * (STAGE / 16);
        wait(&s->full[stage], parity);
        if (first + WALKED > queries) clear_tail(at, queries - first, group);
        u32 p[16], d[16];
        // Query t sees this thread's keys up to t + shift.
        const bool masked = a.causal && index + group * 64 + warp * 16 + 15 > first + shift;
        {
            float x[32];
            mma_fence();
            wide_product(x, held, walked);
            mma_wait<0>();
            hold(x);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int column = i / 2 * 8 + lane % 4 * 2;
                const float2 lse = *(const float2 *)&s->lse[stage][column];
                float p0 = exp2_(fmaf(x[2 * i], base2, -lse.x)), p1 = exp2_(fmaf(x[2 * i + 1], base2, -lse.y));
                if (masked) {
                    const int key = index + own + i % 2 * 8, query = first + shift + column;
                    if (key > query) p0 = 0.0f;
                    if (key > query + 1) p1 = 0.0f;
                }
                p[i] = pack(p0, p1);
            }
        }
        float y[32];
        mma_fence();
        narrow_product(y, held, walked);
#pragma unroll
        for (int i = 0; i < 4; i++) mma_values(d_v, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], matrix(walked + 3 * BOX / 16 + i * 128));
        mma_commit();
        mma_wait<1>();
        hold(y);
        // The rounded weights again: there are no registers for the others.
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int column = i / 2 * 8 + lane % 4 * 2;
            const float2 delta = *(const float2 *)&s->delta[stage][column];
            d[i] = pack(__uint_as_float(p[i] << 16) * (y[2 * i] - delta.x),
                        __uint_as_float(p[i] & 0xffff0000) * (y[2 * i + 1] - delta.y));
        }
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) mma_values(d_k, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3], matrix(walked + i * 128));
        mma_commit();
        mma_wait<0>();
        hold(d_v);
        hold(d_k);
        if (lane == 0) arrive(&s->empty[stage]);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
    const bool first = index + own < count, second = index + own + 8 < count;
    const u64 to = ((u64)(key_row + own) * a.heads + h), column = lane % 4 * 2;
    store(a.d_k + to * 192 + column, d_k, a.scale, first, second, (u64)8 * a.heads * 192);
    store(a.d_v + to * 128 + column, d_v, 1.0f, first, second, (u64)8 * a.heads * 128);
}

extern "C" __global__ void __launch_bounds__(384, 1) queries(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int h = blockIdx.x / a.tiles, *from = a.table + 5 * (blockIdx.x % a.tiles);
    const int row = from[0], row_end = from[1], key_row = from[2], count = from[3], position = from[4];
    const int end = a.causal ? min(count, position + HELD) : count;
    const u32 base = shared_address(memory);
    Small *s = start(memory);
    const int group = threadIdx.x / 128;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 288) produce<false>(a, s, base, h, row, key_row, 0, end, 0);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, own = group * 64 + warp * 16 + lane / 4;
    const u32 held = low_word<16>(base + group * 64 * 128), ring = low_word<BOX>(base + RING_AT);
    const float base2 = a.scale * LOG2E;
    float d_q[96], lse[2], delta[2];
#pragma unroll
    for (int i = 0; i < 96; i++) d_q[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool inside = row + own + 8 * r < row_end;
        const u64 at = (u64)h * a.tokens + row + own + 8 * r;
        lse[r] = inside ? a.lse[at] * LOG2E : __int_as_float(0x7f800000);
        delta[r] = inside ? a.delta[at] : 0.0f;
    }
    wait(&s->held, 0);
    int stage = 0;
    u32 parity = 0;
    for (int first = 0; first < end; first += WALKED) {
        const u32 at = base + RING_AT + stage * STAGE, walked = ring + stage * (STAGE / 16);
        wait(&s->full[stage], parity);
        if (first + WALKED > count) clear_tail(at, count - first, group);
        float x[32], y[32];
        mma_fence();
        wide_product(x, held, walked);
        narrow_product(y, held, walked);
        mma_wait<0>();
        hold(x);
        hold(y);
        const bool masked = first + WALKED > count || (a.causal && first + WALKED - 1 > position + group * 64 + warp * 16);
        u32 d[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float p0 = exp2_(fmaf(x[2 * i], base2, -lse[i % 2])), p1 = exp2_(fmaf(x[2 * i + 1], base2, -lse[i % 2]));
            if (masked) {
                const int key = first + i / 2 * 8 + lane % 4 * 2, last = a.causal ? min(position + own + i % 2 * 8, count - 1) : count - 1;
                if (key > last) p0 = 0.0f;
                if (key + 1 > last) p1 = 0.0f;
            }
            d[i] = pack(p0 * (y[2 * i] - delta[i % 2]), p1 * (y[2 * i + 1] - delta[i % 2]));
        }
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) mma_values(d_q, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3], matrix(walked + i * 128));
        mma_commit();
        mma_wait<0>();
        hold(d_q);
        if (lane == 0) arrive(&s->empty[stage]);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
    const u64 to = ((u64)(row + own) * a.heads + h) * 192 + lane % 4 * 2;
    store(a.d_q + to, d_q, a.scale, row + own < row_end, row + own + 8 < row_end, (u64)8 * a.heads * 192);
}
