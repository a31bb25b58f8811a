"""`perilune env`: what this installation runs on, for a bug report or a look before a long run."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata

import perilune
from perilune.cli.parse import parse

DESCRIPTION = """Print versions, device, threads and the kernel behind every operation.

examples:
  perilune env
  perilune env --json"""

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "transformers", "compressed-tensors")


@dataclass(frozen=True)
class Env:
    json: bool = False
    """print one JSON object instead of lines"""


def run(arguments: list[str]) -> None:
    args = parse(Env, "env", arguments, DESCRIPTION)
    facts = {"perilune": perilune.__version__, "python": sys.version.split()[0], "system": platform.platform()}
    facts |= {name: version(name) for name in PACKAGES} | devices() | kernels()
    print(json.dumps(facts, indent=2) if args.json else "\n".join(f"{key:<20} {facts[key]}" for key in facts))


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> dict[str, str]:
    import torch

    facts = {"cpu cores": str(os.cpu_count()), "torch threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            facts[f"cuda:{i}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}"
    else:
        facts["cuda"] = "none: everything runs on the CPU"
    return facts


def kernels() -> dict[str, str]:
    """Operation -> the code that runs it here: bf16 and heads of 128 on a GPU, fp32 on a CPU."""
    import torch

    from perilune.ops import attnres, conv, kda, moe, mx, norm
    from perilune.ops.kda import decode
    from perilune.ops.mla import paged, varlen

    cuda = torch.cuda.is_available()
    head = torch.empty(1, 1, 128, dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else "cpu")
    row, key, page = head[0], head.new_empty(1, 1, 192), head.new_empty(1, 64, 576)
    return {
        "ops.attnres": attnres.implementation([row]),
        "ops.conv": conv.implementation(row, head.new_empty(128, conv.WIDTH)),
        "ops.kda": kda.implementation(head, head),
        "ops.kda.decode": decode.kernel_here(head.device, head.dtype),
        "ops.mla": varlen.implementation(key, key, head),
        "ops.mla.paged": paged.implementation(page, page),
        "ops.moe": moe.implementation(row, moe.Dense(head, head)),
        "ops.mx": mx.implementation(row),
        "ops.norm": norm.implementation(row),
    }


__all__ = ["run"]
