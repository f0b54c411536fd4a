"""Frames: cut from any pieces, bounded, and nothing but messages."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.daemon import wire
from kvstore.sent_costs import SentCosts

_KEY = bytes(range(32))

MESSAGES: list[msgspec.Struct] = [
    wire.Hello(wire.PROTOCOL, "test", 1),
    wire.Open(1, b"x"),
    wire.Lookup(2, 1, b"\0\0\0\0" * 3, True, [1, 2], False),
    wire.TakeLease(3, 1, 40, [_KEY, _KEY], 1, [wire.RunRef(50, [wire.PieceRef(1, 0, 16)])]),
    wire.Release(4, 7),
    wire.Renew(5, 7),
    wire.Bring(6, 7, 8, [(0, 0), (0, 1)]),
    wire.EndBring(7, 7, 8),
    wire.Held(8, 1, b"\1\0\0\0"),
    wire.Staging(9, 4096),
    wire.Put(10, 1, b"\1\0\0\0", 0, 0),
    wire.PutInexact(11, 1, b"\1\0\0\0", 0, 0),
    wire.Served(12, 1, 1, 2, 3, 4),
    wire.Move(13, 1, [_KEY], "warm"),
    wire.Invalidate(14, 1, None, None, 0.5, False),
    wire.Flush(15),
    wire.GetStats(16, 1),
    wire.GetVerdict(17, 1),
    wire.KeepVerdict(18, 1, b""),
    wire.Explain(19, 1, b"\1\0\0\0", "exact", [], SentCosts({32: 0.5}, {64: 0.5, 128: 1.0}), 1, None),
    wire.Neighbours(20, 1, "text", b"", 3),
    wire.Check(21),
    wire.Hint(22, 1, None, "text", None),
    wire.Admin(23, "status", b"\x80"),
    wire.GetSnapshot(24),
    wire.GetPresence(25, 1, 16, [_KEY], 1, [], False, None),
    wire.TakeHot(26, 1 << 20),
    wire.KeepHot(27, 1, [5], [_KEY]),
    wire.LeaveHot(28),
    wire.WantTexts(29, 1, 32),
    wire.TellTexts(30, 1, [(_KEY, "what it says")]),
]
"""One of each request, and a greeting."""


def test_each_request_is_here() -> None:
    assert {type(each) for each in MESSAGES} == {wire.Hello, *wire.AnyRequest.__args__}  # type: ignore[attr-defined]


@given(st.lists(st.sampled_from(MESSAGES[1:]), max_size=8), st.data())
def test_messages_come_out_as_they_went_in_whatever_pieces_they_come_in(
    messages: list[msgspec.Struct], data: st.DataObject
) -> None:
    stream = b"".join(wire.frame(message) for message in messages)
    frames, found, at = wire.Frames(), [], 0
    while at < len(stream):
        piece = data.draw(st.integers(1, len(stream) - at))
        found += [wire.request(payload) for payload in frames.feed(stream[at : at + piece])]
        at += piece
    assert found == messages
    assert frames.waiting == 0


@pytest.mark.parametrize("length", [0, wire.MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_frame_of_no_or_too_many_bytes_is_refused_before_it_is_there(length: int) -> None:
    with pytest.raises(wire.FrameError, match=str(length)):
        list(wire.Frames().feed(length.to_bytes(4, "little")))


def test_a_message_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(wire.FrameError, match="are the most"):
        wire.frame(wire.Held(1, 1, b"\0" * wire.MAX_FRAME))


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_a_frame_error(payload: bytes) -> None:
    for decode in (wire.request, wire.hello, wire.reply, wire.greeting):
        with contextlib.suppress(wire.FrameError):
            decode(payload)  # type: ignore[operator]


def test_a_greeting_of_a_later_version_is_understood_as_far_as_it_is_ours() -> None:
    later = msgspec.msgpack.encode(["kvstore", 7, "newer", 1, {"more": True}])
    assert wire.hello(later).protocol == 7
