"""Time to first token through a daemon and over a store of this process, in turns, on the real model.

As in `bench.ttft`: a prompt of 1,000 tokens of which 900 are held, in memory or on flash (page cache dropped), and one
whose held parts have moved. Placing the KV is the engine's process's work in both.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

import kvstore
from bench.report import Report
from kvstore import models
from kvstore.api import Store
from kvstore.language_model import LanguageModel
from kvstore.pipeline.recompute import FirstTokens
from kvstore.profile import CPU
from kvstore.quality.reuse import Verdict
from kvstore.session import Generation, Session
from tests.daemon.running import daemon

from .ttft import _drop_page_cache

_PROMPT, _HELD = 1000, 900
_TIERS = ("memory", "cold", "moved")

Tokens = NDArray[np.int32]


def compare(report: Report, folder: Path, repeats: int) -> None:
    model = LanguageModel(models.smollm2())
    model.engine.warm_up(_PROMPT + 20)
    text = model.tokenizer.encode("\n\n".join(topics.values()))
    prefix = text[:_HELD]
    moved = np.concatenate([text[_HELD : _HELD + 40], prefix[128:768]])
    runs: dict[tuple[str, str], list[Generation]] = {}
    with (
        kvstore.open(folder / "own", identity=model.identity, daemon=False) as own,
        daemon(folder / "kv", CPU) as running,
        kvstore.connect(running.socket, identity=model.identity, fallback="none") as remote,
    ):
        stores: dict[str, Store] = {"embedded": own, "daemon": remote}
        for store in stores.values():
            store.keep_verdict(Verdict(fast=FirstTokens(8), careful=None))
            Session(model.engine, store).generate(prefix, 1)
            store.flush()
        for turn in range(repeats + 1):
            for tier in _TIERS:
                begin = 2 * _HELD + turn * _PROMPT
                beginning = moved if tier == "moved" else prefix
                asked = np.concatenate([beginning, text[begin : begin + _PROMPT - len(beginning)]])
                answers = set()
                for name in sorted(stores, reverse=turn % 2 == 0):  # who goes first has the colder caches
                    _bring(stores[name], prefix, tier, folder / ("own" if name == "embedded" else "kv"))
                    session = Session(model.engine, stores[name], "fast" if tier == "moved" else "exact")
                    done = session.generate(asked, 1, keep=False)
                    answers.add((tuple(done.tokens), done.computed + done.recomputed))
                    if turn:
                        runs.setdefault((tier, name), []).append(done)
                if (
                    len(answers) > 1 and tier != "cold"
                ):  # from flash, the measured speed decides what is loaded
                    raise AssertionError(f"{tier}: embedded and daemon differ: {answers}")
    rows = report.table(
        f"prompt of {_PROMPT} tokens, {_HELD} held, medians of {repeats} in turns",
        (
            "tier",
            "TTFT embedded ms",
            "daemon ms",
            "daemon / embedded",
            "store ms embedded",
            "daemon",
            "computed",
        ),
    )
    for tier in _TIERS:
        ours, theirs = runs[tier, "embedded"], runs[tier, "daemon"]
        ratio = statistics.median(b.ttft_seconds / a.ttft_seconds for a, b in zip(ours, theirs, strict=True))
        rows.append(
            (
                tier,
                statistics.median(run.ttft_seconds for run in ours) * 1e3,
                statistics.median(run.ttft_seconds for run in theirs) * 1e3,
                ratio,
                statistics.median(run.store_seconds for run in ours) * 1e3,
                statistics.median(run.store_seconds for run in theirs) * 1e3,
                theirs[-1].computed + theirs[-1].recomputed,
            )
        )
        report.bar(f"E2 TTFT, daemon / embedded, {tier}", ratio, "<=", 1.03)


def _bring(store: Store, prefix: Tokens, tier: str, folder: Path) -> None:
    """See to it that the prefix lies in this tier and nowhere nearer."""
    store.flush()
    match = store.lookup(prefix)
    store.demote(match)
    if tier == "cold":
        _drop_page_cache(folder)
    else:
        store.promote(match)
    found = {block.tier for block in store.lookup(prefix).blocks}
    wanted = {"cold"} if tier == "cold" else {"hot", "warm"}  # what is used again moves on to hot by itself
    assert found <= wanted, f"wanted {wanted}, found {found}"
