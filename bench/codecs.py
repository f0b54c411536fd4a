"""Codecs of the cold tier on real KV: how small, how fast, and what they do to the answers.

The demo model reads chat prompts of about 800 tokens over Python's documentation; with --data also encyclopedia
passages (xquad) and meetings (qmsum). All tokens but the last pass through a codec, block by block, then the model
goes on: KL(full || coded) and whether the most likely token stays, over 16 teacher-forced tokens. The 4-bit rows are
what the kernels offer (keys per channel, values per token, groups of 32), for comparison.

Speeds are of one core, in seconds of its own time, so that others on the machine do not count; bytes are those of the
KV. "to the engine" is decode, turn by 1,000 positions, and place in the engine's buffer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import texts
from bench.report import Report, arguments
from kvstore import codec, models
from kvstore.codec import CODECS, Codec
from kvstore.codec.shape import FrameShape
from kvstore.language_model import LanguageModel
from kvstore.layout import Dtype, Layout
from kvstore.pipeline import kernels
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.rope import Rope
from kvstore.quality.codec_trial import CodecTrial, go_on, pass_through
from kvstore.quality.fidelity import FORCED, reference

BLOCK = 128
WORDS = 480
SYSTEM = "You answer questions about the text that follows."
FOUR_BITS = "4 bits, groups of 32"


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report(
        "Codecs", f"real KV of the demo model, blocks of {BLOCK} tokens, kernels on {kernels.level()}"
    )
    model = LanguageModel(models.smollm2())
    plain = (
        model.identity.layout.token_bytes * 2 // model.identity.layout.itemsize
    )  # bytes a token as float16
    prompts = {kind: some[: 2 if args.quick else 12] for kind, some in _prompts(args.data).items()}
    found: dict[str, dict[str, list[CodecTrial]]] = {name: {} for name in (*CODECS, FOUR_BITS)}
    some_kv: KvAllocation | None = None
    for kind, asked in prompts.items():
        for text, question in asked:
            some_kv, of_prompt = _measure(model, model.chat_prompt(SYSTEM, f"{text}\n\n{question}"))
            for name, sample in of_prompt.items():
                found[name].setdefault(kind, []).append(sample)

    rows = report.table(
        f"over {FORCED} teacher-forced tokens",
        ["codec", "text", "prompts", "of float16", "mean KL", "worst KL", "same token"],
    )
    for name, kinds in found.items():
        for kind, samples in [*kinds.items(), ("all", _all(kinds))]:
            if kind != "all" or len(kinds) > 1:
                rows.append([name, kind, len(samples), *_summary(samples, plain)])
    judged = {name: _summary(_all(kinds), plain) for name, kinds in found.items()}
    assert some_kv is not None
    _speeds(report, some_kv, repeats=20 if args.quick else 60)
    report.bar("fine: smaller than float16", judged["fine"][0], ">=", 2.0, "x")
    report.bar("fine: mean KL", judged["fine"][1], "<=", 0.001)
    report.bar("small: smaller than float16", judged["small"][0], ">=", 3.4, "x")
    report.bar("small: mean KL", judged["small"][1], "<=", 0.012)
    report.bar("small: same most likely token", judged["small"][3], ">=", 0.95)
    report.bar("lossless: bits that change", float(_changed_bits()), "<=", 0)
    return report.finish(args)


def _prompts(data: Any) -> dict[str, list[tuple[str, str]]]:
    """(text, question) by kind of text."""
    _, others = texts.passages(None)
    found = {
        "documentation": [(_words(others, at), "Summarise it, with one example.") for at in range(0, 120, 10)]
    }
    if data is not None:
        passages, _ = texts.passages(data)
        found["encyclopedia"] = [
            (_words([each.text for each in passages], at), passages[at].questions[0].text)
            for at in range(0, 240, 20)
        ]
        found["meetings"] = [
            (_words(meeting.turns, 0), meeting.queries[0][0])
            for meeting in texts.meetings(data)
            if meeting.queries
        ]
    return found


def _words(pieces: Any, start: int) -> str:
    """Pieces from `start` on, WORDS words of them."""
    return " ".join("\n\n".join(pieces[start : start + 40]).split(" ")[:WORDS])


def _all(kinds: dict[str, list[CodecTrial]]) -> list[CodecTrial]:
    return [sample for samples in kinds.values() for sample in samples]


def _summary(samples: list[CodecTrial], token_bytes: int) -> list[float]:
    """[smaller than float16, mean KL, worst mean KL of a prompt, share of tokens that stay]"""
    return [
        token_bytes * sum(sample.tokens for sample in samples) / sum(sample.stored for sample in samples),
        statistics.mean(float(sample.close.kl.mean()) for sample in samples),
        max(float(sample.close.kl.mean()) for sample in samples),
        statistics.mean(float(sample.close.agrees.mean()) for sample in samples),
    ]


def _measure(model: LanguageModel, prompt: NDArray[np.int32]) -> tuple[KvAllocation, dict[str, CodecTrial]]:
    """KV of one prompt, and what each codec makes of it."""
    engine, layout = model.engine, model.identity.layout
    whole = engine.allocate(len(prompt) + FORCED)
    full = reference(engine, whole, engine.prefill(prompt, whole), len(prompt))
    codes: dict[str, Callable[[KvAllocation, int], int]] = {
        name: partial(pass_through, name, layout, BLOCK) for name in CODECS
    }
    codes[FOUR_BITS] = partial(_four_bits, layout.dtype)
    return whole, {name: go_on(engine, whole, prompt, full, code) for name, code in codes.items()}


def _four_bits(dtype: Dtype, kv: KvAllocation, tokens: int) -> int:
    """As `pass_through`, with plain 4-bit codes; the first four tokens stay."""
    stored = 0
    for start in range(4, tokens, BLOCK):
        for arrays, per in ((kv.keys, "channel"), (kv.values, "token")):
            for array in arrays:
                part = array[:, start : min(start + BLOCK, tokens)]
                codes = kernels.quantise(part, src_dtype=dtype, bits=4, per=per)  # type: ignore[arg-type]
                assert codes.offsets is not None, "4 bits have offsets"
                stored += codes.codes.nbytes + codes.scales.nbytes + codes.offsets.nbytes
                kernels.place_quantised(codes, part, dst_dtype=dtype)
    return stored


def _speeds(report: Report, kv: KvAllocation, repeats: int) -> None:
    """The same numbers as 3 KV heads of 64 channels, as the model has them, and as 8 of 128, as larger ones do."""
    block = slice(BLOCK, 2 * BLOCK)
    keys = np.concatenate([array[:, block] for array in kv.keys]).astype(np.float32)
    values = np.concatenate([array[:, block] for array in kv.values]).astype(np.float32)
    for heads, channels, layers in ((3, 64, 6), (8, 128, 2)):
        many = layers * heads * channels // 64
        shape = (channels // 64, layers, heads, BLOCK, 64)
        both = [
            np.moveaxis(array[:many].reshape(shape), 0, 3).reshape(layers, heads, BLOCK, channels)
            for array in (keys, values)
        ]
        columns = ["codec", "KV", "of float16", "encode MB/s", "decode MB/s", "to the engine GB/s"]
        rows = report.table(
            f"{layers} layers of {heads} KV heads of {channels} channels in one frame", columns
        )
        rope = Rope(head_dim=channels, theta=1e5, rotary_dim=channels)
        dtypes: tuple[Dtype, ...] = ("float16", "float32")
        for dtype in dtypes:
            layout = Layout.uniform(layers=layers, kv_heads=heads, head_dim=channels, rope=rope, dtype=dtype)
            raw = np.stack(both, axis=1).astype(dtype).reshape(-1).view(np.uint8)
            for name in CODECS:
                row = _speed(name, raw, FrameShape(layout, range(layers), BLOCK, BLOCK), repeats)
                rows.append([name, dtype, *row])
                if (heads, dtype) == (8, "float16") and name in ("int8", "fine", "small"):
                    least = 2.0 if name == "int8" else 0.8
                    report.bar(f"{name}: to the engine, 8 KV heads, {dtype}", row[-1], ">=", least, "GB/s")


def _speed(name: Codec, raw: NDArray[np.uint8], shape: FrameShape, repeats: int) -> list[float]:
    layout = shape.layout
    encoded = codec.encode(name, raw, shape)
    decoder = codec.decoder(encoded.form, [len(piece) for piece in encoded.pieces], shape)
    for buffer, piece in zip(decoder.pieces, encoded.pieces, strict=True):
        buffer[:] = np.frombuffer(piece, np.uint8)  # reading from flash does this
    out = np.empty_like(raw)
    views = list(layout.layer_views(out, shape.layers, shape.tokens))
    slots = 4 * BLOCK
    engine = [
        [np.empty((array.shape[0], slots, array.shape[2]), array.dtype) for array in arrays]
        for _, *arrays in views
    ]
    rope = layout.layers[0].rope
    assert rope is not None, "given above"
    cos, sin = rope.table([1000])
    options: dict[str, Any] = {"src_dtype": layout.dtype, "dst_dtype": layout.dtype}

    def decode() -> None:
        decoder.finish(out)

    def to_the_engine() -> None:
        decode()
        for (_, key, value), (keys, values) in zip(views, engine, strict=True):
            kernels.place(key, keys[:, BLOCK : 2 * BLOCK], cos=cos, sin=sin, **options)
            kernels.place(value, values[:, BLOCK : 2 * BLOCK], **options)

    plain = raw.nbytes * 2 // layout.itemsize
    return [
        plain / sum(len(piece) for piece in encoded.pieces),
        raw.nbytes / _own_seconds(lambda: codec.encode(name, raw, shape), repeats // 4) / 1e6,
        raw.nbytes / _own_seconds(decode, repeats) / 1e6,
        raw.nbytes / _own_seconds(to_the_engine, repeats) / 1e9,
    ]


def _own_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of this thread that a call takes."""
    call()
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return statistics.median(times)


def _changed_bits() -> int:
    """Bits that the lossless codec changes in all patterns of 16 bits, and in as many of 32."""
    changed = 0
    patterns = np.arange(1 << 16, dtype=np.uint16)
    wide = patterns.astype(np.uint32) << np.uint32(16) | patterns[::-1]
    forms: tuple[tuple[Dtype, NDArray[Any]], ...] = (
        ("float16", patterns),
        ("bfloat16", patterns),
        ("float32", wide),
    )
    for dtype, numbers in forms:
        layout = Layout.uniform(layers=1, kv_heads=4, head_dim=64, rope=None, dtype=dtype)
        shape = FrameShape(layout, range(1), 128, 0)
        raw = numbers.view(np.uint8)
        encoded = codec.encode("lossless", raw, shape)
        decoder = codec.decoder(encoded.form, [len(piece) for piece in encoded.pieces], shape)
        for buffer, piece in zip(decoder.pieces, encoded.pieces, strict=True):
            buffer[:] = np.frombuffer(piece, np.uint8)
        out = np.empty_like(raw)
        decoder.finish(out)
        changed += int(np.bitwise_count(raw ^ out).sum())
    return changed


if __name__ == "__main__":
    sys.exit(main())
