"""The frames between host and guest, whatever way the bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.sandbox.wire import FRAME_MAX, Frame, Parser, frame, spawn_body

frames = st.lists(st.tuples(st.sampled_from(Frame), st.integers(0, 2**32 - 1), st.binary(max_size=200)), max_size=8)


@given(sent=frames, cuts=st.lists(st.integers(1, 50), min_size=1))
def test_frames_survive_any_cut(sent: list[tuple[Frame, int, bytes]], cuts: list[int]) -> None:
    """Bytes in pieces of any size give the frames that were sent."""
    data = b"".join(frame(*one) for one in sent)
    parser, got, at, turn = Parser(), [], 0, 0
    while at < len(data):
        piece = data[at : at + cuts[turn % len(cuts)]]
        got += list(parser.feed(piece))
        at += len(piece)
        turn += 1
    assert got == [(int(kind), stream, body) for kind, stream, body in sent]


@given(lost=st.integers(1, 115), pad=st.integers(0, 40))
def test_a_cut_frame_is_skipped(lost: int, pad: int) -> None:
    """After the rest of a frame whose beginning is lost, the next frame is found."""
    cut = frame(Frame.STDOUT, 7, b"x" * 100)[lost:]
    parser = Parser()
    got = list(parser.feed(cut + bytes(pad))) + list(parser.feed(frame(Frame.HELLO, 0, b"nonce")))
    assert got[-1] == (int(Frame.HELLO), 0, b"nonce")


def test_limits() -> None:
    """What cannot be sent says so before it is sent."""
    with pytest.raises(ValueError, match="65537"):
        frame(Frame.STDIN, 1, bytes(FRAME_MAX + 1))
    with pytest.raises(ValueError, match="zero byte"):
        spawn_body(["a\0b"], {}, "/", "root", False, None)
    with pytest.raises(ValueError, match="use a file"):
        spawn_body(["x" * 70_000], {}, "/", "root", False, None)
