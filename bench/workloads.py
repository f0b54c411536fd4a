"""Streams of prompts as assistants on a device send them, each put together from parts that come again elsewhere.

A request is a system prompt, segments in some order, and a question. Traffic itself fills the store: the requests that
are not `measured` are served first, or in between, and what they computed is what the measured ones find.

    notes      passages of one's notes in random order, four fifths of the tokens shown before; a question about one
    hops       multi-hop: what a first search found was shown before; a second, wiser search finds some of it again
    phone      task, actions so far, the screen as UI elements, the answer's format; a walk that comes back to screens
    tools      some of the functions that belong to a task, in random order; a call of one is asked for
    meeting    the transcript was read in pieces; a question comes with the turns that it is about
    unseen     passages that never came before: nothing to reuse but the system prompt
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path

from bench import texts
from bench.texts import Question

Size = Callable[[str], int]
"""How many tokens a text has."""

HELD = 0.80
"""Share of a notes prompt's tokens that stand in passages shown before."""

_NOTE = 128  # tokens of a chunk, at least
_LOOKED_AT = 64  # new notes among which one that fits is looked for

_TEMPLATE = 40  # tokens that the chat template adds, and the seams between a few segments


@dataclass(frozen=True)
class Request:
    """One prompt, in parts. Not `measured`: served only.

    opening: how an engine that constrains answers begins this one, so that its first token decides something.
    """

    system: str
    segments: tuple[str, ...]
    question: Question
    measured: bool = True
    opening: str = ""

    @property
    def user(self) -> str:
        """All that follows the system prompt."""
        return "\n\n".join([*self.segments, self.question.text])


Stream = Callable[[Path | None, random.Random, Size, int], Iterator[Request]]
"""Requests of at most so many tokens, made of the texts in a folder."""


