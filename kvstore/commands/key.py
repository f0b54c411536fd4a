"""Verbs about the keys of tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import InvalidRequestError

from . import output
from .options import ConfigFile, Dir, DryRun, Json, Socket, Yes
from .target import Target

KeyFilePath = Annotated[
    Path | None, typer.Option("--key-file", help="The file with the keys, by default the configured one.")
]
Tenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        help="A tenant as `kvstore status` shows it, - for KV of none; else each.",
        show_default=False,
    ),
]


def new(key_file: KeyFilePath = None, config: ConfigFile = None) -> None:
    """Make a file for keys: each tenant that comes gets one. `rotate` encrypts what is there already."""
    from kvstore.flash.keys import KeyFile

    source = Target(None, None, config, key_file).config.key()
    if source is None:
        raise InvalidRequestError("no key file is configured; give --key-file, or set key_file")
    if not isinstance(source, KeyFile):
        raise InvalidRequestError("the keyring needs no file: keys are made in it when tenants come")
    source.create()
    output.line(
        f"{source.path} is made; without the keys in it, nothing written under them can be read again"
    )


def rotate(
    tenant: Tenant = None,
    key_file: KeyFilePath = None,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Put what is on flash, of a tenant or of each, under a new key, and erase the old one. Goes on after a stop."""
    with Target(dir, socket, config, key_file).changing() as target:
        done = target.rotate_key(tenant=tenant)
    if json:
        output.json(done)
        return
    output.line(f"{done.tenants} tenants have a new key, {done.records} records were put under it")
    if done.left:
        output.line(f"{done.left} records stay as they are: damaged, or nobody knows whose")
    if done.own:
        output.line(f"{done.own} tenants have keys of their own, and change them themselves")


def drop(
    tenant: Tenant = None,
    key_file: KeyFilePath = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    dir: Dir = None,
    socket: Socket = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Erase the key of a tenant, or of each, and forget its blocks: what was under it is lost for good."""
    chosen = Target(dir, socket, config, key_file)
    with chosen.changing() as target:
        found = target.drop_key(tenant=tenant, dry_run=True)
        if not dry_run:
            output.confirm(
                yes, f"Erase the keys of {found.tenants} tenants, and with them {found.blocks} blocks?"
            )
            found = target.drop_key(tenant=tenant, dry_run=False)
    if json:
        output.json(found)
    else:
        would = "would go" if found.dry_run else "are erased"
        output.line(f"the keys of {found.tenants} tenants {would}, and {found.blocks} blocks with them")
