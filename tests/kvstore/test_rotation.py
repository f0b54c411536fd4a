"""Keys that change or go: nothing is lost but what a dropped key takes along, wherever it stops, whoever reads."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.admin.administration import Administration
from kvstore.admin.bare_directory import BareDirectory
from kvstore.admin.entry import tenant_name
from kvstore.admin.remote import connected
from kvstore.admin.rotation import Rotated, rotate
from kvstore.daemon.remote_store import connect
from kvstore.errors import EncryptionError, InvalidRequestError
from kvstore.flash.keys import Key, KeyFile, Keys
from kvstore.flash.record import BadRecordError, RecordReader
from kvstore.identity import Identity
from kvstore.index import vector_file
from kvstore.open_directory import OpenDirectory
from kvstore.store import KVStore, open_store
from tests.daemon.running import daemon
from tests.faults.child import Child
from tests.known_kv import identity, load, prompt, put, quiet, small_profile

ONE, TWO, THREE = (Key(bytes([number]) * 32) for number in (1, 2, 3))
OWNERS = [identity(), identity(salt=b"a"), identity(salt=b"b")]
PROMPTS = [prompt(seed, 40 + 17 * seed) for seed in range(4)]
ALL = [len(tokens) for tokens in PROMPTS]
NOTHING = [0] * len(PROMPTS)


def _salt(owner: Identity) -> bytes:
    return owner.tenant_salt


def _filled(path: Path, key: Keys | None, owners: list[Identity] = OWNERS) -> Path:
    """All prompts of each owner, the first of each pinned."""
    opened = OpenDirectory(path, small_profile(), key)
    try:
        for owner in owners:
            store = KVStore(opened, owner)
            for tokens in PROMPTS:
                assert put(store, tokens, wait=10).refused == 0
            store.flush(60)
            Administration(opened).pin(PROMPTS[0].tolist(), identity=owner.digest().hex())
    finally:
        opened.close()
    return path


def _held(path: Path, key: Keys | None, owner: Identity) -> list[int]:
    """How much of each prompt comes back; all of it is compared."""
    with open_store(path, identity=owner, profile=small_profile(), key=key) as store:
        found = [load(store, tokens) for tokens in PROMPTS]
        quiet(store)
        store.check()
        assert not list((path / "quarantine").iterdir())
        return found


def _keys(tmp_path: Path) -> KeyFile:
    source = KeyFile(tmp_path / "keys")
    source.create()
    return source


def _administered(path: Path, key: Keys | None, work: Callable[[Administration], Any]) -> Any:
    opened = OpenDirectory(path, small_profile(), key)
    try:
        return work(Administration(opened))
    finally:
        opened.close()


def _rotated(path: Path, key: Keys, tenant: str | None = None) -> Rotated:
    return _administered(path, key, lambda admin: admin.rotate_key(tenant=tenant))


def _records(path: Path) -> set[str]:
    return {file.name for file in (path / "blocks").iterdir()}


def _known(path: Path, key: Keys | None) -> dict[bytes, tuple[int, float]]:
    return {entry.key: (entry.hits, entry.last_use) for entry in BareDirectory(path, key).entries()}


# -- rotation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["in clear", "encrypted"])
def test_rotation_keeps_everything(tmp_path: Path, first: str) -> None:
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source if first == "encrypted" else None)
    for owner in OWNERS:
        vector_file.write(*_some_vectors(path, owner, source if first == "encrypted" else None))
    before, old = _known(path, source if first == "encrypted" else None), source.read()
    done = _rotated(path, source)
    assert (done.tenants, done.records, done.left, done.own) == (3, len(before), 0, 0)
    assert all(len(keys) == 1 and keys != old.get(name) for name, keys in source.read().items())
    assert len(source.read()) == 3
    assert _known(path, source) == before
    assert len(_records(path)) == len(before)
    checked = BareDirectory(path, source).verify()
    assert (checked.blocks, checked.faults, checked.notes) == (len(before), (), ())
    assert len(BareDirectory(path, source).status().pins) == 3
    opened = OpenDirectory(path, small_profile(), source)
    try:
        for owner in OWNERS:
            KVStore(opened, owner)
            file = path / "identities" / f"{owner.digest().hex()}.vectors"
            assert vector_file.read(file, "d", opened.ciphers.sealer(owner.digest())).state == "whole"
            assert vector_file.read(file, "d").vectors == {}
    finally:
        opened.close()
    assert [_held(path, source, owner) for owner in OWNERS] == [ALL] * 3
    for owner in OWNERS:
        assert _held(path, None, owner) == NOTHING


def _some_vectors(path: Path, owner: Identity, source: KeyFile | None) -> Any:
    import numpy as np

    opened = OpenDirectory(path, small_profile(), source)
    KVStore(opened, owner)
    sealer = opened.ciphers.sealer(owner.digest())
    opened.close()
    file = path / "identities" / f"{owner.digest().hex()}.vectors"
    return file, "e", "d", [b"1" * 32], np.ones((1, 8), np.float16), sealer


def test_rotation_of_one_tenant_leaves_the_others_alone(tmp_path: Path) -> None:
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source)
    before, keys = _records(path), source.read()
    done = _rotated(path, source, tenant_name(_salt(OWNERS[1])))
    assert done.tenants == 1
    assert len(before - _records(path)) == done.records == len(before) / 3
    changed = {name for name, each in source.read().items() if keys[name] != each}
    assert changed == {_salt(OWNERS[1])[-32:].hex()}
    assert [_held(path, source, owner) for owner in OWNERS] == [ALL] * 3
    with pytest.raises(InvalidRequestError, match="no tenant 'x' is known"):
        _rotated(path, source, "x")


def test_the_caller_gives_both_keys_to_rotate(tmp_path: Path) -> None:
    path = _filled(tmp_path / "kv", ONE)
    with pytest.raises(EncryptionError, match="give the old and the new one"):
        _rotated(path, ONE)
    assert _rotated(path, (ONE, TWO)).records == len(_records(path))
    assert [_held(path, TWO, owner) for owner in OWNERS] == [ALL] * 3
    assert _held(path, ONE, OWNERS[0]) == NOTHING


def test_what_is_in_clear_is_not_read_before_it_is_rotated(tmp_path: Path) -> None:
    """Else who can write files could plant KV."""
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", None)
    assert [_held(path, source, owner) for owner in OWNERS] == [NOTHING] * 3
    _rotated(path, source)
    assert [_held(path, source, owner) for owner in OWNERS] == [ALL] * 3


def test_what_is_in_clear_comes_under_a_key_while_others_use_it(tmp_path: Path) -> None:
    """Blocks that came to an identity that was open had no size."""
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", None)
    opened = OpenDirectory(path, small_profile(), source)
    try:
        store = KVStore(opened, OWNERS[0])
        put(store, PROMPTS[0], wait=10)
        put(store, PROMPTS[1], wait=10)
        rotate(opened)
        assert [load(store, tokens) for tokens in PROMPTS] == ALL
        quiet(store)
        opened.tiers.check()
        rotate(opened)
    finally:
        opened.close()
    assert [_held(path, source, owner) for owner in OWNERS] == [ALL] * 3
    assert BareDirectory(path, None).entries() == []


def test_a_record_under_another_tenants_key_is_not_read(tmp_path: Path) -> None:
    """Who has a key of his own and can write files could plant KV for others."""
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source, OWNERS[:1])
    source.keep(_salt(OWNERS[1]), source.keys(b""))
    source.keep(b"", (ONE,))
    assert _held(path, source, OWNERS[1]) == NOTHING
    assert _held(path, source, OWNERS[0]) == NOTHING
    source.keep(b"", source.keys(_salt(OWNERS[1])))
    assert _held(path, source, OWNERS[0]) == ALL


def test_a_damaged_record_does_not_keep_the_old_key(tmp_path: Path) -> None:
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source, OWNERS[:1])
    shutil.rmtree(path / "index")  # else the row answers for it
    victim = sorted((path / "blocks").iterdir())[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    count = len(_records(path))
    done = _rotated(path, source)
    assert (done.records, done.left) == (count - 1, 1)
    assert len(source.keys(b"")) == 1


def test_lost_notes_on_identities_lose_no_kv(tmp_path: Path) -> None:
    """Whose a record is, nobody knows then, until its identity is opened."""
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source)
    shutil.rmtree(path / "identities")
    opened = OpenDirectory(path, small_profile(), source)
    try:
        for owner in OWNERS:
            assert [load(KVStore(opened, owner), tokens) for tokens in PROMPTS] == ALL
        opened.tiers.check()
    finally:
        opened.close()


def _rotate(connection: Connection, path: str, file: str) -> None:
    opened = OpenDirectory(Path(path), small_profile(), KeyFile(file))
    connection.send("rotating")
    rotate(opened)
    connection.send("done")
    connection.close()
    os._exit(0)


def test_rotation_killed_anywhere_loses_nothing(tmp_path: Path) -> None:
    """After each kill all is there, to open and to verify; after the last run there is one key for each tenant."""
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source)
    order, kills, halfway = random.Random(1), 0, 0
    for number in range(24):
        child = Child(_rotate, str(path), str(source.path))
        child.receive()
        time.sleep(order.uniform(0, 0.2))
        kills += "done" not in child.kill()
        halfway += any(len(keys) == 2 for keys in source.read().values())
        owner = OWNERS[number % 3]
        assert _held(path, source, owner) == ALL
        assert BareDirectory(path, source).verify().faults == ()
    assert kills > 3
    assert halfway > 1
    _rotated(path, source)
    assert all(len(keys) == 1 for keys in source.read().values())
    assert [_held(path, source, owner) for owner in OWNERS] == [ALL] * 3
    assert len(BareDirectory(path, source).status().pins) == 3
    assert BareDirectory(path, source).verify().notes == ()


# -- dropping ----------------------------------------------------------------------------------------------------------


def test_dropping_a_key_erases_that_tenant_and_copies_of_it(tmp_path: Path) -> None:
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source)
    copy = shutil.copytree(path, tmp_path / "copy")
    gone, secret = OWNERS[1], source.keys(_salt(OWNERS[1]))[0].secret
    name = tenant_name(_salt(gone))
    count = len(_records(path))
    dry = _administered(path, source, lambda admin: admin.drop_key(tenant=name))
    assert (dry.blocks, dry.dry_run) == (count / 3, True)
    done = _administered(path, source, lambda admin: admin.drop_key(tenant=name, dry_run=False))
    assert (done.tenants, done.blocks) == (1, count / 3)
    assert len(_records(path)) == count * 2 / 3
    assert secret.hex() not in source.path.read_text()
    for each in (path, copy):  # the copy is what flash may keep of deleted files
        assert _held(each, source, gone) == NOTHING
        assert [_held(each, source, owner) for owner in (OWNERS[0], OWNERS[2])] == [ALL] * 2
    found = BareDirectory(path, source)
    assert (found.verify().faults, len(found.status().pins)) == ((), 2)
    with open_store(path, identity=gone, profile=small_profile(), key=source) as store:
        put(store, PROMPTS[0], wait=10)  # he may come again
    assert _held(path, source, gone) == [ALL[0], 0, 0, 0]
    assert source.keys(_salt(gone))[0].secret != secret


def _drop(connection: Connection, path: str, file: str, tenant: str) -> None:
    opened = OpenDirectory(Path(path), small_profile(), KeyFile(file))
    connection.send("dropping")
    Administration(opened).drop_key(tenant=tenant, dry_run=False)
    connection.send("done")
    connection.close()
    os._exit(0)


def test_dropping_killed_anywhere_spares_the_others(tmp_path: Path) -> None:
    source = _keys(tmp_path)
    path = _filled(tmp_path / "kv", source)
    order, name = random.Random(2), tenant_name(_salt(OWNERS[1]))
    for _ in range(8):
        child = Child(_drop, str(path), str(source.path), name)
        child.receive()
        time.sleep(order.uniform(0, 0.1))
        said = child.kill()
        assert [_held(path, source, owner) for owner in (OWNERS[0], OWNERS[2])] == [ALL] * 2
        assert BareDirectory(path, source).verify().faults == ()
        if "done" in said:
            assert _held(path, source, OWNERS[1]) == NOTHING
        _filled(path, source, OWNERS[1:2])


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "rotate", "rotate all", "drop", "without a key", "lose the index"]),
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=9,
)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=_STEPS)
def test_whatever_happens_each_tenant_finds_its_own(
    tmp_path: Path, steps: list[tuple[str, int, int]]
) -> None:
    """Against a list of what was put since the tenant's last drop. All that comes back is compared."""
    path = tmp_path / "kv"
    shutil.rmtree(path, ignore_errors=True)
    (tmp_path / "keys").unlink(missing_ok=True)
    source = _keys(tmp_path)
    _filled(path, source, OWNERS[:1])
    held = [set(range(4)), set[int](), set[int]()]
    known = {0}
    for what, who, which in steps:
        name = tenant_name(_salt(OWNERS[who]))
        if what == "put":
            with open_store(path, identity=OWNERS[who], profile=small_profile(), key=source) as store:
                put(store, PROMPTS[which], wait=10)
            held[who].add(which)
            known.add(who)
        elif what == "rotate all":
            _rotated(path, source)
        elif what == "rotate" and who in known:
            _rotated(path, source, name)
        elif what == "drop" and held[who]:
            _administered(path, source, lambda admin, name=name: admin.drop_key(tenant=name, dry_run=False))
            held[who] = set()
        elif what == "lose the index":
            shutil.rmtree(path / "index")
        elif what == "without a key":
            assert _held(path, None, OWNERS[who]) == NOTHING
        for number, owner in enumerate(OWNERS):
            expected = [length if index in held[number] else 0 for index, length in enumerate(ALL)]
            assert _held(path, source, owner) == expected, (what, who)
            known.add(number)
    assert BareDirectory(path, source).verify().faults == ()


