"""The states of a sandbox and what a request means in each of them: tables, no machinery."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a sandbox is. ENDED is the last one; all but RUNNING, PAUSED and ENDED pass by themselves."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    KILLING = "killing"
    ENDED = "ended"


class Request(StrEnum):
    """What can be asked of a sandbox. USE: programs, files and everything else that needs a guest that runs."""

    PAUSE = "pause"
    RESUME = "resume"
    ROLLBACK = "rollback"
    CHECKPOINT = "checkpoint"
    FORK = "fork"
    KILL = "kill"
    USE = "use"


class Decision(StrEnum):
    """START the transition; JOIN the one under way and share its outcome; NOTHING to do; WAIT for the one under way
    and decide again; REFUSE with `Conflict`."""

    START = "start"
    JOIN = "join"
    NOTHING = "nothing"
    WAIT = "wait"
    REFUSE = "refuse"


_DECISIONS = {
    Request.PAUSE: {
        State.RUNNING: Decision.START,
        State.PAUSING: Decision.JOIN,
        State.PAUSED: Decision.NOTHING,
    },
    Request.RESUME: {
        State.PAUSED: Decision.START,
        State.RESUMING: Decision.JOIN,
        State.RUNNING: Decision.NOTHING,
    },
    Request.ROLLBACK: {
        State.RUNNING: Decision.START,
        State.PAUSED: Decision.START,
    },
    Request.CHECKPOINT: {
        State.RUNNING: Decision.START,
        State.PAUSED: Decision.NOTHING,
    },
    Request.FORK: {
        State.RUNNING: Decision.START,
        State.PAUSED: Decision.START,
    },
    Request.KILL: {
        State.CREATING: Decision.WAIT,
        State.RUNNING: Decision.START,
        State.PAUSING: Decision.WAIT,
        State.PAUSED: Decision.START,
        State.RESUMING: Decision.WAIT,
        State.SNAPSHOTTING: Decision.WAIT,
        State.FORKING: Decision.WAIT,
        State.KILLING: Decision.JOIN,
        State.ENDED: Decision.NOTHING,
    },
    # The guest runs on through a checkpoint and a fork but for milliseconds, in which what is sent is held back.
    Request.USE: {
        State.RUNNING: Decision.NOTHING,
        State.SNAPSHOTTING: Decision.NOTHING,
        State.FORKING: Decision.NOTHING,
    },
}

_MOVES = {
    State.CREATING: {State.RUNNING, State.PAUSED, State.ENDED},
    State.RUNNING: {
        *(State.PAUSING, State.SNAPSHOTTING, State.FORKING),
        *(State.RESUMING, State.KILLING, State.ENDED),  # resuming: at an earlier snapshot
    },
    State.PAUSING: {State.PAUSED, State.RUNNING, State.ENDED},
    State.PAUSED: {State.RESUMING, State.FORKING, State.KILLING, State.ENDED},
    State.RESUMING: {State.RUNNING, State.PAUSED, State.ENDED},
    State.SNAPSHOTTING: {State.RUNNING, State.ENDED},
    State.FORKING: {State.RUNNING, State.PAUSED, State.ENDED},
    State.KILLING: {State.ENDED},
    State.ENDED: set(),
}


def decide(request: Request, state: State) -> Decision:
    """What a request does to a sandbox in this state."""
    return _DECISIONS[request].get(state, Decision.REFUSE)


def may_move(before: State, after: State) -> bool:
    """True if a sandbox may go from one state to the other."""
    return after in _MOVES[before]


def after_crash(state: State, has_snapshot: bool) -> tuple[State, str]:
    """What becomes of a sandbox whose service ended while it was in `state`, and why.

    Its machine went with the service. What was committed is kept: the sandbox stands at its last snapshot.
    """
    if state in (State.PAUSED, State.ENDED):
        return state, ""
    if state is State.KILLING:
        return State.ENDED, "killed"
    if has_snapshot and state is not State.CREATING:
        if state is State.RESUMING:
            return State.PAUSED, ""
        return State.PAUSED, f"the service ended while it was {state.value}: it stands at its last snapshot"
    return State.ENDED, f"the service ended while it was {state.value}, before any snapshot"


__all__ = ["Decision", "Request", "State", "after_crash", "decide", "may_move"]
