"""Traces of which blocks requests ask for, over time: real ones from a data folder, else made up.

A block is known by a number that stands for its tokens and all that precede them, so a request is a path of blocks
from the root, and every block has one parent. Streams of text are cut into blocks of 128 tokens, a word or punctuation
mark being 1.3 of them; only full blocks count there.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

WORDS_A_BLOCK = 98  # 128 tokens
TOKEN_BYTES = 56 * 1024  # of KV: Qwen3-1.7B, int8
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


class Request(NamedTuple):
    """`path`: block numbers from the root; `tokens`: of the whole prompt, of which the last block may hold fewer."""

    seconds: float
    path: tuple[int, ...]
    tokens: int
    session: int


@dataclass(frozen=True)
class Trace:
    name: str
    block_tokens: int
    requests: list[Request]

    @cached_property
    def unique(self) -> int:
        return len({block for request in self.requests for block in request.path})

    def block_sizes(self, request: Request) -> list[int]:
        """Tokens of each block of the request's path."""
        whole = self.block_tokens
        return [min(whole, request.tokens - at * whole) for at in range(len(request.path))]


class Clock:
    """The time of a trace."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def traces(data: Path | None, *, quick: bool = False) -> list[Trace]:
    """All traces of the eviction benchmark; `quick` takes a part of each that is long."""
    if data is None:
        return [assistant(requests=2000 if quick else 12_000), chat_service(3000 if quick else 12_000)]
    some = 3000 if quick else None
    return [
        mooncake(data, "conversation", some),
        mooncake(data, "synthetic", 1500 if quick else None),
        agents(data, sessions=30 if quick else 120),
        dialogues(data),
        meetings(data),
    ]


def mooncake(data: Path, name: str, count: int | None = None) -> Trace:
    """Many users of a chat service (conversation) or long documents (synthetic); blocks of 512 tokens."""
    rows = [json.loads(line) for line in _lines(data / "mooncake" / f"{name}_trace.jsonl", count)]
    paths = [tuple(row["hash_ids"]) for row in rows]
    return Trace(
        f"mooncake {name}",
        512,
        [
            Request(row["timestamp"] / 1e3, path, row["input_length"], session)
            for row, path, session in zip(rows, paths, _sessions(paths), strict=True)
        ],
    )


def agents(data: Path, sessions: int) -> Trace:
    """Coding assistants on one device: sessions that start 20 minutes apart in the mean.

    Contexts are an eighth of what was recorded: an id of 64 tokens stands for 8, and a block is 16 ids. Only sessions
    of 10 to 60 requests and at most 128 k recorded tokens. Sessions with tools and a system prompt of equal lengths
    share them (an assumption: the texts are not known).
    """
    rng = random.Random(5)
    chosen = []
    for part in (1, 2):
        for line in _lines(data / "agentic-coding" / f"sessions_rle_part{part}.jsonl"):
            row = json.loads(line)
            if 10 <= len(row["requests"]) <= 60 and max(r["in"] for r in row["requests"]) <= 131_072:
                chosen.append(row)
    rng.shuffle(chosen)
    start, found = 0.0, []
    numbers = _Numbers()
    for session, row in enumerate(chosen[:sessions]):
        head = row["tool_tokens"], row["system_tokens"]
        shared = sum(head) // 64
        for request in row["requests"]:
            ids = [a + i for a, n in request["runs"] for i in range(n)]
            path = tuple(
                numbers[(head, at) if at < shared else (row["id"], ids[at])] for at in range(15, len(ids), 16)
            )
            if path:
                found.append(Request(start + request["t"], path, 128 * len(path), session))
        start += rng.expovariate(1 / (20 * MINUTE))
    return Trace("agentic coding", 128, sorted(found, key=lambda request: request.seconds))


def dialogues(data: Path) -> Trace:
    """A tool agent for an airline (tau-bench): 200 dialogues behind one policy text, begun 40 s apart in the mean."""
    rng = random.Random(6)
    rows = json.loads((data / "tau-bench" / "gpt-4o-airline.json").read_text("utf-8"))
    rng.shuffle(rows)
    start, found = 0.0, []
    for session, row in enumerate(rows):
        now = start
        words: list[str] = []
        for message in row["traj"]:
            if message["role"] == "assistant":
                found.append((now, list(words), session))
                now += rng.lognormvariate(2.0, 0.5)
            elif message["role"] == "user":
                now += rng.lognormvariate(3.5, 1.0)
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            words += [message["role"], *_words(message["content"] or ""), *_words(calls)]
        start += rng.expovariate(1 / 40.0)
    return Trace("tau-bench", 128, _cut(found))


def meetings(data: Path) -> Trace:
    """An assistant that is asked about meetings (qmsum): the transcript, then what was asked and answered so far.

    The questions about a meeting come in one to three sittings, the later ones hours or days after the first; a
    sitting begins with the transcript alone.
    """
    rng = random.Random(7)
    found = []
    session = 0
    start = 0.0
    for part in ("test", "val"):
        for line in _lines(data / "qmsum" / f"qmsum_{part}.jsonl"):
            row = json.loads(line)
            transcript = [
                word
                for turn in row["meeting_transcripts"]
                for word in _words(turn["speaker"] + ": " + turn["content"])
            ]
            asked = [
                (q["query"], q["answer"]) for q in row["general_query_list"] + row["specific_query_list"]
            ]
            sittings = rng.randint(1, 3)
            now = start
            for sitting in range(sittings):
                words = list(transcript)
                for query, answer in asked[sitting::sittings]:
                    words = words + _words(query)
                    found.append((now, words, session))
                    words = words + _words(answer)
                    now += rng.lognormvariate(4.0, 1.0)
                session += 1
                now += rng.expovariate(1 / (6 * HOUR))
            start += rng.expovariate(1 / HOUR)
    return Trace("qmsum", 128, _cut(found))


def assistant(requests: int) -> Trace:
    """Made up: one user's device. Apps with a system prompt each; chats, documents that are asked about, one-shots."""
    rng = random.Random(1)
    apps = [rng.randint(2, 12) for _ in range(6)]
    events: list[tuple[float, int, list[object]]] = []
    start, session, made = 0.0, 0, 0
    while made < requests:
        session += 1
        app = min(int(rng.paretovariate(0.8)) - 1, 5)
        path: list[object] = [("app", app, at) for at in range(apps[app])]
        kind, now = rng.random(), start
        if kind < 0.4:  # one-shot: a summary, a translation
            path += [(session, at) for at in range(rng.randint(1, 12))]
            events.append((now, session, path))
            made += 1
        else:
            if kind < 0.7:  # a document, out of those that come back
                document = min(int(rng.paretovariate(0.6)), 2000)
                size = random.Random(document).randint(8, 60)
                path += [("document", app, document, at) for at in range(size)]
            for turn in range(1 + int(rng.expovariate(1 / 4))):
                path = path + [(session, turn, at) for at in range(rng.randint(1, 4))]
                events.append((now, session, path))
                made += 1
                now += rng.lognormvariate(4.0, 1.0)
                if rng.random() < 0.03:
                    now += rng.expovariate(1 / (8 * HOUR))
        start += rng.expovariate(1 / (3 * MINUTE))
    return _made("assistant (made up)", events)


