"""What a sandbox costs over HTTP: create, exec, checkpoint, pause to first answer, forks; beside the SDK in-process.

    python bench/sandbox_service.py --out bench/results/sandbox_service.json

Needs `perilune sandbox setup`. Works in a root directory of its own that shares what setup made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from perilune.sandbox import Assets, Limits, Manager, Sandbox, state_root
from perilune.sandbox.doctor import choose_accelerator
from perilune.sandbox.qemu import QemuDriver
from perilune.sandbox.service import ServiceConfig, build_app
from perilune.sandbox.service.run import running


def timed(work: Callable[[], Any], runs: int) -> dict[str, float]:
    """Milliseconds of `runs` calls after one that is not counted."""
    work()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - started))
    low, high = statistics.quantiles(times, n=10)[0], statistics.quantiles(times, n=10)[-1]
    return {"median_ms": statistics.median(times), "p10_ms": low, "p90_ms": high}


def over_http(url: str, runs: int) -> dict[str, dict[str, float]]:
    """Each row by a client on this host."""
    client = httpx.Client(base_url=url, timeout=120)

    def post(path: str, **body: Any) -> Any:
        response = client.post(path, json=body)
        response.raise_for_status()
        return response.json() if response.content else None

    def create_and_kill() -> None:
        client.delete(f"/sandboxes/{post('/sandboxes', timeout=600)['sandboxID']}").raise_for_status()

    box = post("/sandboxes", timeout=3600)["sandboxID"]
    path = f"/sandboxes/{box}"

    def pause_and_answer() -> None:
        post(f"{path}/pause")
        post(f"{path}/resume", timeout=3600)
        assert post(f"{path}/exec", cmd="echo x")["stdout"] == "x\n"

    def forks() -> None:
        kids = post(f"{path}/fork", count=16)
        for kid in kids:
            client.delete(f"/sandboxes/{kid['sandbox']['sandboxID']}").raise_for_status()

    def checkpoint() -> None:
        post(f"{path}/exec", cmd="echo x > /x")
        post(f"{path}/snapshots")

    return {
        "get": timed(lambda: client.get(path).raise_for_status(), runs),
        "exec echo": timed(lambda: post(f"{path}/exec", cmd="echo x"), runs),
        "exec and checkpoint": timed(checkpoint, runs),
        "pause, resume, first exec": timed(pause_and_answer, runs),
        "create and kill": timed(create_and_kill, runs),
        "16 forks made and killed": timed(forks, max(runs // 10, 3)),
    }


async def in_process(manager: Manager, runs: int) -> dict[str, dict[str, float]]:
    """The same exec by the SDK, without HTTP."""
    async with Sandbox.create(manager=manager) as box:
        times = []
        for _ in range(runs + 1):
            started = time.perf_counter()
            await box.exec("echo x")
            times.append(1e3 * (time.perf_counter() - started))
    deciles = statistics.quantiles(times[1:], n=10)
    row = {"median_ms": statistics.median(times[1:]), "p10_ms": deciles[0], "p90_ms": deciles[-1]}
    return {"exec echo, SDK in-process": row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--assets", type=Path, default=state_root(), help="where `perilune sandbox setup` put them")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="perilune-bench-") as place:
        os.chmod(place, 0o711)
        root = Path(place) / "root"
        root.mkdir(mode=0o711)
        for name in ("assets", "templates"):
            (root / name).symlink_to(args.assets / name)
        assets = Assets(root)

        async def open_manager() -> Manager:
            driver = QemuDriver(assets.confine, await choose_accelerator(assets))
            return await Manager.open(assets, driver, Limits(memory=4 << 30))

        async def direct() -> dict[str, dict[str, float]]:
            manager = await open_manager()
            try:
                return await in_process(manager, args.runs)
            finally:
                await manager.close()

        load = os.getloadavg()[0]
        with running(build_app(ServiceConfig(), open_manager)) as url:
            rows = over_http(url, args.runs)
        rows |= asyncio.run(direct())
        accelerator = asyncio.run(choose_accelerator(assets))
    result = {
        "command": f"python bench/sandbox_service.py --runs {args.runs}",
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": load,
        "accelerator": accelerator,
        "rows": rows,
    }
    for name, row in rows.items():
        print(f"{name:<28}{row['median_ms']:8.1f} ms  ({row['p10_ms']:.1f} to {row['p90_ms']:.1f})")
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
