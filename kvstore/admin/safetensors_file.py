"""Tensors in one file, in the safetensors format (huggingface.co/docs/safetensors, "Format").

    8 bytes    length of the header, little-endian
    header     JSON: name -> {dtype, shape, data_offsets}, and "__metadata__": name -> text
    data       the tensors one after the other, C order, little-endian

Written piece by piece and read through a map, so that a file may be larger than memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

_ITEM_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_METADATA = "__metadata__"
_ALIGNMENT = 8  # of the data, as the format asks
_MOST_HEADER = 100_000_000  # bytes, as the format's own reader has it


class SafetensorsError(ValueError):
    """A file that is not in the format."""


class Tensor(NamedTuple):
    """One tensor of a file: dtype as the format calls it, and where its bytes lie in the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _ITEM_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    data: Iterator[bytes | memoryview],
) -> int:
    """Write a new file; its bytes. `data`: pieces that are all tensors, one after the other, in their order.

    It takes its name when it is complete and on the medium. Raises FileExistsError, OSError.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten; give another name")
    header: dict[str, object] = {_METADATA: dict(metadata)}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    packed = msgspec.json.encode(header)
    packed += b" " * (-len(packed) % _ALIGNMENT)
    scratch = path.with_name(path.name + ".tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(len(packed).to_bytes(8, "little") + packed)
            written = sum(file.write(piece) for piece in data)
            if written != at:
                raise AssertionError(f"{written} bytes of tensors instead of {at}")
            file.flush()
            os.fsync(file.fileno())
        os.link(scratch, path)  # fails where a file of this name appeared meanwhile
    finally:
        scratch.unlink(missing_ok=True)
    return 8 + len(packed) + at


class SafetensorsFile:
    """Reads a file. Raises SafetensorsError for anything that is not in the format; OSError."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MOST_HEADER, size - 8):
                raise SafetensorsError(f"{path} is not in the safetensors format, or is truncated")
            try:
                parts = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
                self.metadata = msgspec.json.decode(parts.pop(_METADATA, b"{}"), type=dict[str, str])
                described = {name: msgspec.json.decode(part, type=_Described) for name, part in parts.items()}
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SafetensorsError(f"{path} has a header that cannot be read: {error}") from error
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data = np.frombuffer(self._map, np.uint8)[8 + length :]
        self.tensors: dict[str, Tensor] = {}
        for name, each in described.items():
            start, end = each.data_offsets
            fits = each.dtype in _ITEM_BYTES and min(each.shape, default=1) >= 0
            if (
                not fits
                or not 0 <= start <= end <= len(self._data)
                or end - start != nbytes(each.dtype, each.shape)
            ):
                raise SafetensorsError(
                    f"{path}: tensor {name} is described wrongly, or the file is truncated"
                )
            self.tensors[name] = Tensor(each.dtype, each.shape, start, end)
        if sum(each.end - each.start for each in self.tensors.values()) != len(self._data):
            raise SafetensorsError(f"{path} holds other bytes than those of its tensors")

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [n], read-only."""
        tensor = self.tensors[name]
        return self._data[tensor.start : tensor.end]
