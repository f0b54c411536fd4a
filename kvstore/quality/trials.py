"""Prompts that show what moved reuse does to a model's answers, made from any text.

A prompt is a system prompt, passages of the text in some order, and a question. Some questions ask for a fact that was
put between the sentences of a passage, since closeness of logits alone does not tell whether facts are still found.
Each passage then tells a similar one, which is what makes it hard: of single facts SmolLM2-135M found 12 of 12 without
any repair, of four similar ones 12 of 22.

    start, middle, end
                  the fact stands at that place of its passage
    reference     one passage names a place, another tells the fact about that place
    edited        the passage was captured with another number in place of the fact, as before an edit
    twins         another passage is the same but for its place and its number
    open          no fact: about something in the text, or how a sentence of it goes on

Before, the passages were captured in a context:

    alone         with nothing before them
    system        each right behind the system prompt
    traffic       as prompts of the same kind come by: two of them at a time, among other passages in random order
    filler        each behind the system prompt and the same other passages, as `capture` does in idle time
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from ..capture import beginning, filler, head
from ..language_model import LanguageModel
from ..profile import CPU

Task = Literal["start", "middle", "end", "reference", "edited", "twins", "open"]
Context = Literal["alone", "system", "traffic", "filler"]
TASKS: tuple[Task, ...] = get_args(Task)
CONTEXTS: tuple[Context, ...] = get_args(Context)

SYSTEM = "You are a helpful assistant. Answer the question from the notes below."

_PLACES = ("north", "south", "east", "west", "harbour", "hill", "river", "forest", "valley", "island")
_PEOPLE = ("Anna", "Peter", "Maria", "John", "Laura", "Thomas", "Julia", "Robert")
_OVERHEAD = 75  # tokens of the system prompt, the chat template, a question, and the seams
_COMMON = 6  # letters; a shorter word is rarely what a text is about

Tokens = NDArray[np.int32]


class Trial(NamedTuple):
    """One prompt, int32 [n], the prompts that capture its passages in each context, and the fact asked for, if any."""

    task: Task
    prompt: Tokens
    captures: Mapping[Context, tuple[Tokens, ...]]
    fact: str | None


def trials(
    model: LanguageModel, text: str, count: int, *, tokens: int = 450, seed: int = 0
) -> Iterator[Trial]:
    """`count` prompts of about `tokens` tokens, every other one an open question, the other tasks in turns.

    Raises ValueError when `text` is too short: eight passages of a quarter of `tokens` are needed, from 700 on ten of a
    fifth.
    """
    random = np.random.default_rng(seed)
    shown = 4 if tokens < 700 else 5
    size = (tokens - _OVERHEAD) // shown - 15  # room for a fact
    passages = _passages(model, text, size)
    if len(passages) < 2 * shown:
        raise ValueError(
            f"the text makes {len(passages)} passages of about {size} tokens, {2 * shown} are needed: give a longer one"
        )
    recalls = [task for task in TASKS if task != "open"]
    for number in range(count):
        chosen = [passages[at] for at in random.choice(len(passages), 2 * shown, replace=False)]
        task = "open" if number % 2 else recalls[number // 2 % len(recalls)]
        yield _Maker(model, random, chosen[:shown], chosen[shown:]).trial(task)


class _Maker:
    """Makes one trial: `passages` are shown in it, `others` beside them when they were captured."""

    def __init__(
        self,
        model: LanguageModel,
        random: np.random.Generator,
        passages: Sequence[list[str]],
        others: Sequence[list[str]],
    ) -> None:
        self._model = model
        self._random = random
        self._shown = [list(passage) for passage in passages]
        self._others = ["".join(other).strip() for other in others]
        codes = random.choice(np.arange(1000, 10000), len(passages) + 1, replace=False)
        self._codes = [str(code) for code in codes]
        self._places = [str(place) for place in random.choice(_PLACES, len(passages), replace=False)]

    def trial(self, task: Task) -> Trial:
        """A trial of this task. The asked passage is the first here and anywhere in the prompt."""
        before = self._shown
        match task:
            case "open":
                fact, question = None, self._open_question()
            case "start" | "middle" | "end":
                fact, question = self._codes[0], self._ask(f"the {self._places[0]} gate")
                self._tell_all(("start", "middle", "end").index(task))
            case "reference":
                person = str(self._random.choice(_PEOPLE))
                fact, question = self._codes[0], self._ask(f"the gate that {person} guards")
                self._tell_all()
                self._put(1, f"{person} guards the {self._places[0]} gate. ", self._anywhere())
            case "edited":
                fact, question = self._codes[0], self._ask(f"the {self._places[0]} gate")
                self._tell_all()
                old = [piece.replace(self._codes[0], self._codes[-1]) for piece in self._shown[0]]
                before = [old, *self._shown[1:]]
            case "twins":
                fact, question = self._codes[0], self._ask(f"the {self._places[0]} gate")
                self._tell_all()
                self._shown[1] = [piece.replace(self._told(0), self._told(1)) for piece in self._shown[0]]
        told = ["".join(pieces).strip() for pieces in self._shown]
        order = self._random.permutation(len(told))
        prompt = self._prompt([told[at] for at in order], question)
        captured = ["".join(pieces).strip() for pieces in before]
        return Trial(task, prompt, self._captures(captured), fact)

    def _captures(self, passages: Sequence[str]) -> dict[Context, tuple[Tokens, ...]]:
        encode, aside = self._model.tokenizer.encode, "What is this about?"
        before = beginning(head(self._model, SYSTEM), filler(self._model, self._others), CPU.block_tokens)
        among = []
        for first in range(0, len(passages), 2):
            mixed = [*passages[first : first + 2], *self._random.choice(self._others, 2, replace=False)]
            self._random.shuffle(mixed)
            among.append(self._prompt(mixed, aside))
        return {
            "alone": tuple(encode(passage + "\n\n") for passage in passages),
            "system": tuple(self._prompt([passage], aside) for passage in passages),
            "traffic": tuple(among),
            "filler": tuple(np.concatenate([before, encode(passage)]) for passage in passages),
        }

    def _prompt(self, passages: Sequence[str], question: str) -> Tokens:
        return self._model.chat_prompt(SYSTEM, "\n\n".join([*passages, question]))

    def _tell_all(self, where: int | None = None) -> None:
        """A similar fact in each passage; that of the first one at `where`, see `_put`."""
        for at in range(len(self._shown)):
            self._put(at, self._told(at), self._anywhere() if at or where is None else where)

    def _told(self, at: int) -> str:
        return f"The code of the {self._places[at]} gate is {self._codes[at]}. "

    def _anywhere(self) -> int:
        return int(self._random.integers(3))

    def _ask(self, what: str) -> str:
        return f"What is the code of {what}? Answer with the number."

    def _open_question(self) -> str:
        """One whose answer begins in a way that no other question makes likely, two times of three."""
        whole = [words for piece in self._shown[0] if len(words := piece.split()) >= 8]
        match self._random.integers(3):
            case 0:
                return f"What do the notes say about {self._topic()}?"
            case 1 if whole:
                begun = whole[int(self._random.integers(len(whole)))]
                return f"How does this go on in the notes: {' '.join(begun[: len(begun) // 2])}"
            case _:
                return f"In a few words, what is {self._topic()}?"

    def _put(self, passage: int, sentence: str, where: int) -> None:
        """Put a sentence at the start (0), in the middle (1) or at the end (2) of a passage."""
        pieces = self._shown[passage]
        at = (0, len(pieces) // 2, len(pieces))[where]
        if at and not pieces[at - 1][-1:].isspace():
            sentence = f" {sentence}"
        pieces.insert(at, sentence)

    def _topic(self) -> str:
        """A word that a passage has oftener than the others."""
        words: list[list[str]] = [
            re.findall(rf"[A-Za-z]{{{_COMMON},}}", "".join(pieces)) for pieces in self._shown
        ]
        elsewhere = {word for some in words[1:] for word in some}
        own = [word for word in words[0] if word not in elsewhere] or ["this"]
        return max(own, key=lambda word: (own.count(word), len(word)))


def _passages(model: LanguageModel, text: str, tokens: int) -> list[list[str]]:
    """Consecutive passages of about `tokens` tokens, each as its lines and sentences; long ones are cut by words."""
    passages, pieces, size = list[list[str]](), list[str](), 0
    for piece in re.findall(r".+?(?:[.!?](?=\s)\s|\n|$)", text, flags=re.DOTALL):
        words = re.findall(r"\S+\s*|\s+", piece)
        for start in range(0, len(words), 30):
            part = "".join(words[start : start + 30])
            pieces.append(part)
            size += len(model.tokenizer.encode(part))
            if size >= tokens:
                if any(each.strip() for each in pieces):
                    passages.append(pieces)
                pieces, size = [], 0
    return passages
