"""Faults of every kind, put into a closed data directory, each with the entry that a check has to name."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvstore.flash import cold_index
from kvstore.flash.cold_index import ColdIndex, Row
from kvstore.flash.record import Header, RecordReader, assemble
from kvstore.index import vector_file
from kvstore.quality.reuse import Verdict
from kvstore.store import open_store
from tests.known_kv import identity, known_kv, prompt, put, small_profile

PROFILE = small_profile(hot_bytes=0, warm_bytes=128 * 4096, cold_bytes=16 << 20, cold_bytes_per_day=1 << 30)
OWNERS = ("a", "b")
PROMPTS = [np.concatenate([prompt(which // 2, 24), prompt(100 + which, 36)]) for which in range(4)]


def build(directory: Path) -> None:
    """Records of two identities with shared prefixes, tails and inexact spans, an index, and a note of each sort."""
    with open_store(directory, identity=identity(OWNERS[0]), profile=PROFILE) as store:
        for name in OWNERS:
            view = store.view(identity(name))
            for tokens in PROMPTS:
                put(view, tokens, wait=10)
            view.put_inexact(PROMPTS[0], known_kv(PROMPTS[0], view.identity), [(10, 50)])
            view.keep_verdict(Verdict(None, None, reasons=("not measured",)))
        store.flush()
    digest = identity(OWNERS[0]).digest()
    vectors = directory / "identities" / f"{digest.hex()}.vectors"
    vector_file.write(vectors, "none", "00" * 32, [b"k" * 32], np.zeros((1, 8), np.float16))


class Directory:
    """One damaged copy. `hit`: entries that must be named; `lost`: records that may be gone after a repair."""

    def __init__(self, path: Path, order: random.Random) -> None:
        self.path = path
        self.order = order
        self.hit: dict[str, str] = {}
        self.lost: set[str] = set()
        self._free = sorted(os.listdir(path / "blocks"))
        order.shuffle(self._free)
        self._rows: dict[bytes, Row] | None = None

    def record(self, fits: Callable[[Header], bool] = lambda _: True) -> Path | None:
        """A record that nothing was done to yet and that fits."""
        for name in self._free:
            path = self.path / "blocks" / name
            if fits(header_of(path)):
                self._free.remove(name)
                return path
        return None

    def sound(self, key: bytes) -> bool:
        return key[:16].hex() in self._free

    @property
    def rows(self) -> dict[bytes, Row]:
        """To be changed; `finish` writes them."""
        if self._rows is None:
            self._rows = cold_index.read(self.path / "index")[1]
        return self._rows

    @property
    def rows_changed(self) -> bool:
        return self._rows is not None

    def finish(self) -> None:
        if self._rows is not None:
            ColdIndex(self.path / "index").write(self._rows.values())


def header_of(path: Path) -> Header:
    reader = RecordReader(path)
    reader.close()
    return reader.header


def rewrite(path: Path, change: dict[str, Any]) -> None:
    """Give a record another header, with right checksums."""
    header = header_of(path)
    content = path.read_bytes()
    frames = content[len(content) - sum(frame.length for frame in header.frames) :]
    changed = msgspec.structs.replace(header, **change)
    kept = frames[: sum(frame.length for frame in changed.frames)]
    path.write_bytes(b"".join(bytes(piece) for piece in assemble(changed, [kept])))


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    before = bytes(content)
    change(content)
    assert bytes(content) != before
    path.write_bytes(content)


def flip(content: bytearray, order: random.Random, start: int = 0, end: int | None = None) -> None:
    content[order.randrange(start, end or len(content))] ^= 1 << order.randrange(8)


# -- each puts one fault in and says which; None where the directory has no place for it --------------------------


def _on_record(kind: str, change: Callable[[Path, random.Random], None]) -> Callable[[Directory], str | None]:
    def inject(directory: Directory) -> str | None:
        path = directory.record()
        if path is None:
            return None
        change(path, directory.order)
        directory.hit[f"blocks/{path.name}"] = kind
        directory.lost.add(path.name)
        return kind

    return inject


def _flip_header(path: Path, order: random.Random) -> None:
    edit(path, lambda content: flip(content, order, 0, 24 + int.from_bytes(content[12:16], "little")))


def _flip_tokens(path: Path, order: random.Random) -> None:
    tokens = header_of(path).tokens
    at = path.read_bytes().index(tokens)
    edit(path, lambda content: flip(content, order, at, at + len(tokens)))


def _flip_padding(path: Path, order: random.Random) -> None:
    size = path.stat().st_size - sum(frame.length for frame in header_of(path).frames)

    def change(content: bytearray) -> None:
        flip(content, order, 24 + int.from_bytes(content[12:16], "little"), size)

    edit(path, change)


def _flip_frame(path: Path, order: random.Random) -> None:
    size = path.stat().st_size - sum(frame.length for frame in header_of(path).frames)
    edit(path, lambda content: flip(content, order, size))


def _blank(path: Path, order: random.Random) -> None:
    def change(content: bytearray) -> None:
        at = order.choice((0, len(content) - 512))
        content[at : at + 512] = bytes(512)

    edit(path, change)


def _truncate(path: Path, order: random.Random) -> None:
    os.truncate(path, order.randrange(path.stat().st_size))


def _append(path: Path, order: random.Random) -> None:
    edit(path, lambda content: content.extend(order.randbytes(order.choice((1, 512, 4096)))))


def _missing_frames(path: Path, order: random.Random) -> None:
    frames = header_of(path).frames
    rewrite(path, {"frames": frames[: order.randrange(len(frames))]})


def _wrong_parent(path: Path, order: random.Random) -> None:
    rewrite(path, {"parent_key": order.randbytes(32)})


def _foreign_identity(path: Path, _: random.Random) -> None:
    digests = [identity(name).digest() for name in OWNERS]
    digests.remove(header_of(path).identity)
    rewrite(path, {"identity": digests[0]})


def _other_tokens(path: Path, order: random.Random) -> None:
    tokens = bytearray(header_of(path).tokens)
    tokens[order.randrange(len(tokens)) // 4 * 4] ^= 1
    rewrite(path, {"tokens": bytes(tokens)})


def _other_position(directory: Directory) -> str | None:
    names = {header_of(directory.path / "blocks" / name).key for name in directory._free}
    path = directory.record(lambda header: header.exact and header.parent_key in names)
    if path is None:
        return None
    header = header_of(path)
    if not directory.sound(header.parent_key):
        return None
    rewrite(path, {"start": header.start + 16 * directory.order.randrange(1, 9)})
    directory._free.remove(header.parent_key[:16].hex())  # a bad parent says nothing about its child
    directory.hit[f"blocks/{path.name}"] = "position"
    directory.lost.add(path.name)
    return "position"


def _exchange(directory: Directory) -> str | None:
    first, second = directory.record(), directory.record()
    if first is None or second is None:
        return None
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    for path in (first, second):
        directory.hit[f"blocks/{path.name}"] = "exchanged"
        directory.lost.add(path.name)
    return "exchanged"


def _duplicate(directory: Directory) -> str | None:
    path = directory.record()
    if path is None:
        return None
    copy = path.with_name(directory.order.randbytes(16).hex())
    shutil.copyfile(path, copy)
    directory.hit[f"blocks/{copy.name}"] = "duplicate"
    return "duplicate"


def _row_without_record(directory: Directory) -> str | None:
    path = directory.record()
    if path is None:
        return None
    path.unlink()
    directory.hit[f"blocks/{path.name}"] = "row without record"
    directory.lost.add(path.name)
    return "row without record"


def _record_without_row(directory: Directory) -> str | None:
    path = directory.record()
    if path is None:
        return None
    del directory.rows[header_of(path).key]
    directory.hit[f"blocks/{path.name}"] = "record without row"
    return "record without row"


def _on_row(
    kind: str, change: Callable[[Row, random.Random], dict[str, Any]], entry: str = "blocks"
) -> Callable[[Directory], str | None]:
    def inject(directory: Directory) -> str | None:
        path = directory.record()
        if path is None:
            return None
        key = header_of(path).key
        row = directory.rows[key]
        directory.rows[key] = msgspec.structs.replace(row, **change(row, directory.order))
        directory.hit[key.hex() if entry == "index" else f"blocks/{path.name}"] = kind
        return kind

    return inject


def _small_file(kind: str, find: Callable[[Path], list[Path]]) -> Callable[[Directory], str | None]:
    def inject(directory: Directory) -> str | None:
        name = ""
        for path in sorted(find(directory.path)):
            name = path.relative_to(directory.path).as_posix()
            if name not in directory.hit:
                break
        else:
            return None
        if directory.order.random() < 0.7:
            edit(path, lambda content: flip(content, directory.order))
        else:
            # By two bytes at least: a text without its line's end has lost nothing.
            os.truncate(path, directory.order.randrange(max(1, path.stat().st_size - 1)))
        directory.hit[name] = kind
        return kind

    return inject


def _stranger(directory: Directory) -> str | None:
    folder = directory.order.choice((".", "blocks", "identities"))
    path = directory.path / folder / f"holiday-{directory.order.randrange(10_000)}.jpg"
    path.write_bytes(b"jpeg")
    directory.hit[path.relative_to(directory.path).as_posix()] = "stranger"
    return "stranger"


def _nonsense_count(_: Row, order: random.Random) -> dict[str, Any]:
    return order.choice(({"hits": -1}, {"last_use": float("nan")}, {"last_use": -5.0}, {"last_use": 9e12}))


INJECTIONS: dict[str, Callable[[Directory], str | None]] = {
    "bit of a header": _on_record("bit of a header", _flip_header),
    "bit of token ids": _on_record("bit of token ids", _flip_tokens),
    "bit of padding": _on_record("bit of padding", _flip_padding),
    "bit of a frame": _on_record("bit of a frame", _flip_frame),
    "sector of zeros": _on_record("sector of zeros", _blank),
    "truncated": _on_record("truncated", _truncate),
    "appended": _on_record("appended", _append),
    "missing frames": _on_record("missing frames", _missing_frames),
    "wrong parent": _on_record("wrong parent", _wrong_parent),
    "foreign identity": _on_record("foreign identity", _foreign_identity),
    "other tokens": _on_record("other tokens", _other_tokens),
    "position": _other_position,
    "exchanged": _exchange,
    "duplicate": _duplicate,
    "row without record": _row_without_record,
    "record without row": _record_without_row,
    "row of another size": _on_row(
        "row of another size",
        lambda row, order: {"file_bytes": row.file_bytes + order.choice((-1, 1, 4096, -4096))},
    ),
    "row of nonsense counts": _on_row("row of nonsense counts", _nonsense_count, "index"),
    "row of another parent": _on_row(
        "row of another parent", lambda _, order: {"parent_key": order.randbytes(32)}
    ),
    "row of another start": _on_row("row of another start", lambda row, _: {"start": row.start + 16}),
    "row of other tokens": _on_row("row of other tokens", lambda row, _: {"tokens": row.tokens[::-1]}),
    "index damaged": _small_file("index damaged", lambda path: list((path / "index").iterdir())),
    "FORMAT damaged": _small_file("FORMAT damaged", lambda path: [path / "FORMAT"]),
    "note damaged": _small_file("note damaged", lambda path: list((path / "identities").iterdir())),
    "write count damaged": _small_file("write count damaged", lambda path: [path / "writes"]),
    "stranger": _stranger,
}
"""By kind of fault."""
