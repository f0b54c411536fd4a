"""What `kvstore calibrate` measures of graph calls and says of their sizes, with the installed command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import write_tiny_gguf


def test_calls_over_each_context_are_measured_and_sizes_suggested(tmp_path: Path) -> None:
    """Only those of one context were, and the first long prompt waited for the measurement of another."""
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=2, context=1024)
    where = ["--model", str(tmp_path / "tiny.gguf"), "--dir", str(tmp_path / "kv")]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "kvstore"), "calibrate", "--trials", "1", *where],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"KVSTORE_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    (table,) = (tmp_path / "cache").rglob("costs-*.json")
    assert sorted(map(int, json.loads(table.read_text()))) == [512, 1024]
    assert re.search(r"^graph calls: [\d.]+% padding, [\d.]+% above what no calls", done.stdout, re.MULTILINE)
    found = re.search(
        r"^of graphs of ([\d, ]+) tokens, .* would take ([\d.]+)% of the time of (.*)$",
        done.stdout,
        re.MULTILINE,
    )
    assert found is not None
    suggested, in_use = ([int(size) for size in found[each].split(", ")] for each in (1, 3))
    assert in_use == [16, 32, 64, 128, 256, 512]
    assert len(suggested) == len(in_use)
    assert float(found[2]) <= 100
