"""Clients that send anything, or stop reading: each loses its own connection, and nobody else notices."""

from __future__ import annotations

import os
import socket
import struct

import msgspec
import numpy as np
import pytest

from kvstore.daemon import wire
from kvstore.errors import DaemonError
from kvstore.sent_costs import SentCosts
from tests.known_kv import identity, load, prompt, put

from .raw_client import RawClient, raw_client
from .running import daemon
from .test_sharing import connected


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with daemon(tmp_path_factory.mktemp("hostile") / "kv") as made:
        yield made


def _end_of(client: RawClient) -> wire.Refused | None:
    """What the daemon said before it closed."""
    said = None
    try:
        while True:
            found = wire.reply(client.payload())
            said = found if isinstance(found, wire.Refused) else said
    except (EOFError, ConnectionResetError):
        return said


@pytest.mark.parametrize("version", [0, 1, 99])
def test_another_version_is_refused_with_a_clear_error(running, version: int) -> None:  # type: ignore[no-untyped-def]
    with raw_client(running.socket) as client:
        client.send(wire.Hello(version, "future"))
        said = _end_of(client)
        assert said is not None
        assert f"protocol {version} is not spoken here" in said.reason
        assert said.protocols == [wire.PROTOCOL]


def test_a_client_of_another_version_is_told_by_its_own_library(  # type: ignore[no-untyped-def]
    running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.daemon.client import Channel

    monkeypatch.setattr(wire, "PROTOCOL", 41)
    with pytest.raises(DaemonError, match=r"protocol 41 is not spoken.*it speaks \[4\], this client 41"):
        Channel(running.socket, "test")


@pytest.mark.parametrize(
    "sent",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 3) + b"\x93\x01\x02",
        bytes(wire.frame(wire.Renew(1, 1)))[:-1] + b"\xc1",
        bytes(wire.frame(wire.Done(1))),
        bytes(wire.frame(wire.Explain(1, 1, b"\1\0\0\0", "exact", [], SentCosts({0: 1.0}), 1, None))),
        bytes(
            wire.frame(wire.Explain(1, 1, b"\1\0\0\0", "exact", [], SentCosts({16: float("nan")}), 1, None))
        ),
        struct.pack("<I", 4096) + b"\x91" * 4096,
    ],
)
@pytest.mark.parametrize("greeted", [False, True])
def test_a_bad_frame_costs_its_connection_alone(running, sent: bytes, greeted: bool) -> None:  # type: ignore[no-untyped-def]
    with connected(running) as store:
        put(store, prompt(1, 50))
        bad = store.stats().counts.get("daemon_bad_frames", 0)
        with raw_client(running.socket) as client:
            if greeted:
                client.greet()
            client.send_bytes(sent)
            if sent[:4] == b"\0\x10\0\0" and not greeted:
                client.socket.shutdown(socket.SHUT_WR)
            said = _end_of(client)
            assert said is not None
        assert store.stats().counts["daemon_bad_frames"] == bad + 1
        assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]


def test_requests_that_make_no_sense_are_refused_each_by_itself(running) -> None:  # type: ignore[no-untyped-def]
    with connected(running) as store, raw_client(running.socket) as client:
        put(store, prompt(1, 50))
        client.greet()
        view = client.open(identity())
        tokens = prompt(1, 50).astype("<i4").tobytes()
        client.ask(wire.Staging(2, 1 << 16))
        leased = client.ask(wire.Lookup(2, view, tokens, False, [], True))
        keys = [block.key for block in leased.blocks]
        for message in (
            wire.Lookup(3, view + 1, tokens, False, [], False),
            wire.Lookup(3, view, tokens[:-1], False, [], False),
            wire.Lookup(3, view, b"", False, [], False),
            wire.Lookup(3, view, b"\xff\xff\xff\xff", False, [], False),
            wire.TakeLease(3, view, 50, keys, 9, []),
            wire.TakeLease(3, view, 50, keys, 4, [wire.RunRef(60, [wire.PieceRef(9, 0, 1)])]),
            wire.TakeLease(3, view, 50, keys, 4, [wire.RunRef(60, [wire.PieceRef(0, 10, 10)])]),
            wire.TakeLease(3, view, 50, keys, 4, [wire.RunRef(60, [])]),
            wire.Bring(3, leased.lease, 1, [(99, 0)]),
            wire.Bring(3, leased.lease, 1, [(0, 99)]),
            wire.EndBring(3, leased.lease, 77),
            wire.Staging(3, 1 << 16),
            wire.Put(3, view, tokens, 50, 0),
            wire.Put(3, view, tokens, 0, 1 << 40),
            wire.Put(3, view, tokens, 0, (1 << 16) - 100),
            wire.PutInexact(3, view, tokens, 60, 0),
            wire.Open(3, b"no identity"),
            wire.KeepVerdict(3, view, b"\xc1"),
            wire.Explain(3, view, tokens, "exact", [], SentCosts({16: 1.0}, {32: 0.9, 64: 0.5}), 1, None),
            wire.Invalidate(3, view, None, None, None, False),
            wire.Admin(3, "__init__", b"\x80"),
            wire.Admin(3, "close", b"\x80"),
            wire.Admin(3, "status", b"\xc1"),
            wire.Hint(3, view, None, None, None),
        ):
            answer = client.ask(message)
            assert isinstance(answer, wire.Failed), message
            assert (answer.id, answer.kind != "internal") == (3, True), answer
        assert client.ask(wire.Release(4, leased.lease)) == wire.Done(4)
        assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]
        store.check()


