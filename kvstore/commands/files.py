"""Verbs about files: whether those of the store are sound, and taking blocks out and in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import output
from .options import ConfigFile, Dir, IdentityName, Json, Model, Socket, Tokens
from .prompt import optional
from .target import Target


def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside what is bad, in quarantine/. Nothing is deleted.")
    ] = False,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Check all that is held: checksums, keys, parents, sizes. Exit code 1 when something is wrong and stays so."""
    with Target(dir, socket, config).looking_at_damage() as target:
        found = target.verify(repair=repair)
    if json:
        output.json(found)
    else:
        for fault in found.faults:
            output.line(f"{fault.entry}: {fault.kind}: {fault.found}")
            output.line(f"    {fault.repaired or fault.cure}")
        for note in found.notes:
            output.line(f"note: {note}")
        done = sum(fault.repaired is not None for fault in found.faults)
        output.line(
            f"{found.blocks} sound blocks, {output.size(found.bytes_read)} read, {len(found.faults)} faults"
            + (f", {done} repaired" if done else "")
        )
    raise typer.Exit(0 if found.sound else 1)


def export(
    path: Annotated[Path, typer.Argument(help="The file to write, .safetensors; never overwritten.")],
    identity: IdentityName = None,
    block: Annotated[str | None, typer.Option(help="One block and those before it.")] = None,
    tokens: Tokens = None,
    file: Annotated[Path | None, typer.Option("--file", help="A text file; needs --model.")] = None,
    model: Model = None,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Write blocks with all that says whose they are to one portable file; those along a prompt, if one is given."""
    prompt = optional(None, file, tokens, model)
    with Target(dir, socket, config).reading() as target:
        done = target.export(
            str(path.absolute()),
            identity=prompt.identity(identity, target),
            block=block,
            prefix=prompt.tokens,
        )
    if json:
        output.json(done)
        return
    output.line(f"{done.blocks} blocks, {done.tokens} tokens in {done.path}, {output.size(done.nbytes)}")
    for key, reason in done.left_out.items():
        output.line(f"left out: {key[:16]}: {reason}")


def import_(
    path: Annotated[Path, typer.Argument(help="A file that `kvstore export` wrote.")],
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Take in the blocks of a portable file that are not held yet. All of it is checked first."""
    with Target(dir, socket, config).changing(new=True) as target:
        done = target.import_(str(path.absolute()))
    if json:
        output.json(done)
    else:
        output.line(f"{done.added} blocks added, {done.held} held already")
        for key, reason in done.refused.items():
            output.line(f"refused: {key[:16]}: {reason}")
    raise typer.Exit(1 if done.refused else 0)
