"""A real file system of a few hundred KiB, where this process may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


class SmallDisk:
    """A mounted tmpfs; `fill` takes what is free, `relieve` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, *, leave: int = 0) -> None:
        with self._ballast.open("ab") as file, contextlib.suppress(OSError):
            while self.free > leave:
                file.write(bytes(4096))
                file.flush()

    def relieve(self) -> None:
        self._ballast.unlink()

    @contextlib.contextmanager
    def read_only(self, folder: Path) -> Iterator[None]:
        """Nothing below `folder` can be written, also not by who has it open already."""
        assert _run("mount", "--bind", str(folder), str(folder))
        assert _run("mount", "-o", "remount,bind,ro", str(folder))
        try:
            yield
        finally:
            _run("umount", "--lazy", str(folder))


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk | None]:
    """Mount `size` bytes at `path`; None where mounting is not allowed."""
    path.mkdir()
    if os.geteuid() != 0 or not _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)):
        yield None
        return
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
