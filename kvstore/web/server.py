"""The server behind `kvstore.web`: a thread with a loop of its own, so that no request and no daemon waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import threading
from collections.abc import Callable
from functools import partial
from importlib import resources
from importlib.util import find_spec
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from kvstore.errors import InvalidRequestError
from kvstore.open_directory import OpenDirectory
from kvstore.watch.snapshot import Snapshot, snapshot

PORT = 9464
"""Where scrapers look for a process's own metrics, by the port registry of Prometheus."""

_MOST_HEAD = 16 * 1024
_MOST_CLIENTS = 32
_HEAD_SECONDS = 10.0

log = logging.getLogger(__name__)


def serve_http(source: Callable[[], Snapshot], host: str = "127.0.0.1", port: int = PORT) -> HttpServer:
    """Serve the snapshots of `source` until `close`. Port 0 takes any that is free.

    host: "localhost" or a loopback address: there is no password, so who may reach the port may see everything.
    Raises InvalidRequestError for another host, OSError when the port is taken.
    """
    if not _is_loopback(host):
        raise InvalidRequestError(
            f"host {host!r} is reached from outside, and the page has no password; serve it on 127.0.0.1, "
            "behind a proxy that asks for one if need be"
        )
    return HttpServer(source, host, port)


def page(shared: OpenDirectory, address: str) -> HttpServer:
    """Serve what happens in `shared` at `address`, "host:port" or a port. Raises as `serve_http` does."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise InvalidRequestError(f"address {address!r} is not host:port, such as 127.0.0.1:{PORT}")
    return serve_http(partial(snapshot, shared), host.strip("[]") or "127.0.0.1", int(port))


class HttpServer:
    """Serves from when it is made until `close`. A context manager. Use `serve_http`."""

    def __init__(self, source: Callable[[], Snapshot], host: str, port: int) -> None:
        self._source = source
        self._loop = asyncio.new_event_loop()
        self._clients = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvstore-http", daemon=True)
        self._thread.start()
        begun = asyncio.start_server(self._serve, host, port, limit=_MOST_HEAD)
        try:
            self._server = asyncio.run_coroutine_threadsafe(begun, self._loop).result()
        except BaseException:
            self._stop()
            raise
        taken = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{taken}/"
        log.info("serving %s", self.url)

    def close(self) -> None:
        """End all connections and free the port."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        self._server.close()
        turns = 0
        while turns < 5:  # who was just being taken in shows up within a few turns of the loop
            turns += 1
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                turns = 0
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= _MOST_CLIENTS:
                with contextlib.suppress(
                    ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
                ):
                    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
                    writer.write(self._reply(head))
                    await writer.drain()
        finally:
            self._clients -= 1
            writer.close()

    def _reply(self, head: bytes) -> bytes:
        request = _parsed(head)
        if request is None:
            return _answer("400 Bad Request", b"not HTTP\n")
        if not _is_loopback(urlsplit(f"//{request.host}").hostname or ""):
            # A page from elsewhere, whose name was made to lead here, would read what is served.
            return _answer("403 Forbidden", b"reach this by a loopback address\n")
        if request.method not in ("GET", "HEAD"):
            return _answer("405 Method Not Allowed", b"only GET\n", allow="GET, HEAD")
        try:
            answer = self._content(request)
        except Exception as error:
            log.warning("no snapshot for %s", request.path, exc_info=True)
            return _answer("503 Service Unavailable", f"{type(error).__name__}: {error}\n".encode())
        return answer if request.method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _content(self, request: _Request) -> bytes:
        match request.path:
            case "/":
                html = resources.files(__package__).joinpath("page.html").read_bytes()
                return _answer("200 OK", html, "text/html; charset=utf-8")
            case "/snapshot.json":
                return _answer("200 OK", msgspec.json.encode(self._source()), "application/json")
            case "/metrics":
                if find_spec("prometheus_client") is None:
                    return _answer("501 Not Implemented", b"pip install 'npu-kvstore[metrics]'\n")
                from kvstore.watch.metrics import exposition

                return _answer("200 OK", *exposition(self._source, request.accept))
        return _answer("404 Not Found", b"try /, /snapshot.json or /metrics\n")


class _Request(NamedTuple):
    method: str
    path: str
    host: str
    accept: str


def _parsed(head: bytes) -> _Request | None:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    return _Request(words[0], words[1].partition("?")[0], headers.get("host", ""), headers.get("accept", ""))


def _answer(
    status: str, body: bytes, kind: str = "text/plain; charset=utf-8", allow: str | None = None
) -> bytes:
    head = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
        # Nothing from elsewhere is loaded, whatever should find its way into the page.
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:",
        *([f"Allow: {allow}"] if allow else []),
    ]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
