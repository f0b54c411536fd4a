"""Sources of keys: each tenant its own, kept through any stop, shown to nobody; a clear word where one is missing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import keyring
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keyring.backends import fail
from keyrings.alt.file import PlaintextKeyring

import kvstore
from kvstore.errors import EncryptionError
from kvstore.flash.encryption import Key
from kvstore.flash.keys import GivenKeys, KeyFile, Keyring, Keys, KeySource, source_of
from kvstore.store import KVStore
from tests.faults.child import Child
from tests.known_kv import identity, load, prompt, put, small_profile

ONE, TWO = Key(b"1" * 32), Key(b"2" * 32)
TENANTS = [b"", *(identity(salt=bytes([number])).tenant_salt for number in range(5))]


@pytest.fixture
def system_keyring(tmp_path: Path) -> Iterator[PlaintextKeyring]:
    """A real backend, over a file of this test's own."""
    before, backend = keyring.get_keyring(), PlaintextKeyring()
    backend.file_path = str(tmp_path / "keyring.cfg")
    keyring.set_keyring(backend)
    yield backend
    keyring.set_keyring(before)


def _key_file(path: Path) -> KeyFile:
    source = KeyFile(path)
    source.create()
    return source


@pytest.fixture(params=["file", "keyring"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> KeySource:
    if request.param == "file":
        return _key_file(tmp_path / "keys")
    request.getfixturevalue("system_keyring")
    return Keyring("a test")


def _open(path: Path, key: Keys) -> KVStore:
    return kvstore.open(path, identity=identity(), profile=small_profile(), key=key, daemon=False)


def _again(source: KeySource) -> KeySource:
    """As the next process sees it."""
    return KeyFile(source.path) if isinstance(source, KeyFile) else Keyring("a test")


_steps = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["make", "two", "drop", "last"])), max_size=12)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=_steps)
def test_each_tenant_keeps_what_it_was_given(source: KeySource, steps: list[tuple[int, str]]) -> None:
    for tenant in TENANTS:
        source.keep(tenant, ())
    held: dict[bytes, tuple[Key, ...]] = dict.fromkeys(TENANTS, ())
    for number, step in steps:
        tenant = TENANTS[number]
        if step == "make":
            made = source.make(tenant)
            assert not held[tenant] or made == held[tenant][-1]
            held[tenant] = held[tenant] or (made,)
        else:
            both = (held[tenant] or (ONE,))[-1], Key.generate()
            held[tenant] = {"two": both, "drop": (), "last": both[1:]}[step]
            source.keep(tenant, held[tenant])
        assert {each: _again(source).keys(each) for each in TENANTS} == held
    made = [keys[-1] for keys in held.values() if keys]
    assert len({*made}) == len(made), "no two tenants have the same"


def test_a_store_makes_the_keys_of_its_tenants(tmp_path: Path, source: KeySource) -> None:
    owners = [identity(), identity(salt=b"a"), identity(salt=b"b")]
    tokens = prompt(1, 60)
    with _open(tmp_path / "kv", source) as store:
        for owner in owners[:2]:
            put(store.view(owner), tokens, wait=10)
    keys = [source.keys(owner.tenant_salt) for owner in owners]
    assert [len(each) for each in keys] == [1, 1, 0]
    assert keys[0] != keys[1]
    with _open(tmp_path / "kv", _again(source)) as store:
        assert [load(store.view(owner), tokens) for owner in owners] == [60, 60, 0]


# -- a file ------------------------------------------------------------------------------------------------------------


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    source = _key_file(tmp_path / "folder" / "keys")
    made = source.make(b"")
    assert source.path.stat().st_mode & 0o777 == 0o600
    assert made.secret.hex() in source.path.read_text()
    with pytest.raises(EncryptionError, match="exists"):
        source.create()
    source.path.chmod(0o640)
    for refused in (lambda: source.keys(b""), lambda: source.make(b"new")):
        with pytest.raises(EncryptionError, match="others may read"):
            refused()
    assert made.secret.hex() in source.path.read_text()
    with pytest.raises(EncryptionError, match="does not exist; `kvstore key new`"):
        KeyFile(tmp_path / "none").keys(b"")


@pytest.mark.parametrize(
    "content", [b"\xff", b"hello\n", b"- 1234\n", b"- " + b"ab" * 32 + b"\n- " + b"ab" * 32]
)
def test_a_damaged_key_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    """A key made anew over a damaged line would lose the one that could be restored."""
    source = _key_file(tmp_path / "keys")
    source.path.write_bytes(content)
    for refused in (lambda: source.keys(b""), lambda: source.make(b"t"), lambda: source.keep(b"t", (ONE,))):
        with pytest.raises(EncryptionError, match=str(source.path)):
            refused()
    assert source.path.read_bytes() == content


