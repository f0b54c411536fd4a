"""The demonstration: a real model answers questions about a real text, with the store and without it.

Three steps: a first question on an empty store, another question about the same text, and a third one in a new
process, which finds on flash what the first two left. Each step runs without the store too; answers must agree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import models
from .language_model import LanguageModel
from .session import Generation, Session
from .store import KVStore, open_store

_INSTRUCTION = "Answer in one or two sentences, using only the text.\n\n"
_QUESTIONS = (
    "What does this text say about assignment?",
    "What happens when a name is assigned to?",
    "What does an augmented assignment do?",
)
_TEXT_TOKENS = 900
_ROOM = 70  # what instruction, question and chat template add


class _Step(msgspec.Struct, frozen=True):
    """One question, answered without the store and with it."""

    name: str
    question: str
    plain: Generation
    stored: Generation
    answer: str


class _Task(msgspec.Struct, frozen=True):
    """What the new process is asked to do."""

    model: str
    directory: str
    text: str
    name: str
    question: str
    tokens: int


def run(model: Path | None, texts: Sequence[Path], questions: Sequence[str], tokens: int) -> int:
    """Run the three steps and print what came of them; the exit code, 1 when an answer differs."""
    console = Console()
    asked = [*questions, *_QUESTIONS[len(questions) :]]
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-demo-") as directory,
        Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as progress,
    ):
        task = progress.add_task("model")
        path = model or models.smollm2(progress=lambda line: progress.update(task, description=line))
        progress.update(task, description="building graphs (kept for the next time)")
        language_model = LanguageModel(path)
        text = _excerpt(language_model, texts)
        language_model.engine.warm_up(_TEXT_TOKENS + _ROOM + tokens)
        steps = []
        with open_store(directory, identity=language_model.identity) as store:
            for name, question in zip(("first", "second"), asked, strict=False):
                progress.update(task, description=f"{name}: {question}")
                steps.append(_ask(language_model, store, text, name, question, tokens))
        progress.update(task, description=f"new process: {asked[2]}")
        _drop_page_cache(Path(directory))
        steps.append(_ask_in_new_process(_Task(str(path), directory, text, "restart", asked[2], tokens)))
    _show(console, path, steps)
    return int(any(step.plain.tokens != step.stored.tokens for step in steps))


def _excerpt(model: LanguageModel, texts: Sequence[Path]) -> str:
    """About 1,000 tokens of the user's text, or of Python's documentation of assignments and classes."""
    if texts:
        whole = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in texts)
    else:
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[name] for name in ("assignment", "class"))
    return model.tokenizer.decode(model.tokenizer.encode(whole)[:_TEXT_TOKENS])


def _ask(model: LanguageModel, store: KVStore, text: str, name: str, question: str, tokens: int) -> _Step:
    prompt = model.chat_prompt(_INSTRUCTION + text, question)
    plain = Session(model.engine, None).generate(prompt, tokens, stop=model.stop)
    stored = Session(model.engine, store).generate(prompt, tokens, stop=model.stop)
    return _Step(name, question, plain, stored, model.tokenizer.decode(stored.tokens).strip())


def _ask_in_new_process(task: _Task) -> _Step:
    answer = subprocess.run(
        [sys.executable, "-m", "kvstore.demo"],
        input=msgspec.json.encode(task),
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(answer.stdout, type=_Step)


def _drop_page_cache(directory: Path) -> None:
    """Make the new process read from the medium, not from what the OS still has in memory."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _show(console: Console, path: Path, steps: Sequence[_Step]) -> None:
    table = Table(title=f"{path.name} on ONNX Runtime CPU, static graphs", title_justify="left")
    table.add_column("step")
    for column in ("prompt", "hot", "warm", "cold", "computed", "read MB", "TTFT s", "with store"):
        table.add_column(column, justify="right")
    for step in steps:
        stored = step.stored
        table.add_row(
            step.name,
            *map(str, (stored.prompt_tokens, stored.hot, stored.warm, stored.cold)),
            f"{stored.computed}+{stored.padded}",
            f"{stored.bytes_read / 1e6:.1f}",
            f"{step.plain.ttft_seconds:.2f}",
            f"{stored.ttft_seconds:.2f} [bold]({step.plain.ttft_seconds / stored.ttft_seconds:.1f}x)[/bold]",
        )
    console.print(table)
    console.print(
        "Tokens of the prompt by the tier that held their KV, and computed + padding; TTFT is the time to the first "
        "token without the store; read from flash with the page cache dropped."
    )
    equal = all(step.plain.tokens == step.stored.tokens for step in steps)
    console.print(
        "[green]Answers with and without the store are equal.[/green]"
        if equal
        else "[red]Answers differ.[/red]"
    )
    for step in steps:
        console.print(f"[bold]{step.question}[/bold]\n  {step.answer}")


def _child() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    model = LanguageModel(Path(task.model))
    model.engine.warm_up(_TEXT_TOKENS + _ROOM + task.tokens)
    with open_store(task.directory, identity=model.identity) as store:
        step = _ask(model, store, task.text, task.name, task.question, task.tokens)
    sys.stdout.buffer.write(msgspec.json.encode(step))


if __name__ == "__main__":
    _child()
