"""Verbs about this machine and its settings."""

from __future__ import annotations

import typer

from . import output
from .options import ConfigFile, Dir, Json, Socket
from .target import Target


def doctor(dir: Dir = None, config: ConfigFile = None, json: Json = False) -> None:
    """Look at limits, memory, devices, disk and versions, each with the cure. Exit code 1 when something is bad."""
    from kvstore.admin.doctor import examine

    target = Target(dir, None, config)
    findings = examine(target.config.directory, target.config.device())
    if json:
        output.json(findings)
    else:
        for each in findings:
            output.line(f"{each.level:>5}  {each.about}: {each.found}")
            if each.cure is not None:
                output.line(f"{'':>5}  → {each.cure}")
    raise typer.Exit(1 if any(each.level == "bad" for each in findings) else 0)


def config_show(
    dir: Dir = None, socket: Socket = None, config: ConfigFile = None, json: Json = False
) -> None:
    """Each setting with its value and where that comes from."""
    from kvstore.config import load

    flags = {
        "directory": None if dir is None else str(dir),
        "socket": None if socket is None else str(socket),
    }
    loaded = load(config, flags)
    settings = loaded.shown()
    if json:
        output.json(settings)
        return
    output.table(
        ("setting", "value", "from"),
        (
            (name, "none" if each.value is None else str(each.value), each.origin)
            for name, each in settings.items()
        ),
    )
    output.line(f"file: {loaded.file}{'' if loaded.file.exists() else ' (there is none)'}")
