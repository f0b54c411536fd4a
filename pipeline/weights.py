"""Weights of a llama-family GGUF as float32, in the arrangement that the static graphs want.

Opening a model reads the GGUF once, dequantises it and writes one raw file under the cache directory, named after
the SHA-256 of the GGUF; later opens map that file into memory and read nothing else. What is arranged here, so
that no graph has to do it at run time:

- query, key and value projections are one matrix, gate and up projections are one matrix;
- matrices are [in, out], row-major, except embedding and output head, which are [vocab, hidden];
- the softmax scale 1/sqrt(head_dim) is folded into the query projection (into the query norm where there is one);
- llama.cpp permutes the rows of Q and K of arch "llama", so that RoPE pairs are neighbours; the permutation is
  undone, so that every model here pairs channel i with i + head_dim/2 ("half", as Hugging Face does);
- RoPE cosines and sines for every position of the context, from fp64 angles.

Supported: arch llama, qwen2, qwen3; full rotary; dense feed-forward with SiLU. Anything else is refused by name.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from .gguf_metadata import read_metadata
from .rope import Explicit, Linear, Rope, Scaling, Yarn

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_FORMAT = 1
_ALIGNMENT = 4096  # tensors start on a page, so that they can be mapped one by one

# Metadata that would ask for another computation than the graphs'.
_CHANGE_THE_COMPUTATION = (
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
)
_KNOWN_SCALING = {"type", "factor", "original_context_length", "finetuned"}


class UnsupportedModel(ValueError):
    """The GGUF holds something that the graphs do not compute; the message names it."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the graphs need to know of a model. Sizes are counts, `context_length` is in tokens."""

    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    vocab: int
    context_length: int
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """The output head is the embedding matrix."""
    quantization: str
    """Tensor types of the GGUF's matrices and what they were turned into, e.g. "gguf:Q4_1,Q8_0→float32"."""


class Tensor(msgspec.Struct, frozen=True):
    """Where a float32 tensor lies in the weights file: byte offset and shape."""

    offset: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)


class _Contents(msgspec.Struct, frozen=True):
    config: ModelConfig
    tensors: dict[str, Tensor]


