"""packed_few.cu and packed_many.cu on a CPU: compiled as C++ and run thread by thread, for three multiprocessors.

Finds wrong numbers, deadlocks and some races where there is no GPU; says nothing about speed or memory ordering.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest
from sources_on_cpu import check, compiled, rewritten, skip_without_compiler, tensor_map

from perilune.ops.moe import packed_cuda

BLOCKS = 3  # so that a block takes several tiles
FEW_BODIES = {
    "times": "return both_host(x, y);",
    "narrow": "return narrow_host(low, high);",
    "address": "return 0;",
    "wait": "barrier_wait(&barrier, parity);",
    "arrive": "barrier_arrive(&barrier, 0);",
    "expect": "barrier_arrive(&barrier, bytes);",
    "copy": "bulk_copy(to, from, bytes, &barrier);",
    "begin": "barrier_init(&barrier, arrivals);",
    "publish": "",
    "multiply": "multiply_host(d, a0, a1, a2, a3, b0, b1);",
}
FEW_WORDS = """
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float wide(unsigned bits) { return __uint_as_float(bits << 16); }
inline unsigned both_host(unsigned x, unsigned y) {
  return narrow_host(wide(x & 0xffff) * wide(y & 0xffff), wide(x >> 16) * wide(y >> 16));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 4; ++i) z |= unsigned(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return z;
}
static unsigned given[32][32][6];
inline int __any_sync(unsigned, int yes) {
  int warp = threadIdx.x >> 5, any = 0;
  given[warp][threadIdx.x & 31][0] = yes;
  __syncwarp();
  for (int i = 0; i < 32; ++i) any |= given[warp][i][0];
  __syncwarp();
  return any;
}
inline void multiply_host(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(given[warp][lane], mine, 24);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < 16; ++k) {
      unsigned a = given[warp][lane / 4 * 4 + k % 8 / 2][(i >> 1) + k / 8 * 2];
      unsigned b = given[warp][(lane % 4 * 2 + (i & 1)) * 4 + k % 8 / 2][4 + k / 8];
      sum += (double)wide(a >> 16 * (k & 1) & 0xffff) * wide(b >> 16 * (k & 1) & 0xffff);
    }
    d[i] = (float)sum;
  }
  __syncwarp();
}
"""
FEW_ENTRY = """
extern "C" int run(void *given, int grid, int seed) {
  const Arguments &a = *static_cast<Arguments *>(given);
  return run_grid([&] { packed_few(a); }, {grid, 1}, THREADS, BYTES, seed);
}
"""
MANY_BODIES = {"choose": "return choose_host(x, y, which);"}
MANY_WORDS = """
static const Place gridDim = {BLOCKS, 1};
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline bool __any_sync(u32, bool yes) { return gather(2000 + current / 32, 32, yes); }
inline u32 choose_host(u32 x, u32 y, u32 which) {
  const u64 both = u64(y) << 32 | x;
  u32 z = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = which >> 4 * i & 15, byte = both >> (nibble & 7) * 8 & 255;
    z |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return z;
}
// Rows behind the last one are zeros.
inline void copy(const TensorMap &map, u32 to, int column, int row, u64 *bar) {
  const int size = map.words[1], rows = map.words[2], width = map.words[3], box = map.words[4];
  if (to % (size == 2 ? 1024 : 128)) FAIL("a copy goes to %u\\n", to);
  copies.push_back([=] {
    for (int r = 0; r < box; ++r)
      for (int unit = 0; unit < 64 * size / 16; ++unit) {
        unsigned char *there = shared_of(0) + to + r * 64 * size + ((size == 2 ? unit ^ r % 8 : unit) << 4);
        const u64 from = map.words[0] + (u64(row + r) * width + column) * size + unit * 16;
        if (row + r < rows) memcpy(there, reinterpret_cast<const void *>(from), 16);
        else memset(there, 0, 16);
      }
    Barrier &b = barriers.at(bar);
    b.bytes -= box * 64 * size, settle(b);
  });
}
template <int N> inline void add_product(float (&d)[N], const u32 (&a)[4], u64 b) {
  static u32 lefts[FIBERS][4];
  memcpy(lefts[current], a, 16);
  __syncwarp();
  struct Quad { u32 a[4][4]; } quad;
  memcpy(quad.a, lefts[current / 4 * 4], sizeof quad);
  __syncwarp();
  const int lane = current % 32;
  const unsigned char *memory = shared_of(0);
  float *out = d;
  const u32 *mine = a;
  fibers[current].open.push_back([=] {
    if (memcmp(mine, quad.a[lane % 4], 16)) FAIL("registers are overwritten under a product\\n");
    for (int n = 0; n < N; ++n) {
      const int half = n % 4 / 2, column = n / 4 * 8 + lane % 4 * 2 + n % 2;
      double sum = out[n];
      for (int k = 0; k < 16; ++k) {
        const u32 two = quad.a[k % 8 / 2][half + k / 8 * 2];
        sum += double(wide(two >> 16 * (k % 2))) * wide(number(memory, b, column, k));
      }
      out[n] = float(sum);
    }
  });
}
"""
MANY_ENTRY = """
extern "C" int run(const Arguments *given, int grid, int seed) {
  return run_grid([given] { packed_many(*given); }, grid, 1, seed);
}
"""


@functools.cache
def _library(sources: tuple[Path, ...], defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    if sources == packed_cuda.FEW:
        text = "\n".join(path.read_text() for path in sources)
        text = f"{FEW_WORDS}{rewritten(text, FEW_BODIES, 128, 'shared_memory')}{FEW_ENTRY}"
        return compiled("cuda_on_cpu.h", text, (*defines, ("BYTES", packed_cuda.SHARED_BYTES)))
    # The first three files are Hopper's instructions.
    text = "\n".join(path.read_text() for path in sources[3:])
    text = f"{MANY_WORDS}{rewritten(text, MANY_BODIES, 1024, 'shared_of(0)')}{MANY_ENTRY}"
    return compiled("hopper_on_cpu.h", text, (*defines, ("BLOCKS", BLOCKS)))


def _launch(sources, name, numbers, arguments, device) -> None:
    check(_library(sources, tuple(numbers.items())).run(ctypes.byref(arguments), BLOCKS, 1))


@pytest.fixture
def packed_on_cpu(monkeypatch) -> None:
    """packed_cuda on CPU tensors, in this test."""
    skip_without_compiler()
    monkeypatch.setattr(packed_cuda, "_launch", _launch)
    monkeypatch.setattr(packed_cuda, "tensor_map", tensor_map)
