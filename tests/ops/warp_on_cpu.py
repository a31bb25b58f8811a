"""Builds a CUDA kernel of perilune/ops/kda for the CPU, with warp_on_cpu.h in the place of warp.cuh."""

from sources_on_cpu import compiled, needs_compiler


def build(sources, kernel, defines):
    """A library with run(blocks, arguments) and shared_bytes(). sources: as the kernel's module has them."""
    assert sources[0].name == "warp.cuh"
    text = "".join(f'#include "{path}"\n' for path in sources[1:])
    text += f'extern "C" void run(int blocks, Arguments *a) {{ launch({kernel}, blocks, THREADS, a); }}\n'
    text += 'extern "C" int shared_bytes() { return sizeof(Shared); }\n'
    return compiled("warp_on_cpu.h", text, defines.items())


__all__ = ["build", "needs_compiler"]
