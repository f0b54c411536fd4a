"""The HTTP server: what it answers, to whom, and that it ends."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import msgspec
import pytest

from kvstore.errors import InvalidRequestError
from kvstore.store import KVStore, open_store
from kvstore.watch.snapshot import Snapshot
from kvstore.web import HttpServer, page, serve_http
from tests.known_kv import identity, load, prompt, put, small_profile


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 100))
        load(store, prompt(1, 120)[:100])
        yield store


@pytest.fixture
def server(store: KVStore) -> Iterator[HttpServer]:
    with serve_http(store.snapshot, port=0) as server:
        yield server


def _port(server: HttpServer) -> int:
    return int(server.url.rstrip("/").rpartition(":")[2])


def ask(server: HttpServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", _port(server), timeout=30)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply, body


def test_the_page_loads_nothing_from_elsewhere(server: HttpServer) -> None:
    reply, body = ask(server, "/")
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    text = body.decode()
    assert "</html>" in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_snapshot_as_json_is_the_snapshot(server: HttpServer, store: KVStore) -> None:
    reply, body = ask(server, "/snapshot.json")
    assert reply.headers["Content-Type"] == "application/json"
    told = msgspec.json.decode(body, type=Snapshot)
    mine = store.snapshot()
    assert told.stats == mine.stats
    assert told.prefixes == mine.prefixes
    assert json.loads(body)["stats"]["counts"]["tokens_matched"] == 100


def test_metrics_in_the_format_that_the_scraper_accepts(server: HttpServer) -> None:
    reply, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    reply, body = ask(server, "/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain")
    assert b'kvstore_asked_tokens_total{result="hit"} 100.0' in body


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/", 405),
        ("GET", "/snapshot.json?x=1", 200),
        ("GET", "/../etc", 404),
    ],
)
def test_other_requests(server: HttpServer, method: str, path: str, status: int) -> None:
    assert ask(server, path, method)[0].status == status


def test_head_gives_no_body(server: HttpServer) -> None:
    reply, body = ask(server, "/", "HEAD")
    assert (reply.status, body) == (200, b"")
    assert int(reply.headers["Content-Length"]) > 1000


def test_a_name_that_was_made_to_lead_here_is_refused(server: HttpServer) -> None:
    """DNS rebinding: a web page anywhere could read what is served, through a name of its own for 127.0.0.1."""
    assert ask(server, "/snapshot.json", Host="evil.example:9464")[0].status == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:9464"):
        assert ask(server, "/snapshot.json", Host=host)[0].status == 200


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET /\r\n\r\n", b"\xff\xfe / HTTP/9\r\n\r\n"])
def test_what_is_not_http_is_told_so(server: HttpServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=30) as sock:
        sock.sendall(sent)
        assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_who_says_nothing_or_too_much_keeps_nobody_from_being_served(server: HttpServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", _port(server)), timeout=30) for _ in range(5)]
    silent[0].sendall(b"GET / HTTP/1.1\r\n" + b"x" * 200_000)
    assert ask(server, "/snapshot.json")[0].status == 200
    for sock in silent:
        sock.close()
    assert ask(server, "/snapshot.json")[0].status == 200


def test_a_source_that_fails_is_an_answer_and_no_end(store: KVStore) -> None:
    found = [store.snapshot()]
    with serve_http(found.pop, port=0) as server:
        assert ask(server, "/snapshot.json")[0].status == 200
        reply, body = ask(server, "/snapshot.json")
        assert reply.status == 503
        assert b"IndexError" in body
        found.append(store.snapshot())
        assert ask(server, "/snapshot.json")[0].status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org", ""])
def test_no_host_that_others_reach(store: KVStore, host: str) -> None:
    with pytest.raises(InvalidRequestError, match="no password"):
        serve_http(store.snapshot, host=host, port=0)


def test_a_port_that_is_taken(server: HttpServer, store: KVStore) -> None:
    with pytest.raises(OSError, match="in use"):
        serve_http(store.snapshot, port=_port(server))


def test_closing_frees_the_port_and_ends_who_waits(store: KVStore) -> None:
    server = serve_http(store.snapshot, port=0)
    with socket.create_connection(("127.0.0.1", _port(server)), timeout=30) as waiting:
        server.close()
        server.close()
        assert waiting.recv(1) == b""
    serve_http(store.snapshot, port=_port(server)).close()


def test_from_within_a_running_loop_as_in_the_daemon(store: KVStore) -> None:
    async def daemon() -> int:
        with page(store._shared, "127.0.0.1:0") as server:
            return (await asyncio.to_thread(ask, server, "/snapshot.json"))[0].status

    assert asyncio.run(daemon()) == 200


def test_the_daemons_page_takes_host_and_port(store: KVStore) -> None:
    with page(store._shared, "localhost:0") as server:
        assert server.url.startswith("http://localhost:")
        assert ask(server, "/snapshot.json")[0].status == 200
    for wrong in ("here", "127.0.0.1:http", "127.0.0.1:99999", ""):
        with pytest.raises(InvalidRequestError, match="host:port"):
            page(store._shared, wrong)
