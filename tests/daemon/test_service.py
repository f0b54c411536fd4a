"""How a daemon starts, is alone, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstore.daemon import service
from kvstore.daemon.remote_store import connect
from kvstore.errors import DirectoryInUseError
from kvstore.store import open_store
from tests.faults.child import ChildDied
from tests.known_kv import identity, load, prompt, put, small_profile

from .running import Daemon, daemon
from .test_sharing import connected


def test_a_second_daemon_on_the_directory_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running:
        second = Daemon(tmp_path / "kv")
        second.socket = tmp_path / "other.run" / "d.sock"
        with pytest.raises(ChildDied, match=f"DirectoryInUseError.*in use by process {running.pid}"):
            second.start()
        with pytest.raises(DirectoryInUseError):
            open_store(tmp_path / "kv", identity=identity(), profile=small_profile())
        with connected(running) as store:
            put(store, prompt(1, 50))


def test_a_second_daemon_on_the_socket_is_refused(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running:
        second = Daemon(tmp_path / "other")
        second.socket = running.socket
        with pytest.raises(ChildDied, match="DaemonRunningError"):
            second.start_and_see()
        with connected(running) as store:
            put(store, prompt(1, 50))


def test_what_a_crash_leaves_is_not_in_the_way(tmp_path: Path) -> None:
    running = Daemon(tmp_path / "kv")
    for _ in range(3):
        running.start()
        with connected(running) as store:
            put(store, prompt(1, 50))
            store.flush()
            assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]
            running.kill()
        assert running.socket.exists(), "a stale socket"


def test_a_stop_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    running = Daemon(tmp_path / "kv")
    running.start()
    with connected(running) as store:
        stored = 0
        for seed in range(20):
            stored += put(store, prompt(seed, 40)).stored
        assert running.stop() == 0
    assert stored == 800
    assert not running.socket.exists()
    running.start()
    with connected(running) as store:
        assert sum(load(store, prompt(seed, 40)) for seed in range(20)) == 800  # type: ignore[arg-type]
    assert running.stop() == 0


def test_a_stop_under_load_answers_what_it_took(tmp_path: Path) -> None:
    """Puts that were confirmed are there; those that were not were refused, and none hangs."""
    running = Daemon(tmp_path / "kv")
    running.start()
    confirmed: list[int] = []

    def work() -> None:
        with connect(running.socket, identity=identity(), fallback="none") as store:
            for seed in range(400):
                if put(store, prompt(seed, 40)).refused:
                    return
                confirmed.append(seed)

    thread = threading.Thread(target=work)
    thread.start()
    while len(confirmed) < 20:
        thread.join(0.005)
    assert running.stop() == 0
    thread.join(60)
    assert not thread.is_alive()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile(warm_bytes=1 << 22)) as store:
        assert [load(store, prompt(seed, 40)) for seed in confirmed] == [40] * len(confirmed)


def test_the_socket_is_this_users_alone(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running:
        assert running.socket.stat().st_mode & 0o777 == 0o600
        assert running.socket.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    running = Daemon(tmp_path / "kv")
    running.socket.parent.mkdir()
    running.socket.parent.chmod(0o777)
    with pytest.raises(ChildDied, match="others may write"):
        running.start()


_GIVEN = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
from kvstore.daemon import serve
from tests.known_kv import small_profile
serve(sys.argv[1], small_profile())
"""


def test_a_socket_that_the_service_manager_opened_and_its_notifications(tmp_path: Path) -> None:
    """sd_listen_fds(3) and sd_notify(3), as `Type=notify` with a socket unit has them."""
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(60)
    path = tmp_path / "given.sock"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def hand_over() -> None:
        os.dup2(listener.fileno(), 3)

    environment = os.environ | {"LISTEN_FDS": "1", "NOTIFY_SOCKET": str(tmp_path / "notify")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", _GIVEN, str(tmp_path / "kv")],
        env=environment,
        preexec_fn=hand_over,
        pass_fds=(3,),
    )
    try:
        with connect(path, identity=identity(), fallback="none") as store:  # it waits in the backlog
            assert told.recv(100) == b"READY=1"
            assert put(store, prompt(1, 50)).stored == 50
            process.terminate()
            assert told.recv(100) == b"STOPPING=1"
            assert process.wait(60) == 0
        assert path.exists(), "it is the service manager's"
    finally:
        process.kill()
        listener.close()
        told.close()


def test_the_units_are_there_and_name_the_socket_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    units = Path(service.__file__).parent / "units"
    assert "ListenStream=%t/kvstore/daemon.sock" in (units / "kvstore.socket").read_text()
    assert "Type=notify" in (units / "kvstore.service").read_text()
    assert (units / "org.kvstore.daemon.plist").exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    if sys.platform == "linux":
        assert service.default_socket() == Path("/run/user/1000/kvstore/daemon.sock")
