"""Every verb by the installed command: on a directory that nobody has open, and on a running daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvstore.daemon.remote_store import connect
from kvstore.pipeline.recompute import FirstTokens
from kvstore.quality.reuse import Measurement, Verdict
from kvstore.store import open_store
from tests.daemon.running import daemon
from tests.known_kv import LAYOUT, identity, prompt, put, small_profile

PROFILE = small_profile(hot_bytes=8 * 4096, warm_bytes=256 * 4096, cold_bytes=64 << 20)
SYSTEM = prompt(1, 40)
CHATS = [np.concatenate([SYSTEM, prompt(10 + which, 30)]) for which in range(3)]
OURS = identity().digest().hex()
VERDICT = Verdict(
    FirstTokens(4),
    None,
    (Measurement(FirstTokens(4), 64, 0.01, 0.021, 0.98, 0.95, 0.5, 40, 0.1),),
    ("careful: no repair keeps 90% of the recall, the best 50% of 40 prompts",),
)
_BLOCKS = 2 + 3 * 3 + 4  # of the chats, whose first two blocks are shared, and of the tenant's text


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """The installed command, aimed at one target."""

    def __init__(self, aim: list[str], environment: dict[str, str]) -> None:
        self.aim = aim
        self._environment = environment

    def __call__(self, *arguments: str, aim: list[str] | None = None, code: int = 0) -> Done:
        script = Path(sys.executable).parent / "kvstore"
        assert script.exists(), "install the package: pip install -e '.[dev]'"
        run = subprocess.run(
            [str(script), *arguments, *(self.aim if aim is None else aim)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
            env=self._environment,
        )
        assert "Traceback" not in run.stderr, run.stderr
        assert run.returncode == code, (arguments, run.stdout, run.stderr)
        return Done(run.returncode, run.stdout, run.stderr)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats that share a system prompt, and a tenant's text."""
    path = tmp_path_factory.mktemp("built") / "kv"
    with open_store(path, identity=identity(), profile=PROFILE) as store:
        store.keep_verdict(VERDICT)
        for tokens in CHATS:
            put(store, tokens, wait=10)
        put(store.view(identity(salt=b"tenant")), prompt(2, 50), wait=10)
        store.flush(60)
    return path


@pytest.fixture(scope="module", params=["directory", "daemon"])
def command(
    request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    """The tests of this module use one target one after the other; those that change it put things right again."""
    folder = tmp_path_factory.mktemp("target")
    folder.chmod(0o700)
    shutil.copytree(built, folder / "kv")
    environment = {
        **os.environ,
        "KVSTORE_CONFIG": str(folder / "config.toml"),
        "KVSTORE_CACHE_DIR": str(folder / "cache"),
    }
    (folder / "config.toml").write_text(
        'block_tokens = 16\nhot_bytes = "32 KiB"\nwarm_bytes = "1 MiB"\ncold_bytes = "64 MiB"\n'
    )
    if request.param == "directory":
        yield Command(["--dir", str(folder / "kv")], environment)
        return
    script = Path(sys.executable).parent / "kvstore"
    socket = folder / "socket"
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [str(script), "serve", "--dir", str(folder / "kv"), "--socket", str(socket)],
            env=environment,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + 60
            while not socket.exists():
                assert daemon.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield Command(["--socket", str(socket)], environment)
        finally:
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(60) == 0, (folder / "log").read_text()


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(CHATS[0].tolist()))
    return str(path)


def _is_daemon(command: Command) -> bool:
    return command.aim[0] == "--socket"


def test_status(command: Command) -> None:
    found = command("status", "--json").json
    assert found["blocks"] == _BLOCKS
    assert found["tiers"]["cold"]["blocks"] == _BLOCKS
    assert ("hot" in found["tiers"]) == _is_daemon(command)
    assert OURS in [each["identity"] for each in found["identities"]]
    said = command("status").out
    assert "tokens" in said
    for line in (
        f"{OURS[:12]}, careful: not used: {VERDICT.reasons[0]}",
        f"{OURS[:12]}, fast: first 4 tokens of each run (mean KL 0.021, first tokens equal in 98% of 64 prompts, "
        "recall 50% of 40 facts)",
        f"{identity(salt=b'tenant').digest().hex()[:12]}: not used: this identity was never measured",
    ):
        assert f"moved runs of {line}" in said


def test_ls_page_by_page(command: Command) -> None:
    first = command("ls", "--json", "--limit", str(_BLOCKS - 3)).json
    rest = command("ls", "--json", "--after", first["after"]).json
    names = [each["block"] for page in (first, rest) for each in page["blocks"]]
    assert len(names) == len(set(names)) == _BLOCKS
    assert rest["after"] is None
    few = command("ls", "--identity", OURS[:9], "--max-tokens", "15", "--order", "size", "--json").json
    assert [each["tokens"] for each in few["blocks"]] == [6, 6, 6]


