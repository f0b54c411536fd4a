"""`import kvstore` is light: what is heavy loads on first use."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    "torch",
    "faiss",
    "onnx",
    "onnxruntime",
    "typer",
    "rich",
    "sentence_transformers",
    "tokenizers",
    "gguf",
    "prometheus_client",
}


def _loaded_by(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return {name.partition(".")[0] for name in output.split()}


def test_import_loads_nothing_heavy() -> None:
    assert not _loaded_by("import kvstore") & HEAVY


def test_opening_a_store_loads_nothing_heavy() -> None:
    assert not _loaded_by("import kvstore; kvstore.open; kvstore.Identity; kvstore.Layout") & HEAVY


def test_public_names_resolve() -> None:
    import kvstore

    assert all(getattr(kvstore, name) is not None for name in kvstore.__all__)
