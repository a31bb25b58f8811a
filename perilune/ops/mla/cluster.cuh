// What latent.cu needs of Hopper besides wgmma.cuh: clusters of CLUSTER blocks, named barriers, narrow numbers.

__device__ __forceinline__ int cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of the cluster meet; what they wrote and initialised before is seen behind it.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives at the barrier that lies at the same place in block `rank` of the cluster: this thread has read what it guards.
// Not `release.cluster`, which would also wait for the thread's writes to be seen by the whole device.
__device__ __forceinline__ void arrive_at(u64 *b, int rank) {
    asm volatile("{ .reg .b32 x; mapa.shared::cluster.u32 x, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [x]; }"
                 :: "r"(shared_address(b)), "r"(rank) : "memory");
}
// A box of the map to the same place in every block of the cluster; its bytes count on each one's barrier.
__device__ __forceinline__ void copy_to_all(const TensorMap &map, u32 to, int column, int row, u64 *bar) {
    if (CLUSTER == 1) return copy(map, to, column, row, bar);
    const u16 all = (1 << CLUSTER) - 1;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"((u64)&map), "r"(column), "r"(row), "r"(shared_address(bar)), "h"(all) : "memory");
}
// THREADS threads meet at barrier `id`; any_of: whether `yes` holds in one of them.
template <int THREADS> __device__ __forceinline__ void meet(int id) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(THREADS) : "memory");
}
template <int THREADS> __device__ __forceinline__ bool any_of(int id, bool yes) {
    u32 any;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"((u32)yes), "r"(id), "n"(THREADS) : "memory");
    return any;
}
template <int N> __device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> __device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }

__device__ __forceinline__ u32 pair(float low, float high) {  // bf16
    u32 z;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(high), "f"(low));
    return z;
}
__device__ __forceinline__ u16 bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 times(u32 x, u32 y) {  // two bf16 each
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}
__device__ __forceinline__ void load16(u32 from, u32 (&x)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(from));
}
__device__ __forceinline__ void store16(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Four 8 x 8 matrices of bf16, each turned around; lane 8 m + i names row i of matrix m.
__device__ __forceinline__ void store_transposed(u32 to, const u32 (&z)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to), "r"(z[0]), "r"(z[1]), "r"(z[2]), "r"(z[3]) : "memory");
}