def test_a_client_that_reads_no_replies_is_given_up_and_delays_nobody(running) -> None:  # type: ignore[no-untyped-def]
    with connected(running) as store, raw_client(running.socket) as stuck:
        tokens = np.concatenate([prompt(seed, 500) for seed in range(3)])
        put(store, tokens)
        stuck.greet()
        view = stuck.open(identity())
        asked = wire.frame(wire.Lookup(2, view, tokens.astype("<i4").tobytes(), False, [], False))
        stuck.socket.settimeout(5)
        for turn in range(200_000):
            try:
                stuck.send_bytes(asked)
            except OSError:  # reset, or a pipe that broke
                break
            if turn % 500 == 0:
                assert store.lookup(prompt(0, 500)).length == 500
        else:
            pytest.fail("it was not given up")
        assert store.lookup(prompt(0, 500)).length == 500


def test_many_requests_in_flight_are_each_answered(running) -> None:  # type: ignore[no-untyped-def]
    with connected(running) as store, raw_client(running.socket) as client:
        put(store, prompt(1, 50))
        client.greet()
        view = client.open(identity())
        tokens = prompt(1, 50).astype("<i4").tobytes()
        messages = []
        for number in range(2, 400):
            kinds = (
                wire.Lookup(number, view, tokens, False, [], False),
                wire.GetStats(number, view),
                wire.Explain(number, view, tokens, "exact", [], None, 1, None),
            )
            messages.append(kinds[number % 3])
        client.send_bytes(b"".join(wire.frame(message) for message in messages))
        answers = [client.receive() for _ in messages]
        assert sorted(answer.id for answer in answers) == list(range(2, 400))
        assert not any(isinstance(answer, wire.Failed) for answer in answers)


def test_descriptors_that_a_client_sends_go_nowhere(running) -> None:  # type: ignore[no-untyped-def]
    with raw_client(running.socket) as client:
        client.greet()
        before = len(os.listdir(f"/proc/{running.pid}/fd"))
        reading, writing = os.pipe()
        for number in range(50):
            socket.send_fds(client.socket, [wire.frame(wire.Check(number + 1))], [reading, writing])
            assert client.receive() == wire.Done(number + 1)
        os.close(reading)
        os.close(writing)
        assert len(os.listdir(f"/proc/{running.pid}/fd")) == before


def test_a_greeting_is_limited_before_anyone_is_known(running) -> None:  # type: ignore[no-untyped-def]
    with raw_client(running.socket) as client:
        client.send_bytes(struct.pack("<I", 100_000))
        said = _end_of(client)
        assert said is not None
        assert "100000 bytes" in said.reason


def test_clients_that_come_and_go_leave_nothing(running) -> None:  # type: ignore[no-untyped-def]
    before = len(os.listdir(f"/proc/{running.pid}/fd"))
    for number in range(60):
        client = RawClient(running.socket)
        if number % 3:
            client.greet()
        if number % 3 == 2:
            client.send(wire.Open(1, identity().to_bytes()))
            client.send_bytes(msgspec.msgpack.encode([1, 2]))
        client.close()
    with connected(running) as store:
        store.check()
    assert len(os.listdir(f"/proc/{running.pid}/fd")) <= before + 1