def test_show_and_tree(command: Command, tokens: str) -> None:
    (tree,) = command("tree", "--identity", OURS, "--json").json
    (root,) = tree["nodes"]
    assert (root["tokens"], len(root["children"])) == (40, 3)
    (along,) = command("tree", "--tokens", tokens, "--identity", OURS, "--json").json
    assert [len(node["children"]) for node in along["nodes"]] == [1]
    block = command("ls", "--identity", OURS, "--json").json["blocks"][0]
    shown = command("show", block["block"][:16], "--json").json
    assert len(shown["token_ids"]) == block["tokens"]
    assert sum(frame["raw"] for frame in shown["frames"]) == LAYOUT.block_bytes(block["tokens"])


def test_explain(command: Command, tokens: str) -> None:
    found = command("explain", "--tokens", tokens, "--identity", OURS, "--json").json
    told = found["explanation"]
    assert found["tokens"] == sum(span["length"] for span in told["spans"]) == 70
    assert (told["prefix"], told["computed"]) == (69, 1)
    assert found["cost"]["computed"] == 1
    assert found["cost"]["flash_bytes"] + found["cost"]["memory_bytes"] > 0
    assert told["refused"] == VERDICT.reasons[0]
    for policy, does in (
        ("careful", f"not used: {VERDICT.reasons[0]}"),
        ("fast", "first 4 tokens of each run ("),
    ):
        said = command("explain", "--tokens", tokens, "--identity", OURS, "--policy", policy).out
        assert "prefix" in said
        assert f"\nmoved runs: {does}" in said


def test_pin_and_unpin(command: Command, tokens: str) -> None:
    pinned = command("pin", "--tokens", tokens, "--identity", OURS, "--json").json
    assert (pinned["held"], pinned["changed"], len(pinned["pins"])) == (70, True, 1)
    assert len(command("status", "--json").json["pins"]) == 1
    assert command("unpin", "--tokens", tokens, "--identity", OURS, "--json").json["pins"] == []
    assert "no pin" in command("unpin", "--tokens", tokens, "--identity", OURS, code=1).out


def test_export_purge_and_import(command: Command, tokens: str, tmp_path: Path) -> None:
    """What was exported and purged comes back; without confirmation nothing goes."""
    path = str(tmp_path / "chat.safetensors")
    out = command("export", path, "--identity", OURS, "--json").json
    assert (out["blocks"], out["left_out"]) == (_BLOCKS - 4, {})
    assert "overwritten" in command("export", path, code=1).err
    purge = ["purge", "--prefix", "--tokens", tokens, "--identity", OURS]
    assert "--yes" in command(*purge, code=2).err
    said = command(*purge, "--dry-run", "--json").json
    assert (said["blocks"], said["dry_run"]) == (
        1,
        True,
    )  # all 70 tokens: only the last block begins with them
    done = command("purge", "--all", "--identity", OURS, "--yes", "--json").json
    assert (done["blocks"], done["dry_run"]) == (_BLOCKS - 4, False)
    assert command("status", "--json").json["blocks"] == 4
    taken = command("import", path, "--json").json
    assert (taken["added"], taken["refused"]) == (_BLOCKS - 4, {})
    if _is_daemon(command):
        assert command("flush", "--json").json["blocks"] == _BLOCKS
    assert command("status", "--json").json["tiers"]["cold"]["blocks"] == _BLOCKS


def test_verify_and_gc(command: Command) -> None:
    found = command("verify", "--json").json
    assert (found["blocks"], found["faults"]) == (_BLOCKS, [])
    assert command("gc", "--dry-run", "--json").json["dry_run"] is True
    command("gc", "--yes")


def test_damage_is_found_and_repaired(command: Command, tmp_path: Path) -> None:
    folder = Path(command("status", "--json").json["directory"])
    command("export", str(tmp_path / "all.safetensors"))
    record = sorted((folder / "blocks").iterdir())[0]
    content = bytearray(record.read_bytes())
    content[-1] ^= 1
    record.write_bytes(content)
    (fault,) = command("verify", "--json", code=1).json["faults"]
    assert fault["kind"] == "record"
    assert fault["entry"] == f"blocks/{record.name}"
    assert record.name in command("verify", aim=["--dir", str(folder)], code=1).out
    assert command("verify", "--repair", "--json").json["faults"][0]["repaired"]
    assert command("verify", "--json").json["faults"] == []
    assert command("import", str(tmp_path / "all.safetensors"), "--json").json["added"] == 1
    assert command("gc", "--yes", "--json").json["nbytes"] > 0