# -- in a daemon -------------------------------------------------------------------------------------------------------


def test_a_daemons_keys_change_and_go_while_it_serves(tmp_path: Path) -> None:
    """Clients read and put all the while; nothing they read is wrong, and nothing is lost but the tenant dropped."""
    source = _keys(tmp_path)
    path = tmp_path / "kv"
    with daemon(path, small_profile(warm_bytes=8 << 20), key=source) as running:
        stores = [connect(running.socket, identity=owner, profile=small_profile()) for owner in OWNERS]
        for store in stores:
            for tokens in PROMPTS:
                put(store, tokens, wait=10)  # type: ignore[arg-type]
            store.flush(60)
        old = source.read()
        ended = threading.Event()
        failed: list[BaseException] = []

        def use() -> None:
            seed = 100
            try:
                while not ended.is_set():
                    seed += 1
                    for store in stores:
                        assert load(store, PROMPTS[seed % 4]) == ALL[seed % 4]  # type: ignore[arg-type]
                        put(store, prompt(seed % 16, 30), wait=10)  # type: ignore[arg-type]
            except BaseException as error:
                failed.append(error)

        user = threading.Thread(target=use)
        user.start()
        admin = connected(running.socket)
        try:
            for _ in range(3):
                assert admin.rotate_key().left == 0
        finally:
            ended.set()
            user.join()
        assert not failed, stores[0].stats()
        assert all(len(keys) == 1 and keys != old[name] for name, keys in source.read().items())
        admin.drop_key(tenant=tenant_name(_salt(OWNERS[1])), dry_run=False)
        assert [load(stores[1], tokens) for tokens in PROMPTS] == NOTHING  # type: ignore[arg-type]
        assert [load(stores[0], tokens) for tokens in PROMPTS] == ALL  # type: ignore[arg-type]
        assert admin.verify().faults == ()
        admin.close()
        for store in stores:
            store.close()
    assert [_held(path, source, owner) for owner in OWNERS] == [ALL, NOTHING, ALL]


