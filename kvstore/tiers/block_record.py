"""A block's record on flash, opened: nothing of it is read before it is known to be this block's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..block import Block
from ..flash.cold import ColdTier
from ..flash.record import BadRecordError, RecordReader


def open_record(
    cold: ColdTier, block: Block, lock: AbstractContextManager[Any], *, ahead: bool = False
) -> RecordReader:
    """Open a block's record and check that it is this block. Raises BadRecordError.

    ahead: its first frame is read next, so it comes with the header, in one read.
    Called outside the store's lock, on a leased block; `lock` is that lock.
    """
    try:
        reader = _reader(cold, block, ahead)
    except BadRecordError:
        with lock:  # it may have been set aside just then, which happens under the lock
            reader = _reader(cold, block, ahead)
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


def _reader(cold: ColdTier, block: Block, ahead: bool) -> RecordReader:
    nbytes = block.head_bytes if ahead else 0
    return cold.reader_aside(block.number, nbytes) if block.aside else cold.reader(block.key, nbytes)
