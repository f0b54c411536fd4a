"""Lets mkdocstrings read `kvstore.index` and its siblings without an import.

In a checkout the subsystems lie beside `kvstore/`; a reader of source text finds them only inside it. So it gets a copy
of the source in which the package looks as it does installed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

_ROOT = Path(__file__).parents[2]
_SUBSYSTEMS = ("index", "pipeline", "prefetch")
_trees: list[tempfile.TemporaryDirectory[str]] = []


@event_priority(100)  # before mkdocstrings looks at its configuration
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Point the Python handler at the copy."""
    tree = tempfile.TemporaryDirectory(prefix="kvstore-docs-")
    _trees.append(tree)
    package = Path(tree.name) / "kvstore"
    nothing_built = shutil.ignore_patterns("__pycache__", "*.so", "*.c", "*.h")
    shutil.copytree(_ROOT / "kvstore", package, ignore=nothing_built)
    for name in _SUBSYSTEMS:
        shutil.copytree(_ROOT / name, package / name, ignore=nothing_built, dirs_exist_ok=True)
    handlers = config.plugins["mkdocstrings"].config["handlers"]
    handlers["python"]["paths"] = [tree.name]
    return config


def on_shutdown() -> None:
    """Remove it."""
    while _trees:
        _trees.pop().cleanup()
