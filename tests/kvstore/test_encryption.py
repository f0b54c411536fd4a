"""With a key, flash gives nothing away, comes back bit for bit, and to nobody else."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.admin.administration import Administration
from kvstore.admin.bare_directory import BareDirectory
from kvstore.daemon.remote_store import connect
from kvstore.flash.ciphers import Ciphers
from kvstore.flash.encryption import AlteredError, Cipher, Key, OtherKeyError
from kvstore.flash.keys import GivenKeys
from kvstore.flash.record import BadRecordError, RecordReader
from kvstore.index import vector_file
from kvstore.open_directory import OpenDirectory
from kvstore.store import KVStore, open_store
from tests.daemon.running import daemon
from tests.known_kv import identity, known_kv, load, prompt, put, quiet, small_profile

OURS, OTHER = Key(b"k" * 32), Key(b"o" * 32)
_PROMPTS = [prompt(seed, 50 + 7 * seed) for seed in range(6)]
_SLICE = 16  # bytes that must not be found: four token ids, four numbers of KV


def _open(path: Path, key: Key | None, **changes: int) -> KVStore:
    return open_store(path, identity=identity(), profile=small_profile(**changes), key=key)


def _filled(path: Path, key: Key | None) -> Path:
    with _open(path, key) as store:
        for tokens in _PROMPTS:
            assert put(store, tokens, wait=10).refused == 0
        store.flush(60)
    opened = OpenDirectory(path, small_profile(), key)
    try:
        Administration(opened).pin(_PROMPTS[0].tolist())
    finally:
        opened.close()
    return path


def _held(path: Path, key: Key | None) -> list[int]:
    """How much of each prompt comes back; all of it is compared."""
    with _open(path, key) as store:
        return [load(store, tokens) for tokens in _PROMPTS]


_ALL = [len(tokens) for tokens in _PROMPTS]
_NOTHING = [0] * len(_PROMPTS)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    secret=st.binary(min_size=32, max_size=32), lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4)
)
def test_what_was_put_comes_back_after_a_restart(tmp_path: Path, secret: bytes, lengths: list[int]) -> None:
    path = tmp_path / "kv"
    shutil.rmtree(path, ignore_errors=True)
    prompts = [prompt(100 + number, length) for number, length in enumerate(lengths)]
    with _open(path, Key(secret)) as store:
        for tokens in prompts:
            put(store, tokens, wait=10)
    with _open(path, Key(secret)) as store:
        assert [load(store, tokens) for tokens in prompts] == lengths
        assert not any(store.stats().bad_records.values())


def test_records_without_an_index_are_adopted(tmp_path: Path) -> None:
    path = _filled(tmp_path / "kv", OURS)
    shutil.rmtree(path / "index")
    assert _held(path, OURS) == _ALL


def test_nothing_in_any_file_tells_of_tokens_or_kv(tmp_path: Path) -> None:
    """The same search finds all of it in a directory that is not encrypted."""
    clear, sealed = _filled(tmp_path / "clear", None), _filled(tmp_path / "sealed", OURS)
    secrets = list[bytes]()
    for tokens in _PROMPTS:
        secrets.append(tokens.astype("<i4").tobytes())
        secrets += [array[:, 0].tobytes() for array in known_kv(tokens, identity()).each()]
    names = set[str]()
    for file in (clear / "blocks").iterdir():
        reader = RecordReader(file)
        names.add(file.name)
        secrets += [reader.header.key, reader.header.parent_key]
        for number, frame in enumerate(reader.header.frames):  # KV as its codec stores it
            pieces = [np.empty(length, np.uint8) for length in frame.lengths]
            reader.stored(number, pieces)
            secrets += [piece.tobytes() for piece in pieces]
        reader.close()
    found = {path: _search(path, secrets) for path in (clear, sealed)}
    assert len(found[clear]) > 100
    assert not found[sealed]
    assert {file.name for file in (clear / "index").iterdir()}.isdisjoint(
        {file.name for file in (sealed / "index").iterdir()}
    )
    assert names.isdisjoint(file.name for file in (sealed / "blocks").iterdir()), (
        "names are hashes of prompts"
    )


def _search(path: Path, secrets: list[bytes]) -> set[bytes]:
    """Slices of secrets, from any place of them, that occur anywhere in a file."""
    wanted = {
        secret[at : at + _SLICE]
        for secret in secrets
        for at in range(0, len(secret) - _SLICE + 1, 4)
        if len(set(secret[at : at + _SLICE])) > 4  # zeros are anywhere
    }
    found = set[bytes]()
    for file in path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            windows = {content[at : at + _SLICE] for at in range(len(content) - _SLICE + 1)}
            found |= windows & wanted
    return found


@pytest.mark.parametrize("key", [None, OTHER], ids=["no key", "another key"])
def test_who_has_not_the_key_gets_nothing_and_destroys_nothing(tmp_path: Path, key: Key | None) -> None:
    path = _filled(tmp_path / "kv", OURS)
    files = {file.name: file.read_bytes() for file in (path / "blocks").iterdir()}
    with _open(path, key) as store:
        assert [load(store, tokens) for tokens in _PROMPTS] == _NOTHING
        assert store.stats().bad_records.get("encrypted with another key") == len(files)
        assert store.stats().cold.used > sum(map(len, files.values())), "it counts against the budget"
        put(store, _PROMPTS[1], wait=10)
        quiet(store)
    assert not list((path / "quarantine").iterdir())
    assert all((path / "blocks" / name).read_bytes() == content for name, content in files.items())
    assert _held(path, OURS) == _ALL
    assert len(BareDirectory(path, OURS).status().pins) == 1
    assert not BareDirectory(path, key).status().pins
    assert _held(path, key)[1] == _ALL[1], "each key has its own"


def test_a_key_sees_nothing_that_is_not_encrypted(tmp_path: Path) -> None:
    """Else who can write files could plant KV."""
    path = _filled(tmp_path / "kv", None)
    assert _held(path, OURS) == _NOTHING
    assert _held(path, None) == _ALL


def test_records_of_another_key_go_first_when_room_is_needed(tmp_path: Path) -> None:
    path = _filled(tmp_path / "kv", OTHER)
    foreign = _names(path)
    with _open(path, OURS) as store:
        put(store, prompt(200, 80), wait=10)
        store.flush(60)
        budget = store.stats().cold.used - 2 * 4096
    with _open(path, OURS, cold_bytes=budget) as store:
        lowered = _names(path) & foreign
        assert 0 < len(lowered) < len(foreign)
        put(store, prompt(201, 80), wait=10)
        store.flush(60)
        assert _names(path) & foreign < lowered
        assert store.stats().cold.used <= budget
        assert not store.stats().counts.get("evicted_cold")
        assert [load(store, prompt(seed, 80)) for seed in (200, 201)] == [80, 80]


def _names(path: Path) -> set[str]:
    return {file.name for file in (path / "blocks").iterdir()}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_flipped_bit_passes(tmp_path: Path, data: st.DataObject) -> None:
    """In header, salt, frames or tags: the record is refused. Zeros between header and frames are nobody's."""
    path = tmp_path / "kv"
    if not path.exists():
        _filled(path, OURS)
    files = sorted((path / "blocks").iterdir())
    content = bytearray(data.draw(st.sampled_from(files)).read_bytes())
    ends = struct.unpack_from("<8sIIQ", content)[2] + 24
    cipher = _ciphers(OURS)
    frames = len(content) - _stored_bytes(tmp_path / "whole", bytes(content), cipher)
    at = data.draw(st.one_of(st.integers(0, ends - 1), st.integers(frames, len(content) - 1)))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadRecordError):
        _read_all(tmp_path / "altered", bytes(content), cipher)


