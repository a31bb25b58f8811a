// wgmma.cuh and cluster.cuh of perilune/ops/mla for a CPU: the same functions, so that latent.cu runs in a test without a
// GPU. Every thread of a cluster is a fiber, warps take turns in a random order, copies land at random moments, products
// are made when they must be (or earlier, by chance), shared memory starts as NaN. Says nothing about memory ordering.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define FAIL(...) (fprintf(stderr, __VA_ARGS__), abort())

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct Place {
  int x, y;
} threadIdx, blockIdx;
using std::max;
using std::min;

constexpr int THREADS = 384, FIBERS = THREADS * CLUSTER;
constexpr size_t SHARED = 232448;

struct Barrier {
  int expected = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;
};
struct Meeting {
  int count = 0, generation = 0;
  bool any = false, result = false;
};
struct Fiber {
  ucontext_t context;
  bool done;
  std::vector<std::function<void()>> open;              // products behind the last commit
  std::deque<std::vector<std::function<void()>>> groups;
};
static std::vector<Fiber> fibers(FIBERS);
static std::vector<unsigned char> storage(CLUSTER *SHARED + 1024);
static ucontext_t scheduler;
static int current;
static std::map<const void *, Barrier> barriers;
static std::map<int, Meeting> meetings;                 // by block and barrier, or by warp
static std::vector<std::function<void()>> copies;
static std::mt19937 dice;

inline unsigned char *shared_of(int rank) {
  auto first = (reinterpret_cast<uintptr_t>(storage.data()) + 1023) & ~uintptr_t(1023);
  return reinterpret_cast<unsigned char *>(first) + rank * SHARED;
}
inline int cluster_rank() { return current / THREADS; }
inline unsigned char *at(u32 address) {
  if (address >= SHARED) FAIL("shared address %u\n", address);
  return shared_of(cluster_rank()) + address;
}
inline u32 shared_address(const void *p) { return static_cast<const unsigned char *>(p) - shared_of(cluster_rank()); }

inline void pause_fiber() { swapcontext(&fibers[current].context, &scheduler); }
inline bool gather(int key, int threads, bool yes = false) {
  Meeting &m = meetings[key];
  const int generation = m.generation;
  m.any |= yes;
  if (++m.count == threads) {
    m.count = 0, m.result = m.any, m.any = false, ++m.generation;
  } else {
    while (m.generation == generation) pause_fiber();
  }
  return m.result;
}
inline int warp_key() { return 1000 + current / 32; }
inline void __syncwarp() { gather(warp_key(), 32); }
inline void __syncthreads() { gather(cluster_rank() * 16, THREADS); }
inline void cluster_meet() { gather(900, FIBERS); }
template <int N> inline void meet(int id) { gather(cluster_rank() * 16 + id, N); }
template <int N> inline bool any_of(int id, bool yes) { return gather(cluster_rank() * 16 + id, N, yes); }
inline float __shfl_xor_sync(u32, float x, int step) {
  static float lanes[FIBERS];
  lanes[current] = x;
  __syncwarp();
  const float y = lanes[current ^ step];
  __syncwarp();
  return y;
}
inline int __shfl_sync(u32, int x, int lane) {
  static int lanes[FIBERS];
  lanes[current] = x;
  __syncwarp();
  const int y = lanes[current / 32 * 32 + lane];
  __syncwarp();
  return y;
}
template <int N> inline void fewer_registers() {}
template <int N> inline void more_registers() {}

inline void settle(Barrier &b) {
  if (b.pending < 0) FAIL("a barrier got more arrivals than it expects\n");
  if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.expected;
}
inline void barrier_init(u64 *b, int count) {
  barriers[b] = Barrier();
  barriers[b].expected = barriers[b].pending = count;
}
inline void barriers_ready() {}
inline void proxy_fence() {}
inline void expect(u64 *b, int bytes) {
  Barrier &x = barriers.at(b);
  x.bytes += bytes, --x.pending, settle(x);
}
inline void arrive(u64 *b) { expect(b, 0); }
inline u64 *in_block(u64 *b, int rank) {
  return reinterpret_cast<u64 *>(shared_of(rank) + shared_address(b));
}
inline void arrive_at(u64 *b, int rank) { arrive(in_block(b, rank)); }
inline void wait(u64 *b, u32 parity) {
  while ((barriers.at(b).phase & 1) == parity) pause_fiber();
}

struct alignas(64) TensorMap {
  u64 words[16];  // address, bytes of a number, rows, columns, rows of a box
};
inline void copy_to_all(const TensorMap &map, u32 to, int column, int row, u64 *bar) {
  const int size = map.words[1], rows = map.words[2], width = map.words[3], box = map.words[4];
  if (to % 1024 * (size == 2)) FAIL("a copy goes to %u\n", to);
  for (int rank = 0; rank < CLUSTER; ++rank) {
    u64 *there = in_block(bar, rank);
    copies.push_back([=] {
      for (int r = 0; r < box; ++r)
        for (int unit = 0; unit < 64 * size / 16; ++unit) {
          if (row + r >= rows) FAIL("row %d of %d is fetched\n", row + r, rows);
          auto from = reinterpret_cast<const unsigned char *>(map.words[0]) + (u64(row + r) * width + column) * size + unit * 16;
          memcpy(shared_of(rank) + to + r * 64 * size + ((size == 2 ? unit ^ r % 8 : unit) << 4), from, 16);
        }
      Barrier &b = barriers.at(there);
      b.bytes -= box * 64 * size, settle(b);
    });
  }
}

