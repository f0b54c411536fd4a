"""Texts that the workloads are made of: from real data where a folder is given, else from Python's own documentation.

Each function gives the same shapes either way. The data come as published, see each function for the file; what
stands in for them is cut from `pydoc_data.topics`.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple


class Question(NamedTuple):
    """`answers` are those of which any counts as right; none where nobody knows the answer."""

    text: str
    answers: tuple[str, ...] = ()


class Passage(NamedTuple):
    text: str
    questions: tuple[Question, ...] = ()


class Search(NamedTuple):
    """A question, and passages among which its answer is spread."""

    question: Question
    passages: tuple[str, ...]


class Task(NamedTuple):
    """What a user asks of an assistant, and the functions, by name, that it takes; `group` holds them and others."""

    text: str
    called: tuple[str, ...]
    group: tuple[str, ...]


class Meeting(NamedTuple):
    """What was said, turn by turn, and questions, each with the numbers of the turns that it is about."""

    turns: tuple[str, ...]
    queries: tuple[tuple[str, tuple[int, ...]], ...]


def passages(data: Path | None) -> tuple[list[Passage], list[str]]:
    """Passages with questions about them (xquad), and others (2wiki)."""
    if data is None:
        some = [
            Passage(text, (Question(f"What does the text say about {name}?"),)) for name, text in _pieces()
        ]
        return some[::2], [passage.text for passage in some[1::2]]
    asked = [
        Passage(
            paragraph["context"],
            tuple(Question(qa["question"], (qa["answers"][0]["text"],)) for qa in paragraph["qas"]),
        )
        for article in _json(data / "xquad" / "xquad.en.json")["data"]
        for paragraph in article["paragraphs"]
    ]
    others = _json(data / "2wiki" / "2wikimultihopqa_corpus.json")
    return asked, [f"{other['title']}\n{other['text']}" for other in others]


def searches(data: Path | None) -> list[Search]:
    """Questions that need more than one passage (musique, passages cut to chunks of 110 words)."""
    if data is None:
        named = list(_pieces())
        return [
            Search(
                Question(f"How do {named[at][0]} and {named[at + 29][0]} belong together?"),
                tuple(text for _, text in named[at : at + 30]),
            )
            for at in range(0, len(named) - 30, 3)
        ]
    return [
        Search(
            Question(record["question"], tuple(record["answers"])),
            tuple(
                " ".join(words)
                for passage in record["ctxs"]
                for words in _parts(passage["text"].split(), 110)
            ),
        )
        for record in _json(data / "musique" / "musique_s.json")
    ]


def screens(data: Path | None) -> dict[str, list[list[str]]]:
    """Screens by app, a screen as its UI elements, one a line (autodroid)."""
    if data is not None:
        apps = _json(data / "autodroid" / "baseline_data_update.json")
        return {app: list(named.values()) for app, named in apps.items()}
    apps = {}
    for app, text in topics.items():
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        menu = [f"<button>{line}</button>" for line in lines[:3]]
        shown = [[*menu, *(f"<p>{line}</p>" for line in some)] for some in _parts(lines[3:], 24)]
        if len(shown) >= 6:
            apps[app] = [
                [element.replace(">", f" id={number}>", 1) for number, element in enumerate(screen)]
                for screen in shown
            ]
    return apps


def functions(data: Path | None) -> dict[str, str]:
    """JSON descriptions of functions by class.name (bfcl)."""
    if data is None:
        return {name: _described(name, text) for name, text in topics.items() if len(text) > 400}
    return {
        f"{name}.{function['name']}": json.dumps(function)
        for name, document in _DOCUMENTS.items()
        for function in _json_lines(data / "bfcl" / "multi_turn_func_doc" / f"{document}.json")
    }


def tasks(data: Path | None) -> list[Task]:
    """What is asked for turn by turn (bfcl, multi-turn base)."""
    names = list(functions(data))
    if data is None:
        return [
            Task(f"Which rules hold for {name}?", (name,), tuple(names[at - 8 : at + 8]))
            for at, name in enumerate(names)
            if 8 <= at < len(names) - 8
        ]
    return [
        Task(
            turn[-1]["content"],
            tuple(dict.fromkeys(name for name in record["path"] if name in names)),
            tuple(name for name in names if name.partition(".")[0] in record["involved_classes"]),
        )
        for record in _json_lines(data / "bfcl" / "BFCL_v4_multi_turn_base.json")
        for turn in record["question"]
        if turn
    ]


def meetings(data: Path | None) -> list[Meeting]:
    """Meetings with questions about parts of them (qmsum, test and validation)."""
    if data is None:
        return [_lecture(name, text) for name, text in topics.items() if len(text) > 8_000]
    found = []
    for part in ("test", "val"):
        for record in _json_lines(data / "qmsum" / f"qmsum_{part}.jsonl"):
            turns = tuple(f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"])
            queries = tuple(
                (
                    query["query"],
                    tuple(turn for turn in _numbers(query["relevant_text_span"]) if turn < len(turns)),
                )
                for query in record["specific_query_list"]
            )
            found.append(Meeting(turns, queries))
    return found


_DOCUMENTS = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}


def _pieces(words: int = 75) -> Iterator[tuple[str, str]]:
    """(topic, text) of consecutive paragraphs of about so many words."""
    for name, text in topics.items():
        some: list[str] = []
        for paragraph in text.split("\n\n"):
            some.append(paragraph.strip("\n"))
            if sum(len(each.split()) for each in some) >= words:
                yield name, "\n\n".join(some)
                some = []


def _described(name: str, text: str) -> str:
    """A help text in the form of a function's description."""
    about = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")[1:4]]
    properties = {
        word: {"type": "string", "description": f"What is known of {word}."}
        for word in dict.fromkeys(re.findall(r"\*(\w+)\*", text)[:3])
    }
    parameters = {"type": "dict", "properties": properties, "required": list(properties)}
    return json.dumps(
        {"name": name, "description": textwrap.shorten(" ".join(about), 500), "parameters": parameters}
    )


def _lecture(name: str, text: str) -> Meeting:
    """A help text in the form of a meeting: a turn is a paragraph, a question is about some turns in a row."""
    speakers = cycle(("Ada", "Grace", "Guido"))
    turns = [f"{next(speakers)}: {' '.join(each.split())}" for each in text.split("\n\n") if len(each) > 40]
    queries = tuple(
        (
            f"What was said about {name} after “{turns[first][:40]}”?",
            tuple(range(first, min(first + 8, len(turns)))),
        )
        for first in range(0, len(turns) - 1, 5)
    )
    return Meeting(tuple(turns), queries)


def _parts(whole: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (whole[at : at + size] for at in range(0, len(whole), size))


def _numbers(spans: list[list[str]]) -> list[int]:
    """Turns of inclusive spans, each once, in order."""
    return sorted({turn for first, last in spans for turn in range(int(first), int(last) + 1)})


def _json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
