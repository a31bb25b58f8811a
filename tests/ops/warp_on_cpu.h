// perilune/ops/kda/warp.cuh for a CPU: the same functions, so that a CUDA kernel runs in a test without a GPU. Each
// thread of a block is a fiber; what concerns a warp or a block is done by the last fiber that arrives. Blocks run one
// after the other: shared memory starts as NaN, asynchronous copies arrive as late as the program allows in even blocks
// and at once in odd ones, odd blocks run their warps from the last to the first.

#include <math.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned int u32;
typedef long long i64;
struct bf16 {
  unsigned short bits;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct int3 {
  int x, y, z;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
using std::max;
using std::min;

inline float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// ---- Fibers

struct Warp {
  int count = 0, generation = 0;
  u32 a[32][4], b[32][2], out[32][4];
  float d[32][4];
  const void *row[32];
  float value[32], result[32];
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<std::vector<std::function<void()>>> copies;
  bool done;
};
static std::vector<Fiber> fibers;
static Warp warps[32], whole_block;
static ucontext_t scheduler;
static int3 threadIdx, blockIdx, gridDim;
alignas(16) unsigned char bytes[232448];

template <class F>
void together(Warp &w, int size, F last) {
  int me = threadIdx.x, generation = w.generation;
  if (++w.count == size) {
    last();
    w.count = 0, ++w.generation;
  } else {
    while (w.generation == generation) swapcontext(&fibers[me].context, &scheduler);
  }
}
inline void __syncthreads() {
  together(whole_block, static_cast<int>(fibers.size()), [] {});
}
inline Warp &my_warp() { return warps[threadIdx.x / 32]; }

// ---- warp.cuh

inline float low(u32 pair) { return __uint_as_float(pair << 16); }
inline float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
inline u32 rounded(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? 0.f : x; }
inline float power_of_two(float x) { return flushed(exp2f(x)); }
inline float reciprocal(float x) { return flushed(1.f / flushed(x)); }

inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Warp &w = my_warp();
  int lane = threadIdx.x & 31;
  memcpy(w.a[lane], a, 16), memcpy(w.d[lane], d, 16);
  w.b[lane][0] = b0, w.b[lane][1] = b1;
  together(w, 32, [&w] {
    float A[16][16], B[16][8];
    for (int l = 0; l < 32; ++l) {
      int r = l / 4, c = l % 4;
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          A[r + 8 * (i & 1)][2 * c + e + 8 * (i >> 1)] = e ? high(w.a[l][i]) : low(w.a[l][i]);
      for (int i = 0; i < 2; ++i)
        for (int e = 0; e < 2; ++e) B[2 * c + e + 8 * i][r] = e ? high(w.b[l][i]) : low(w.b[l][i]);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        double sum = w.d[l][i];
        for (int k = 0; k < 16; ++k)
          sum += static_cast<double>(A[l / 4 + 8 * (i >> 1)][k]) * B[k][l % 4 * 2 + (i & 1)];
        w.d[l][i] = static_cast<float>(sum);
      }
  });
  memcpy(d, w.d[lane], 16);
}

inline void load_four(u32 (&x)[4], const void *row, bool transposed) {
  Warp &w = my_warp();
  int lane = threadIdx.x & 31;
  w.row[lane] = row;
  together(w, 32, [&w, transposed] {
    for (int l = 0; l < 32; ++l)
      for (int m = 0; m < 4; ++m) {
        unsigned short pair[2];
        for (int e = 0; e < 2; ++e) {
          int i = transposed ? l % 4 * 2 + e : l / 4, j = transposed ? l / 4 : l % 4 * 2 + e;
          pair[e] = static_cast<const unsigned short *>(w.row[8 * m + i])[j];
        }
        w.out[l][m] = pair[0] | static_cast<u32>(pair[1]) << 16;
      }
  });
  memcpy(x, w.out[lane], 16);
}
inline void load_tiles(u32 (&x)[4], const void *row) { load_four(x, row, false); }
inline void load_tiles_transposed(u32 (&x)[4], const void *row) { load_four(x, row, true); }

inline void store_tiles_transposed(void *row, const u32 (&x)[4]) {
  Warp &w = my_warp();
  int lane = threadIdx.x & 31;
  w.row[lane] = row;
  memcpy(w.a[lane], x, 16);
  together(w, 32, [&w] {
    for (int l = 0; l < 32; ++l)
      for (int m = 0; m < 4; ++m)
        for (int e = 0; e < 2; ++e) {
          void *to = const_cast<void *>(w.row[8 * m + l % 4 * 2 + e]);
          static_cast<unsigned short *>(to)[l / 4] = static_cast<unsigned short>(w.a[l][m] >> 16 * e);
        }
  });
}

inline float exchange(float x, int from) {
  Warp &w = my_warp();
  int lane = threadIdx.x & 31;
  w.value[lane] = x;
  together(w, 32, [&w] { memcpy(w.result, w.value, sizeof w.value); });
  return w.result[from];
}
inline float shuffle_xor(float x, int by) { return exchange(x, (threadIdx.x & 31) ^ by); }
inline float shuffle(float x, int from) { return exchange(x, from & 31); }
inline bool any_of_warp(bool x) {
  float any = x;
  for (int by = 1; by < 32; by <<= 1) any = max(any, shuffle_xor(any, by));
  return any;
}

inline void copy16(void *to, const void *from, bool real) {
  auto copy = [=] {
    if (real)
      memcpy(to, from, 16);
    else
      memset(to, 0, 16);
  };
  if (blockIdx.x % 2)
    copy();
  else
    fibers[threadIdx.x].copies.back().push_back(copy);
}
inline void commit_copies() { fibers[threadIdx.x].copies.emplace_back(); }
template <int PENDING>
inline void wait_copies() {
  auto &groups = fibers[threadIdx.x].copies;
  while (static_cast<int>(groups.size()) > PENDING + 1) {
    for (auto &copy : groups.front()) copy();
    groups.erase(groups.begin());
  }
}

// ---- Launch

// Runs one warp until it waits for others or ends, so that warps drift as far apart as barriers let them; counts ends.
inline int advance(int warp) {
  int ended = 0, before;
  do {
    before = warps[warp].generation + whole_block.generation + ended;
    for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
      if (fibers[i].done) continue;
      threadIdx.x = i;
      swapcontext(&scheduler, &fibers[i].context);
      ended += fibers[i].done;
    }
  } while (warps[warp].generation + whole_block.generation + ended != before);
  return ended;
}

template <class A>
void launch(void (*kernel)(A), int blocks, int threads, A *arguments) {
  gridDim = {blocks, 1, 1};
  for (blockIdx = {0, 0, 0}; blockIdx.x < blocks; ++blockIdx.x) {
    memset(bytes, 0xff, sizeof bytes);
    fibers = std::vector<Fiber>(threads);
    static std::function<void()> body;
    body = [&] { kernel(*arguments); };
    for (Fiber &f : fibers) {
      f.stack.resize(1 << 17), f.copies.resize(1), f.done = false;
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
      f.context.uc_link = &scheduler;
      makecontext(&f.context, +[] { body(), fibers[threadIdx.x].done = true; }, 0);
    }
    for (int left = threads; left > 0;)
      for (int n = 0; n < threads / 32; ++n) left -= advance(blockIdx.x % 2 ? threads / 32 - 1 - n : n);
  }
}
