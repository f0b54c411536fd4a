"""What looking costs: pages of a list of 100,000 blocks, in an open store and in a directory that nobody has open.

Blocks hold no KV here, since only their number matters. Token ids and the shape of the sharing are made up: prompts of
eight blocks, of which every fourth begins like another one.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.report import Report, arguments
from kvstore.admin.administration import Administration
from kvstore.admin.bare_directory import BareDirectory
from kvstore.admin.held import Held
from kvstore.admin.listing import Order
from kvstore.block import Block, block_key
from kvstore.directory import DataDirectory
from kvstore.flash.cold_index import ColdIndex
from kvstore.identity import Identity
from kvstore.layout import Layout
from kvstore.open_directory import OpenDirectory
from kvstore.profile import Profile

_TOKENS = 128
_PROMPT = 8
_MOST_SECONDS = 0.5
_ORDERS: tuple[Order, ...] = ("key", "recent", "hits", "size")

_IDENTITY = Identity(
    weights="00" * 32,
    tokenizer="00" * 32,
    quantisation="none",
    layout=Layout.uniform(layers=1, kv_heads=1, head_dim=2, rope=None),
)


def blocks(opened: OpenDirectory, count: int) -> None:
    """Hold `count` blocks without KV."""
    rng = np.random.default_rng(0)
    digest = _IDENTITY.digest()
    space = opened.tiers.namespace(digest)
    space.open(_IDENTITY, 1)
    parent, first, held = b"", b"", 0
    while held < count:
        tokens = rng.integers(0, 50_000, _TOKENS).astype(np.int32)
        at = held % _PROMPT
        if at == 0:
            parent = first if held % (4 * _PROMPT) == 0 and first else b""
        block = Block(
            number=opened.tiers.new_number(),
            key=block_key(digest, parent, tokens),
            parent_key=parent,
            namespace=space,
            tokens=tokens,
            start=0 if not parent else (at or 1) * _TOKENS,
            nbytes=0,
            cold_bytes=4096,
            hits=int(rng.integers(0, 100)),
            last_use=float(rng.integers(1, 1_000_000)),
        )
        space.add(block)
        opened.tiers.blocks[block.number] = block
        parent = block.key
        first = first or parent
        held += 1


def pages(held: Held, order: Order, most: int) -> list[float]:
    """Seconds of each of the first `most` pages of 100 blocks."""
    times, after = list[float](), None
    for _ in range(most):
        started = time.perf_counter()
        page = held.ls(order=order, after=after, limit=100)
        times.append(time.perf_counter() - started)
        after = page.after
    return times


def main() -> int:
    args = arguments("pages of a list of 100,000 blocks")
    count = 10_000 if args.quick else 100_000
    report = Report("Pages of a list of blocks", "index on flash, in the page cache")
    rows = report.table(
        "seconds a page of 100 blocks",
        ("target", "order", "blocks", "first look", "median", "worst"),
    )
    with tempfile.TemporaryDirectory() as folder:
        opened = OpenDirectory(
            None, Profile(block_tokens=_TOKENS, hot_bytes=0, warm_bytes=1 << 20, cold_bytes=0)
        )
        blocks(opened, count)
        path = Path(folder) / "kv"
        directory = DataDirectory(path, _TOKENS)
        ColdIndex(directory.index).write(opened.tiers.rows())
        for block in opened.tiers.blocks.values():
            directory.block_file(block.key).touch()
        directory.close()
        for name, make in _targets(opened, path):
            started = time.perf_counter()
            held = make()
            held.entries()
            opening = time.perf_counter() - started
            for order in _ORDERS:
                times = pages(held, order, 5 if args.quick else 20)
                rows.append((name, order, count, opening, sorted(times)[len(times) // 2], max(times)))
                report.bar(
                    f"median page, {name}, {order}", sorted(times)[len(times) // 2], "<=", _MOST_SECONDS, "s"
                )
        opened.close()
    return report.finish(args)


def _targets(opened: OpenDirectory, path: Path) -> list[tuple[str, Callable[[], Held]]]:
    return [("open store", lambda: Administration(opened)), ("directory", lambda: BareDirectory(path))]


if __name__ == "__main__":
    sys.exit(main())
