"""Verbs that look and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvstore.errors import InvalidRequestError

from . import output
from .options import (
    ConfigFile,
    Dir,
    File,
    IdentityName,
    Json,
    Model,
    Socket,
    Special,
    Text,
    Tokens,
)
from .prompt import given, optional, text_of, tokenizer_of
from .target import Target

if TYPE_CHECKING:
    from kvstore.admin.status import IdentityStatus
    from kvstore.admin.tree import Node
    from kvstore.pipeline.tokenizer import Tokenizer
    from kvstore.quality.reuse import Measurement
    from kvstore.sent_costs import SentCosts


def status(dir: Dir = None, socket: Socket = None, config: ConfigFile = None, json: Json = False) -> None:
    """Tiers and budgets, identities, what they hold and do with moved runs, pins, and why things were refused."""
    with Target(dir, socket, config).reading() as target:
        found = target.status()
    if json:
        output.json(found)
        return
    where = found.directory or "memory alone"
    owner = "" if found.owner is None else f", open in process {found.owner}"
    output.line(
        f"{where}{owner}: {found.blocks} blocks of up to {found.block_tokens} tokens, {found.tokens} tokens"
    )
    output.table(
        ("tier", "blocks", "leased", "used", "budget"),
        (
            (
                name,
                str(tier.blocks),
                str(tier.leased),
                output.size(tier.used),
                output.size(tier.total) if tier.total else "?",
            )
            for name, tier in found.tiers.items()
        ),
        right=("blocks", "leased", "used", "budget"),
    )
    output.table(
        ("identity", "tenant", "blocks", "tokens", "KV", "on flash", "hits", ""),
        (
            (
                each.identity[:12],
                each.tenant or "-",
                str(each.blocks),
                str(each.tokens),
                output.size(each.kv_bytes),
                output.size(each.flash_bytes),
                str(each.hits),
                each.description,
            )
            for each in found.identities
        ),
        right=("blocks", "tokens", "KV", "on flash", "hits"),
    )
    for each in found.identities:
        for policy, does in _policies(each):
            output.line(f"moved runs of {each.identity[:12]}{policy}: {does}")
    for pin in found.pins:
        output.line(f"pinned: {pin.tokens} tokens of {pin.identity[:12]}")
    if found.quarantined:
        output.line(f"{found.quarantined} records in quarantine; `kvstore gc` removes them")
    for what, counts in (
        ("not stored", found.refusals),
        ("held and not used", found.misses),
        ("bad records", found.bad_records),
    ):
        for reason, count in sorted(counts.items(), key=lambda pair: -pair[1]):
            if count:
                output.line(f"{what}: {count} × {reason}")


def _policies(identity: IdentityStatus) -> Iterator[tuple[str, str]]:
    """Policies, and what each does."""
    from kvstore.quality.reuse import NOT_MEASURED

    if not identity.policies:
        yield "", _does(None, NOT_MEASURED.why_none("careful"), None)
    for policy, use in identity.policies.items():
        yield f", {policy}", _does(use.repair, use.reason, use.measured)


def _does(repair: str | None, refused: str | None, measured: Measurement | None) -> str:
    """What a policy does with moved runs, by which figures, or why nothing."""
    from kvstore.quality.reuse import figures

    if repair is None:
        return f"not used: {refused}"
    return repair if measured is None else f"{repair} ({figures(measured)})"


def quota(dir: Dir = None, socket: Socket = None, config: ConfigFile = None, json: Json = False) -> None:
    """What each tenant of a daemon holds, and the most that it may."""
    with Target(dir, socket, config).changing(daemon="only a daemon has tenants with quotas") as target:
        found = target.quota()
    if json:
        output.json(found)
        return
    output.table(
        ("tenant", "in memory", "at most", "on flash", "at most "),
        (
            (
                each.tenant or "-",
                output.size(each.memory_bytes),
                _limit(each.most_memory_bytes),
                output.size(each.flash_bytes),
                _limit(each.most_flash_bytes),
            )
            for each in found
        ),
        right=("in memory", "at most", "on flash", "at most "),
    )


def _limit(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else output.size(nbytes)


def ls(
    identity: IdentityName = None,
    block: Annotated[str | None, typer.Option(help="First digits of a block.")] = None,
    tenant: Annotated[str | None, typer.Option(help="A tenant, as `kvstore status` shows it.")] = None,
    tier: Annotated[str | None, typer.Option(help="hot, warm or cold.")] = None,
    min_age: Annotated[float | None, typer.Option(help="Unused for at least so many seconds.")] = None,
    max_age: Annotated[float | None, typer.Option(help="Used within so many seconds.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="At least so many tokens.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="At most so many tokens.")] = None,
    min_hits: Annotated[int | None, typer.Option(help="Used at least so often.")] = None,
    max_hits: Annotated[int | None, typer.Option(help="Used at most so often.")] = None,
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--not-pinned", help="Only (not) pinned ones.")
    ] = None,
    order: Annotated[str, typer.Option(help="key, recent, hits or size.")] = "key",
    after: Annotated[str | None, typer.Option(help="Where the page before ended.")] = None,
    limit: Annotated[int, typer.Option(help="Blocks a page.")] = 100,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Blocks, page by page."""
    with Target(dir, socket, config).reading() as target:
        page = target.ls(
            identity=identity,
            block=block,
            tenant=tenant,
            tier=tier,
            min_age=min_age,
            max_age=max_age,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            min_hits=min_hits,
            max_hits=max_hits,
            pinned=pinned,
            order=order,  # type: ignore[arg-type]  # checked there
            after=after,
            limit=limit,
        )
    if json:
        output.json(page)
        return
    output.table(
        ("block", "identity", "tier", "start", "tokens", "KV", "on flash", "hits", "unused for", ""),
        (
            (
                each.block[:16],
                each.identity[:8],
                each.tier,
                str(each.start),
                str(each.tokens),
                output.size(each.kv_bytes),
                output.size(each.flash_bytes),
                str(each.hits),
                output.age(each.last_use),
                " ".join(
                    word
                    for word, said in (
                        ("pinned", each.pinned),
                        ("leased", each.leases),
                        ("inexact", not each.exact),
                    )
                    if said
                ),
            )
            for each in page.blocks
        ),
        right=("start", "tokens", "KV", "on flash", "hits", "unused for"),
    )
    if page.after is not None:
        output.line(f"more: --after {page.after}")


