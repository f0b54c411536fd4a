"""`kvstore top`: what the cache does, live in a terminal.

    top.run(store.snapshot)                # until Ctrl-C
    top.run(store.snapshot, once=True)     # one picture of all since opening

The source may be anything that gives snapshots, such as a daemon's client. A picture is made of plain lines: laid out
by rich's tables it took twenty milliseconds of a core, and takes two.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from .change import KINDS, Change, quantile
from .snapshot import Snapshot
from .stats import TierStats
from .timings import STAGES

_LEVELS = " ▁▂▃▄▅▆▇█"
_KEPT = 120
_LATELY = 10
_COLORS = {
    "prefix": "green",
    "moved": "cyan",
    "recomputed": "yellow",
    "computed": "bright_black",
    "hot": "red",
    "warm": "yellow",
    "cold": "blue",
}
_FAINT = "bright_black"
_WIDEST = 140

Line = list[tuple[str, str]]
"""Pieces of text, each with its style."""


def run(
    source: Callable[[], Snapshot], interval: float = 1.0, once: bool = False, console: Console | None = None
) -> None:
    """Show `source` every `interval` seconds until Ctrl-C; `once` prints a single picture. What it raises ends it."""
    console = console or Console()
    seen: deque[Snapshot] = deque([source()], maxlen=_KEPT)
    if once:
        console.print(Picture(seen))
        return
    try:
        with Live(Picture(seen), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                time.sleep(interval)
                seen.append(source())
                live.update(Picture(seen), refresh=True)
    except KeyboardInterrupt:
        return


class Picture:
    """The last of these snapshots, oldest first, and how it came to that: stages lately, reuse for as long as seen."""

    def __init__(self, seen: Iterable[Snapshot]) -> None:
        self._seen = list(seen)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(min(options.max_width, _WIDEST)):
            for text, style in line:
                yield Segment(text, console.get_style(style) if style else None)
            yield Segment.line()

    def lines(self, width: int) -> list[Line]:
        now = self._seen[-1]
        lately = Change(self._seen[-_LATELY - 1 :][0] if len(self._seen) > 1 else None, now)
        half = width // 2 - 1
        below = zip_longest(
            [_head("hottest prefixes", half), *_prefixes(now, half)],
            [_head("read ahead; not stored; not used", width - half - 2), *_rest(now, width - half - 2)],
            fillvalue=[(" " * half, "")],
        )
        where = f"  {now.path or 'in memory'}  profile {now.profile}  pid {now.pid}"
        return [
            [("kvstore", "bold"), (set_cell_size(where, max(0, width - 7)), "")],
            _head("tiers", width),
            *_tiers(now, width),
            _head("tokens of prompts", width),
            *_tokens(self._seen, width),
            _head(f"stages, {_span(lately)}", width),
            *_stages(lately, now, width),
            *([*left, ("  ", ""), *right] for left, right in below),
        ]


def _tiers(now: Snapshot, width: int) -> Iterable[Line]:
    for name in ("hot", "warm", "cold"):
        tier: TierStats = getattr(now.stats, name)
        used = (
            f"{_bytes(tier.used):>10} of {_bytes(tier.total):<9}" if tier.total else f"{'none':>10} {'':<12}"
        )
        right = f"{used} {tier.blocks:>9,} blocks {tier.leased:>6,} leased"
        label = f"{name}, pinned" if tier.pinned else name
        yield _meter(label, tier.used, tier.total, _COLORS[name], right, width)
    spent = now.stats.counts.get("bytes_written_today", 0)
    if now.writes_per_day is not None:
        right = f"{_bytes(spent):>10} of {_bytes(now.writes_per_day):<9} {'':>30}"
        yield _meter("written today", spent, now.writes_per_day, "magenta", right, width)
    elif now.stats.cold.total:
        yield [(f" {'written today':<14}", ""), (f"{_bytes(spent)}, no limit", _FAINT)]


def _tokens(seen: Sequence[Snapshot], width: int) -> Iterable[Line]:
    total = Change(None, seen[-1])
    tokens = total.tokens()
    asked = sum(tokens.values())
    steps = [Change(before, after).tokens() for before, after in pairwise(seen)]
    shares = [_reused(each) for each in steps][-max(1, width - 36) :]
    share = _reused(tokens)
    right = "nothing asked yet" if share is None else f"{share:.1%} of {asked:,}"
    yield [
        (f" {'reused':<14}", ""),
        (f"{sparkline(shares):<{max(1, width - 36)}}", "green"),
        (f"{right:>20}", ""),
    ]
    for kind in KINDS:
        yield _meter(kind, tokens[kind], asked, _COLORS[kind], f"{tokens[kind]:>20,}", width)
    requests, saved = total.count("requests"), total.count("ttft_saved_us") - total.count("ttft_lost_us")
    if requests:
        yield [
            (
                f" {'':<14}{requests:,} requests, {_seconds(saved / 1e6)} to first tokens saved by costs",
                _FAINT,
            )
        ]


def _reused(tokens: dict[str, int]) -> float | None:
    asked = sum(tokens.values())
    return (tokens["prefix"] + tokens["moved"]) / asked if asked else None


def _stages(lately: Change, now: Snapshot, width: int) -> Iterable[Line]:
    yield [(f" {'':<14}{'runs':>9}{'half within':>14}{'95 % within':>14}{'in all':>14}", _FAINT)]
    uses = {name: lately.stage(name) for name in STAGES}
    most = max(use.seconds for use in uses.values())
    for name, use in uses.items():
        half, nearly = (quantile(use, now.bounds, share) for share in (0.5, 0.95))
        taken = _seconds(use.seconds) if use.count else ""
        text = f"{use.count:>9,}{_within(half):>14}{_within(nearly):>14}{taken:>14}"
        room = max(0, width - 15 - len(text) - 2)
        yield [(f" {name:<14}", ""), (text, ""), ("  ", ""), *_bar(use.seconds, most, "cyan", room)]
    hidden = lately.hidden()
    if hidden is not None:
        yield _meter("overlap", hidden, 1.0, "green", f"{hidden:>8.0%} of loading was not waited for", width)


def _prefixes(now: Snapshot, width: int) -> Iterable[Line]:
    if not now.prefixes:
        return [[(f"{' none used yet':<{width}}", _FAINT)]]
    head: Line = [(_cut(f" {'last block':<18}{'tokens':>9}{'hits':>9}  tier", width), _FAINT)]
    rows: list[Line] = [
        [(_cut(f" {each.key:<18}{each.tokens:>9,}{each.hits:>9,}  {each.tier}", width), "")]
        for each in now.prefixes
    ]
    return [head, *rows]


def _rest(now: Snapshot, width: int) -> Iterable[Line]:
    counts, stats = now.stats.counts, now.stats
    read = counts.get("bytes_prefetched_read", 0)
    if read:
        used = counts.get("bytes_prefetched_used", 0)
        yield [(_cut(f" {_bytes(read)} read ahead, {used / read:.0%} of it used", width), "")]
    else:
        yield [(_cut(" nothing read ahead yet", width), _FAINT)]
    reasons = [*stats.refusals.items(), *stats.misses.items(), *stats.bad_records.items()]
    for reason, count in sorted(reasons, key=lambda each: -each[1])[:9]:
        yield [(_cut(f" {reason}", width - 10), ""), (f"{count:>10,}", "")]


def _head(title: str, width: int) -> Line:
    return [("── ", _FAINT), (title, "bold"), (f" {'─' * max(0, width - len(title) - 4)}", _FAINT)]


def _meter(label: str, part: float, whole: float, color: str, right: str, width: int) -> Line:
    return [
        (f" {label:<14}", ""),
        *_bar(part, whole, color, max(0, width - 16 - len(right))),
        (f" {right}", ""),
    ]


def _bar(part: float, whole: float, color: str, width: int) -> Line:
    filled = round(min(1.0, part / whole) * width) if whole else 0
    if part and not filled:
        filled = min(1, width)
    return [("━" * filled, color), ("┄" * (width - filled), _FAINT)]


def _cut(text: str, width: int) -> str:
    """`text` in exactly `width` cells."""
    return set_cell_size(text if len(text) <= width else text[: max(0, width - 1)] + "…", width)


def sparkline(shares: Iterable[float | None]) -> str:
    """One character a share between 0 and 1, a point for None."""
    return "".join("·" if each is None else _LEVELS[max(1, round(each * 8))] for each in shares)


def _span(change: Change) -> str:
    return "since opening" if change.seconds is None else f"the last {_seconds(change.seconds)}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _within(seconds: float | None) -> str:
    return "" if seconds is None else _seconds(seconds)


def _seconds(seconds: float) -> str:
    size = abs(seconds)
    if size == 0:
        return "0 s"
    if size < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if size < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if size < 600 else f"{seconds / 60:,.0f} min"