def chat_service(requests: int) -> Trace:
    """Made up: many users behind one system prompt; three conversations in four end after the first answer."""
    rng = random.Random(2)
    events: list[tuple[float, int, list[object]]] = []
    start, session = 0.0, 0
    while len(events) < requests:
        session += 1
        path: list[object] = [("system", 0)]
        now, more = start, rng.choice((0.03, 0.05, 0.75))
        while True:
            path = path + [(session, len(path), at) for at in range(1 + int(rng.expovariate(1 / 10)))]
            events.append((now, session, path))
            if rng.random() > more:
                break
            now += rng.lognormvariate(4.5, 0.9)
        start += rng.expovariate(3)
    return _made("chat service (made up)", events)


class _Numbers(dict[object, int]):
    """Numbers things in the order in which they are first seen."""

    def __missing__(self, key: object) -> int:
        self[key] = len(self)
        return self[key]


def _made(name: str, events: Iterable[tuple[float, int, Sequence[object]]]) -> Trace:
    numbers = _Numbers()
    requests = []
    for now, session, path in sorted(events, key=lambda event: event[0]):
        blocks = tuple(numbers[each] for each in path)
        requests.append(Request(now, blocks, 128 * len(blocks), session))
    return Trace(name, 128, requests)


def _cut(prompts: Iterable[tuple[float, list[str], int]]) -> list[Request]:
    """Prompts of words as paths of full blocks, in the order of time; equal words behind equal words share a block."""
    numbers = _Numbers()
    found = []
    for now, words, session in sorted(prompts, key=lambda prompt: prompt[0]):
        path: list[int] = []
        for at in range(0, len(words) - WORDS_A_BLOCK + 1, WORDS_A_BLOCK):
            path.append(numbers[path[-1] if path else -1, tuple(words[at : at + WORDS_A_BLOCK])])
        if path:
            found.append(Request(now, tuple(path), 128 * len(path), session))
    return found


def _sessions(paths: Iterable[Sequence[int]]) -> Iterator[int]:
    """Who asks, where a trace does not say: the one whose block the deepest known one is, the shared root apart."""
    owner: dict[int, int] = {}
    session = 0
    for path in paths:
        known = next((block for block in reversed(path[1:]) if block in owner), None)
        if known is None:
            session += 1
        mine = session if known is None else owner[known]
        for block in path:
            owner.setdefault(block, mine)
        yield mine


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _lines(path: Path, count: int | None = None) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if count is not None and number >= count:
                return
            yield line