def test_a_client_has_its_tenant_under_its_own_key(tmp_path: Path) -> None:
    path, owner = tmp_path / "kv", OWNERS[1]
    with daemon(path) as running:

        def store(key: Keys | None, of: Identity = owner) -> Any:
            return connect(running.socket, identity=of, profile=small_profile(), key=key, required=True)

        with store(ONE) as mine, store(None, OWNERS[0]) as other:
            for each in (mine, other):
                for tokens in PROMPTS:
                    put(each, tokens, wait=10)
                each.flush(60)
            for wrong, said in ((None, "a key of its own"), (TWO, "another key")):
                with pytest.raises(EncryptionError, match=said):
                    store(wrong)
            with store(ONE) as again:
                assert [load(again, tokens) for tokens in PROMPTS] == ALL
            with pytest.raises(EncryptionError, match="without a key"):
                store(ONE, OWNERS[0])
        running.stop()
        for file in path.rglob("*"):
            assert not file.is_file() or ONE.secret not in file.read_bytes()
        assert _under(path, None) == len(_records(path)) / 2
        running.start()
        with store(TWO) as stranger:
            assert [load(stranger, tokens) for tokens in PROMPTS] == NOTHING
        running.stop()
        running.start()
        with store(ONE) as mine:
            assert [load(mine, tokens) for tokens in PROMPTS] == ALL
            with store(None, OWNERS[0]) as other:
                assert [load(other, tokens) for tokens in PROMPTS] == ALL
            admin = connected(running.socket)
            with pytest.raises(EncryptionError, match="opens with the old and the new one"):
                admin.rotate_key(tenant=tenant_name(_salt(owner)))
            assert admin.verify().faults == ()
            with store((ONE, THREE)) as both:
                assert admin.rotate_key(tenant=tenant_name(_salt(owner))).records == len(_records(path)) / 2
                assert [load(both, tokens) for tokens in PROMPTS] == ALL
            with pytest.raises(EncryptionError, match="another key"):
                store(ONE)
            with store(THREE) as mine:
                admin.drop_key(tenant=tenant_name(_salt(owner)), dry_run=False)
                put(mine, PROMPTS[0], wait=10)
                mine.flush(60)
                assert mine.stats().refusals.get("no key")
            with pytest.raises(EncryptionError, match="a key of its own"):
                store(None)
            admin.close()
    assert _held(path, None, OWNERS[0]) == ALL
    assert _under(path, None) == len(_records(path)), "what was put after the drop is not in clear either"