def test_what_takes_a_daemon_says_so(command: Command, tokens: str) -> None:
    if _is_daemon(command):
        done = command("warm", "--tokens", tokens, "--identity", OURS, "--json").json
        assert (done["held"], done["in_memory"]) == (70, 70)
        assert command("top", "--json").json["stats"]["cold"]["blocks"] == _BLOCKS
        assert "cold" in command("top", "--once").out
        folder = command("status", "--json").json["directory"]
        refused = command("purge", "--all", "--yes", aim=["--dir", folder], code=1)
        assert "in use by process" in refused.err
    else:
        for verb in (["warm", "--tokens", tokens], ["flush"]):
            assert "kvstore serve" in command(*verb, aim=[], code=2).err
        assert "no daemon" in command("flush", aim=["--socket", "/nowhere/socket"], code=1).err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["ls", "--limit", "many"], "--limit"),
        (["ls", "--limit", "0"], "limit 0"),
        (["ls", "--tier", "lukewarm"], "lukewarm"),
        (["ls", "--after", "x"], "no place in a list"),
        (["ls", "--socket", "/s"], "not both"),
        (["show"], "'block'"),
        (["show", "zz"], "no held block"),
        (["explain"], "--tokens"),
        (["explain", "some text"], "--model"),
        (["explain", "--tokens", "/nowhere.json"], None),
        (["purge"], "exactly one"),
        (["purge", "--tier", "hot", "--all"], "exactly one"),
        (["status", "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_2(built: Path, arguments: list[str], says: str | None) -> None:
    done = Command(["--dir", str(built)], dict(os.environ))(*arguments, code=1 if says is None else 2)
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("kvstore: ")
    assert (says or "/nowhere.json") in line


def test_quotas_are_a_daemons(built: Path, tmp_path: Path) -> None:
    refused = Command(["--dir", str(built)], dict(os.environ))("quota", code=2)
    assert "only a daemon" in refused.err
    profile = small_profile(tenant_memory_bytes=1 << 20)
    with (
        daemon(tmp_path / "kv", profile) as running,
        connect(running.socket, identity=identity(salt=b"one"), fallback="none") as store,
    ):
        put(store, prompt(1, 50))  # type: ignore[arg-type]
        command = Command(["--socket", str(running.socket)], dict(os.environ))
        (found,) = command("quota", "--json").json
        assert (found["memory_bytes"], found["most_memory_bytes"]) == (4 * 4096, 1 << 20)
        assert found["most_flash_bytes"] is None
        assert "1.0 MiB" in command("quota").out
        assert "no limit" in command("quota").out


def test_no_directory_is_said_so(tmp_path: Path) -> None:
    for verb in ("status", "verify", "gc"):
        done = Command(["--dir", str(tmp_path / "none")], dict(os.environ))(verb, code=1)
        assert len(done.err.splitlines()) == 1
        assert not (tmp_path / "none").exists()


def test_doctor_names_a_cure_for_all_that_is_not_good(tmp_path: Path) -> None:
    findings = Command(["--dir", str(tmp_path)], dict(os.environ))("doctor", "--json").json
    assert {each["about"] for each in findings} >= {"versions", "kernels", "locked memory", "disk space"}
    assert all((each["cure"] is None) == (each["level"] == "good") for each in findings)
    assert list(tmp_path.iterdir()) == []


def test_config_show_tells_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('profile = "nnapi"\nwarm_bytes = "1 GiB"\n')
    command = Command([], {**os.environ, "KVSTORE_CONFIG": str(file), "KVSTORE_COLD_BYTES": "2GiB"})
    shown = command("config", "show", "--json", "--dir", "/kv").json
    assert shown["warm_bytes"] == {"value": 1 << 30, "origin": f"{file}, line 2"}
    assert shown["cold_bytes"] == {"value": 2 << 30, "origin": "KVSTORE_COLD_BYTES"}
    assert shown["directory"] == {"value": "/kv", "origin": "--directory"}
    assert shown["block_tokens"] == {"value": 128, "origin": "profile nnapi"}
    assert shown["log_level"]["origin"] == "default"


def test_bench_lists_what_a_checkout_has() -> None:
    names = Command([], dict(os.environ))("bench").out.split()
    assert "kernels" in names
    assert "kernels" in Command([], dict(os.environ))("bench", "nothing", code=2).err


def test_completion_is_there() -> None:
    environment = {
        **os.environ,
        "_KVSTORE_COMPLETE": "complete_bash",
        "COMP_WORDS": "kvstore pu",
        "COMP_CWORD": "1",
    }
    assert "purge" in Command([], environment)().out
