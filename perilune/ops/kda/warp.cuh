// What a warp of an NVIDIA GPU (sm_90) can do that C++ has no word for. Fragments of m16n8k16 products, for
// lane = 4 r + c:
//   A [16, 16] a[0] (row r, columns 2c, 2c + 1), a[1] (row r + 8), a[2], a[3] (the same rows, columns 2c + 8, 2c + 9)
//   B [16, 8]  b0 (rows 2c, 2c + 1, column r), b1 (rows 2c + 8, 2c + 9)
//   D [16, 8]  d[0], d[1] (row r, columns 2c, 2c + 1), d[2], d[3] (row r + 8)

typedef unsigned int u32;
typedef long long i64;

struct bf16 {
  unsigned short bits;
};

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// 2^x and 1 / x by the hardware; results below 2^-126 become 0. Volatile: computed again, not kept.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Four [8, 8] tiles of bf16; lane 8 m + i gives the address of row i of tile m.
__device__ __forceinline__ void load_tiles(u32 (&x)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address(row))
               : "memory");
}
__device__ __forceinline__ void load_tiles_transposed(u32 (&x)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address(row))
               : "memory");
}

// The way back.
__device__ __forceinline__ void store_tiles_transposed(void *row, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address(row)), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Copy 16 bytes to shared memory behind the program's back; zeros unless `real`.
__device__ __forceinline__ void copy16(void *to, const void *from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ float shuffle_xor(float x, int by) { return __shfl_xor_sync(0xffffffffu, x, by); }
__device__ __forceinline__ float shuffle(float x, int from) { return __shfl_sync(0xffffffffu, x, from); }
__device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }
