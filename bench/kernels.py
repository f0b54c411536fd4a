"""Kernels against memcpy: rotate, dequantise, quantise and split 64 MB of keys on one core.

Speeds count the bytes written (when quantising, read), as memcpy's count the bytes it copies.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.report import Report, alternate, arguments, median_seconds
from kvstore.pipeline import kernels, kernels_numpy
from kvstore.pipeline.kernels import Dtype, Quantised
from kvstore.pipeline.rope import Rope

HEAD_DIM = 64
GIB = 1 << 30


HELD_TO_BARS = ("memcpy", "place fp16", "rotate fp16", "int8 keys, rotated")


def main() -> int:
    args = arguments(__doc__ or "")
    repeats = 5 if args.quick else 15
    report = Report("Kernels", f"memory to memory, one core, level {kernels.level()}")

    keys = np.random.default_rng(0).standard_normal((8, 65536, HEAD_DIM)).astype(np.float16)  # 64 MB
    large = Workload(keys)
    calls = large.calls()
    others = {name: call for name, call in calls.items() if name not in HELD_TO_BARS}
    judged = alternate({name: calls[name] for name in HELD_TO_BARS}, 3 * repeats)
    rest = alternate({"memcpy": calls["memcpy"]} | others, repeats)
    for title, times in (("64 MB of fp16, beyond all caches", judged), ("the same, not held to a bar", rest)):
        rows = report.table(title, ["kernel", "ms", "GiB/s", "of memcpy"])
        for name, seconds in times.items():
            speed = large.bytes_of(name) / seconds
            rows.append([name, seconds * 1e3, speed / GIB, speed * times["memcpy"] / keys.nbytes])
    report.bar("fp16 rotation, of memcpy", judged["memcpy"] / judged["rotate fp16"], ">=", 0.5)
    report.bar(
        "int8 dequantise + rotate, of memcpy", judged["memcpy"] / judged["int8 keys, rotated"], ">=", 0.35
    )

    block = Workload(keys[:3, :128].copy())
    rows = report.table("one layer of one block, [3, 128, 64], in cache", ["kernel", "µs a call", "GiB/s"])
    for name, call in block.calls().items():
        seconds = median_seconds(call, 30 * repeats)
        rows.append([name, seconds * 1e6, block.bytes_of(name) / seconds / GIB])

    native_level = kernels.level()
    part = keys[:, :4096].copy()  # 4 MB
    target = np.empty_like(part)

    def rotate_on(name: str) -> Callable[[], None]:
        def run() -> None:
            kernels.use(name)
            kernels.place(part, target, src_dtype="float16", dst_dtype="float16", **large.turn)

        return run

    rows = report.table("rotate fp16, 4 MB, each level", ["level", "ms", "GiB/s"])
    for name, seconds in alternate({name: rotate_on(name) for name in kernels.levels()}, repeats).items():
        rows.append([name, seconds * 1e3, part.nbytes / seconds / GIB])
    kernels.use(native_level)
    report.bar(f"numpy against {native_level}, largest difference", largest_difference(part), "<=", 1, "ulp")
    return report.finish(args)


class Workload:
    """The same keys in every form, and a target for each kernel."""

    def __init__(self, keys: NDArray[np.float16]) -> None:
        self.keys = keys
        cos, sin = Rope(head_dim=HEAD_DIM, theta=1e4, rotary_dim=HEAD_DIM).table([4711])
        self.turn: dict[str, Any] = {"cos": cos, "sin": sin}

    def calls(self) -> dict[str, Callable[[], object]]:
        keys, turn = self.keys, self.turn
        heads, tokens, channels = keys.shape
        out16, out32 = np.empty_like(keys), np.empty(keys.shape, np.float32)
        wide, brain = keys.astype(np.float32), kernels_numpy.from_floats(keys.astype(np.float32), "bfloat16")
        out_brain = np.empty_like(brain)
        transposed = np.empty((heads, channels, tokens), np.float16).transpose(0, 2, 1)
        slots = np.random.default_rng(1).permutation(tokens)
        planes, joined = kernels.split_planes(keys, 2), np.empty(keys.nbytes, np.uint8)

        def place(
            src: NDArray[Any], dst: NDArray[Any], a: Dtype, b: Dtype, **options: Any
        ) -> Callable[[], None]:
            return lambda: kernels.place(src, dst, src_dtype=a, dst_dtype=b, **options)

        def dequantise(src: Quantised, **options: Any) -> Callable[[], None]:
            return lambda: kernels.place_quantised(src, out16, dst_dtype="float16", **options)

        def quantise(**recipe: Any) -> Callable[[], Quantised]:
            return lambda: kernels.quantise(keys, src_dtype="float16", **recipe)

        int8_keys: dict[str, Any] = {"bits": 8, "per": "channel", "group": 128}
        int8_values: dict[str, Any] = {"bits": 8, "per": "token"}
        int4_keys: dict[str, Any] = {"bits": 4, "per": "channel"}
        int4_values: dict[str, Any] = {"bits": 4, "per": "token"}
        return {
            "memcpy": lambda: ctypes.memmove(out16.ctypes.data, keys.ctypes.data, keys.nbytes),
            "place fp16": place(keys, out16, "float16", "float16"),
            "place fp16 in random slots": place(keys, out16, "float16", "float16", slots=slots),
            "rotate fp16": place(keys, out16, "float16", "float16", **turn),
            "rotate fp16 in random slots": place(keys, out16, "float16", "float16", slots=slots, **turn),
            "rotate fp16, interleaved": place(
                keys, out16, "float16", "float16", pairing="interleaved", **turn
            ),
            "rotate fp16, slots innermost": place(keys, transposed, "float16", "float16", **turn),
            "rotate fp16 to fp32": place(keys, out32, "float16", "float32", **turn),
            "rotate bf16": place(brain, out_brain, "bfloat16", "bfloat16", **turn),
            "rotate fp32": place(wide, out32, "float32", "float32", **turn),
            "int8 keys, rotated": dequantise(quantise(**int8_keys)(), **turn),
            "int8 values": dequantise(quantise(**int8_values)()),
            "int4 keys, rotated": dequantise(quantise(**int4_keys)(), **turn),
            "int4 values": dequantise(quantise(**int4_values)()),
            "quantise int8 keys": quantise(**int8_keys),
            "quantise int8 values": quantise(**int8_values),
            "quantise int4 keys": quantise(**int4_keys),
            "quantise int4 values": quantise(**int4_values),
            "split planes": lambda: kernels.split_planes(keys, 2, planes),
            "join planes": lambda: kernels.join_planes(planes, joined),
        }

    def bytes_of(self, name: str) -> int:
        """Bytes written, or for quantising read."""
        return self.keys.nbytes * (2 if name.endswith("fp32") else 1)


def largest_difference(keys: NDArray[np.float16]) -> float:
    """Largest distance in units in the last place between this level's results and numpy's."""
    cos, sin = Rope(head_dim=HEAD_DIM, theta=1e4, rotary_dim=HEAD_DIM).table(np.arange(keys.shape[1]) - 999)
    native_level = kernels.level()
    worst = 0
    for dtype, holds in (("float16", np.float16), ("bfloat16", np.uint16), ("float32", np.float32)):
        for src in (
            keys,
            *(kernels.quantise(keys, src_dtype="float16", bits=b, per="channel") for b in (8, 4)),
        ):
            results = []
            for name in (native_level, "numpy"):
                kernels.use(name)
                dst: NDArray[Any] = np.empty(keys.shape, holds)
                options: dict[str, Any] = {"dst_dtype": dtype, "cos": cos, "sin": sin}
                if isinstance(src, Quantised):
                    kernels.place_quantised(src, dst, **options)
                else:
                    kernels.place(src, dst, src_dtype="float16", **options)
                results.append(_in_order(dst))
            worst = max(worst, int(np.abs(results[0] - results[1]).max()))
    kernels.use(native_level)
    return float(worst)


def _in_order(array: NDArray[Any]) -> NDArray[np.int64]:
    """Integers that count floats upwards, so that neighbours differ by 1."""
    width = 8 * array.dtype.itemsize
    bits = array.view(f"u{array.dtype.itemsize}").astype(np.int64)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return np.where(bits >> (width - 1), -magnitude, magnitude)


if __name__ == "__main__":
    sys.exit(main())
