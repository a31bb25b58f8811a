// Varlen attention forward on Hopper: keys 192 wide, values 128 wide, bf16. One block holds 128 queries of one head, 64 in
// each of two warpgroups; a third warpgroup's first thread copies tiles of 128 keys and values into a two-deep ring.
// While the tensor cores multiply one tile's weights with its values, the next tile's scores are made, and the warpgroups
// take turns so that one's softmax runs beside the other's products.
//
// Compiled behind wgmma.cuh.

constexpr int M = 128, C = 128, STAGES = 2, BOX = 128 * 128;  // a box is 128 rows of 64 bf16
constexpr int Q_AT = 0, K_AT = 3 * BOX, V_AT = K_AT + STAGES * 3 * BOX, SMALL_AT = V_AT + STAGES * 2 * BOX;
#define NOTHING __int_as_float(0xff800000)
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

struct Arguments {
    TensorMap q, k, v;                    // [tokens, heads side by side], boxes of 128 x 64
    u16 *o;
    float *lse, *peak;                    // [H, T]; [H, tiles, 8] largest logit of each warp's rows
    const int *table;                     // [tiles, 5], see tiles.py: query_tiles
    int tiles, heads, tokens, q_width, k_width, v_width, causal;
    float scale;
};

struct Small { u64 q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES]; };

struct Tile { int row, row_end, key_row, keys, position, end; };

__device__ __forceinline__ void produce(const Arguments &a, Small *s, u32 base, const Tile &tile, int h) {
    expect(&s->q_full, 3 * BOX);
    for (int i = 0; i < 3; i++) copy(a.q, base + Q_AT + i * BOX, h * a.q_width + i * 64, tile.row, &s->q_full);
    int stage = 0;
    u32 parity = 1;
    for (int first = 0; first < tile.end; first += C) {
        wait(&s->k_empty[stage], parity);
        expect(&s->k_full[stage], 3 * BOX);
        for (int i = 0; i < 3; i++)
            copy(a.k, base + K_AT + (stage * 3 + i) * BOX, h * a.k_width + i * 64, tile.key_row + first, &s->k_full[stage]);
        wait(&s->v_empty[stage], parity);
        expect(&s->v_full[stage], 2 * BOX);
        for (int i = 0; i < 2; i++)
            copy(a.v, base + V_AT + (stage * 2 + i) * BOX, h * a.v_width + i * 64, tile.key_row + first, &s->v_full[stage]);
        if (++stage == STAGES) { stage = 0; parity ^= 1; }
    }
}

// One warpgroup's 64 queries. A thread has rows `row` and `row` + 8 of its warp's 16; x[4j + {0, 1, 2, 3}] are columns
// 8j + 2 (lane % 4) + {0, 1, 0, 1} of rows {0, 0, 8, 8}.
struct Softmax {
    float top[2], sum[2], shrink[2];

    __device__ __forceinline__ void weigh(float (&x)[64], const Tile &tile, int first, int position, float base2, bool causal) {
        const int lane = threadIdx.x % 32, warp_last = causal ? min(position - lane / 4, tile.keys - 1) : tile.keys - 1;
        const int last0 = causal ? min(position, tile.keys - 1) : tile.keys - 1;
        const int last1 = causal ? min(position + 8, tile.keys - 1) : tile.keys - 1;
        if (first + C - 1 > warp_last) {
#pragma unroll
            for (int i = 0; i < 64; i++)
                if (first + i / 4 * 8 + lane % 4 * 2 + i % 2 > (i % 4 < 2 ? last0 : last1)) x[i] = NOTHING;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float y = fmaxf(x[2 * r], x[2 * r + 1]);
#pragma unroll
            for (int j = 1; j < 16; j++) y = fmaxf(y, fmaxf(x[4 * j + 2 * r], x[4 * j + 2 * r + 1]));
            y = fmaxf(y, __shfl_xor_sync(~0u, y, 1));
            y = fmaxf(y, __shfl_xor_sync(~0u, y, 2));
            y = fmaxf(y, top[r]);
            const float shift = y == NOTHING ? 0.0f : y * base2;
            shrink[r] = exp2_(fmaf(top[r], base2, -shift));
            top[r] = y;
            float z = 0.0f;
#pragma unroll
            for (int j = 0; j < 16; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &p = x[4 * j + 2 * r + e];
                    p = exp2_(fmaf(p, base2, -shift));
                    z += p;
                }
            sum[r] = sum[r] * shrink[r] + z;
        }
    }
};

