"""A block's record on flash, opened: nothing of it is read before it is known to be this block's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..block import Block
from ..flash.cold import ColdTier
from ..flash.record import BadRecordError, RecordReader


def open_record(cold: ColdTier, block: Block, lock: AbstractContextManager[Any]) -> RecordReader:
    """Open a block's record and check that it is this block. Raises BadRecordError.

    Called outside the store's lock, on a leased block; `lock` is that lock.
    """
    try:
        reader = _reader(cold, block)
    except BadRecordError:
        with lock:  # it may have been set aside just then, which happens under the lock
            reader = _reader(cold, block)
    header = reader.header
    for reason, same in (
        ("identity", header.identity == block.namespace.digest),
        ("key", header.key == block.key and header.parent_key == block.parent_key),
        ("exactness", header.exact == block.exact),
        ("position", header.start == block.start),
        ("tokens", np.array_equal(header.token_ids(), block.tokens)),
        ("shape", sum(frame.raw_length for frame in header.frames) == block.nbytes),
        ("codec", header.lossless or block.namespace.codec != "lossless"),
    ):
        if not same:
            reader.close()
            raise BadRecordError(reason, f"block {block.key.hex()[:16]}")
    return reader


def _reader(cold: ColdTier, block: Block) -> RecordReader:
    return cold.reader_aside(block.number) if block.aside else cold.reader(block.key)
