"""Measure the published figures again: the commands of bench/all.toml, under time limits, each GPU with one at a time.

    python bench/all.py FOLDER [--only serve-decode memory ...] [--minutes 25] [--traces FOLDER] [--list]

A job writes FOLDER/NAME.json and its output to FOLDER/NAME.log; one that outlasts its `seconds` is ended, and what it
had written stays. Jobs of one GPU share the machine's GPUs; after them those of several GPUs run alone. What the
machine has too few GPUs for, and what no time is left for, is said. FOLDER/all.json has how each ended. Nothing in
bench/results is touched: copy there what is to be published. --traces: where bench/cache.py says what they are.
bench/quickstart.py, qat.py and agreement.py are run alone: they write bench/results and README themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

BENCH = Path(__file__).parent
LEAST = 20.0  # seconds under which a job is not begun


@dataclass(frozen=True)
class Job:
    """command: with {python}, {torchrun}, {out} (its JSON), {gpus} (how many), {folder} (room on disk), {traces}."""

    name: str
    command: str
    seconds: float
    gpus: int = 1  # the least it needs: 0 a CPU, 2 or more all that there are


@dataclass(frozen=True)
class Outcome:
    """state: "ok", "failed" (its exit status is not 0), "cut" (its time was up) or "skipped"; why: for the last."""

    name: str
    state: str
    seconds: float = 0.0
    why: str = ""


def read(path: Path) -> list[Job]:
    return [Job(name, **fields) for name, fields in tomllib.loads(path.read_text()).items()]


def run(job: Job, gpus: list[int], folder: Path, deadline: float, traces: Path | None) -> Outcome:
    """The job in a process group of its own, ended whole when its time is up."""
    if "{traces}" in job.command and traces is None:
        return Outcome(job.name, "skipped", why="needs --traces")
    left = min(job.seconds, deadline - time.monotonic())
    if left < min(LEAST, job.seconds):
        return Outcome(job.name, "skipped", why="no time is left")
    words = {
        "python": sys.executable,
        "out": str(folder / f"{job.name}.json"),
        "gpus": str(len(gpus)),
        "torchrun": f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {len(gpus)}",
        "folder": str(folder / "scratch"),
        "traces": str(traces),
    }
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    with (folder / f"{job.name}.log").open("w") as log:
        process = subprocess.Popen(
            job.command.format(**words).split(),
            cwd=BENCH.parent,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(left)
            state = "failed" if status else "ok"
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:
            end(process)
    return Outcome(job.name, state, round(time.monotonic() - begin, 1))


def end(process: subprocess.Popen[bytes]) -> None:
    """Also what the job has left behind in its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lanes(jobs: list[Job], gpus: list[int], one: Callable[[Job, list[int]], Outcome]) -> list[Outcome]:
    """The jobs in their order, as many at once as there are GPUs."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    outcomes: list[Outcome] = []

    def lane(gpu: int) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            outcomes.append(told(one(job, [gpu])))

    threads = [threading.Thread(target=lane, args=(gpu,)) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def told(outcome: Outcome) -> Outcome:
    print(f"{outcome.state:8s}{outcome.seconds:8.1f} s  {outcome.name}  {outcome.why}".rstrip(), flush=True)
    return outcome


def measure(jobs: list[Job], folder: Path, gpus: list[int], seconds: float, traces: Path | None) -> list[Outcome]:
    """All jobs within so many seconds; the outcomes, in the order in which they were known."""
    one = partial(run, folder=folder, deadline=time.monotonic() + seconds, traces=traces)
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    outcomes = [
        told(Outcome(job.name, "skipped", why=f"needs {job.gpus} GPUs; there are {len(gpus)}"))
        for job in jobs
        if job.gpus > len(gpus)
    ]
    outcomes += lanes([job for job in jobs if job.gpus == 1 <= len(gpus)], gpus, one)
    for job in jobs:
        if job.gpus != 1 and job.gpus <= len(gpus):
            outcomes.append(told(one(job, gpus if job.gpus else [])))
    (folder / "all.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return outcomes


def chosen(jobs: list[Job], only: list[str] | None) -> list[Job]:
    """In the order of `only`; a name stands also for all that begin with it and a dash."""
    if only is None:
        return jobs
    found: Mapping[str, list[Job]] = {
        name: [job for job in jobs if job.name == name or job.name.startswith(f"{name}-")] for name in only
    }
    for name, those in found.items():
        if not those:
            raise SystemExit(f"--only names {name!r}; the jobs are {', '.join(job.name for job in jobs)}")
    return list(dict.fromkeys(job for those in found.values() for job in those))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("measured"))
    parser.add_argument("--only", nargs="+", help="names, or the word before a dash")
    parser.add_argument("--minutes", type=float, default=120.0, help="for all together")
    parser.add_argument("--traces", type=lambda text: Path(text).resolve())
    parser.add_argument("--jobs", type=Path, default=BENCH / "all.toml")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    jobs = chosen(read(options.jobs), options.only)
    if options.list:
        for job in jobs:
            print(f"{job.name:18s}{job.gpus} GPUs {job.seconds:5.0f} s  {job.command}")
        return
    import torch

    gpus = list(range(torch.cuda.device_count()))
    outcomes = measure(jobs, options.folder.resolve(), gpus, options.minutes * 60, options.traces)
    sys.exit(any(outcome.state == "failed" for outcome in outcomes))


if __name__ == "__main__":
    main()
