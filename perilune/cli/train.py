"""`perilune train`: a training run described by a TOML file."""

from __future__ import annotations

from perilune.errors import Error

HELP = """usage: perilune train CONFIG.toml [--key value ...]

Train from a TOML file; every key of the file can be changed on the command line. A run whose folder holds a
checkpoint continues from it, to the same bits as a run that was never stopped.

examples:
  perilune train run.toml
  perilune train run.toml --steps 200 --optim.lr 1e-3 --out runs/second
  perilune train run.toml --init-from runs/quickstart/checkpoint
  perilune train run.toml --memory.plan k3 --memory-report  # what one step keeps; trains nothing
  torchrun --nproc-per-node 2 --no-python perilune train run.toml

All keys, with their defaults:
"""


def run(arguments: list[str]) -> None:
    from perilune.train.config import load_config

    if arguments[:1] in (["-h"], ["--help"]):
        print(HELP)
        load_config(None, ["--help"])
    if not arguments or arguments[0].startswith("-"):
        raise Error("CONFIG.toml is missing (see `perilune train --help`)")
    report = "--memory-report" in arguments
    config = load_config(arguments[0], [word for word in arguments[1:] if word != "--memory-report"])
    if report:
        from perilune.train.memory_report import memory_report

        print(memory_report(config))
        return

    from perilune.parallel import mesh
    from perilune.train import train

    try:
        result = train(config)
    except Exception:
        # What follows from another rank's failure would only hide it.
        if not mesh.fails_first():
            raise SystemExit(2) from None
        raise
    finally:
        mesh.stop()
    if mesh.leads():
        print(f"checkpoint  {result.checkpoint}\nreport      {result.out / 'report.html'}")


__all__ = ["run"]
