// A block of a CUDA kernel as C++ on one core: every thread is a fiber, warps take turns in a random order, bulk copies
// land at random moments, shared memory starts as NaN. For the constructs that KDA decode uses; not a general emulator.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __expf expf_host
#define FAIL(...) (fprintf(stderr, __VA_ARGS__), abort())

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float __uint_as_float(unsigned x) {
  float f;
  memcpy(&f, &x, 4);
  return f;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float expf_host(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline void __stcs(float4 *p, float4 x) { *p = x; }
inline unsigned narrow_host(float low, float high) {  // two floats to bf16, to nearest even
  auto bits = [](float f) {
    unsigned u;
    memcpy(&u, &f, 4);
    return f != f ? 0x7fffu : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  };
  return bits(low) | bits(high) << 16;
}

struct Place {
  int x, y;
} threadIdx, blockIdx, gridDim;
struct Meeting {
  int count = 0, generation = 0;
} warp_meetings[32], block_meeting, reader_meeting, preparer_meeting;
struct Barrier {
  int expected = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;
};
struct Copy {
  void *to;
  const void *from;
  int bytes;
  void *barrier;  // null for a thread's own copy (cp.async)
  int thread;
};
struct Own {
  int pending = 0;
  std::vector<void *> arrivals;  // to make once nothing is pending
} own[1024];
std::map<void *, Barrier> barriers;
std::vector<Copy> copies;
std::vector<ucontext_t> fibers;
std::vector<bool> done;
ucontext_t scheduler;
int current, block_threads;
float lanes[32][32];
unsigned char *shared_memory;
std::mt19937 dice;

inline void pause_fiber() { swapcontext(&fibers[current], &scheduler); }
inline void gather(Meeting &m, int threads) {
  int generation = m.generation;
  if (++m.count == threads)
    m.count = 0, ++m.generation;
  else
    while (m.generation == generation) pause_fiber();
}
inline void __syncwarp() { gather(warp_meetings[threadIdx.x >> 5], 32); }
inline void __syncthreads() { gather(block_meeting, block_threads); }
inline float __shfl_xor_sync(unsigned, float x, int step) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  lanes[warp][lane] = x;
  __syncwarp();
  float y = lanes[warp][lane ^ step];
  __syncwarp();
  return y;
}
inline int __shfl_sync(unsigned, int x, int lane) {
  static int words[32][32];
  int warp = threadIdx.x >> 5;
  words[warp][threadIdx.x & 31] = x;
  __syncwarp();
  int y = words[warp][lane];
  __syncwarp();
  return y;
}
inline int atomicAdd(int *p, int x) {
  *p += x;
  return *p - x;
}
inline void settle(Barrier &b) {
  if (b.pending < 0) FAIL("a barrier got more arrivals than it expects\n");
  if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.expected;
}
inline void barrier_init(void *p, int arrivals) {
  barriers[p] = Barrier();
  barriers[p].expected = barriers[p].pending = arrivals;
}
inline void barrier_arrive(void *p, int bytes) {
  Barrier &b = barriers.at(p);
  b.bytes += bytes, --b.pending;
  settle(b);
}
inline void barrier_wait(void *p, unsigned parity) {
  while ((barriers.at(p).phase & 1) == (parity & 1)) pause_fiber();
}
inline void bulk_copy(void *to, const void *from, int bytes, void *barrier) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) & 15)
    FAIL("a bulk copy is not aligned to 16 bytes\n");
  if (!barrier) ++own[current].pending;
  copies.push_back({to, from, bytes, barrier, current});
}
inline void arrive_after_copies(void *barrier) {
  if (own[current].pending)
    own[current].arrivals.push_back(barrier);
  else
    barrier_arrive(barrier, 0);
}
inline void land(const Copy &c) {
  memcpy(c.to, c.from, c.bytes);
  if (c.barrier) {
    barriers.at(c.barrier).bytes -= c.bytes, settle(barriers.at(c.barrier));
  } else if (--own[c.thread].pending == 0) {
    for (void *barrier : own[c.thread].arrivals) barrier_arrive(barrier, 0);
    own[c.thread].arrivals.clear();
  }
}

// Runs kernel() in every block of the grid; 0, or 1 if a block hangs, 2 if it leaves copies behind.
template <class Kernel> int run_grid(Kernel kernel, Place grid, int threads, int bytes, int seed) {
  static std::vector<std::vector<char>> stacks(1024, std::vector<char>(1 << 17));
  static Kernel *body;
  std::vector<unsigned char> memory(bytes + 128);
  shared_memory = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~127ul);
  body = &kernel, block_threads = threads, gridDim = grid, dice.seed(seed);
  for (int block = 0; block < grid.x * grid.y; ++block) {
    memset(shared_memory, 0xff, bytes);
    for (auto &m : warp_meetings) m = Meeting();
    block_meeting = reader_meeting = preparer_meeting = Meeting();
    barriers.clear(), copies.clear();
    blockIdx = {block % grid.x, block / grid.x};
    fibers.assign(threads, ucontext_t()), done.assign(threads, false);
    for (int t = 0; t < threads; ++t) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = stacks[t].data(), fibers[t].uc_stack.ss_size = stacks[t].size();
      makecontext(&fibers[t], +[] { (*body)(), done[current] = true, pause_fiber(); }, 0);
    }
    std::vector<int> warps(threads / 32);
    for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
    int left = threads;
    for (long idle = 0; left; ++idle) {
      std::shuffle(warps.begin(), warps.end(), dice);
      for (int warp : warps) {
        if (dice() % 3 == 0) continue;
        for (int t = 32 * warp; t < 32 * warp + 32; ++t) {
          if (done[t]) continue;
          current = t, threadIdx = {t, 0};
          swapcontext(&scheduler, &fibers[t]);
          left -= done[t];
        }
      }
      while (!copies.empty() && dice() % 16) {
        std::swap(copies[dice() % copies.size()], copies.back());
        Copy c = copies.back();
        copies.pop_back();
        land(c);
        idle = 0;
      }
      if (idle > 200000) return 1;
    }
    if (!copies.empty()) return 2;
  }
  return 0;
}