def _ciphers(key: Key) -> Ciphers:
    ciphers = Ciphers(GivenKeys((key,)))
    ciphers.note(identity().digest(), identity().tenant_salt)
    return ciphers


def _stored_bytes(file: Path, content: bytes, cipher: Ciphers) -> int:
    file.write_bytes(content)
    reader = RecordReader(file, cipher)
    reader.close()
    return sum(frame.length for frame in reader.header.frames)


def _read_all(file: Path, content: bytes, cipher: Ciphers) -> None:
    file.write_bytes(content)
    reader = RecordReader(file, cipher)
    try:
        layout = identity().layout
        reader.read(layout, 0, np.empty(layout.block_bytes(len(reader.header.tokens) // 4), np.uint8))
    finally:
        reader.close()


def test_who_makes_checksums_fit_is_found_out(tmp_path: Path) -> None:
    """xxh3 has no key: only the tag tells what was altered on purpose."""
    path = _filled(tmp_path / "kv", OURS)
    file = next((path / "blocks").iterdir())
    content = bytearray(file.read_bytes())
    _, version, length, _ = struct.unpack_from("<8sIIQ", content)
    content[24 + length - 40] ^= 1
    body = bytes(content[24 : 24 + length])
    checksum = xxhash.xxh3_64_intdigest(struct.pack("<II", version, length) + body)
    struct.pack_into("<Q", content, 16, checksum)
    with pytest.raises(BadRecordError, match="authentication: header"):
        _read_all(tmp_path / "altered", bytes(content), _ciphers(OURS))


def test_no_two_writings_share_a_keystream() -> None:
    """A repeated nonce would give away the XOR of what was written, and the key that authenticates."""
    cipher = Cipher(OURS)
    assert len({cipher.seal(bytes(64)) for _ in range(50)}) == 50
    sealing = cipher.sealing()
    stored = [sealing.encrypt(number, [bytes(64), bytes(64)])[0] for number in range(20)]
    streams = [bytes(piece[at : at + 16]) for pieces in stored for piece in pieces for at in range(0, 64, 16)]
    assert len(set(streams)) == len(streams)


@given(st.binary(max_size=200), st.integers(0, 10_000))
def test_small_files_are_whole_or_refused(plain: bytes, at: int) -> None:
    cipher = Cipher(OURS)
    stored = cipher.seal(plain)
    assert cipher.open(stored) == plain
    with pytest.raises(OtherKeyError):
        Cipher(OTHER).open(stored)
    altered = bytearray(stored)
    altered[at % len(stored)] ^= 0x10
    with pytest.raises((OtherKeyError, AlteredError)):
        cipher.open(bytes(altered))
    with pytest.raises((OtherKeyError, AlteredError)):
        cipher.open(stored[: at % len(stored)])


def test_vectors_are_encrypted(tmp_path: Path) -> None:
    cipher, rows = Cipher(OURS), np.arange(32, dtype=np.float16).reshape(2, 16)
    nbytes = vector_file.write(tmp_path / "v", "e", "d", [b"1" * 32, b"2" * 32], rows, cipher)
    assert nbytes == (tmp_path / "v").stat().st_size <= vector_file.size(2, 16)
    assert not _search(tmp_path, [rows.tobytes(), b"1" * 32])
    found = vector_file.read(tmp_path / "v", "d", cipher)
    assert found.state == "whole"
    assert np.array_equal(found.vectors[b"2" * 32], rows[1])
    for other in (None, Cipher(OTHER)):
        assert vector_file.read(tmp_path / "v", "d", other).vectors == {}


def test_verify_judges_what_it_can_read(tmp_path: Path) -> None:
    path = _filled(tmp_path / "kv", OURS)
    blocks = len(list((path / "blocks").iterdir()))
    found = BareDirectory(path, OURS).verify()
    assert (found.blocks, found.faults) == (blocks, ())
    for key in (None, OTHER):
        found = BareDirectory(path, key).verify()
        assert (found.blocks, found.faults) == (0, ())
        assert any(f"{blocks} records are" in note for note in found.notes)
        BareDirectory(path, key).verify(repair=True)
    assert _held(path, OURS) == _ALL


def test_a_daemon_encrypts_what_all_its_clients_put(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    owners = [identity(), identity(salt=b"tenant")]
    with daemon(path, key=OURS) as running:
        for owner in owners:
            with connect(running.socket, identity=owner, profile=small_profile()) as store:
                put(store, _PROMPTS[0], wait=10)  # type: ignore[arg-type]
                store.flush(60)
    assert not _search(path, [_PROMPTS[0].astype("<i4").tobytes()])
    for key, length in ((OURS, len(_PROMPTS[0])), (None, 0), (OTHER, 0)):
        with _open(path, key) as here:
            assert [load(here.view(owner), _PROMPTS[0]) for owner in owners] == [length, length]