class Weights:
    """The float32 weights of one model, mapped read-only from `path`.

    `digest` is the SHA-256 (hex) of the GGUF the weights came from, `folder` the cache folder that belongs to this
    very model (other files derived from it may be kept there).
    """

    def __init__(self, folder: Path, digest: str, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.folder = folder
        self.digest = digest
        self.config = config
        self.tensors = tensors
        self.path = folder / "weights.bin"

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """Read-only view of a tensor. KeyError for a name that the model does not have."""
        tensor = self.tensors[name]
        raw = self._map[tensor.offset : tensor.offset + tensor.nbytes]
        return raw.view(np.float32).reshape(tensor.shape)

    @cached_property
    def _map(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, dtype=np.uint8, mode="r")


def open_weights(
    gguf: Path,
    cache: Path,
    *,
    variant: str = "plain",
    prepare: Callable[[Weights], None] | None = None,
) -> Weights:
    """Weights of the model in `gguf`, converted on the first call and mapped from `cache` afterwards.

    `prepare` is called once after the conversion, while the folder is not yet visible to others: it may append to
    the weights file and add files; `variant` names what it does, so that folders of different runtimes coexist.
    Of threads and processes that come at the same time one converts and the others wait; the folder appears whole or
    not at all. Raises UnsupportedModel or GgufError (nothing is left in the cache) and OSError.
    """
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache / f"{digest[:32]}-v{_FORMAT}-{variant}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{folder.name}.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                unfinished = cache / f".{folder.name}.unfinished"
                shutil.rmtree(unfinished, ignore_errors=True)  # of a process that died
                unfinished.mkdir()
                try:
                    _convert(gguf, unfinished)
                    if prepare:
                        prepare(_read(unfinished, digest))
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    return _read(folder, digest)


def _read(folder: Path, digest: str) -> Weights:
    contents = msgspec.json.decode((folder / "model.json").read_bytes(), type=_Contents)
    return Weights(folder, digest, contents.config, contents.tensors)


def _convert(gguf: Path, folder: Path) -> None:
    source = _Gguf(gguf)
    config = _config(source)
    tensors: dict[str, Tensor] = {}
    with (folder / "weights.bin").open("wb") as file:
        for name, array in _arrange(source, config):
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            tensors[name] = Tensor(file.tell(), array.shape)
            file.write(np.ascontiguousarray(array, dtype=np.float32).data)
        if unread := source.unread():
            raise UnsupportedModel(
                f"{gguf.name}: tensors of no use to arch {config.arch}: {', '.join(unread)}"
            )
        file.truncate(file.tell() + -file.tell() % _ALIGNMENT)
        file.flush()
        os.fsync(file.fileno())
    (folder / "model.json").write_bytes(msgspec.json.encode(_Contents(config, tensors)))


class _Gguf:
    """A GGUF file: metadata by key, tensors by name (dequantised), and which tensors were not asked for."""

    def __init__(self, path: Path) -> None:
        self._metadata = read_metadata(path)
        try:
            tensors = _TensorReader(path).tensors
        except (ValueError, IndexError) as error:
            raise UnsupportedModel(
                f"{path.name}: the tensors cannot be read, is the file whole? {error}"
            ) from error
        self.name = path.name
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._unread = set(self._tensors)
        self.arch = str(self._metadata.get("general.architecture"))

    def of_arch(self, key: str, default: Any = None) -> Any:
        """Metadata `<arch>.<key>`; UnsupportedModel if it is missing and there is no default."""
        value = self._metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise UnsupportedModel(f"{self.name}: metadata {self.arch}.{key} is missing")
        return value

    def keys_of_arch(self, prefix: str) -> set[str]:
        start = f"{self.arch}.{prefix}"
        return {key.removeprefix(start) for key in self._metadata if key.startswith(start)}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in numpy order (GGUF stores it reversed)."""
        if name not in self._tensors:
            raise UnsupportedModel(f"{self.name}: tensor {name} is missing")
        return tuple(int(size) for size in self._tensors[name].shape[::-1])

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        found = self.shape(name)
        if found != shape:
            raise UnsupportedModel(f"{self.name}: tensor {name} has shape {found}, the metadata says {shape}")
        stored = self._tensors[name]
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:  # what gguf raises for a type it has no numpy form of
            raise UnsupportedModel(
                f"{self.name}: tensor {name} has type {stored.tensor_type.name}, which cannot be read"
            ) from error
        self._unread.discard(name)
        return np.asarray(values, dtype=np.float32).reshape(shape)

    def matrix_types(self) -> str:
        types = {t.tensor_type.name for t in self._tensors.values() if len(t.shape) > 1}
        return ",".join(sorted(types))

    def unread(self) -> list[str]:
        return sorted(self._unread)


class _TensorReader(GGUFReader):
    """Steps over arrays in the metadata: the vocabulary takes the plain reader seconds, and is not wanted here."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw = self.data.data
        kind = GGUFValueType(int.from_bytes(raw[orig_offs : orig_offs + 4], "little"))
        end = orig_offs + 12
        count = int.from_bytes(raw[orig_offs + 4 : end], "little")
        if kind in self.gguf_scalar_to_np:
            end += count * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        elif kind == GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + int.from_bytes(raw[end : end + 8], "little")
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, kind]


