"""Pinned prefixes: what of them is held is not evicted, and that stays so across restarts.

A pin names token ids, not blocks. So it also holds for what is put later: a block that continues a pinned tail takes
its place, and one that damage took is pinned again as soon as its tokens are back. Who invalidates a prefix gets rid of
it, pinned or not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..block import Block, block_key
from ..errors import BudgetError
from ..flash.ciphers import Ciphers
from ..flash.encryption import CLEAR_BYTES, AlteredError, Cipher, OtherKeyError
from ..namespace import ROOT_KEY

log = logging.getLogger(__name__)


class Pin(msgspec.Struct, frozen=True):
    """The first tokens of prompts of one identity (its digest). `tokens` int32 little-endian.

    token_bytes: of KV. whole: the identity permits exact reuse only, so keys start from the prompt as a whole.
    """

    identity: bytes
    tokens: bytes
    token_bytes: int
    whole: bool = False

    def token_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.tokens, "<i4").astype(np.int32)


class _Piece(NamedTuple):
    """What one block of a pinned prefix holds of it."""

    identity: bytes
    parent_key: bytes
    tokens: bytes


class Pins:
    """The pins of one data directory, kept in `file` (None: in memory), at most `limit` bytes of KV in all.

    `ciphers` encrypt them, each tenant's in a file beside. Prefixes that several pins share count once. Called under
    the store's lock.
    """

    def __init__(
        self, file: Path | None, block_tokens: int, limit: int, ciphers: Ciphers | None = None
    ) -> None:
        self.limit = limit
        self._ciphers = Ciphers() if ciphers is None else ciphers
        self._file = file
        self._block_tokens = block_tokens
        self._pins: dict[tuple[bytes, bytes], Pin] = {}
        self._pieces: Counter[_Piece] = Counter()
        self._behind: dict[tuple[bytes, bytes], list[_Piece]] = {}
        self._holders: dict[_Piece, Block] = {}
        self.used = 0
        """Bytes of KV that are pinned, held or not, in whole blocks."""
        self.unlock()

    def unlock(self) -> None:
        """Read the pins of tenants whose keys came since."""
        for pin in read(self._file, self._ciphers) if self._file is not None else ():
            if (pin.identity, pin.tokens) in self._pins:
                continue
            if self.used + self._more(pin) <= self.limit:
                self._insert(pin)
            else:
                log.warning("a pin of %d tokens is left out: budgets were lowered", len(pin.tokens) // 4)

    def rewrite(self) -> None:
        """Write them under the keys that are their tenants' now. Raises OSError, EncryptionError."""
        self._write(self._pins.values())

    def __iter__(self) -> Iterator[Pin]:
        return iter(tuple(self._pins.values()))

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, pin: Pin) -> None:
        """Pin a prefix; nothing changes when it is pinned already. Raises BudgetError, OSError."""
        if (pin.identity, pin.tokens) in self._pins:
            return
        more = self._more(pin)
        if self.used + more > self.limit:
            raise BudgetError(
                f"pinning {len(pin.tokens) // 4} tokens takes {more} bytes more, {self.used} of {self.limit} are "
                "pinned already; unpin something or raise warm_bytes and cold_bytes"
            )
        self._write([*self._pins.values(), pin])
        self._insert(pin)

    def remove(self, identity: bytes, tokens: bytes) -> bool:
        """End a pin; False when there is none of these very tokens. Raises OSError."""
        pin = self._pins.get((identity, tokens))
        if pin is None:
            return False
        self._write([each for each in self._pins.values() if each is not pin])
        del self._pins[identity, tokens]
        for piece, nbytes in self._cut(pin):
            self._pieces[piece] -= 1
            if not self._pieces[piece]:
                del self._pieces[piece]
                self._holders.pop(piece, None)
                self.used -= nbytes
        self._index()
        return True

    def covers(self, block: Block) -> bool:
        """Whether a block, just made findable, is what holds part of a pinned prefix.

        Where a prefix ends inside a block, many blocks may go on from there: one of them holds it.
        """
        found = False
        if block.exact:
            held = block.tokens.astype("<i4").tobytes()
            for piece in self._behind.get((block.namespace.digest, block.parent_key), ()):
                if piece.tokens.startswith(held):
                    found = True
                elif held.startswith(piece.tokens):
                    holder = self._holders.get(piece)
                    if holder is None or not holder.namespace.holds(holder):
                        holder = self._holders[piece] = block
                    found = found or holder is block
        return found

    def _insert(self, pin: Pin) -> None:
        self._pins[pin.identity, pin.tokens] = pin
        for piece, nbytes in self._cut(pin):
            if not self._pieces[piece]:
                self.used += nbytes
            self._pieces[piece] += 1
        self._index()

    def _index(self) -> None:
        self._behind = {}
        for piece in self._pieces:
            self._behind.setdefault((piece.identity, piece.parent_key), []).append(piece)

    def _more(self, pin: Pin) -> int:
        return sum(nbytes for piece, nbytes in self._cut(pin) if not self._pieces[piece])

    def _cut(self, pin: Pin) -> Iterator[tuple[_Piece, int]]:
        """The pieces of a prefix by block, and the most bytes that a block which holds one takes."""
        ids = pin.token_ids()
        key, seed = ROOT_KEY, block_key(pin.identity, ROOT_KEY, ids) if pin.whole else pin.identity
        for at in range(0, len(ids), self._block_tokens):
            piece = ids[at : at + self._block_tokens]
            yield (
                _Piece(pin.identity, key, piece.astype("<i4").tobytes()),
                self._block_tokens * pin.token_bytes,
            )
            key = block_key(seed, key, piece)

    def _write(self, pins: Iterable[Pin]) -> None:
        if self._file is None:
            return
        sorted_out: dict[Cipher | None, list[Pin]] = {cipher: [] for cipher in self._ciphers.all()}
        for pin in pins:
            sorted_out.setdefault(self._ciphers.of(pin.identity), []).append(pin)
        for cipher, its_pins in sorted(
            sorted_out.items(), key=lambda each: not each[1]
        ):  # none is ever in no file
            file = file_under(self._file, cipher)
            if its_pins:
                write(file, its_pins, cipher)
            else:
                file.unlink(missing_ok=True)