__device__ __forceinline__ void consume(const Arguments &a, Small *s, u32 base, const Tile &tile, int h, int group, int entry) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int row = group * 64 + warp * 16 + lane / 4, position = tile.position + row;
    const float base2 = a.scale * LOG2E;
    float x[64], o[64];
    u32 p[32];
    Softmax softmax{{NOTHING, NOTHING}, {0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0.0f;
    const u32 q = low_word<16>(base + Q_AT + group * 64 * 128), k_low = low_word<16>(base + K_AT);
    const u32 v_low = low_word<BOX>(base + V_AT);
    const int count = (tile.end + C - 1) / C;
    auto take_turn = [&] {
#if TURNS
        asm volatile("bar.sync %0, 256;" :: "r"(1 + group) : "memory");
#endif
        mma_fence();
    };
    auto give_turn = [&] {
#if TURNS
        asm volatile("bar.arrive %0, 256;" :: "r"(2 - group) : "memory");
#endif
    };
    auto scores = [&](int t) {
        const u32 k = k_low + t % STAGES * (3 * BOX / 16);
#pragma unroll
        for (int i = 0; i < 12; i++)
            mma_rows(x, matrix(q + i / 4 * (BOX / 16) + i % 4 * 2), matrix(k + i / 4 * (BOX / 16) + i % 4 * 2), i);
        mma_commit();
    };
    auto values = [&](int t) {
        const u32 v = v_low + t % STAGES * (2 * BOX / 16);
#pragma unroll
        for (int i = 0; i < 8; i++) mma_values(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], matrix(v + i * 128));
        mma_commit();
    };
    auto weights = [&] {
#pragma unroll
        for (int i = 0; i < 32; i++)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    };
    wait(&s->q_full, 0);
    if (count > 0) {
        wait(&s->k_full[0], 0);
        take_turn();
        scores(0);
        give_turn();
        mma_wait<0>();
        hold(x);
        if (lane == 0) arrive(&s->k_empty[0]);
        softmax.weigh(x, tile, 0, position, base2, a.causal);
        weights();
        for (int t = 1; t < count; t++) {
            wait(&s->k_full[t % STAGES], t / STAGES & 1);
            wait(&s->v_full[(t - 1) % STAGES], (t - 1) / STAGES & 1);
            take_turn();
            scores(t);
            values(t - 1);
            give_turn();
            mma_wait<1>();
            hold(x);
            if (lane == 0) arrive(&s->k_empty[t % STAGES]);
            softmax.weigh(x, tile, t * C, position, base2, a.causal);
            mma_wait<0>();
            hold(o);
            if (lane == 0) arrive(&s->v_empty[(t - 1) % STAGES]);
#pragma unroll
            for (int i = 0; i < 64; i++) o[i] *= softmax.shrink[i % 4 / 2];
            weights();
        }
        const int last = (count - 1) % STAGES, valid = tile.keys - (count - 1) * C;
        wait(&s->v_full[last], (count - 1) / STAGES & 1);
        if (valid < C) {                  // what lies behind the last key may be anything, NaN too
            for (int i = valid * 8 + thread; i < C * 8; i += 128) {
                const u32 at = base + V_AT + last * 2 * BOX + i * 16;
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(at), "r"(0) : "memory");
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" :: "r"(at + BOX), "r"(0) : "memory");
            }
            proxy_fence();
            asm volatile("bar.sync %0, 128;" :: "r"(3 + group) : "memory");
        }
        take_turn();
        values(count - 1);
        give_turn();
        mma_wait<0>();
        hold(o);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float z = softmax.sum[r];
        z += __shfl_xor_sync(~0u, z, 1);
        z += __shfl_xor_sync(~0u, z, 2);
        const int at = tile.row + row + 8 * r;
        if (at < tile.row_end) {
            const float f = z > 0.0f ? __fdividef(1.0f, z) : 0.0f;
            if (lane % 4 == 0) a.lse[(u64)h * a.tokens + at] = z > 0.0f ? softmax.top[r] * a.scale + log2f(z) * LN2 : NOTHING;
            u32 *out = (u32 *)(a.o + ((u64)at * a.heads + h) * 128) + lane % 4;
#pragma unroll
            for (int j = 0; j < 16; j++) {
                u32 y;
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(o[4 * j + 2 * r + 1] * f), "f"(o[4 * j + 2 * r] * f));
                out[4 * j] = y;
            }
        } else softmax.top[r] = NOTHING;
    }
    float y = fmaxf(softmax.top[0], softmax.top[1]);
#pragma unroll
    for (int i = 1; i < 32; i *= 2) y = fmaxf(y, __shfl_xor_sync(~0u, y, i));
    if (lane == 0) a.peak[((u64)h * a.tiles + entry) * 8 + group * 4 + warp] = y * a.scale;
}

extern "C" __global__ void __launch_bounds__(384, 1) forward(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int entry = blockIdx.x % a.tiles, h = blockIdx.x / a.tiles;
    const int *from = a.table + 5 * entry;
    Tile tile{from[0], from[1], from[2], from[3], from[4], 0};
    tile.end = a.causal ? min(tile.keys, tile.position + M) : tile.keys;
    Small *s = (Small *)(memory + SMALL_AT);
    if (threadIdx.x == 0) {
        barrier_init(&s->q_full, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s->k_full[i], 1);
            barrier_init(&s->v_full[i], 1);
            barrier_init(&s->k_empty[i], 8);
            barrier_init(&s->v_empty[i], 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    proxy_fence();
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) produce(a, s, shared_address(memory), tile, h);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#if TURNS
        if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
        consume(a, s, shared_address(memory), tile, h, group, entry);
    }
}
