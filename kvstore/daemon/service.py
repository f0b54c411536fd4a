"""How a daemon starts, is alone, and ends: its socket, the service manager, signals.

    kvstore.daemon.serve("~/kv", CPU)

One daemon a socket, by a lock beside it, and one process a data directory, by the lock in that. Both locks go with the
process, whatever ends it; a socket that nobody listens on any more is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from kvstore.errors import DaemonError, DaemonRunningError
from kvstore.flash.keys import Keys
from kvstore.index.embedder import Embedder
from kvstore.open_directory import OpenDirectory
from kvstore.profile import CPU, Profile

from .server import LEASE_SECONDS, Server

_FIRST_DESCRIPTOR = 3  # sd_listen_fds(3)
_SWITCH_SECONDS = 0.0005
"""Of the interpreter, from a thread that copies to the one that answers look-ups: all would wait for the usual 5 ms."""

log = logging.getLogger(__name__)


def default_socket() -> Path:
    """Where a user's daemon listens unless told otherwise."""
    return platformdirs.user_runtime_path("kvstore") / "daemon.sock"


def serve(
    path: str | os.PathLike[str] | None,
    profile: Profile = CPU,
    socket: str | os.PathLike[str] | None = None,
    http: str | None = None,
    *,
    key: Keys | None = None,
    embedder: Embedder | None = None,
    lease_seconds: float = LEASE_SECONDS,
) -> None:
    """Serve the data directory `path` (None: memory alone) until SIGTERM or SIGINT; then lose nothing accepted.

    socket: where to listen, `default_socket()` by default; ignored where a service manager hands a socket over. http:
    "host:port" of the page that shows what happens, None for none. key: encrypts what lies on flash, see `keys`.

    embedder: says what texts speak of, for `hint(text=…)`; clients give the texts, see `RemoteStore.use_semantics`.

    Raises DaemonRunningError, DirectoryInUseError and what `kvstore.open` raises, DaemonError for a socket that cannot
    be made.
    """
    location = None if path is None else Path(path).expanduser()
    with _listening(Path(socket).expanduser() if socket is not None else default_socket()) as listener:
        shared = OpenDirectory(location, profile, key, walled=True)
        shared.embedder = embedder
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            asyncio.run(_serve(shared, listener, http, lease_seconds))
        finally:
            sys.setswitchinterval(before)
            shared.close()


async def _serve(
    shared: OpenDirectory, listener: socket.socket, http: str | None, lease_seconds: float
) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Signals go to the main thread's loop, and not to every kind of loop: elsewhere they end the process as usual.
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    server = Server(shared, listener, lease_seconds=lease_seconds)
    with _page(shared, http):
        server.start()
        tell_service_manager("READY=1")
        log.info("serving %s", listener.getsockname() or "the socket given")
        await stopped.wait()
        tell_service_manager("STOPPING=1")
        server.stop()
        await asyncio.sleep(0)  # replies to what was just finished
        await asyncio.sleep(0.01)
        server.let_go()


@contextlib.contextmanager
def _page(shared: OpenDirectory, http: str | None) -> Iterator[None]:
    if http is None:
        yield
        return
    from importlib import import_module

    with import_module("kvstore.web").page(shared, http):
        yield


# -- one daemon a socket -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """The socket that the service manager hands over, or one made at `path`, for this user alone."""
    given = given_socket()
    if given is not None:
        yield given
        return
    _make_folder(path.parent)
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DaemonRunningError(
                f"a daemon listens on {path} already; stop it, or give another socket"
            ) from None
        listener = _listener(path)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            listener.close()
    finally:
        os.close(lock)


def _make_folder(folder: Path) -> None:
    """Raises DaemonError unless it is this user's alone: others could put their own socket there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        raise DaemonError(f"no folder for the socket: {error}; give another socket") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise DaemonError(f"others may write {folder}; give a socket in a folder of your own, with chmod 700")


def _listener(path: Path) -> socket.socket:
    """A socket at `path`. One that is there is stale: who listened on it held the lock."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            with contextlib.suppress(OSError):
                made.connect(str(path))
                raise DaemonRunningError(f"something else listens on {path}; give another socket")
            made.close()
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
        made.listen(64)
    except DaemonError:
        made.close()
        raise
    except OSError as error:
        made.close()
        raise DaemonError(f"no socket at {path}: {error}; give another path, of at most 100 bytes") from error
    return made


# -- the service manager -----------------------------------------------------------------------------------------------


def given_socket() -> socket.socket | None:
    """The one socket that systemd opened for us, sd_listen_fds(3); None when there is none. Raises DaemonError."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    if count != "1":
        raise DaemonError(f"the service manager hands over {count or 'no'} sockets, one is needed")
    os.set_inheritable(_FIRST_DESCRIPTOR, False)
    given = socket.socket(fileno=_FIRST_DESCRIPTOR)
    if given.family != socket.AF_UNIX or given.type != socket.SOCK_STREAM:
        raise DaemonError("the service manager hands over a socket that is no Unix stream socket")
    return given


def tell_service_manager(state: str) -> None:
    """sd_notify(3). Nothing happens where nobody wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.connect(address)
        told.sendall(state.encode())