def file_under(file: Path, cipher: Cipher | None) -> Path:
    """Where the pins under a cipher lie; `file` is where those in clear do."""
    return file if cipher is None else file.with_name(f"{file.name}.{cipher.id.hex()}")


def write(file: Path, pins: Iterable[Pin], cipher: Cipher | None = None) -> None:
    """Keep pins in a file. Raises OSError."""
    content = msgspec.msgpack.encode(list(pins))
    if cipher is not None:
        content = cipher.seal(content)
    scratch = file.with_suffix(".tmp")
    scratch.write_bytes(xxhash.xxh3_64_digest(content) + content)
    scratch.rename(file)


def read(file: Path, ciphers: Ciphers) -> list[Pin]:
    """The pins kept in `file` and beside it; none of one that is missing or damaged, which is logged."""
    found: dict[tuple[bytes, bytes], Pin] = {}
    for cipher in ciphers.all():
        path = file_under(file, cipher)
        try:
            pins = check(path, ciphers)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            log.warning("%s is not used, nothing is pinned: %s", path, error)
            continue
        found |= {(pin.identity, pin.tokens): pin for pin in pins if ciphers.permits(pin.identity, cipher)}
    return list(found.values())


def check(file: Path, ciphers: Ciphers) -> list[Pin]:
    """Those of one file. Raises OSError, and ValueError for a damaged file."""
    content = file.read_bytes()
    if xxhash.xxh3_64_digest(content[8:]) != content[:8]:
        raise ValueError("its checksum does not fit")
    content = content[8:]
    if file.suffix:
        try:
            content = ciphers.unsealing(content[:CLEAR_BYTES])[0].open(content)
        except (OtherKeyError, AlteredError) as error:
            raise ValueError("it is not what was written under this key") from error
    return msgspec.msgpack.decode(content, type=list[Pin])
