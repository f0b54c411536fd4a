"""What this machine gives the store, what it does not, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kvstore.profile import Profile

_PROBE = 16 << 20  # bytes written and read to see how fast flash is
_FEW_FILES = 1024


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. `cure`: what to do, None where nothing is wrong.

    level: bad: the store does not work as it is; weak: it works, and less well than it could.
    """

    about: str
    level: Literal["good", "weak", "bad"]
    found: str
    cure: str | None = None


def examine(directory: Path, profile: Profile) -> list[Finding]:
    """Look at versions, kernels, limits, devices and the disk. Writes and removes one file of 16 MiB."""
    return [
        *_versions(),
        *_kernels(),
        *_limits(profile),
        *_memory(profile),
        *_devices(),
        *_folder(directory),
        *_disk(directory, profile),
    ]


def _versions() -> Iterator[Finding]:
    names = ("npu-kvstore", "numpy", "lmdb", "zstandard", "onnxruntime", "tokenizers")
    found = [f"Python {platform.python_version()}", f"{platform.system()} {platform.machine()}"]
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    yield Finding("versions", "good", ", ".join(found))


def _kernels() -> Iterator[Finding]:
    from kvstore.pipeline import kernels

    level = kernels.level()
    if level != "numpy":
        yield Finding("kernels", "good", f"native code, {level}")
    else:
        cure = "install a wheel for this platform, or a C compiler and build again; unset KVSTORE_KERNELS"
        yield Finding("kernels", "weak", "numpy stands in for native code", cure)


def _limits(profile: Profile) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = profile.hot_bytes
    if soft in (resource.RLIM_INFINITY, -1) or soft >= wanted:
        yield Finding(
            "locked memory", "good", f"{_size(soft)} may be locked, the hot tier has {_size(wanted)}"
        )
    else:
        cure = f"ulimit -l {-(-wanted // 1024)}, or memlock in limits.conf, or LimitMEMLOCK= of the service"
        yield Finding(
            "locked memory", "weak", f"{_size(soft)} may be locked, the hot tier has {_size(wanted)}", cure
        )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files >= _FEW_FILES:
        yield Finding("open files", "good", f"{files} at a time")
    else:
        cure = f"ulimit -n {min(65_536, most if most > 0 else 65_536)}"
        yield Finding("open files", "weak", f"{files} at a time", cure)


def _memory(profile: Profile) -> Iterator[Finding]:
    wanted = profile.hot_bytes + profile.warm_bytes
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return
    if wanted > total // 2:
        cure = "lower hot_bytes and warm_bytes to less than half of memory"
        yield Finding("memory", "weak", f"tiers may take {_size(wanted)} of {_size(total)}", cure)
    else:
        yield Finding("memory", "good", f"tiers may take {_size(wanted)} of {_size(total)}")


def _devices() -> Iterator[Finding]:
    heaps = Path("/dev/dma_heap")
    if heaps.is_dir():
        usable = [heap.name for heap in sorted(heaps.iterdir()) if os.access(heap, os.R_OK)]
        if usable:
            yield Finding("dma-buf heaps", "good", ", ".join(usable))
        else:
            cure = "give this user read access to one of /dev/dma_heap, by a udev rule or a group"
            yield Finding("dma-buf heaps", "weak", "none may be used", cure)
    else:
        kind = "memfd" if hasattr(os, "memfd_create") else "POSIX shared memory"
        yield Finding("dma-buf heaps", "good", f"not on this system; {kind} serves")


def _folder(directory: Path) -> Iterator[Finding]:
    there = _nearest_existing(directory)
    if not os.access(there, os.W_OK | os.X_OK):
        cure = "chown or chmod it, or choose another directory (--dir, KVSTORE_DIRECTORY)"
        yield Finding("directory", "bad", f"{there} cannot be written by this user", cure)
        return
    if not directory.exists():
        yield Finding("directory", "good", f"{directory} is new and can be made")
        return
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        cure = f"chmod 700 {directory}: KV tells what was read and written"
        yield Finding("directory", "weak", f"others may look into {directory} (mode {mode:o})", cure)
    else:
        yield Finding("directory", "good", f"{directory}, mode {mode:o}")


def _disk(directory: Path, profile: Profile) -> Iterator[Finding]:
    there = _nearest_existing(directory)
    free = shutil.disk_usage(there).free
    if profile.cold_bytes > free:
        cure = "lower cold_bytes, or free some space: a full disk costs reuse, not requests"
        yield Finding(
            "disk space", "weak", f"{_size(free)} free, cold_bytes is {_size(profile.cold_bytes)}", cure
        )
    else:
        yield Finding("disk space", "good", f"{_size(free)} free, cold_bytes is {_size(profile.cold_bytes)}")
    if free < 4 * _PROBE or not os.access(there, os.W_OK | os.X_OK):
        return
    try:
        written, read = _flash_speed(there)
    except OSError as error:
        yield Finding("disk speed", "bad", f"cannot be written: {error}", "see dmesg, or use another disk")
        return
    found = f"writes {_size(int(written))}/s, reads {_size(int(read))}/s: {_speed_class(read)}"
    if read < 100e6:
        cure = "a slow medium: loading pays only for large models; try another disk"
        yield Finding("disk speed", "weak", found, cure)
    else:
        yield Finding("disk speed", "good", found)


def _flash_speed(folder: Path) -> tuple[float, float]:
    """Bytes a second, written and read past the page cache."""
    import numpy as np

    from kvstore.flash.flash_file import FlashReader, sync, write

    data = np.random.default_rng(0).integers(0, 256, _PROBE, np.uint8)
    descriptor, name = tempfile.mkstemp(prefix="kvstore-doctor-", dir=folder)
    os.close(descriptor)
    try:
        started = time.perf_counter()
        write(name, [data.data])
        sync(name)
        between = time.perf_counter()
        reader = FlashReader(name)
        reader.read([data], 0)
        reader.close()
        return _PROBE / (between - started), _PROBE / (time.perf_counter() - between)
    finally:
        os.unlink(name)


def _speed_class(read: float) -> str:
    for least, name in (
        (2e9, "as fast as NVMe or UFS 4"),
        (1e9, "as fast as UFS 3"),
        (3e8, "as fast as SATA"),
    ):
        if read >= least:
            return name
    return "as fast as eMMC or an SD card"


def _nearest_existing(directory: Path) -> Path:
    path = directory.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path


def _size(nbytes: int) -> str:
    if nbytes in (resource.RLIM_INFINITY, -1):
        return "any amount"
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
