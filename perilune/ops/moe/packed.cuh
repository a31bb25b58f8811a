// MXFP4 codes as released -> pairs of bf16; and which tile of which expert's rows is whose.
//
// A word has eight nibbles, sign in bit 3. Nibbles i and i + 4 become a pair: one nibble of each half of the word is
// masked, and one multiplication puts its magnitude at the boundary of exponent and mantissa of a bf16 and its sign on
// top. That is 2^-126 times the element (subnormal for 0.5); a factor of 2^126 times the block's scale makes the weight,
// rounded as bf16 rounds.
//
// Compiled behind packed_hopper.cuh, or wgmma.cuh and cluster.cuh of perilune/ops/mla.

typedef unsigned char u8;

// Elements times 2^-126: pair i of (x >> 8 * (i / 2)), nibbles 0 and 4 or 1 and 5 of it.
__device__ __forceinline__ u32 even_pair(u32 x) { return (x & 0x000f000fu) * 0x1040u & 0x81c081c0u; }
__device__ __forceinline__ u32 odd_pair(u32 x) { return (x & 0x00f000f0u) * 0x0104u & 0x81c081c0u; }

// The factor of a scale byte up to 128; and that of any byte, for elements that were multiplied by 2^126 before.
__device__ __forceinline__ u32 factor(u32 byte) { return byte * 0x00800080u + 126 * 0x00800080u; }
__device__ __forceinline__ u32 great_factor(u32 byte) {
  return byte == 255 ? 0x7fc07fc0u : byte == 0 ? 0x00400040u : byte * 0x00800080u;
}

// The four pairs of a word. GREAT: some scale is past 128, and the product takes two steps.
template <bool GREAT> __device__ __forceinline__ void decode(u32 word, u32 scale, u32 (&pair)[4]) {
  pair[0] = even_pair(word), pair[1] = odd_pair(word);
  pair[2] = even_pair(word >> 8), pair[3] = odd_pair(word >> 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (GREAT) pair[i] = times(pair[i], 0x7e807e80u);
    pair[i] = times(pair[i], scale);
  }
}

// Ends of rows [E], then how many tiles of so many rows the experts up to and with each one have [E]; [E] are scratch.
__device__ __forceinline__ void count_tiles(const int *given, int experts, int height, int threads, int *words) {
  int *now = words + experts, *next = now + experts;
  for (int e = threadIdx.x; e < experts; e += threads) {
    words[e] = given[e];
    now[e] = (given[e] - (e ? given[e - 1] : 0) + height - 1) / height;
  }
  __syncthreads();
  for (int step = 1; step < experts; step *= 2) {
    for (int e = threadIdx.x; e < experts; e += threads) next[e] = now[e] + (e >= step ? now[e - step] : 0);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += threads) now[e] = next[e];
    __syncthreads();
  }
}
// The expert of a tile: the first with more tiles up to it.
__device__ __forceinline__ int expert_of(const int *tiles, int experts, int tile) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tiles[middle] > tile) high = middle; else low = middle + 1;
  }
  return low;
}
