"""Windows of tokens by hash: at which places in held blocks may these few tokens stand.

A window is a fixed number of consecutive tokens. `WindowHash` hashes all windows of an array at once;
`WindowTable` holds *entries*, non-negative numbers chosen by the caller, each under the hash of its window.
Hashes only find: the caller compares tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Entries = NDArray[np.int32]


class WindowHash:
    """Rolling hash of `window` tokens, a power of two.

    A window of 2k tokens hashes to `left * m_k + right` (mod 2^64) of its halves, so that log2(window) passes
    over the whole array hash every window. The multipliers are odd and random in each process: nobody can
    prepare texts that collide.
    """

    def __init__(self, window: int) -> None:
        if window < 1 or window & (window - 1):
            raise ValueError(f"a window is a power of two, got {window}")
        self.window = window
        random = np.random.default_rng()
        passes = window.bit_length()
        self._odd = random.integers(0, 2**64, passes + 1, np.uint64) | np.uint64(1)

    def __call__(self, ids: NDArray[np.int32]) -> Hashes:
        """Hash of the window that starts at each token: uint64 [max(0, n - window + 1)], high bits the best."""
        if len(ids) < self.window:
            return np.empty(0, np.uint64)
        hashes = self._of_tokens(ids)
        for step in range(self.window.bit_length() - 1):
            hashes = hashes[: -(1 << step)] * self._odd[step + 1] + hashes[1 << step :]
        return self._mixed(hashes)

    def of(self, windows: NDArray[np.int32]) -> Hashes:
        """The same of `windows`, int32 [n, window]: uint64 [n]. Less work for windows that do not overlap."""
        hashes = self._of_tokens(windows)
        for step in range(self.window.bit_length() - 1):
            hashes = hashes[:, ::2] * self._odd[step + 1] + hashes[:, 1::2]
        return self._mixed(hashes[:, 0])

    def _of_tokens(self, ids: NDArray[np.int32]) -> Hashes:
        hashes: Hashes = ids.astype(np.uint64) * self._odd[0]
        hashes ^= hashes >> np.uint64(32)
        return hashes

    def _mixed(self, hashes: Hashes) -> Hashes:
        hashes = hashes ^ (hashes >> np.uint64(32))
        hashes *= self._odd[-1]
        return hashes


class WindowTable:
    """Entries 0..capacity-1 by hash. Entries of equal hash are copies, ranked newest first.

    How: each bucket chains one entry, the newest, of each hash in it (`_next`); from there the older entries
    of the same hash follow in a list of their own (`_older`, `_newer`). So a hash is found in a few steps,
    however many copies another has.

    Links are entry + 1, and 0 for none: memory that comes zeroed is taken by the system only where it is used.
    """

    def __init__(self) -> None:
        self._hash = np.empty(0, np.uint64)
        self._next = np.empty(0, np.int32)
        self._older = np.empty(0, np.int32)
        self._newer = np.empty(0, np.int32)
        self._newest = np.zeros(1, np.int32)  # by bucket
        self._bits = 0

    def grow(self, capacity: int) -> None:
        """Allow entries up to `capacity`, and have two to four times as many buckets. Takes longer the more is held."""
        link = self._newest[self._newest > 0]
        chains = [link]
        while len(link):
            link = self._next[link - 1]
            link = link[link > 0]
            chains.append(link)
        newest = np.concatenate(chains)
        held = len(self._hash)
        for name in ("_hash", "_next", "_older", "_newer"):
            old = getattr(self, name)
            new = np.empty(capacity, old.dtype)
            new[:held] = old
            setattr(self, name, new)
        self._bits = (capacity - 1).bit_length() + 1
        self._newest = np.zeros(1 << self._bits, np.int32)
        buckets = self._buckets(self._hash[newest - 1])
        order = np.argsort(buckets)
        self._chain(newest[order], buckets[order])

    def add(self, entry: int, value: int) -> None:
        """Hold a free `entry` under hash `value`, as the newest of its copies."""
        before, same = self._search(value)
        link = entry + 1
        self._hash[entry] = value
        self._newer[entry] = 0
        self._older[entry] = same
        if same:
            self._newer[same - 1] = link
            self._next[entry] = self._next[same - 1]
            self._follow(value, before, link)
        else:
            bucket = self._bucket(value)
            self._next[entry] = self._newest[bucket]
            self._newest[bucket] = link

    def fill(self, entries: Entries, hashes: Hashes) -> None:
        """As `add` of entries[i] under hashes[i] one after the other, to a table that holds none; far cheaper."""
        order = np.argsort(hashes, kind="stable")  # by hash is by bucket, too, and the oldest copy first
        values, links = hashes[order], entries[order] + 1
        same = values[1:] == values[:-1]
        older, newer = np.zeros(len(links), np.int32), np.zeros(len(links), np.int32)
        older[1:][same] = links[:-1][same]
        newer[:-1][same] = links[1:][same]
        self._hash[links - 1] = values
        self._older[links - 1] = older
        self._newer[links - 1] = newer
        newest = links[newer == 0]
        self._chain(newest, self._buckets(values[newer == 0]))

    def discard(self, entry: int) -> None:
        """Free a held `entry`."""
        newer, older = int(self._newer[entry]), int(self._older[entry])
        if older:
            self._newer[older - 1] = newer
        if newer:
            self._older[newer - 1] = older
            return
        value = int(self._hash[entry])
        before, _ = self._search(value)
        after = int(self._next[entry])
        if older:
            self._next[older - 1] = after
            after = older
        self._follow(value, before, after)

    def find(self, hashes: Hashes) -> tuple[NDArray[np.intp], Entries]:
        """(i, entry) for each hashes[i] that is held, with the newest entry of that hash, in no order."""
        link = self._newest[self._buckets(hashes)]
        at = np.flatnonzero(link > 0)
        entries = link[at] - 1
        found = [(at[:0], entries[:0])]
        while len(at):
            same = self._hash[entries] == hashes[at]
            found.append((at[same], entries[same]))
            other = ~same
            link = self._next[entries[other]]
            more = link > 0
            at, entries = at[other][more], link[more] - 1
        return np.concatenate([i for i, _ in found]), np.concatenate([entry for _, entry in found])

    def older(self, entries: Entries) -> Entries:
        """The next older copy of each of these held entries; negative where there is none."""
        return self._older[entries] - 1

    def _chain(self, newest: NDArray[np.int32], buckets: NDArray[np.int64]) -> None:
        """Let each of these links, in the order of their buckets, be in its bucket, and nothing else."""
        starts = np.diff(buckets, prepend=-1) > 0
        self._next[newest - 1] = np.where(np.append(starts[1:], True), 0, np.roll(newest, -1))
        self._newest[buckets[starts]] = newest[starts]

    def _buckets(self, hashes: Hashes) -> NDArray[np.int64]:
        return (hashes >> np.uint64(64 - self._bits)).astype(np.int64)

    def _bucket(self, value: int) -> int:
        return value >> (64 - self._bits)

    def _search(self, value: int) -> tuple[int, int]:
        """Links: to what precedes the newest entry of this hash in its bucket, and to that entry; 0 for none."""
        before, link = 0, int(self._newest[self._bucket(value)])
        while link and int(self._hash[link - 1]) != value:
            before, link = link, int(self._next[link - 1])
        return before, link

    def _follow(self, value: int, before: int, link: int) -> None:
        """Let the entry of `link` stand behind that of `before` in the bucket of this hash."""
        if before:
            self._next[before - 1] = link
        else:
            self._newest[self._bucket(value)] = link
