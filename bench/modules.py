"""Time the modules other than KDA at Kimi-K3 widths, each against plain torch, torch.compile and public peers.

    python bench/modules.py [--only moe] [--out bench/results/modules.json] [--plot bench/results/modules.png]
    python bench/modules.py --join a.json b.json --plot bench/results/modules.png     (runs of single modules, no GPU)

One CUDA device. `modules_<name>.py` beside this file has the cases of a module; all implementations of a case run in
one process on the same random inputs, in turns, and a figure is the median with the fastest and slowest beside it. The
floor of a case is the longer of its real FLOPs at the bfloat16 rate and its fewest bytes at the copy bandwidth, both
measured first on the same card. Peers are not installed by this project; one that cannot be imported is left out and
one that fails is recorded with its error.
"""

import argparse
import importlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from modules_timing import rounds

MODULES = ("moe", "mla", "attnres")


def ceilings() -> dict[str, float]:
    """FLOP/s of a large bfloat16 product and bytes/s (read + written) of a large copy, random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    times = rounds({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, 10)
    product, copy = (float(times[name]["ms"]) / 1e3 for name in ("product", "copy"))
    return {"flop_per_s": 2 * 8192**3 / product, "bytes_per_s": 2 * source.numel() / copy}


def versions() -> dict[str, str]:
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    for peer in ("flash-attn", "sgl-flash-mla", "flashinfer-python", "fla-core"):
        try:
            found[peer] = importlib.metadata.version(peer)
        except importlib.metadata.PackageNotFoundError:
            found[peer] = "not installed"
    return found


def with_floor(row: dict, ceiling: dict[str, float]) -> dict:
    """Adds floor_ms and share = floor / time where the case has one."""
    floor = max(row.get("flop", 0) / ceiling["flop_per_s"], row.get("bytes", 0) / ceiling["bytes_per_s"])
    if floor and "ms" in row:
        row |= {"floor_ms": 1e3 * floor, "share": 1e3 * floor / row["ms"]}
        if row.get("flop"):
            row["tflop_per_s"] = row["flop"] / row["ms"] / 1e9
        if row.get("bytes"):
            row["tb_per_s"] = row["bytes"] / row["ms"] / 1e9
    return row


def plot(rows: list[dict], path: Path) -> None:
    """A panel a module: the time of each implementation of a case over the case's floor (1 = at the floor)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "share" in row]
    names = list(dict.fromkeys(row["module"] for row in rows))
    counts = [sum(row["module"] == name for row in rows) for name in names]
    size = {"figsize": (11, 1 + 0.22 * sum(counts)), "height_ratios": counts}
    figure, axes = plt.subplots(len(names), 1, squeeze=False, **size)
    for axis, name in zip(axes[:, 0], names, strict=True):
        chosen = [row for row in rows if row["module"] == name][::-1]
        colours = ["tab:blue" if row["implementation"].startswith("perilune") else "tab:gray" for row in chosen]
        axis.barh(
            [f"{row['case']}: {row['implementation']}" for row in chosen],
            [1 / r["share"] for r in chosen],
            color=colours,
        )
        axis.axvline(1, color="black", linestyle=":")
        axis.set_xscale("log")
        axis.set_title(name)
        axis.tick_params(labelsize=6)
    axes[-1, 0].set_xlabel("time / floor")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def measured(names: Sequence[str], out: Path) -> dict:
    """Runs the modules; the file is written after every row, so that a run that is cut short leaves what it has."""
    device = torch.device("cuda")
    result: dict = {
        "device": torch.cuda.get_device_name(device),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ceilings": ceilings(),
        "seconds": {},
        "rows": [],
    }
    print(json.dumps(result), flush=True)
    for name in names:
        start = time.monotonic()
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        try:
            for row in importlib.import_module(f"modules_{name}").rows(device):
                result["rows"].append(with_floor(row, result["ceilings"]))
                result["seconds"][name] = round(time.monotonic() - start, 1)
                out.write_text(json.dumps(result, indent=1) + "\n")
                print(json.dumps(row), flush=True)
        except Exception as error:
            result["rows"].append({"module": name, "case": "all", "error": f"{type(error).__name__}: {error}"[:500]})
            out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def joined(results: list[dict]) -> dict:
    """One result of several runs on the same kind of device; each run keeps its own ceilings, versions and date."""
    runs = [{k: v for k, v in result.items() if k != "rows"} for result in results]
    devices = {result["device"] for result in results}
    if len(devices) != 1:
        raise SystemExit(f"results of different devices: {sorted(devices)}")
    return {"device": devices.pop(), "runs": runs, "rows": [row for result in results for row in result["rows"]]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("bench/results/modules.json"))
    arguments.add_argument("--plot", type=Path)
    arguments.add_argument("--only", choices=MODULES, action="append")
    arguments.add_argument("--join", type=Path, nargs="+", help="results of earlier runs to put into one file")
    options = arguments.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.join:
        result = joined([json.loads(path.read_text()) for path in options.join])
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    else:
        result = measured(options.only or MODULES, options.out)
    if options.plot:
        plot(result["rows"], options.plot)


if __name__ == "__main__":
    main()
