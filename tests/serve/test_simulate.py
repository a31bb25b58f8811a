"""Traces, the models of peers against hand-made cases of their public behaviour, and the replay's sums."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.cli import main
from perilune.errors import Error
from perilune.serve.cache import Geometry, Placement, check_integrity
from perilune.serve.simulate import POLICIES, Request, Trace, policy, read, replay
from perilune.serve.simulate.align import VllmAlign
from perilune.serve.simulate.ours import Perilune
from perilune.serve.simulate.radix import ALPHAS, Marconi, lru, mamba_radix

DATA = Path(__file__).parents[1] / "data" / "traces"
UNIT = 512
K3 = Geometry.of("kimi-k3", match_unit=UNIT)
GB = 10**9
PLENTY = 500 * GB


def ask(keys: str, at: float = 0.0, extra: int = 1) -> Request:
    """A prompt of one 512-token block a letter and `extra` tokens, with an answer of one token."""
    return Request(at, len(keys) * UNIT + extra, 1, list(keys))


def hits(cache: object, *prompts: str) -> list[int]:
    """Hit blocks of prompts served in order."""
    served = [cache.serve(ask(keys, float(at))) for at, keys in enumerate(prompts)]  # type: ignore[attr-defined]
    return [one.device // UNIT for one in served]


def test_an_agentic_trace_is_decoded(tmp_path: Path) -> None:
    session = {"block": 64, "requests": [[0.0, 200, 70, 0, 0, [[1, 3]]], [5.0, 400, 9, 0, 3, [[7, 2], [20, 1]]]]}
    (tmp_path / "plain").write_text(json.dumps(session) + "\n" + json.dumps(session) + "\n")
    (tmp_path / "packed").write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    trace = read(tmp_path / "plain")
    assert trace == read(tmp_path / "packed")
    first, second, third, _ = trace.requests
    assert (first.prompt, first.output, first.turn, second.turn) == (200, 70, 0, 1)
    assert first.keys == [1, 2, 3, 7]  # (200 + 70) // 64: the answer is what the next prompt goes on with
    assert second.keys == [1, 2, 3, 7, 8, 20]
    assert third.keys[0] != first.keys[0]  # ids belong to their session
    assert (second.at, third.at) == (5.0, 6.0)
    assert [len(r.keys) for r in read(tmp_path / "plain", unit=128).requests] == [2, 3, 2, 3]
    long = {"block": 64, "requests": [[0.0, 64, 192, 0, 0, [[1, 1]]], [5.0, 128, 9, 0, 1, [[2, 1]]]]}
    (tmp_path / "long").write_text(json.dumps(long))
    first, second = read(tmp_path / "long").requests  # the answer does not fit into the next prompt: nobody sends it
    assert len(first.keys) == 4
    assert not set(first.keys[1:]) & set(second.keys)


def test_offsets_interleave_sessions() -> None:
    trace = read(DATA / "agentic.jsonl", offsets=DATA / "agentic-offsets.json")
    plain = read(DATA / "agentic.jsonl")
    times = [request.at for request in trace.requests]
    assert times == sorted(times)
    assert sorted(r.prompt for r in trace.requests) == sorted(r.prompt for r in plain.requests)
    assert trace.requests != plain.requests


def test_a_conversation_trace_is_decoded(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 400, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 2048, "output_length": 5, "hash_ids": [0, 1, 8, 9]},
    ]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    first, second = read(tmp_path / "trace").requests
    assert first.keys == [0, 1, 8]
    assert (second.at, second.turn, second.keys) == (1.5, 1, [0, 1, 8, 9])


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("{", "not one JSON object"), ("[1]", "holds a list"), ('{"a": 1}', "must have 'requests'")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(Error, match=message):
        read(tmp_path / "trace")
    with pytest.raises(Error, match="cannot be read"):
        read(tmp_path / "absent")
    with pytest.raises(Error, match="must be a multiple of the trace's 512"):
        read(DATA / "conversation.jsonl", unit=64)
    with pytest.raises(Error, match="arrival times of its own"):
        read(DATA / "conversation.jsonl", offsets=DATA / "agentic-offsets.json")


ROW: dict[str, object] = {"timestamp": 0, "input_length": 1200, "output_length": 4, "hash_ids": [0, 1, 2]}


def session(*request: object, **other: object) -> dict[str, object]:
    return {"block": 64, "requests": [list(request)], **other}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, {**ROW, "hash_ids": None}], r"line 2: hash_ids is missing; must be a list of integers >= 0"),
        ([ROW, {**ROW, "hash_ids": [[1], [2]]}], r"line 2: hash_ids is \[\[1\], \[2\]\]"),
        ([{**ROW, "hash_ids": [0]}], r"line 1: hash_ids has 1 entries; input_length 1200 has 2 whole blocks"),
        ([ROW, {"timestamp": 0, "input_length": 1, "hash_ids": []}], r"line 2: output_length is missing"),
        ([{**ROW, "output_length": -1}], r"line 1: output_length is -1; must be an integer from 0"),
        ([{**ROW, "input_length": "1200"}], r"line 1: input_length is '1200'; must be an integer"),
        ([{**ROW, "input_length": 10**15}], r"line 1: input_length is 10{15}; must be an integer from 1 to 16777216"),
        ([{**ROW, "timestamp": -1}], r"line 1: timestamp is -1; must be a number from 0 to 1e\+15"),
        ([{**ROW, "timestamp": float("nan")}], r"line 1: timestamp is nan; must be a number from 0"),
        ([{**ROW, "timestamp": 10**400}], r"line 1: timestamp is 10{56}"),
        ([{**ROW, "timestamp": 9}, ROW], r"line 2: timestamp is 0; must be >= 9"),
        ([session(0.0, 200, 70, 0, 0, [[1, 3]]), ROW], r"line 2: block is missing; must be the first line's, 64"),
        ([session(block=0)], r"line 1: block is 0; must be an integer >= 1"),
        ([session(requests=[])], r"line 1: requests is \[\]; must be a list of at least one request"),
        ([session(0.0, 200)], r"line 1: requests\[0\] is \[0\.0, 200\]; must be \[t, input"),
        ([session(-1.0, 200, 70, 0, 0, [[1, 3]])], r"line 1: requests\[0\] t is -1\.0; must be a number from 0"),
        ([session(0.0, 200, 70, 0, 9, [[1, 3]])], r"requests\[0\] keep is 9; must be an integer from 0 to 0"),
        ([session(0.0, 200, 70, 0, 0, [[1, 10**12]])], r"length of a run is 10{12}; must be an integer from 0 to"),
        ([session(0.0, 200, 70, 0, 0, 7)], r"requests\[0\] runs holds 7; must be a list of \[start, length\]"),
        ([session(0.0, 300, 70, 0, 0, [[1, 3]])], r"requests\[0\] has 3 ids; input 300 has 4 whole blocks"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, rows: list[object], message: str) -> None:
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(Error, match=message):
        read(tmp_path / "trace")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"offset_s": [1e400]}', f'{{"offset_s": [1{"0" * 400}]}}', "[0]", "{}"]
)
def test_offsets_that_are_no_times_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "offsets").write_text(text)
    with pytest.raises(Error, match="must be a JSON object with 'offset_s'"):
        read(DATA / "agentic.jsonl", offsets=tmp_path / "offsets")


def test_a_broken_gzip_file_is_refused_and_an_empty_line_is_none(tmp_path: Path) -> None:
    text = (json.dumps(ROW) + "\n\n") * 500
    (tmp_path / "plain").write_text(text)
    assert len(read(tmp_path / "plain").requests) == 500
    packed = gzip.compress(text.encode())
    for broken in (packed[:-20], packed[:2], packed[:40] + bytes(20) + packed[60:]):
        (tmp_path / "packed").write_bytes(broken)
        with pytest.raises(Error, match="cannot be read after line"):
            read(tmp_path / "packed")
    with pytest.raises(Error, match="limit is -1; must be >= 1"):
        read(tmp_path / "plain", limit=-1)


def test_vllm_align_loses_the_block_of_a_branch_and_hits_a_prompt_end() -> None:
    assert hits(VllmAlign(K3, PLENTY), "abcdefgh", "abcdefghij") == [0, 8]  # the partly filled tail of a prompt
    assert hits(VllmAlign(K3, PLENTY), "abcdefgh", "abcdefxy", "abcdefpq") == [0, 0, 0]  # inside a block: never


def test_vllm_align_pins_a_junction_at_whole_blocks_on_the_second_sighting() -> None:
    shared = "abcdefghijklm"  # 13 units; a block of 6144 tokens has 12
    assert hits(VllmAlign(K3, PLENTY), shared + "no", shared + "pq", shared + "rs") == [0, 0, 12]


def test_vllm_align_keeps_no_state_of_a_turn_end() -> None:
    cache = VllmAlign(K3, PLENTY, 1536)
    cache.serve(Request(0.0, 4 * UNIT + 1, 2 * UNIT, list("abcdef")))
    assert cache.serve(ask("abcdefgh")).device == 4 * UNIT
    ours = Perilune(K3, PLENTY)
    ours.serve(Request(0.0, 4 * UNIT + 1, 3 * UNIT, list("abcdefg")))
    assert ours.serve(ask("abcdefgh")).device == 7 * UNIT


def test_vllm_align_evicts_states_before_the_kv_of_their_request() -> None:
    cache = VllmAlign(K3, 5 * 6144 * 27_648)  # a prompt takes three blocks of state and one of KV
    assert hits(cache, "abcd", "efgh") == [0, 0]
    assert ("tail", 4) in cache._pool  # "abcd" is prefix number 4
    assert ("state", 4) not in cache._pool
    served = cache.serve(ask("abcdij"))
    assert (served.device, served.stateless) == (0, 4 * UNIT)


def test_mamba_radix_leaves_a_state_a_chunk_and_ours_does_not() -> None:
    long = "".join(chr(0x4E00 + i) for i in range(40))  # 20,480 tokens: chunks end at 8192 and 16384
    assert hits(mamba_radix(K3, PLENTY), long, long[:20] + "ab") == [0, 16]
    assert hits(Perilune(K3, PLENTY), long, long[:20] + "ab", long[:20] + "cd") == [0, 0, 20]


def test_lru_drops_the_longest_unused() -> None:
    room = int(2.2 * (K3.state_bytes + 4 * UNIT * K3.token_bytes))
    assert hits(lru(K3, room), "abcd", "efgh", "abcdx", "ijkl", "abcdx", "efgh") == [0, 0, 4, 0, 5, 0]


def test_marconi_takes_the_alpha_that_served_its_window_best() -> None:
    cache = Marconi(K3, 100 * GB, window=3)
    assert len(cache._caches) == len(ALPHAS)
    assert hits(cache, "abcd", "abxy", "abpq", "abrs") == [0, 0, 2, 2]  # a state at the branch, on its second sighting
    assert len(cache._caches) == 1


def test_marconi_keeps_a_node_that_branches() -> None:
    cache = Marconi(K3, 100 * GB, window=1)
    hits(cache, "abcd", "abxy", "abpq")
    fork = next(node for node in cache._caches[0].cache.tree.nodes() if node.degree > 1)
    order = cache._caches[0].cache.eviction.order([fork], 9.0, lambda _: 1, lambda _: True)
    assert next(order, None) is None


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("file", ["agentic.jsonl", "conversation.jsonl"])
def test_sums_and_the_bound(name: str, file: str) -> None:
    trace = read(DATA / file, UNIT)
    bound = replay(trace, policy("infinite", K3, 0))
    result = replay(trace, policy(name, K3, 20 * GB))
    assert result.hit_tokens == result.device_hit_tokens + result.host_hit_tokens <= bound.hit_tokens
    assert result.prefill_tokens + result.hit_tokens == result.prompt_tokens == sum(r.prompt for r in trace.requests)
    assert result.mean_cached_bytes <= 20 * GB


def test_the_bound_is_a_set_of_prefixes() -> None:
    trace = read(DATA / "agentic.jsonl", UNIT)
    seen: set[tuple[object, ...]] = set()
    hit = 0
    for request in trace.requests:
        known = [n for n in range(1, (request.prompt - 1) // UNIT + 1) if tuple(request.keys[:n]) in seen]
        hit += max(known, default=0) * UNIT
        seen |= {tuple(request.keys[:n]) for n in range(1, len(request.keys) + 1)}
    assert replay(trace, policy("infinite", K3, 0)).hit_tokens == hit


def test_a_host_tier_serves_what_the_device_lost_and_counts_its_bytes() -> None:
    trace = read(DATA / "agentic.jsonl", UNIT, DATA / "agentic-offsets.json")
    small = replay(trace, Perilune(K3, 4 * GB))
    cache = Perilune(K3, 4 * GB, 100 * GB)
    tiered = replay(trace, cache)
    check_integrity(cache.cache)
    assert tiered.hit_tokens > small.hit_tokens
    assert tiered.host_hit_tokens > 0
    assert tiered.bytes_written_back >= tiered.bytes_fetched > 0


def test_the_published_layout_replays_too() -> None:
    trace = read(DATA / "agentic.jsonl", UNIT)
    wide = Perilune(Geometry.of("kimi-k3", page_tokens=6144, match_unit=UNIT), 40 * GB)
    ours = Perilune(K3, 40 * GB)
    published, small = replay(trace, wide), replay(trace, ours)
    check_integrity(wide.cache)
    assert 0 < published.hit_tokens <= small.hit_tokens


def test_the_checkpoint_before_the_last_serves_a_prompt_rewritten_near_its_end() -> None:
    for prompts, expected in (
        (["abcd", "abcdef", "abcdxy"], [8, 8]),
        (["abcd", "abcdef", "abcdefgh", "abcdxy"], [10, 14]),
    ):
        trace = Trace([ask(keys) for keys in prompts], UNIT)
        found = [replay(trace, Perilune(K3, PLENTY, placement=Placement(keep=keep))).hit_tokens for keep in (2, 0)]
        assert found == [blocks * UNIT for blocks in expected]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = str(DATA / "agentic.jsonl")
    assert main(["simulate-cache", trace, "--budget-gb", "20", "--host-gb", "20", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert 0 < row["token_hit_rate"] < 1
    assert row["policy"] == "perilune"
    plot = tmp_path / "curves.png"
    assert main(["simulate-cache", trace, "--compare", str(plot), "--budgets-gb", "5", "20", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * len(POLICIES)
    assert plot.stat().st_size > 1000
    assert main(["simulate-cache", trace, "--policy", "marconi", "--host-gb", "1"]) == 2
    assert "has no host tier" in capsys.readouterr().err
    for name in ("--budget-gb", "--host-gb", "--budgets-gb"):
        for size in ("-1", "inf", "nan"):
            assert main(["simulate-cache", trace, name, size]) == 2
            assert f"{name[2:].replace('-', '_')} is {float(size)}; must be >= 0" in capsys.readouterr().err


def test_cache_and_simulator_need_no_torch() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "triton"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import perilune.serve, perilune.serve.cache, perilune.serve.simulate
perilune.serve.PrefixCache
from perilune.cli import main
sys.exit(main(["simulate-cache", "--help"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
