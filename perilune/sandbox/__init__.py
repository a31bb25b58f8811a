"""Sandboxes for agents: virtual machines that are captured in milliseconds, paused, resumed and forked.

Usable alone: nothing of Perilune but its error base is imported, and torch is not needed.
"""

from perilune.sandbox.assets import Assets, Template, state_root
from perilune.sandbox.box import Forks, Sandbox, kill_all
from perilune.sandbox.driver import Capabilities, Command, Driver, Network, Output, Process, Result, Stats
from perilune.sandbox.errors import (
    BadSnapshot,
    Conflict,
    Exhausted,
    GuestError,
    NotFound,
    Recoverable,
    SandboxError,
    Terminal,
    Unavailable,
)
from perilune.sandbox.manager import Manager
from perilune.sandbox.options import Event, Limits, Options
from perilune.sandbox.snapshot import Snapshot
from perilune.sandbox.states import State
from perilune.sandbox.store import Record
from perilune.sandbox.sync import SyncSandbox

__all__ = [
    "Assets",
    "BadSnapshot",
    "Capabilities",
    "Command",
    "Conflict",
    "Driver",
    "Event",
    "Exhausted",
    "Forks",
    "GuestError",
    "Limits",
    "Manager",
    "Network",
    "NotFound",
    "Options",
    "Output",
    "Process",
    "Record",
    "Recoverable",
    "Result",
    "Sandbox",
    "SandboxError",
    "Snapshot",
    "State",
    "Stats",
    "SyncSandbox",
    "Template",
    "Terminal",
    "Unavailable",
    "kill_all",
    "state_root",
]
