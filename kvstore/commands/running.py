"""Verbs that run something: the daemon, the live view, the demonstration, measurements."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import InvalidRequestError

from . import output
from .options import ConfigFile, Dir, Json, Socket
from .target import Target

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.pipeline.engine import StaticGraphEngine


def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="A llama-family GGUF; SmolLM2-135M-Instruct is fetched when none is given."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text files to ask about; Python's own documentation when none is given."),
    ] = None,
    question: Annotated[list[str] | None, typer.Option(help="Questions to ask, at least two.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 48,
) -> None:
    """Answer questions about a text with and without the store, then again in a new process, and compare."""
    from kvstore import demo as demonstration

    raise typer.Exit(demonstration.run(model, text or [], question or [], tokens))


def serve(
    dir: Dir = None,
    socket: Annotated[Path | None, typer.Option(help="Where to listen.", show_default=False)] = None,
    profile: Annotated[str | None, typer.Option(help="What the device allows: cpu, ane, nnapi, …")] = None,
    http: Annotated[
        str | None, typer.Option(help="Address and port of the web page, on loopback.", show_default=False)
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="What embeds texts: builtin, or a folder of a sentence model.", show_default=False),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json.")] = None,
    config: ConfigFile = None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C."""
    from kvstore.config import load

    flags = {
        "directory": None if dir is None else str(dir),
        "socket": None if socket is None else str(socket),
        "profile": profile,
        "http": http,
        "embedder": embedder,
        "log_level": log_level,
        "log_format": log_format,
    }
    loaded = load(config, flags)
    device, key, embeds = loaded.device(), loaded.key(), loaded.embedder()
    from kvstore import daemon
    from kvstore.watch import logs

    logs.configure(loaded.settings.log_level, loaded.settings.log_format)
    loaded.directory.parent.mkdir(parents=True, exist_ok=True)
    http_at = loaded.settings.http or None
    daemon.serve(loaded.directory, device, loaded.socket, http_at, key=key, embedder=embeds)


def top(
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """What a daemon does just now: tiers, hits, stages, hottest prefixes."""
    from kvstore.admin.remote import RemoteSnapshots

    source = RemoteSnapshots(Target(None, socket, config).config.socket)
    try:
        if json:
            output.json(source())
            return
        from kvstore.watch import top as view

        view.run(source, interval, once)
    finally:
        source.close()


def calibrate(
    model: Annotated[Path, typer.Option(help="The GGUF to measure.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Texts like those of its use; Python's own documentation when none is given."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts of the user in the order in which they came, which decide how close answers have to stay: "
            "a JSON list of texts, with the template's marks, or of lists of token ids."
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Prompts to answer; more say more.")] = 64,
    dir: Dir = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Measure what graph calls cost here, and which repair of moved KV this model's answers bear."""
    target = Target(dir, None, config)
    from kvstore.language_model import LanguageModel
    from kvstore.quality import calibrate as calibration
    from kvstore.quality.reuse import named
    from kvstore.store import open_store

    opened = LanguageModel(model)
    whole = (
        "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in text or ())
        or _documentation()
    )
    own = _own_prompts(prompts, opened.tokenizer.encode) if prompts else ()
    profile = target.profile_for_directory()
    with open_store(target.config.directory, identity=opened.identity, profile=profile) as store:
        _measure(opened.engine, _progress("graph calls", quiet=json))
        try:
            verdict = calibration.calibrate(
                opened, store, whole, own=own, trials=trials, progress=_progress("repairs", quiet=json)
            )
        except ValueError as error:
            raise InvalidRequestError(f"{error}; give more or longer --text") from error
    if json:
        output.json(verdict)
        return
    for policy, repair in (("fast", verdict.fast), ("careful", verdict.careful)):
        output.line(f"{policy}: {'prefixes only' if repair is None else named(repair)}")
    for reason in verdict.reasons:
        output.line(f"because {reason}")
    output.line(f"codecs with loss that it bears: {', '.join(verdict.codecs) or 'none'}")
    for fact in _about_calls(opened.engine):
        output.line(fact)


def _measure(engine: StaticGraphEngine, progress: Callable[[float], None]) -> None:
    """Costs of graph calls over each context that a prompt of this model may need; they are kept for later runs."""
    before = (0, *engine.contexts)
    contexts = [slots for last, slots in pairwise(before) if last < engine.config.context_length]
    for number, slots in enumerate(contexts, start=1):
        engine.costs(slots)
        progress(number / len(contexts))


def _about_calls(engine: StaticGraphEngine) -> Iterator[str]:
    """How well the sizes of the engine's graphs fitted what it computed so far, and which would fit it best."""
    from kvstore.pipeline.schedule import CallCosts, interpolate, suggest_sizes

    done = engine.statistics
    if not done.lengths:
        return
    yield (
        f"graph calls: {done.padding / (done.tokens + done.padding):.1%} padding, "
        f"{done.planned_seconds / done.bound_seconds - 1:.1%} above what no calls of these sizes can beat"
    )
    slots = next((slots for slots in engine.contexts if slots > max(done.lengths)), engine.contexts[-1])
    # Graphs of one token are for decoding, whatever the prompts.
    seconds = {size: each for size, each in engine.costs(slots).seconds.items() if size > 1}
    if not seconds:
        return
    step = max(1, max(seconds) // 16)
    others = {size: interpolate(seconds, size) for size in range(step, max(seconds), step) if size > 1}
    suggested = suggest_sizes(done.lengths, among := others | seconds, len(seconds))

    def taken(sizes: Iterable[int]) -> float:
        costs = CallCosts({size: among[size] for size in sizes})
        return sum(times * costs.cover(tokens).seconds for tokens, times in done.lengths.items())

    yield (
        f"of graphs of {', '.join(map(str, suggested))} tokens, the best for these prompts, calls would take "
        f"{taken(suggested) / taken(seconds):.1%} of the time of {', '.join(map(str, seconds))}"
    )


def _own_prompts(path: Path, encode: Callable[..., NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    import msgspec

    from kvstore.index.tokens import token_ids

    try:
        given = msgspec.json.decode(path.read_bytes(), type=list[str | list[int]])
        return [encode(each, special=True) if isinstance(each, str) else token_ids(each) for each in given]
    except ValueError as error:  # msgspec's, or of ids that are none
        raise InvalidRequestError(
            f"{path}: needs a JSON list of texts or of lists of ids: {error}"
        ) from error


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which; without it, what there is.")] = None,
) -> None:
    """Run a benchmark of a checkout, with all further arguments."""
    import kvstore

    checkout = Path(kvstore.__file__).parent.parent
    there = sorted(
        path.stem
        for path in (checkout / "bench").glob("*.py")
        if "__main__" in path.read_text(encoding="utf-8", errors="replace")
    )
    if not there:
        raise InvalidRequestError("benchmarks are part of a checkout, and this is an installed package")
    if name is None:
        output.line("\n".join(there))
        return
    if name not in there:
        raise InvalidRequestError(f"there is no benchmark {name!r}, but {', '.join(there)}")
    command = [sys.executable, "-m", f"bench.{name}", *context.args]
    raise typer.Exit(subprocess.run(command, cwd=checkout, check=False).returncode)


def _documentation() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _progress(what: str, *, quiet: bool) -> Callable[[float], None]:
    def say(done: float) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"\r{what} {done:4.0%}", end="" if done < 1 else "\n", file=sys.stderr, flush=True)

    return say