def _under(path: Path, key: Keys | None) -> int:
    return len(BareDirectory(path, key).entries())


def test_a_daemon_shows_no_key(tmp_path: Path) -> None:
    """Neither a client's nor its own: not in its log at the highest level, nor in what the system shows of it."""
    source = _keys(tmp_path)
    socket = tmp_path / "run" / "d.sock"
    environment = {**os.environ, "KVSTORE_CONFIG": os.devnull, "KVSTORE_KEY_FILE": str(source.path)}
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--log-level", "debug"]
    with (tmp_path / "log").open("wb") as log:
        serving = subprocess.Popen(
            [*command, "--dir", str(tmp_path / "kv"), "--socket", str(socket)],
            stderr=log,
            stdout=log,
            env=environment,
        )
    try:
        until = time.monotonic() + 60
        while not socket.exists() and time.monotonic() < until:
            time.sleep(0.05)
        with connect(socket, identity=OWNERS[1], profile=small_profile(), key=ONE, required=True) as store:
            put(store, PROMPTS[0], wait=10)  # type: ignore[arg-type]
        with pytest.raises(EncryptionError):
            connect(socket, identity=OWNERS[1], profile=small_profile(), key=TWO, required=True)
        with connect(socket, identity=OWNERS[0], profile=small_profile(), required=True) as store:
            put(store, PROMPTS[0], wait=10)  # type: ignore[arg-type]
        process = Path(f"/proc/{serving.pid}")
        shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    finally:
        serving.terminate()
        serving.wait(60)
    shown += (tmp_path / "log").read_bytes()
    assert b"serving" in shown
    for key in (ONE, TWO, *source.keys(b"")):
        for form in (key.secret, key.secret.hex().encode(), repr(key.secret)[2:-1].encode()):
            assert form not in shown


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "keyring"])
def test_the_verbs(tmp_path: Path, where: str) -> None:
    path = _filled(tmp_path / "kv", None, OWNERS[:2])
    file = tmp_path / "secret" / "keys"
    settings_ = {"KVSTORE_KEY_FILE": str(file)} if where == "file" else {"KVSTORE_KEYRING": "a test"}
    environment = {
        **os.environ,
        **settings_,
        "KVSTORE_CONFIG": os.devnull,
        "KVSTORE_DIRECTORY": str(path),
        "KVSTORE_SOCKET": str(tmp_path / "none.sock"),
        "PYTHON_KEYRING_BACKEND": "keyrings.alt.file.PlaintextKeyring",
        "XDG_DATA_HOME": str(tmp_path / "keyring"),
    }

    def run(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        assert "Traceback" not in done.stderr
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done.stdout + done.stderr

    blocks = len(_records(path))
    if where == "file":
        assert "kvstore key new" in run("status", code=1)
        run("key", "new")
        assert "exists" in run("key", "new", code=1)
    else:
        assert "needs no file" in run("key", "new", code=2)
    said = run("key", "rotate")
    assert f"2 tenants have a new key, {blocks} records were put under it" in said
    name = tenant_name(_salt(OWNERS[1]))
    assert f"1 tenants have a new key, {blocks // 2} records" in run("key", "rotate", "--tenant", name)
    assert f"{blocks} sound blocks" in run("verify")
    assert "no tenant" in run("key", "drop", "--tenant", "nobody", "--yes", code=2)
    assert "--yes" in run("key", "drop", "--tenant", name, code=2)
    assert "1 tenants would go" in run("key", "drop", "--tenant", name, "--dry-run")
    assert f"{blocks} sound blocks" in run("verify")
    run("key", "drop", "--tenant", name, "--yes")
    assert f"{blocks - blocks // 2} sound blocks" in run("verify")
    run("key", "rotate", "--tenant", "-")
    run("key", "drop", "--yes")
    assert "0 sound blocks" in run("verify")
    assert _records(path) == set()


def test_a_record_in_clear_among_keys_says_so(tmp_path: Path) -> None:
    path = _filled(tmp_path / "kv", None, OWNERS[:1])
    opened = OpenDirectory(path, small_profile(), ONE)
    try:
        with pytest.raises(BadRecordError, match="not encrypted"):
            RecordReader(next((path / "blocks").iterdir()), opened.ciphers)
        assert KVStore(opened, OWNERS[0]).stats().bad_records.get("not encrypted") == len(_records(path))
    finally:
        opened.close()
