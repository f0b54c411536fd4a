"""Four sessions that share a system prompt, on simulated devices: policies beside published figures.

The workload is that of a scheduler walkthrough for Apple's ANE and Android's NNAPI (mvpfactory.io, 2026): four
concurrent sessions behind one system prompt of 256 tokens, and few pinned buffers, each holding a block. Its text gives
results, not the traffic; so the traffic here is made up, once for all devices and policies, from what chats look like:
think times, messages, answers, a pasted text now and then, sessions that end and others that begin. Figures are medians
over seeds.

A prompt is the whole conversation so far; its KV and that of the answer is put when the answer is complete. A block at
the end of a conversation that is not full is replaced by a fuller one with the next turn. Hits are tokens of prompts
that the NPU finds in its pinned buffers, from the start on without a gap. What is not there is computed: nothing lies
in other tiers, so that the policies alone make the difference.

per-session lru    each session finds only what it put itself, and holds a system prompt of its own
all others         one index over the tokens: the system prompt is there once

Pinned + lru and frequency-weighted lru come out even, where the publication has 12 points between them: all policies
here give up leaves first, which by itself keeps a prefix as long as anything hangs on it. Pinning adds to that only
where the system prompt would go between two sessions.

Memory is that of weights, buffers in use, and the KV of the request in flight that is not read in place; its peak is
given over the peak without a cache. The room is a ceiling that every policy reaches.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from bench.replay import made
from bench.report import Report, arguments
from bench.traces import Clock
from kvstore.pipeline.simulated import roofline
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import DEFAULT
from kvstore.prefetch.policy import Facts, Policy

SYSTEM = 256
SESSIONS = 4
CONTEXT = 2048
"""Tokens that the compiled graphs of such a device see; a session that would exceed it ends."""
HOURS = 8
GRAPH = 32
"""Tokens of the smallest graph: prefill pads what it computes to a multiple of it."""

WEIGHT_BYTES = 1.0e9  # 1.7 billion parameters of 4 bits, with scales and embeddings
TOKEN_BYTES = 56 * 1024
MEMORY_BYTES_PER_SECOND = 60e9

NONE = "none"
PER_SESSION = "per-session lru"
PUBLISHED = {
    NONE: (0, 210, 0),
    PER_SESSION: (31, 145, 18),
    "frequency-weighted lru": (54, 98, 22),
    "pinned + lru": (66, 71, 15),
}
"""Hit rate in %, mean prefill latency in ms, peak memory over that of none in %."""
POLICIES = (*PUBLISHED, DEFAULT)
"""From the last to the first, as published; ours is to be ahead of them."""
EVEN = 0.1
"""Points of hits, and percent of latency, by which two published policies may come out the other way round."""


@dataclass(frozen=True)
class Device:
    """Rules of a platform: `buffers` pinned buffers hold a block of `block_tokens` tokens each."""

    name: str
    block_tokens: int
    buffers: int
    tokens_per_second: float


_FLAGSHIP, _MID = (DEVICES[name].recompute.tokens_per_second for name in ("flagship", "mid"))
SIMULATED = (
    Device("ANE-like, 8 buffers", 256, 8, _FLAGSHIP),
    Device("ANE-like, 12 buffers", 256, 12, _FLAGSHIP),
    Device("NNAPI-like, 4 buffers", 128, 4, _MID),
    Device("NNAPI-like, 16 buffers", 128, 16, _MID),
)


class Turn(NamedTuple):
    """A request of one session: `prompt` tokens, the system prompt first; `whole` with the answer."""

    seconds: float
    session: int
    prompt: int
    whole: int


def workload(seed: int, hours: float = HOURS) -> list[Turn]:
    """Turns of four sessions at a time, in the order of time. Where one ends, another begins after a pause.

    A session has 6 turns in the mean. A message has some 40 tokens (lognormal), one in seven brings a text of 200 to
    900 along; an answer has some 120, at most 256. Between an answer and the next message lie some 40 seconds, between
    two sessions 10 minutes in the mean.
    """
    rng = random.Random(seed)
    turns, session = [], 0
    for _ in range(SESSIONS):
        now = rng.expovariate(1 / 120)
        while now < hours * 3600:
            session += 1
            tokens = SYSTEM
            for _ in range(1 + int(rng.expovariate(1 / 5.5))):
                tokens += max(4, round(rng.lognormvariate(3.7, 0.7)))
                if rng.random() < 1 / 7:
                    tokens += rng.randint(200, 900)
                prompt = tokens
                if prompt > CONTEXT - 256:
                    break
                tokens += min(256, max(8, round(rng.lognormvariate(4.8, 0.6))))
                turns.append(Turn(now, session, prompt, tokens))
                now += (tokens - prompt) / 20 + rng.lognormvariate(3.7, 0.9)
            now += rng.expovariate(1 / 600)
    return sorted(turns)


class Outcome(NamedTuple):
    """Share of prompt tokens hit in %, mean milliseconds of a prefill, peak bytes."""

    hits: float
    latency: float
    peak: float


class Replay:
    """The pinned buffers of one device under one policy; NONE is a device without a cache."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self._clock = Clock()
        self._policy: Policy | None = None if name == NONE else made(name, device.buffers, self._clock)
        self._apart = name == PER_SESSION
        self._numbers: dict[object, int] = {}
        self._tails: dict[
            int, tuple[int, int, int]
        ] = {}  # of a session: its last block, if not full; depth, tokens
        self._seconds = roofline(
            device.tokens_per_second,
            weight_bytes=WEIGHT_BYTES,
            memory_bytes_per_second=MEMORY_BYTES_PER_SECOND,
        )

    def run(self, turns: Sequence[Turn]) -> Outcome:
        hits, seconds, peak = 0, 0.0, 0.0
        for turn in turns:
            self._clock.now = turn.seconds
            held, known = self._held(turn)
            known = min(known, turn.prompt - 1)  # the first logits need a token
            hits += known
            seconds += self._seconds(-(-(turn.prompt - known) // GRAPH) * GRAPH, turn.prompt)
            self._put(turn, held, turn.prompt - known)
            buffers = 0 if self._policy is None else len(self._policy) * self.device.block_tokens
            peak = max(peak, WEIGHT_BYTES + TOKEN_BYTES * (buffers + turn.whole - known))
        asked = sum(turn.prompt for turn in turns)
        return Outcome(100 * hits / asked, 1000 * seconds / len(turns), peak)

    def _held(self, turn: Turn) -> tuple[list[int], int]:
        """The blocks of a prompt that are held, from the root on without a gap, and the tokens in them."""
        size, held = self.device.block_tokens, list[int]()
        if self._policy is None:
            return held, 0
        for depth in range(turn.prompt // size):
            block = self._block(turn.session, depth, size)
            if block not in self._policy:
                break
            held.append(block)
        known = len(held) * size
        tail, depth, tokens = self._tails.get(turn.session, (-1, -1, 0))
        if depth == len(held) and tail in self._policy:
            held.append(tail)
            known += tokens
        return held, known

    def _put(self, turn: Turn, held: list[int], computed: int) -> None:
        """Keep the whole conversation, as far as there is room or the policy makes it."""
        policy, size = self._policy, self.device.block_tokens
        if policy is None:
            return
        policy.touch(held)
        sizes = [min(size, turn.whole - start) for start in range(0, turn.whole, size)]
        path = [self._block(turn.session, depth, tokens) for depth, tokens in enumerate(sizes)]
        tail, depth, _ = self._tails.pop(turn.session, (-1, -1, 0))
        if tail not in path:
            policy.remove(tail)  # a fuller block takes its place
            held = held[:depth] if tail in held else held
        fresh = len(path) - len(held)
        saved = self._seconds(computed, turn.prompt) / computed
        refused = False
        for depth in range(len(held), len(path)):
            facts = Facts(
                parent=path[depth - 1] if depth else None,
                nbytes=size * TOKEN_BYTES,  # a buffer is taken up whole
                saved=sizes[depth] * saved,
                fresh=fresh,
                whole=sizes[depth] == size,
                session=turn.session,
                name=path[depth],
            )
            if not refused and len(policy) >= self.device.buffers:
                victim = policy.victim(lambda block: block not in path, facts)
                refused = victim is None
                if victim is not None:
                    policy.remove(victim)
            if refused:
                policy.passed(facts)
            else:
                policy.insert(path[depth], facts)
        if sizes[-1] < size:
            self._tails[turn.session] = path[-1], len(path) - 1, sizes[-1]

    def _block(self, session: int, depth: int, tokens: int) -> int:
        """The number of the block of so many tokens, `depth` blocks down a conversation."""
        end = depth * self.device.block_tokens + tokens
        owner = None if end <= SYSTEM and not self._apart else session
        return self._numbers.setdefault((owner, depth, tokens), len(self._numbers))


def measure(device: Device, seeds: Sequence[int], hours: float = HOURS) -> dict[str, list[Outcome]]:
    """Outcomes of each policy, one a seed."""
    traffic = [workload(seed, hours) for seed in seeds]
    return {name: [Replay(device, name).run(turns) for turns in traffic] for name in POLICIES}


def tabulate(report: Report, device: Device, found: dict[str, list[Outcome]]) -> None:
    rows = report.table(
        f"{device.name} of {device.block_tokens} tokens, {device.tokens_per_second:,.0f} tokens/s, simulated device",
        [
            "policy",
            "hits %",
            "prefill ms",
            "of none %",
            "peak memory %",
            "published: hits %",
            "prefill ms",
            "of none %",
            "peak memory %",
        ],
    )
    none = found[NONE]
    for name, outcomes in found.items():
        hits, latency, _ = map(statistics.median, zip(*outcomes, strict=True))
        relative = statistics.median(o.latency / n.latency for o, n in zip(outcomes, none, strict=True))
        peak = statistics.median(o.peak / n.peak for o, n in zip(outcomes, none, strict=True))
        theirs: Sequence[object] = ("", "", "", "")
        if name in PUBLISHED:
            rate, ms, memory = PUBLISHED[name]
            theirs = (rate, ms, f"{100 * ms / PUBLISHED[NONE][1]:.0f}", f"+{memory}")
        rows.append(
            (
                name,
                f"{hits:.1f}",
                f"{latency:.0f}",
                f"{100 * relative:.0f}",
                f"+{100 * peak - 100:.1f}",
                *theirs,
            )
        )


def compare(report: Report, found: dict[Device, dict[str, list[Outcome]]]) -> None:
    """Hold the order of POLICIES against the measured one, on the device where it comes out worst.

    Seeds are compared each with itself, and the median of the differences decides.
    """
    for worse, better in pairwise(POLICIES):
        points, times = {}, {}
        for device, outcomes in found.items():
            pairs = list(zip(outcomes[better], outcomes[worse], strict=True))
            points[device.name] = statistics.median(b.hits - w.hits for b, w in pairs)
            times[device.name] = statistics.median(b.latency / w.latency for b, w in pairs)
        even = EVEN if better != DEFAULT else 0.0
        least, most = min(points, key=points.__getitem__), max(times, key=times.__getitem__)
        report.bar(f"{better} over {worse}: hits ({least})", points[least], ">=", -even, "points")
        report.bar(f"{better} over {worse}: prefill ({most})", times[most], "<=", 1 + even / 100, "times")


def main() -> int:
    args = arguments(__doc__ or "", _options)
    seeds = range(args.seeds if not args.quick else 5)
    report = Report("Four sessions, one system prompt", f"simulated devices, medians of {len(seeds)} seeds")
    found = {device: measure(device, seeds) for device in SIMULATED}
    for device, outcomes in found.items():
        tabulate(report, device, outcomes)
    compare(report, found)
    return report.finish(args)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=20, help="how many workloads to take medians of")


if __name__ == "__main__":
    sys.exit(main())
