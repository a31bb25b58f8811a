"""The command line: parses, calls one room, prints. Every command is one module with `run(arguments)`.

Nothing heavy is imported before a command is chosen, so that `perilune --help` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from perilune import __version__
from perilune.errors import Error

COMMANDS = {
    "quickstart": "train a small model on real text, on a CPU, and measure what it learned",
    "train": "train from a TOML file",
    "export": "write a checkpoint of a run, of any number of processes, in the released layout",
    "plan": "predict memory and communication of a training run on many GPUs",
    "generate": "continue a text with a checkpoint",
    "chat": "talk with a checkpoint in the terminal",
    "quantize": "pack the routed experts of a checkpoint to MXFP4",
    "serve": "answer over HTTP like OpenAI's and Anthropic's services, with a page at /ui",
    "bench-serve": "send load to a running server and measure it",
    "simulate-cache": "replay a trace of requests through the prefix cache",
    "sandbox": "virtual machines for agents: checkpoint, pause, resume, fork; and the service for them",
    "info": "count a model's parameters, bytes and state without building it",
    "env": "print versions, device, threads and the kernel behind every operation",
}

HELP = f"""usage: perilune COMMAND [options]

Train and run Kimi-K3-style language models: from a laptop CPU to a GPU cluster, with one model definition.

commands:
{chr(10).join(f"  {name:<15} {summary}" for name, summary in COMMANDS.items())}

options:
  -h, --help   this text; `perilune COMMAND --help` explains one command
  --version    print the version
  --debug      with any command: print the traceback of an error

examples:
  perilune quickstart
  perilune info kimi-k3
  perilune generate runs/quickstart/checkpoint "def main():"
"""

# Packages of the extra `serve`, some of them of `sandbox` too; all others are of `train`.
SERVE = ("fastapi", "uvicorn", "xgrammar", "prometheus_client", "huggingface_hub", "httpx2")
FAILED = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 an error (one line on stderr), 130 stopped by Ctrl-C."""
    # Threads that spin for long make a CPU step 10 times slower as soon as another program runs beside it.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What comes after `--` is another program's.
    ours = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:ours]
    arguments = [argument for argument in arguments[:ours] if argument != "--debug"] + arguments[ours:]
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("perilune: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`perilune info kimi-k3 | head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"perilune: {describe(error, arguments[0])}", file=sys.stderr)
        return FAILED


def describe(error: Exception, command: str) -> str:
    """One line for a person: what failed, on what, and how to see more where that can help."""
    if isinstance(error, Error):
        message = str(error)
    elif isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("perilune"):
        extra = "serve" if (error.name or "").split(".")[0] in SERVE else "train"
        extra = "sandbox" if command == "sandbox" else extra
        message = f"the package {error.name!r} is not installed; `pip install 'perilune[{extra}]'` brings it"
    elif isinstance(error, OSError):
        places = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        message = f"{places}: {error.strerror}" if places and error.strerror else error.strerror or str(error)
    else:
        message = f"unexpected {type(error).__name__}: {error} (--debug prints the traceback)"
    return " ".join(message.split())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    name, *rest = arguments
    if name == "--version":
        print(f"perilune {__version__}")
        return 0
    if name not in COMMANDS:
        raise Error(f"command {name!r} is unknown; allowed: {', '.join(COMMANDS)}")
    try:
        import_module(f"perilune.cli.{name.replace('-', '_')}").run(rest)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0


__all__ = ["main"]