def workload(name: str, data: Path | None, size: Size, count: int, seed: int = 1) -> list[Request]:
    """The requests of a workload in order, `count` of them measured (fewer where the texts run out).

    data: the folder of real texts; without it, Python's documentation. Raises KeyError for an unknown name.
    """
    make, tokens = KINDS[name]
    stream = make(data, random.Random(seed), lru_cache(maxsize=None)(size), tokens - _TEMPLATE)
    if make in (_notes, _phone, _tools, _unseen):  # one long stream; the others mark what prepares what
        first = islice(stream, max(8, count // 4))
        stream = chain((replace(request, measured=False) for request in first), stream)
    taken, measured = [], 0
    for request in stream:
        taken.append(request)
        measured += request.measured
        if measured == count:
            break
    return taken


def by_words(query: str, passages: Sequence[str]) -> list[str]:
    """`passages`, best first: by the words they share with `query`, rare words counting more."""
    words = [set(passage.lower().split()) for passage in passages]
    common = Counter(word for some in words for word in some)
    asked = set(query.lower().split())
    worth = [sum(1 / common[word] for word in asked & some) for some in words]
    return [passages[at] for at in sorted(range(len(passages)), key=lambda at: (-worth[at], at))]


def _notes(data: Path | None, rng: random.Random, size: Size, tokens: int) -> Iterator[Request]:
    """A note comes again the likelier the oftener it was shown, and new ones come at a constant rate.

    Which gives a Zipf law (Simon, On a class of skew distribution functions, 1955).
    """
    system = "You answer questions about the user's notes. Answer from the notes below."
    asked, others = texts.passages(data)
    rng.shuffle(others)
    passages = [*asked, *(texts.Passage(other) for other in others[: len(asked)])]
    rng.shuffle(passages)
    new = [note for note in _chunked(passages, size) if size(note.text) <= (1 - HELD) * tokens]
    history: list[texts.Passage] = []
    longest = max(size(question.text) for passage in asked for question in passage.questions)
    while new:
        left = tokens - size(system) - longest
        shown = _fill(rng.sample(history, len(history)), size, HELD * tokens)
        left -= sum(size(note.text) for note in shown)
        fresh = _fill(new[:_LOOKED_AT], size, left)
        new = [note for note in new if note not in fresh] if fresh else new[1:]
        shown += fresh
        rng.shuffle(shown)
        history += shown
        questions = [question for note in shown for question in note.questions]
        if questions:
            yield Request(system, tuple(note.text for note in shown), rng.choice(questions))


def _chunked(passages: Sequence[texts.Passage], size: Size) -> Iterator[texts.Passage]:
    """Short passages joined, as splitters for retrieval do, to notes of at least _NOTE tokens."""
    waiting: list[texts.Passage] = []
    for passage in passages:
        waiting.append(passage)
        if sum(size(each.text) for each in waiting) >= _NOTE:
            questions = tuple(question for each in waiting for question in each.questions)
            yield texts.Passage("\n".join(each.text for each in waiting), questions)
            waiting = []


def _fill(notes: Sequence[texts.Passage], size: Size, left: float) -> list[texts.Passage]:
    """Different notes, the first that still fit, of at most `left` tokens together."""
    taken: list[texts.Passage] = []
    for note in notes:
        if size(note.text) <= left and note not in taken:
            left -= size(note.text)
            taken.append(note)
    return taken


def _hops(data: Path | None, rng: random.Random, size: Size, tokens: int) -> Iterator[Request]:
    system = "Answer the question from the passages below, in a few words."
    found = texts.searches(data)
    rng.shuffle(found)
    for search in found:
        left = tokens - size(system) - size(search.question.text)
        once = by_words(search.question.text, search.passages)
        again = by_words(f"{search.question.text} {once[0]}", search.passages)
        yield Request(system, _fitting(once, size, left), search.question, measured=False)
        yield Request(system, _fitting(again, size, left), search.question)


def _phone(data: Path | None, rng: random.Random, size: Size, tokens: int) -> Iterator[Request]:
    """A walk through a few apps, some screens of each, the first ones of a list oftener than the last."""
    system = (
        "You operate a phone for its user. You are given a task, the actions taken so far and the current screen "
        "as UI elements, each with an id. Choose the next action that brings the task nearer to its end."
    )
    form = (
        "Answer in this form and with nothing else:\n- id: the id of the element to use, or -1 when the task is done"
        "\n- action: tap or input\n- input text: what to type, or N/A"
    )
    walks = []
    for app, shown in rng.sample(sorted(texts.screens(data).items()), 3):
        bodies = ["\n".join(elements) for elements in shown if len(elements) >= 12]
        rng.shuffle(bodies)
        walks.append((app, bodies[:15]))
    while True:
        app, bodies = rng.choice(walks)
        goal = rng.choice(rng.choice(bodies).splitlines()[3:])
        actions: list[str] = []
        for screen in rng.choices(bodies, [1 / (at + 1) for at in range(len(bodies))], k=rng.randint(3, 8)):
            task = "\n".join(
                [f"Task: in {app}, get to {_words(goal)}", "Actions so far:", *(actions or ["none"])]
            )
            left = tokens - size(system) - size(form) - size(task)
            elements = _fitting(screen.splitlines(), size, left)
            yield Request(system, (task, "\n".join(elements)), Question(form))
            actions.append(f"- tap {_words(rng.choice(elements))}")


def _tools(data: Path | None, rng: random.Random, size: Size, tokens: int) -> Iterator[Request]:
    """The answer is opened, as by engines that are told to call a function: what comes first is its name.

    Free to begin as it likes, SmolLM2-135M takes "You", "The" or "Here" with about the same likelihood.
    """
    opening = '{"name": "'
    system = (
        "You are an assistant that can call the functions below. Answer with one call and nothing else, as "
        '{"name": function, "arguments": {argument: value, …}}.'
    )
    described = texts.functions(data)
    tasks = texts.tasks(data)
    while True:
        rng.shuffle(tasks)
        for task in tasks:
            others = [name for name in task.group if name not in task.called]
            rng.shuffle(others)
            left = tokens - size(system) - size(task.text) - size(opening)
            shown = list(_fitting([described[name] for name in (*task.called, *others)], size, left))
            rng.shuffle(shown)
            names = tuple(f'{name.partition(".")[2] or name}"' for name in task.called)
            yield Request(system, tuple(shown), Question(task.text, names), opening=opening)


def _meeting(data: Path | None, rng: random.Random, size: Size, tokens: int) -> Iterator[Request]:
    """Meeting by meeting: first its pieces so far as anybody asks about them, then up to eight questions."""
    system = "You help with a meeting. Use only what was said."
    found = texts.meetings(data)
    rng.shuffle(found)
    for meeting in found:
        turns, queries = meeting.turns, [query for query in meeting.queries if query[1]]
        asked, wanted = [], set[int]()
        for question, about in sorted(queries, key=lambda query: query[1])[:8]:
            left = tokens - size(system) - size(question)
            shown = _fitting([turns[at] for at in about], size, left)
            asked.append(Request(system, shown, Question(question)))
            wanted.update(about[: len(shown)])
        summary = Question("Write down the main points of this part.")
        at = 0
        while at < len(turns):
            piece = _fitting(turns[at:], size, tokens - size(system) - size(summary.text))
            if wanted.intersection(range(at, at + len(piece))):
                yield Request(system, piece, summary, measured=False)
            at += max(1, len(piece))
        yield from asked


def _unseen(data: Path | None, rng: random.Random, size: Size, tokens: int) -> Iterator[Request]:
    system = "Answer the question from the passages below, in a few words."
    asked, others = texts.passages(data)
    pool = list(dict.fromkeys([*(passage.text for passage in asked), *others]))
    rng.shuffle(pool)
    question = Question("What do these passages have in common?")
    while pool:
        shown = _fitting(pool, size, tokens - size(system) - size(question.text))
        pool = pool[max(1, len(shown)) :]
        if shown:
            yield Request(system, shown, question)


KINDS: dict[str, tuple[Stream, int]] = {
    "notes-1000": (_notes, 1000),
    "notes-2000": (_notes, 2000),
    "hops": (_hops, 1500),
    "phone": (_phone, 1000),
    "tools": (_tools, 1500),
    "meeting": (_meeting, 950),
    "unseen": (_unseen, 1000),
}
"""By name: how its requests are made, and how many tokens a prompt has at most."""


def _fitting(parts: Sequence[str], size: Size, left: int) -> tuple[str, ...]:
    """As many of the first parts as have at most `left` tokens together, with the seams between them."""
    ends = accumulate(size(part) + 1 for part in parts)
    return tuple(part for part, end in zip(parts, ends, strict=True) if end <= left)


def _words(element: str) -> str:
    """What a UI element says, without its markup."""
    return re.sub(r"<[^>]*>", "", element).strip() or element
