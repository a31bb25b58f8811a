"""States and their store: every move is in the table, every race has one winner, what is committed lasts."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from perilune.sandbox.errors import BadSnapshot, Conflict, NotFound, SandboxError
from perilune.sandbox.snapshot import Snapshot, check_format, from_json, to_json
from perilune.sandbox.states import Decision, Request, State, after_crash, decide, may_move
from perilune.sandbox.store import TOLD_S, LayerRow, Store

PASSING = {State.CREATING, State.PAUSING, State.RESUMING, State.SNAPSHOTTING, State.FORKING, State.KILLING}


def snapshot(box: str = "box", layers: tuple[str, ...] = ("m",), **fields: object) -> Snapshot:
    base = Snapshot(box, None, "busybox", {"driver": "fake"}, layers, (), "s", True, time.time(), 10)
    return Snapshot(**{**base.__dict__, **fields}).sealed()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state.db")


def test_the_table_is_complete() -> None:
    """A request that starts is one from a state that stands; every state can be killed; every passing state ends."""
    for request, state in itertools.product(Request, State):
        decision = decide(request, state)
        if decision is Decision.START:
            assert state not in PASSING
        if decision in (Decision.WAIT, Decision.JOIN):
            assert state in PASSING
        if request is Request.KILL:
            assert decision is not Decision.REFUSE
    for state in State:
        assert may_move(state, State.ENDED) == (state is not State.ENDED)
    assert decide(Request.PAUSE, State.PAUSING) is Decision.JOIN
    assert decide(Request.RESUME, State.RUNNING) is Decision.NOTHING
    assert decide(Request.KILL, State.PAUSING) is Decision.WAIT


@pytest.mark.parametrize(("state", "has"), list(itertools.product(State, (True, False))))
def test_after_a_crash_every_state_stands(state: State, has: bool) -> None:
    """No state of a crash needs a service that is gone, and a reason is said where something was lost."""
    after, reason = after_crash(state, has)
    assert after in (State.PAUSED, State.ENDED)
    if state not in (State.PAUSED, State.ENDED, State.RESUMING):
        assert reason
    if has and state in (State.RUNNING, State.PAUSING, State.SNAPSHOTTING, State.FORKING, State.RESUMING):
        assert after is State.PAUSED


def test_compare_and_set(store: Store) -> None:
    """Of two moves from one record the second fails and says what is."""
    record = store.insert("box", "busybox", {}, {})
    running = store.move(record, State.RUNNING)
    store.move(running, State.PAUSING)
    with pytest.raises(Conflict, match="pausing"):
        store.move(running, State.KILLING)
    with pytest.raises(SandboxError, match="no way"):
        store.move(store.get("box"), State.FORKING)
    with pytest.raises(SandboxError, match="cannot be changed"):
        store.move(store.get("box"), State.RUNNING, template="other")


def test_one_service_at_a_time(store: Store, tmp_path: Path) -> None:
    """The file is locked."""
    with pytest.raises(SandboxError, match="another service"):
        Store(tmp_path / "state.db")
    store.close()
    Store(tmp_path / "state.db").close()


def test_renewed_while_it_expires(store: Store) -> None:
    """A record that was read as expired cannot be acted on after it was renewed (AgentENV #165)."""
    record = store.insert("box", "busybox", {}, {}, expires=time.time() - 1)
    store.move(record, State.RUNNING)
    (expired,) = store.expired(time.time())
    store.move(store.get("box"), State.RUNNING, expires=time.time() + 100)
    with pytest.raises(Conflict):
        store.move(expired, State.PAUSING)
    assert store.expired(time.time()) == []


def test_what_has_ended_is_told_for_a_day_if_its_life_had_no_end(store: Store) -> None:
    """Or records of machines that died would only ever become more; those that live are never among them."""
    for box, expires in (("lives", None), ("died", None), ("later", time.time() + 1e6)):
        store.move(store.insert(box, "busybox", {}, {}, expires=expires), State.RUNNING)
    for box in ("died", "later"):
        store.move(store.get(box), State.ENDED, reason="its machine has ended")
    assert store.expired(time.time() + TOLD_S - 60) == []
    assert [record.id for record in store.expired(time.time() + TOLD_S + 60)] == ["died"]


def test_a_commit_is_all_or_nothing(store: Store, tmp_path: Path) -> None:
    """Snapshot, layers and the sandbox's move come together, or not at all, also over a reopening."""
    record = store.move(store.insert("box", "busybox", {}, {}), State.RUNNING)
    pausing = store.move(record, State.PAUSING)
    taken = snapshot(layers=("m1", "m2"))
    rows = [LayerRow(name, "memory", 5) for name in ("m1", "m2", "s")]
    with pytest.raises(Conflict):
        store.commit(taken, rows, record, State.RUNNING)  # an old record
    assert store.layers() == {}
    with pytest.raises(NotFound):
        store.snapshot(taken.id)
    store.commit(taken, rows, pausing, State.PAUSED)
    store.close()
    again = Store(tmp_path / "state.db")
    assert again.get("box").state is State.PAUSED
    assert again.get("box").snapshot == taken.id
    assert again.snapshot(taken.id) == taken
    assert set(again.layers()) == {"m1", "m2", "s"}


def test_layers_go_with_their_last_user(store: Store) -> None:
    """A snapshot that a sandbox stands on stays; a shared layer stays for the other; then all go."""
    record = store.move(store.insert("box", "busybox", {}, {}), State.RUNNING)
    one = snapshot(layers=("m1",), label="one")
    two = snapshot(layers=("m1", "m2"), label="two")
    record = store.commit(one, [LayerRow("m1", "memory", 1), LayerRow("s", "state", 1)], record, State.RUNNING)
    record = store.commit(two, [LayerRow("m2", "memory", 1)], record, State.RUNNING)
    store.hide(one.id)
    assert store.collect() == []
    assert [known.label for known in store.snapshots()] == ["two"]
    store.hide(two.id)
    assert store.collect() == []
    assert store.snapshots() == []
    assert store.snapshot(two.id) == two
    store.move(store.move(record, State.KILLING), State.ENDED)
    assert {row.id for row in store.collect()} == {"m1", "m2", "s"}
    assert store.layers() == {}


def test_a_manifest_is_what_it_was(store: Store) -> None:
    """Another version, or any changed field, is refused; so is another machine, with what differs."""
    taken = snapshot()
    text = to_json(taken)
    assert from_json(text) == taken
    with pytest.raises(BadSnapshot, match="version 0"):
        from_json(text.replace('"version": "1"', '"version": "0"'))
    with pytest.raises(BadSnapshot, match="checksum"):
        from_json(text.replace('"m"', '"n"'))
    check_format(taken, {"driver": "fake"})
    with pytest.raises(BadSnapshot, match=r"driver 'fake'.*'qemu'.*version None"):
        check_format(taken, {"driver": "qemu", "version": "10"})


def test_labels_find_the_newest(store: Store) -> None:
    record = store.move(store.insert("box", "busybox", {}, {}), State.RUNNING)
    first = snapshot(label="base", created=1.0)
    second = snapshot(label="base", created=2.0, layers=("m2",))
    rows = [LayerRow(name, "memory", 1) for name in ("m", "m2", "s")]
    record = store.commit(first, rows, record, State.RUNNING)
    store.commit(second, [], record, State.RUNNING)
    assert store.snapshot("base") == second
    assert store.snapshot(first.id) == first