def show(
    block: Annotated[str, typer.Argument(help="First digits of a block, as `kvstore ls` shows it.")],
    model: Model = None,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """One block: its tokens, what it hangs on, what hangs on it, and its record."""
    with Target(dir, socket, config).reading() as target:
        found = target.show(block)
    if json:
        output.json(found)
        return
    row = found.block
    for name, value in (
        ("block", row.block),
        ("identity", f"{row.identity[:12]}: {found.identity}"),
        (
            "tier",
            row.tier + (", pinned" if row.pinned else "") + (f", {row.leases} leases" if row.leases else ""),
        ),
        ("tokens", f"{row.tokens} from {row.start} on, {output.size(row.kv_bytes)} of KV"),
        ("used", f"{row.hits} times, last {output.age(row.last_use)} ago"),
        ("serves as", found.serves),
        ("behind", f"{len(found.path)} blocks" + (f", last {found.path[-1][:16]}" if found.path else "")),
        ("before", ", ".join(each[:16] for each in found.children) or "nothing"),
        ("record", found.record or "none"),
        ("text" if model else "token ids", _whole(found.token_ids, tokenizer_of(model))),
    ):
        output.line(f"{name:>10}  {value}")
    if found.unreadable:
        output.line(f"{'damaged':>10}  {found.unreadable}; `kvstore verify` looks at all of it")
    for frame in found.frames:
        layers = f"layers {frame.layers[0]}–{frame.layers[1] - 1}"
        output.line(
            f"{'frame':>10}  {layers}, {frame.form}, {output.size(frame.stored)} for {output.size(frame.raw)}"
        )


def tree(
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    model: Model = None,
    special: Special = False,
    identity: IdentityName = None,
    depth: Annotated[int, typer.Option(help="Branchings down from the root.")] = 4,
    width: Annotated[int, typer.Option(help="Branches shown at each.")] = 20,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Held prompts as a tree of what they share; those that begin with a text or tokens, if given."""
    start = optional(text, file, tokens, model, special=special)
    with Target(dir, socket, config).reading() as target:
        found = target.tree(identity=identity, prefix=start.tokens, depth=depth, width=width)
    if json:
        output.json(found)
        return
    from rich.text import Text as Plain
    from rich.tree import Tree as Drawn

    for each in found:
        drawn = Drawn(Plain(f"{each.identity[:12]}: {each.description}"))
        for node in each.nodes:
            _draw(drawn, node, start.tokenizer)
        if each.hidden:
            drawn.add(Plain(f"… {each.hidden} more"))
        if each.orphans or each.inexact:
            drawn.add(
                Plain(
                    f"not behind any prefix: {each.orphans} orphans, {each.inexact} computed behind moved runs"
                )
            )
        output.console().print(drawn)


def explain(
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    model: Model = None,
    special: Special = False,
    identity: IdentityName = None,
    policy: Annotated[str, typer.Option(help="exact, careful or fast.")] = "careful",
    measured: Annotated[
        bool,
        typer.Option(
            "--measured",
            help="Build the model's graphs and go by what they cost: then the answer is what a request does.",
        ),
    ] = False,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Where each token of a prompt would come from, why not from nearer, and what it would cost."""
    prompt = given(text, file, tokens, model, special=special)
    calls = _Calls(None, None, 1)
    if measured:
        if model is None:
            raise InvalidRequestError("--measured takes --model, whose graphs it builds")
        calls = _measured(model, len(prompt.tokens))
    with Target(dir, socket, config).reading() as target:
        found = target.explain(
            prompt.tokens,
            identity=identity or calls.identity or prompt.identity(None, target),
            policy=policy,
            costs=calls.costs,
            layer_groups=calls.layer_groups,
        )
    if json:
        output.json(found)
        return
    told, cost = found.explanation, found.cost
    output.table(
        ("tokens", "from", "what", "of", "moved by", "why"),
        (
            (
                f"{span.start}–{span.start + span.length - 1}",
                span.source,
                span.kind,
                (span.block or "")[:16],
                f"{span.shift:+d}" if span.shift else "",
                span.reason or "",
            )
            for span in told.spans
        ),
    )
    output.line(
        f"{found.tokens} tokens under {found.identity[:12]}, policy {told.policy}: {told.prefix} as prefix, "
        f"{told.moved} moved, {told.recomputed} recomputed, {told.computed} computed"
    )
    figures = told.verdict.measured(told.policy)
    output.line(f"moved runs: {_does(told.repair, told.refused, figures)}")
    output.line(
        f"cost: {output.size(cost.memory_bytes)} from memory, {output.size(cost.flash_bytes)} from flash"
        f"{_time(cost.flash_seconds)}, {cost.computed} tokens through the model{_time(cost.compute_seconds)}"
    )
    for note in told.notes:
        output.line(f"note: {note}")


class _Calls(NamedTuple):
    """What an engine's graph calls cost, its layer groups, and the identity of its KV."""

    identity: str | None
    costs: SentCosts | None
    layer_groups: int


def _measured(model: Path, tokens: int) -> _Calls:
    from kvstore.language_model import LanguageModel
    from kvstore.sent_costs import SentCosts

    opened = LanguageModel(model)
    kv = opened.engine.allocate(tokens + 1)
    costs = SentCosts.of(opened.engine.costs(kv.slots))
    opened.engine.recycle(kv)
    return _Calls(opened.identity.digest().hex(), costs, len(opened.engine.layer_groups))


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f" ({seconds * 1e3:.1f} ms)"


def _draw(drawn: object, node: Node, tokenizer: Tokenizer | None) -> None:
    from rich.text import Text as Plain
    from rich.tree import Tree as Drawn

    assert isinstance(drawn, Drawn)
    about = (
        f"{node.tokens} tokens from {node.start}, {node.blocks} blocks, {output.size(node.flash_bytes)}, "
        f"{node.hits} hits{', pinned' if node.pinned else ''}  {text_of(node.first, tokenizer)}"
    )
    branch = drawn.add(Plain(about))
    for child in node.children:
        _draw(branch, child, tokenizer)
    if node.hidden:
        branch.add(Plain(f"… {node.hidden} more"))


def _whole(tokens: tuple[int, ...], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return tokenizer.decode(tokens, special=True)