def _config(source: _Gguf) -> ModelConfig:
    arch = source.arch
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"{source.name}: arch {arch} is not one of {', '.join(ARCHITECTURES)}")
    hidden, heads = int(source.of_arch("embedding_length")), int(source.of_arch("attention.head_count"))
    kv_heads = source.of_arch("attention.head_count_kv", heads)
    context_length = int(source.of_arch("context_length"))
    head_dim = int(source.of_arch("attention.key_length", hidden // heads))
    value_dim = int(source.of_arch("attention.value_length", head_dim))
    rotary_dim = int(source.of_arch("rope.dimension_count", head_dim))
    window = int(source.of_arch("attention.sliding_window", 0))
    for key in _CHANGE_THE_COMPUTATION:
        if value := source.of_arch(key, 0):
            raise UnsupportedModel(f"{source.name}: metadata {arch}.{key} is {value}")
    if not isinstance(kv_heads, int):
        raise UnsupportedModel(
            f"{source.name}: the number of KV heads differs from layer to layer: {kv_heads}"
        )
    if value_dim != head_dim:
        raise UnsupportedModel(f"{source.name}: values have head_dim {value_dim}, keys {head_dim}")
    if rotary_dim != head_dim:
        raise UnsupportedModel(f"{source.name}: partial rotary ({rotary_dim} of head_dim {head_dim})")
    if 0 < window < context_length:
        raise UnsupportedModel(f"{source.name}: sliding window of {window} tokens")
    return ModelConfig(
        arch=arch,
        layers=int(source.of_arch("block_count")),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=int(source.of_arch("feed_forward_length")),
        norm_eps=float(source.of_arch("attention.layer_norm_rms_epsilon")),
        vocab=source.shape("token_embd.weight")[0],
        context_length=context_length,
        rope=Rope(
            head_dim=head_dim,
            theta=float(source.of_arch("rope.freq_base", 10000.0)),
            rotary_dim=rotary_dim,
            scaling=_scaling(source, rotary_dim),
        ),
        qkv_bias="blk.0.attn_q.bias" in source,
        qk_norm="blk.0.attn_q_norm.weight" in source,
        tied="output.weight" not in source,
        quantization=f"gguf:{source.matrix_types()}→float32",
    )


def _scaling(source: _Gguf, rotary_dim: int) -> Scaling | None:
    if "rope_freqs.weight" in source:
        # llama.cpp writes Llama 3 scaling as its outcome: one divisor for each frequency, whatever the length.
        return Explicit(tuple(source.tensor("rope_freqs.weight", (rotary_dim // 2,)).astype(float).tolist()))
    if unknown := source.keys_of_arch("rope.scaling.") - _KNOWN_SCALING:
        raise UnsupportedModel(f"{source.name}: metadata {', '.join(sorted(unknown))}")
    kind = source.of_arch("rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = float(source.of_arch("rope.scaling.factor"))
    if kind == "linear":
        return Linear(factor)
    if kind == "yarn":
        return Yarn(factor, int(source.of_arch("rope.scaling.original_context_length")))
    raise UnsupportedModel(f"{source.name}: RoPE scaling {kind}")


def _arrange(source: _Gguf, config: ModelConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors that the graphs use, by the name they use, in order of use."""
    c, hidden = config, config.hidden
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    scale = np.float32(1 / math.sqrt(c.head_dim))
    query_scale = np.float32(1) if c.qk_norm else scale

    def halves(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rows of Q or K with their RoPE pairs (i, i + head_dim/2) instead of neighbours."""
        if c.arch != "llama":
            return rows
        rest = rows.shape[1:]
        return rows.reshape(-1, c.head_dim // 2, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)

    yield "embedding", source.tensor("token_embd.weight", (c.vocab, hidden))
    cosines, sines = c.rope.table(np.arange(c.context_length))
    factor = np.float32(c.rope.attention_factor)
    yield "rope.cos", cosines * factor
    yield "rope.sin", sines * factor
    for i in range(c.layers):
        read, name = f"blk.{i}", f"layers.{i}"
        yield f"{name}.attention_norm", source.tensor(f"{read}.attn_norm.weight", (hidden,))
        q = halves(source.tensor(f"{read}.attn_q.weight", (queries, hidden))) * query_scale
        k = halves(source.tensor(f"{read}.attn_k.weight", (keys, hidden)))
        v = source.tensor(f"{read}.attn_v.weight", (keys, hidden))
        yield f"{name}.qkv", np.concatenate([q, k, v]).T
        if c.qkv_bias:
            q = halves(source.tensor(f"{read}.attn_q.bias", (queries,))) * query_scale
            k = halves(source.tensor(f"{read}.attn_k.bias", (keys,)))
            yield f"{name}.qkv_bias", np.concatenate([q, k, source.tensor(f"{read}.attn_v.bias", (keys,))])
        if c.qk_norm:
            yield f"{name}.query_norm", source.tensor(f"{read}.attn_q_norm.weight", (c.head_dim,)) * scale
            yield f"{name}.key_norm", source.tensor(f"{read}.attn_k_norm.weight", (c.head_dim,))
        yield f"{name}.output", source.tensor(f"{read}.attn_output.weight", (hidden, queries)).T
        yield f"{name}.ffn_norm", source.tensor(f"{read}.ffn_norm.weight", (hidden,))
        gate = source.tensor(f"{read}.ffn_gate.weight", (c.ffn, hidden))
        up = source.tensor(f"{read}.ffn_up.weight", (c.ffn, hidden))
        yield f"{name}.gate_up", np.concatenate([gate, up]).T
        yield f"{name}.down", source.tensor(f"{read}.ffn_down.weight", (hidden, c.ffn)).T
    yield "final_norm", source.tensor("output_norm.weight", (hidden,))
    if not c.tied:
        yield "head", source.tensor("output.weight", (c.vocab, hidden))
