"""Hierarchical KV-cache store for LLM inference on NPU devices."""

from pathlib import Path

# In a checkout the subsystems lie beside this folder, installed they lie inside it; find them either way.
if not (Path(__file__).parent / "index").is_dir():
    __path__.append(str(Path(__file__).parent.parent))
