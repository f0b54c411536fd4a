"""Verbs that change what is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import InvalidRequestError

from . import output
from .options import (
    ConfigFile,
    Dir,
    DryRun,
    File,
    IdentityName,
    Json,
    Model,
    Socket,
    Special,
    Text,
    Tokens,
    Yes,
)
from .prompt import given, optional
from .target import Target

if TYPE_CHECKING:
    from kvstore.admin.administration import Pinned
    from kvstore.admin.purge import Purged


def flush(socket: Socket = None, config: ConfigFile = None, json: Json = False) -> None:
    """Have a daemon bring all that was put before onto the medium."""
    with Target(None, socket, config).changing(daemon="only a daemon has something to flush") as target:
        done = target.flush()
    if json:
        output.json(done)
    else:
        output.line(f"{done.blocks} blocks are on flash")


def purge(
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    model: Model = None,
    special: Special = False,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Prompts that begin with the text or tokens.")
    ] = False,
    document: Annotated[
        bool,
        typer.Option("--document", help="All that holds a part of the text or tokens, and what came behind."),
    ] = False,
    tenant: Annotated[str | None, typer.Option(help="All of a tenant, as `kvstore status` shows it.")] = None,
    adapter: Annotated[str | None, typer.Option(help="All made with an adapter, by its digest.")] = None,
    older_than: Annotated[float | None, typer.Option(help="All that is unused for so many seconds.")] = None,
    tier: Annotated[str | None, typer.Option(help="Free a tier: hot, warm or cold.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All there is.")] = False,
    identity: IdentityName = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Forget blocks, after saying how many and asking."""
    if prefix and document:
        raise InvalidRequestError("give --prefix or --document, not both")
    prompt = None
    if prefix or document:
        prompt = given(text, file, tokens, model, special=special)
    elif optional(text, file, tokens, model).tokens:
        raise InvalidRequestError("say what of the text is meant: --prefix or --document")
    with Target(dir, socket, config).changing() as target:
        named = identity if prompt is None or document else prompt.identity(identity, target)

        def go(*, dry: bool) -> Purged:
            return target.purge(
                prefix=prompt.tokens if prompt is not None and prefix else None,
                document=prompt.tokens if prompt is not None and document else None,
                tenant=tenant,
                adapter=adapter,
                older_than=older_than,
                tier=tier,
                everything=everything,
                identity=named,
                dry_run=dry,
            )

        found = go(dry=True)
        if not dry_run and found.blocks:
            if not json:
                output.line(_purged(found))
            output.confirm(yes, "Forget them?")
            found = go(dry=False)
    if json:
        output.json(found)
    else:
        output.line(_purged(found))


def pin(
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    model: Model = None,
    special: Special = False,
    identity: IdentityName = None,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Keep what is held of the beginning of a prompt, now or later, from being evicted."""
    prompt = given(text, file, tokens, model, special=special)
    with Target(dir, socket, config).changing() as target:
        done = target.pin(prompt.tokens, identity=prompt.identity(identity, target))
    _say_pinned(done, json=json, what=f"{done.held} of {len(prompt.tokens)} tokens are held and stay")


def unpin(
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    model: Model = None,
    special: Special = False,
    identity: IdentityName = None,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """End a pin, given by the very text or tokens that were pinned."""
    prompt = given(text, file, tokens, model, special=special)
    with Target(dir, socket, config).changing() as target:
        done = target.unpin(prompt.tokens, identity=prompt.identity(identity, target))
    _say_pinned(done, json=json, what="unpinned" if done.changed else "no pin is of these very tokens")
    if not done.changed:
        raise typer.Exit(1)


def warm(
    text: Text = None,
    file: File = None,
    tokens: Tokens = None,
    model: Model = None,
    special: Special = False,
    identity: IdentityName = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Have a daemon bring what it holds of a prompt from flash to memory, before it is asked for."""
    prompt = given(text, file, tokens, model, special=special)
    with Target(None, socket, config).changing(daemon="only a daemon keeps KV in memory") as target:
        done = target.warm(prompt.tokens, identity=prompt.identity(identity, target))
    if json:
        output.json(done)
    else:
        output.line(f"{done.held} of {done.tokens} tokens are held, {done.in_memory} of them in memory now")


def gc(
    dry_run: DryRun = False,
    yes: Yes = False,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Remove what no request will ever use, after saying what that is and asking."""
    with Target(dir, socket, config).changing() as target:
        found = target.gc(dry_run=True)
        if not dry_run and found.garbage:
            if not json:
                for each in found.garbage:
                    output.line(f"{each.what}: {each.why}, {output.size(each.nbytes)}")
            output.confirm(yes, "Remove it?")
            found = target.gc(dry_run=False)
    if json:
        output.json(found)
        return
    if found.dry_run:
        for each in found.garbage:
            output.line(f"{each.what}: {each.why}, {output.size(each.nbytes)}")
    done = "would be removed" if found.dry_run else "removed"
    output.line(f"{len(found.garbage)} things, {output.size(found.nbytes)} {done}")


def _purged(found: Purged) -> str:
    kept = f"; {found.kept} that are in use stay" if found.kept else ""
    return (
        f"{found.blocks} blocks, {found.tokens} tokens, {output.size(found.memory_bytes)} in memory and "
        f"{output.size(found.flash_bytes)} on flash {'would go' if found.dry_run else 'are gone'}{kept}"
    )


def _say_pinned(done: Pinned, *, json: bool, what: str) -> None:
    if json:
        output.json(done)
        return
    output.line(
        f"{what}; {len(done.pins)} pins, {output.size(done.pinned_bytes)} of at most "
        f"{output.size(done.most_pinned_bytes)}"
    )
