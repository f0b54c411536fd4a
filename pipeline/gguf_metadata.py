"""The metadata of a GGUF file as a plain dict.

Only the key-value section is read, in one pass: 0.1 s for a vocabulary of 49,000 tokens and its merges, where the
`gguf` package, made for tensors and for editing in place, takes seconds. Format: GGUF versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from os import PathLike
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is no GGUF, one of another version, or cut short."""


def read_metadata(path: str | PathLike[str]) -> dict[str, Any]:
    """Every key of the GGUF at `path`: int, float, bool and str as such, arrays as lists of these.

    Raises GgufError, which names the file, and OSError.
    """
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # mmap refuses an empty file
            raise GgufError(f"{path} is empty, not a GGUF file") from error
        with data:
            try:
                return _Cursor(data).metadata()
            except (GgufError, struct.error, UnicodeDecodeError) as error:
                raise GgufError(f"{path}: {error}") from error


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._bytes(4) != b"GGUF":
            raise GgufError("not a GGUF file: it starts with other bytes than GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise GgufError(f"GGUF version {version}; versions 2 and 3, little-endian, can be read")
        self._number("Q")  # of tensors
        return {self._string(): self._value(self._number("I")) for _ in range(self._number("Q"))}

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise GgufError(f"unknown value type {kind} at byte {self._at}")
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(count)]
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{count}{code}", self._bytes(count * struct.calcsize(code))))

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """As `count` times _string, without the calls: vocabulary and merges are nearly all there is to read."""
        data, at = self._data, self._at
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > len(data):
                raise GgufError(f"cut short: a string ends at byte {at}, the file at {len(data)}")
            strings.append(data[start:at].decode("utf-8"))
        self._at = at
        return strings

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _bytes(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise GgufError(f"cut short: {count} bytes are missing from byte {self._at} on")
        self._at += count
        return taken