// ---- Products: thread i of a warpgroup has row 16 (i / 32) + i % 32 / 4 (+ 8) and columns 8j + i % 4 * 2 + {0, 1}

inline float wide(u16 x) {
  const u32 bits = u32(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline u16 bf16(float f) {
  u32 u;
  memcpy(&u, &f, 4);
  return f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
template <int NEXT> inline u32 low_word(u32 address) { return address >> 4; }
inline u64 matrix(u32 low) { return u64(low) << 4; }
inline u16 number(const unsigned char *memory, u64 matrix, int row, int column) {  // swizzled over 128 bytes
  u32 address = u32(matrix) + row * 128 + column * 2;
  address ^= (address >> 7 & 7) << 4;
  u16 x;
  memcpy(&x, memory + address, 2);
  return x;
}
template <bool TURNED, int N> inline void product(float (&d)[N], u64 a, u64 b, int keep) {
  const unsigned char *memory = shared_of(cluster_rank());
  const int i = current % THREADS % 128;
  float *out = d;
  fibers[current].open.push_back([=] {
    for (int n = 0; n < N; ++n) {
      const int row = i / 32 * 16 + i % 32 / 4 + n % 4 / 2 * 8, column = n / 4 * 8 + i % 4 * 2 + n % 2;
      float sum = keep ? out[n] : 0.f;
      for (int k = 0; k < 16; ++k)
        sum += wide(TURNED ? number(memory, a, k, row) : number(memory, a, row, k)) * wide(number(memory, b, column, k));
      out[n] = sum;
    }
  });
}
template <int N> inline void mma_s(float (&d)[N], u64 a, u64 b, int keep) { product<false>(d, a, b, keep); }
template <int N> inline void mma_o(float (&d)[N], u64 a, u64 b, int keep) { product<true>(d, a, b, keep); }
inline void mma_fence() {}
template <int N> inline void mma_wait() {
  auto &groups = fibers[current].groups;
  while (groups.size() > N) {
    for (auto &x : groups.front()) x();
    groups.pop_front();
  }
}
inline void mma_commit() {
  fibers[current].groups.push_back(std::move(fibers[current].open));
  fibers[current].open.clear();
  if (dice() % 4 == 0) mma_wait<0>();
}
template <int N> inline void hold(float (&x)[N]) { asm volatile("" ::"r"(x) : "memory"); }

// ---- Numbers

inline float __int_as_float(int x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
inline float exp2_(float x) { return exp2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ldg(const int *p) { return *p; }
inline u32 __byte_perm(u32 x, u32 y, u32 which) {
  const u64 both = u64(y) << 32 | x;
  u32 z = 0;
  for (int i = 0; i < 4; ++i) z |= u32(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return z;
}
inline u32 pair(float low, float high) { return bf16(low) | u32(bf16(high)) << 16; }
inline u32 times(u32 x, u32 y) {
  return pair(wide(x) * wide(y), wide(x >> 16) * wide(y >> 16));
}
inline void load16(u32 from, u32 (&x)[4]) { memcpy(x, at(from), 16); }
inline void store16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const u32 x[4] = {a, b, c, d};
  memcpy(at(to), x, 16);
}
inline void store_transposed(u32 to, const u32 (&z)[4]) {
  static u32 rows[FIBERS], numbers[FIBERS][4];
  rows[current] = to, memcpy(numbers[current], z, 16);
  __syncwarp();
  const int first = current / 32 * 32, lane = current % 32;
  for (int i = 0; i < 8; ++i) {  // this lane's row: column i was with lane 4i + row / 2
    const u32 two = numbers[first + 4 * i + lane % 8 / 2][lane / 8];
    const u16 x = lane % 2 ? two >> 16 : two;
    memcpy(at(to) + 2 * i, &x, 2);
  }
  __syncwarp();
}

// ---- Launch

// Runs kernel() in every cluster of the grid: 0, or 1 if one hangs, 2 if it leaves copies behind.
template <class Kernel> int run_grid(Kernel kernel, int blocks, int sequences, int seed) {
  static std::vector<std::vector<char>> stacks(FIBERS, std::vector<char>(1 << 17));
  static std::function<void()> body;
  body = kernel, dice.seed(seed);
  for (int first = 0; first < blocks * sequences; first += CLUSTER) {
    memset(storage.data(), 0xff, storage.size());
    meetings.clear(), barriers.clear(), copies.clear();
    for (int i = 0; i < FIBERS; ++i) {
      Fiber &f = fibers[i];
      f.done = false, f.open.clear(), f.groups.clear();
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = stacks[i].data(), f.context.uc_stack.ss_size = stacks[i].size();
      makecontext(&f.context, +[] { body(), fibers[current].done = true, pause_fiber(); }, 0);
    }
    std::vector<int> warps(FIBERS / 32);
    for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
    int left = FIBERS;
    for (long idle = 0; left; ++idle) {
      std::shuffle(warps.begin(), warps.end(), dice);
      for (int warp : warps) {
        if (dice() % 3 == 0) continue;
        for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
          if (fibers[i].done) continue;
          const int block = first + i / THREADS;
          current = i, threadIdx = {i % THREADS, 0}, blockIdx = {block % blocks, block / blocks};
          swapcontext(&scheduler, &fibers[i].context);
          left -= fibers[i].done;
        }
      }
      while (!copies.empty() && dice() % 16) {
        std::swap(copies[dice() % copies.size()], copies.back());
        auto land = copies.back();
        copies.pop_back();
        land();
        idle = 0;
      }
      if (idle > 20000) return 1;
    }
    if (!copies.empty()) return 2;
  }
  return 0;
}
