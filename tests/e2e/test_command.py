"""The `kvstore` command where parts of it are not installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        (("typer", "rich"), [], "npu-kvstore[cli]"),
        (("gguf", "jinja2", "onnx", "onnxruntime", "tokenizers"), ["demo"], "npu-kvstore[npu]"),
    ],
)
def test_a_missing_extra_is_one_line_and_exit_2(
    tmp_path: Path, missing: tuple[str, ...], arguments: list[str], extra: str
) -> None:
    """The base install, whose command ended in a traceback of imports."""
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.partition(".")[0] not in (*missing, "__editable__") and path.suffix != ".pth":
            (tmp_path / path.name).symlink_to(path)
    run = subprocess.run(
        [sys.executable, "-S", "-m", "kvstore.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=_CHECKOUT,
        env={"PYTHONPATH": f"{_CHECKOUT}:{tmp_path}", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert run.returncode == 2, run.stderr
    assert extra in run.stderr
    assert len(run.stderr.splitlines()) == 1
