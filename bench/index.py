"""What finding costs: the trie beside chains of block hashes, and the chunk table.

Token ids are made up, since only their number and the shape of the sharing matter: a few system prompts,
single questions that fan out from each, conversations that go on and fork. Prompts of 8,192 tokens are looked
up in three kinds: held whole, diverging at a random token, and begun by nothing held.

Hash chains are what server-side stores use: the key of a block is a hash of its tokens and its parent's key,
in one dictionary. They match whole blocks only, and trust the hash.

The chunk table is asked for prompts of passages that are held elsewhere, with new text between them (about nine
tenths are held), for prompts held whole, for new ones, and for texts made to be costly: one token repeated, and
one passage that stands in hundreds of blocks. A store fills it at once, by the first look-up that asks for moved
runs; that is timed beside insertions one by one.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from bench.report import Report, arguments
from kvstore.index.chunks import ChunkTable, Held
from kvstore.index.trie import Trie

BLOCK = 128
PROMPT = 8192
VOCABULARY = 150_000
SHARED = 40
Tokens = NDArray[np.int32]


class Block(NamedTuple):
    number: int
    tokens: Tokens
    parent: int | None


def traffic(rng: np.random.Generator, count: int) -> Iterator[Block]:
    """`count` blocks, numbered from 0, in an order in which a store may meet them."""
    systems: list[tuple[int, Tokens]] = []  # last full block, tokens behind it
    full: list[int] = []
    depth: dict[int, int] = {}
    number = 0
    while True:
        kind = rng.random()
        above: int | None = None
        rest = np.empty(0, np.int32)
        if len(systems) < 8:
            new = int(rng.integers(2 * BLOCK, 10 * BLOCK))  # a system prompt, with something behind it
        elif kind < 0.7:
            above, rest = systems[min(int(rng.zipf(1.5)) - 1, 7)]
            new = int(rng.integers(20, 3 * BLOCK)) if kind < 0.4 else int(rng.integers(1, PROMPT))
        else:
            above = full[rng.integers(len(full))]  # fork from an earlier conversation
            new = PROMPT
        begun = 0 if above is None else depth[above] + 1
        tokens = np.concatenate([rest, rng.integers(0, VOCABULARY, new, dtype=np.int32)])
        tokens = tokens[: PROMPT - begun * BLOCK]
        for at in range(0, len(tokens), BLOCK):
            piece = tokens[at : at + BLOCK]
            if len(systems) < 8 and len(piece) < BLOCK:
                systems.append((number - 1, piece))
                break
            yield Block(number, piece, above)
            above = number
            if len(piece) == BLOCK:
                full.append(number)
                depth[number] = begun + at // BLOCK
            number += 1
            if number == count:
                return


def fan_out(rng: np.random.Generator, count: int) -> Iterator[Block]:
    """`count` prompts that share their first `SHARED` tokens and then differ, all within the first block."""
    shared = rng.integers(0, VOCABULARY, SHARED, dtype=np.int32)
    for number in range(count):
        tail = rng.integers(0, VOCABULARY, BLOCK - SHARED, dtype=np.int32)
        yield Block(number, np.concatenate([shared, tail]), None)


class Chains:
    """Keys of blocks by a hash chain, in one dictionary."""

    def __init__(self, digest: Callable[[bytes], bytes]) -> None:
        self._digest = digest
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def insert(self, block: int, tokens: Tokens, parent: int | None) -> None:
        above = b"" if parent is None else self._keys[parent]
        self._keys[block] = key = self._digest(above + tokens.tobytes())
        self._blocks[key] = block

    def lookup(self, tokens: Tokens) -> list[int]:
        prompt, width, key = tokens.tobytes(), BLOCK * tokens.itemsize, b""
        found: list[int] = []
        for at in range(0, len(prompt), width):
            key = self._digest(key + prompt[at : at + width])
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found


def xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def path_tokens(trie: Trie, block: int) -> Tokens:
    parts = []
    at: int | None = block
    while at is not None:
        parts.append(trie.tokens(at))
        at = trie.parent(at)
    return np.concatenate(parts[::-1])


def requests(trie: Trie, rng: np.random.Generator, count: int) -> dict[str, list[Tokens]]:
    """`count` prompts of each kind."""
    ends = [leaf for leaf in trie.leaves() if trie.start(leaf) + len(trie.tokens(leaf)) == PROMPT]
    whole = [path_tokens(trie, ends[i]) for i in rng.integers(len(ends), size=count)]
    diverging = [tokens.copy() for tokens in whole]
    for tokens in diverging:
        tokens[rng.integers(PROMPT) :] += 1
    return {
        "held whole": whole,
        "diverging": diverging,
        "not held": [rng.integers(0, VOCABULARY, PROMPT, dtype=np.int32) for _ in range(count)],
    }


def seconds(calls: Iterable[Callable[[], object]]) -> NDArray[np.float64]:
    """Wall time of each call."""
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return np.array(times)


def least_seconds(calls: list[Callable[[], object]]) -> NDArray[np.float64]:
    """Wall time of each call, the least of three rounds: a busy machine takes the core away for milliseconds."""
    least: NDArray[np.float64] = np.min([seconds(calls) for _ in range(3)], axis=0)
    return least


def micros(times: NDArray[np.float64]) -> tuple[float, float]:
    """Median and 99th percentile in µs."""
    p50, p99 = np.percentile(times, (50, 99)) * 1e6
    return float(p50), float(p99)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def overhead(
    index: Callable[[], Trie | ChunkTable],
    blocks: Callable[[np.random.Generator, int], Iterator[Block]],
    count: int,
) -> float:
    """Bytes a block beyond its tokens, at 4 bytes a token. In a process of its own: memory freed hides growth."""
    made, tokens = index(), 0
    before = resident_bytes()
    for block in blocks(np.random.default_rng(1), count):
        made.insert(*block)
        tokens += len(block.tokens)
    return (resident_bytes() - before - 4 * tokens) / len(made)


def measure_memory(report: Report, count: int) -> None:
    rows = report.table("Memory beyond 4 bytes a token", ["index", "traffic", "blocks", "bytes a block"])
    for name, index, blocks, shape in (
        ("trie", partial(Trie, BLOCK), traffic, "conversations"),
        ("trie", partial(Trie, BLOCK), fan_out, "fan-out of one node"),
        ("chunk table", partial(ChunkTable, BLOCK), traffic, "conversations"),
    ):
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            extra = fresh.apply(overhead, (index, blocks, count))
        rows.append((name, shape, count, extra))
        if name == "trie":
            report.bar(f"trie beyond tokens, {shape}, {count:,} blocks", extra, "<=", 1024, "bytes a block")


def measure_trie(report: Report, sizes: tuple[int, ...], repeats: int) -> None:
    lookups = report.table(
        "Look up 8,192 tokens, in µs",
        ["prompt", "blocks", "trie p50", "p99", "xxh3 chain p50", "p99", "blake2b chain p50", "p99"],
    )
    changes = report.table(
        "Change the trie, in µs a block",
        ["traffic", "blocks", "insert p50", "p99", "mean", "remove p50", "p99", "mean"],
    )
    for count in sizes:
        rng = np.random.default_rng(2)
        trie, weak, strong = Trie(BLOCK), Chains(xxh3), Chains(blake2b)
        times = []
        for block in traffic(np.random.default_rng(1), count):
            times.append(seconds([partial(trie.insert, *block)])[0])
            weak.insert(*block)
            strong.insert(*block)
        inserting = np.array(times)
        for kind, asked in requests(trie, rng, repeats).items():
            ours, theirs, safe = (
                micros(least_seconds([partial(index.lookup, tokens) for tokens in asked]))
                for index in (trie, weak, strong)
            )
            lookups.append((kind, count, *ours, *theirs, *safe))
            if kind == "held whole" and count == sizes[0]:
                report.bar(f"8,192-token lookup, {count:,} blocks, p50", ours[0], "<=", 100, "µs")
            if kind == "held whole" and count == sizes[-1]:
                report.bar(f"8,192-token lookup, {count:,} blocks, p99", ours[1], "<=", 1000, "µs")
        del weak, strong
        leaves = rng.permutation(list(trie.leaves()))[: 10 * repeats].tolist()
        removing = seconds(partial(trie.remove, leaf) for leaf in leaves)
        row = (*micros(inserting), inserting.mean() * 1e6, *micros(removing), removing.mean() * 1e6)
        changes.append(("conversations", count, *row))

        trie = Trie(BLOCK)
        inserting = seconds(
            partial(trie.insert, *block) for block in fan_out(np.random.default_rng(1), count)
        )
        asked = [np.resize(trie.tokens(int(i)), PROMPT) for i in rng.integers(count, size=repeats)]
        for tokens in asked:
            tokens[int(rng.integers(SHARED, BLOCK)) :] += 1
        ours = micros(least_seconds([partial(trie.lookup, tokens) for tokens in asked]))
        lookups.append(("diverging in a fan-out", count, *ours, "", "", "", ""))
        removing = seconds(partial(trie.remove, int(i)) for i in rng.permutation(count)[: 10 * repeats])
        row = (*micros(inserting), inserting.mean() * 1e6, *micros(removing), removing.mean() * 1e6)
        changes.append(("fan-out of one node", count, *row))
        del trie


def passages(held: Tokens, rng: np.random.Generator, length: int) -> Tokens:
    """Stretches of 60..400 held tokens with up to 60 new ones between them."""
    parts: list[Tokens] = []
    total = 0
    while total < length:
        at = int(rng.integers(len(held) - 400))
        parts.append(held[at : at + int(rng.integers(60, 400))])
        parts.append(rng.integers(0, VOCABULARY, int(rng.integers(60)), dtype=np.int32))
        total += len(parts[-1]) + len(parts[-2])
    return np.concatenate(parts)[:length]


def fill_seconds(count: int) -> float:
    """What it takes to make a table of `count` blocks, the least of three."""
    depth: list[int] = []
    held = []
    for number, tokens, parent in traffic(np.random.default_rng(1), count):
        depth.append(0 if parent is None else depth[parent] + 1)
        held.append(Held(number, tokens, parent, depth[number] * BLOCK))
    least = np.inf
    for _ in range(3):
        started = time.perf_counter()
        ChunkTable(BLOCK, room=2 * count).fill(held)
        least = min(least, time.perf_counter() - started)
    return float(least)


def measure_chunks(report: Report, count: int, repeats: int) -> None:
    lookups = report.table(
        "Find moved runs, in ms",
        ["prompt", "tokens", "blocks", "p50", "p99", "runs", "covered", "sources a run"],
    )
    changes = report.table(
        "Change the chunk table, in µs a block",
        ["blocks", "insert p50", "p99", "mean", "filled at once", "remove p50", "p99", "mean"],
    )
    rng = np.random.default_rng(3)
    filling = fill_seconds(count)
    table = ChunkTable(BLOCK, room=count + 1000)
    inserting = seconds(partial(table.insert, *block) for block in traffic(np.random.default_rng(1), count))
    held = np.concatenate([block.tokens for block in traffic(np.random.default_rng(1), min(count, 40_000))])
    repeated = np.full(BLOCK, 7, np.int32)
    common = rng.integers(0, VOCABULARY, BLOCK, dtype=np.int32)
    for number in range(count, count + 1000, 2):
        table.insert(number, repeated, number - 2 if number > count else None)
        table.insert(number + 1, common)
    for length, limit in ((PROMPT, 3), (4 * PROMPT, 10)):
        worst = 0.0
        for kind, make in (
            ("moved passages", lambda n: passages(held, rng, n)),
            ("held whole", lambda n: held[(at := int(rng.integers(len(held) - n))) : at + n]),
            ("not held", lambda n: rng.integers(0, VOCABULARY, n, dtype=np.int32)),
            ("one token repeated", lambda n: np.resize(repeated, n)),
            ("one passage repeated", lambda n: np.resize(common, n)),
        ):
            asked = [make(length) for _ in range(repeats)]
            p50, p99 = micros(least_seconds([partial(table.find, tokens) for tokens in asked]))
            runs = table.find(asked[-1])
            covered = sum(run.length for run in runs) / length
            sources = float(np.mean([len(run.sources) for run in runs])) if runs else 0.0
            lookups.append((kind, length, len(table), p50 / 1e3, p99 / 1e3, len(runs), covered, sources))
            if "repeated" not in kind:
                worst = max(worst, p50 / 1e3)
        report.bar(f"chunk lookup of {length:,} tokens, {count:,} blocks, p50", worst, "<=", limit, "ms")
    numbers = rng.permutation(count)[: 100 * repeats].tolist()
    removing = seconds(partial(table.remove, number) for number in numbers)
    row = (*micros(inserting), inserting.mean() * 1e6, filling / count * 1e6)
    changes.append((count, *row, *micros(removing), removing.mean() * 1e6))
    report.bar(f"filling a chunk table with {count:,} blocks at once", filling, "<=", count / 100_000, "s")


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("Index", f"block of {BLOCK} tokens, made-up traffic, all in RAM")
    sizes = (20_000,) if args.quick else (200_000, 1_000_000)
    measure_trie(report, sizes, 300 if args.quick else 3000)
    measure_chunks(report, sizes[0], 30 if args.quick else 100)
    measure_memory(report, sizes[0])
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
