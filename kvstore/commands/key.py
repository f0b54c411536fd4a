"""Verbs about the key of a data directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import InvalidRequestError

from . import output
from .options import ConfigFile, Dir, Json, Yes
from .target import Target

KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="The key's file, by default the configured one.")
]


def new(key_file: KeyFile = None, config: ConfigFile = None) -> None:
    """Make a key. What is put from then on is encrypted; `rotate` encrypts what is there."""
    from kvstore.encryption import Key

    file = _file(key_file, Target(None, None, config))
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    Key.generate().write(file)
    output.line(f"{file} holds a new key; without it, nothing written under it can be read again")


def rotate(key_file: KeyFile = None, dir: Dir = None, config: ConfigFile = None, json: Json = False) -> None:
    """Make a new key, encrypt all that is held with it, and drop the old one. Goes on where a stop left it."""
    from kvstore.admin.bare_directory import BareDirectory
    from kvstore.admin.rotation import rotate_key_file

    target = Target(dir, None, config)
    path = target.config.directory
    done = rotate_key_file(path, _file(key_file, target), BareDirectory(path).block_tokens)
    if json:
        output.json(done)
        return
    output.line(
        f"{done.records} records encrypted anew, {done.already} were already, {done.left} left as they are"
    )


def drop(key_file: KeyFile = None, yes: Yes = False, config: ConfigFile = None) -> None:
    """Erase a key. All that was written under it is lost for good; its files go when their room is needed."""
    from kvstore import encryption

    file = _file(key_file, Target(None, None, config))
    fresh = file.with_name(file.name + encryption.NEXT)
    if not (file.exists() or fresh.exists()):
        raise encryption.EncryptionError(f"{file} does not exist")
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidRequestError("nothing was changed: confirm with --yes")
        typer.confirm(f"Erase {file}, and with it all that is encrypted?", abort=True, err=True)
    encryption.erase(file)
    encryption.erase(fresh)
    output.line(f"{file} is erased")


def _file(given: Path | None, target: Target) -> Path:
    file = given.expanduser() if given is not None else target.config.key_file
    if file is None:
        raise InvalidRequestError("no key file is configured; give --key-file, or set key_file")
    return file