def test_a_dropped_key_is_overwritten(tmp_path: Path) -> None:
    source = _key_file(tmp_path / "keys")
    source.make(b"")
    with source.path.open("rb") as before:
        source.keep(b"", ())
        assert set(before.read()) == {0}


def _make_keys(connection: Connection, path: str, first: int) -> None:
    source = KeyFile(path)
    made = [(number, source.make(bytes([number])).secret) for number in (0, *range(first, first + 30))]
    connection.send(made)
    connection.close()


def test_processes_that_make_keys_lose_none(tmp_path: Path) -> None:
    source = _key_file(tmp_path / "keys")
    children = [Child(_make_keys, str(source.path), first) for first in (1, 101)]
    for child in children:
        for number, secret in child.receive():
            assert source.keys(bytes([number]))[-1].secret == secret
        child.join()
    assert len(source.read()) == 61


# -- the keyring -------------------------------------------------------------------------------------------------------


def test_without_the_package_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)  # as for who did not install it
    with pytest.raises(EncryptionError, match=r"pip install 'npu-kvstore\[keyring\]', or use a key file"):
        _open(tmp_path / "kv", Keyring())
    assert not (tmp_path / "kv" / "blocks").exists()


@pytest.mark.usefixtures("system_keyring")
def test_without_a_backend_the_error_says_what_to_do(tmp_path: Path) -> None:
    keyring.set_keyring(fail.Keyring())
    with pytest.raises(EncryptionError, match="choose a backend, or use a key file"):
        _open(tmp_path / "kv", Keyring())


@pytest.mark.usefixtures("system_keyring")
def test_what_is_no_key_in_the_keyring_is_not_overwritten() -> None:
    keyring.set_password("a test", "-", "someone else's")
    with pytest.raises(EncryptionError, match="is no key"):
        Keyring("a test").make(b"")
    assert keyring.get_password("a test", "-") == "someone else's"


# -- the caller --------------------------------------------------------------------------------------------------------


def test_what_may_be_given() -> None:
    for fine in (ONE, ONE.secret, bytearray(ONE.secret), [ONE], (ONE.secret,)):
        assert source_of(fine).keys(b"t") == (ONE,)  # type: ignore[arg-type,union-attr]
    assert source_of((ONE, TWO)).keys(b"t") == (ONE, TWO)  # type: ignore[union-attr]
    assert source_of(None) is None
    for wrong in (b"short", (), (ONE, TWO, ONE)):
        with pytest.raises(EncryptionError):
            source_of(wrong)
    assert ONE.secret.hex() not in repr(ONE) + str(ONE)


def test_nobody_changes_the_callers_key_for_him() -> None:
    source = GivenKeys((ONE,))
    with pytest.raises(EncryptionError, match="the key is the caller's"):
        source.keep(b"t", (ONE, TWO))
    source.keep(b"t", ())
    assert (source.keys(b"t"), source.keys(b"other")) == ((), (ONE,))
    with pytest.raises(EncryptionError, match="was dropped"):
        source.make(b"t")


class _Vault:
    """A source of the caller's own, as over a platform's key store."""

    def __init__(self) -> None:
        self.held: dict[bytes, tuple[Key, ...]] = {}

    def keys(self, tenant: bytes) -> tuple[Key, ...]:
        return self.held.get(tenant, ())

    def keep(self, tenant: bytes, keys: tuple[Key, ...]) -> None:
        self.held[tenant] = keys

    def make(self, tenant: bytes) -> Key:
        return self.held.setdefault(tenant, (Key.generate(),))[-1]


def test_a_caller_may_have_a_source_of_his_own(tmp_path: Path) -> None:
    vault, tokens = _Vault(), prompt(1, 40)
    with _open(tmp_path / "kv", vault) as store:
        put(store, tokens, wait=10)
    assert list(vault.held) == [b""]
    key = vault.held[b""][-1].secret
    with _open(tmp_path / "kv", key) as store:
        assert load(store, tokens) == 40


def test_no_key_is_logged_or_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = os.urandom(32)
    for key in (secret, ONE):  # the second cannot read what the first wrote
        with _open(tmp_path / "kv", key) as store:
            put(store, prompt(1, 40), wait=10)
    said = caplog.text.encode() + b"".join(
        file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()
    )
    for form in (secret, secret.hex().encode(), repr(secret).encode()):
        assert form not in said
