// KDA decode on Hopper: what decode.py specifies, for K = V = 128.
//
// A block stays on its multiprocessor and takes (head, sequence) items, heads innermost: one at its start, then what is
// next, as multiprocessors are not equally far from memory. Its warps are a pipeline over the items, each with its own
// work and ahead of the next:
//   fetchers    copies into rings of buffers, one warp for a token's small vectors, one for 16 KB units, each 32 rows
//               of a matrix or 16 entries of a tail
//   preparers   convolution, norms, gate: one warp for each of q, k, v, gate, four channels a lane
//   readers     eight warps; the reads of matrix and tail with k and q. A lane has four columns, a warp four rows of a
//               unit; in place they keep the matrix in registers
//   finisher    corrections u, outputs
// Every sum has one fixed order that does not depend on how many tokens a launch has or on the batch: a verification of
// n drafts equals n decode steps bit for bit. Compiled by NVRTC (decode_cuda.py), which defines
//   X inputs and output, B beta logits, W convolution weights, P norm weight, WINDOW, RING: float or bf16;
//   SAFE: the gate is bounded; TOKENS: tokens of a sequence in a launch; LAYERS: `step` takes a table of layers.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};

constexpr int DIM = 128;
constexpr int READERS = 8, PREPARERS = 4;
constexpr int FINISHER = READERS + PREPARERS, VECTOR_FETCHER = FINISHER + 1, UNIT_FETCHER = FINISHER + 2;  // warps
constexpr int THREADS = 32 * (UNIT_FETCHER + 1);
constexpr int UNIT = 16384;    // bytes
constexpr int ROWS = 32;       // rows of a matrix in a unit
constexpr int CAPACITY = 71;   // tail entries a slot
constexpr int FULL = 64;       // entries that make a matrix
constexpr int BLOCK = 16;      // entries with a common decay origin
constexpr float CENTRE = 40.f; // nats
constexpr int AHEAD = TOKENS <= 4 || sizeof(X) == 2 ? 2 : 1;  // items that may be prepared at once
constexpr int VECTORS = TOKENS <= 4 ? 3 : 2;
constexpr int MAX_UNITS = 12;
constexpr int TICKETS = 4;
constexpr int VOICES = 1;  // lanes that speak for a warp at a barrier (32 for tools that cannot follow one)

__device__ __forceinline__ float wide(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 narrow(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }
__device__ __forceinline__ float4 load4(const bf16 *p) {
  uint2 raw = *reinterpret_cast<const uint2 *>(p);
  return make_float4(wide(raw.x & 0xffff), wide(raw.x >> 16), wide(raw.y & 0xffff), wide(raw.y >> 16));
}
__device__ __forceinline__ float load1(const float *p) { return *p; }
__device__ __forceinline__ float load1(const bf16 *p) { return wide(p->bits); }
__device__ __forceinline__ void store4(float *p, float4 x) { *reinterpret_cast<float4 *>(p) = x; }
__device__ __forceinline__ void store4(bf16 *p, float4 x) {
  *reinterpret_cast<uint2 *>(p) = make_uint2(narrow(x.x, x.y), narrow(x.z, x.w));
}
__device__ __forceinline__ void store1(float *p, float x) { *p = x; }
__device__ __forceinline__ void store1(bf16 *p, float x) { p->bits = static_cast<u16>(narrow(x, 0.f)); }
__device__ __forceinline__ float rounded(float x, const float *) { return x; }
__device__ __forceinline__ float rounded(float x, const bf16 *) { return wide(narrow(x, 0.f) & 0xffff); }
template <class T> __device__ __forceinline__ float4 rounded4(float4 x, const T *kind) {
  return make_float4(rounded(x.x, kind), rounded(x.y, kind), rounded(x.z, kind), rounded(x.w, kind));
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

__device__ __forceinline__ float dot(float4 a, float4 b) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, a.x * b.x)));
}
// Products that the compiler may not fuse with a sum here and leave alone there: bits must not depend on TOKENS.
__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 times(float4 a, float b) { return times(a, make_float4(b, b, b, b)); }
__device__ __forceinline__ float4 minus(float4 a, float4 b) {
  return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ void add(float4 &a, float4 b) {
  a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
}
__device__ __forceinline__ void add(float4 &a, float4 b, float by) {
  a.x = fmaf(b.x, by, a.x), a.y = fmaf(b.y, by, a.y), a.z = fmaf(b.z, by, a.z), a.w = fmaf(b.w, by, a.w);
}
__device__ __forceinline__ float4 exp4(float4 x, float plus) {
  return make_float4(__expf(x.x + plus), __expf(x.y + plus), __expf(x.z + plus), __expf(x.w + plus));
}
__device__ __forceinline__ float at(float4 x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
