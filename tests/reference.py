"""An independent oracle: a llama-family transformer in plain numpy fp32, read from the same GGUF as the engine.

It shares no code with the engine. Keys and queries are half-split: pairs (i, i + rotary_dim / 2), angles in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class _Layer(NamedTuple):
    attn_norm: F32
    q: F32
    k: F32
    v: F32
    q_bias: F32
    k_bias: F32
    v_bias: F32
    q_norm: F32 | None
    k_norm: F32 | None
    output: F32
    ffn_norm: F32
    gate: F32
    up: F32
    down: F32


class Reference:
    """The model in `path`. `long_rope` selects LongRoPE's long divisors, whatever the number of tokens."""

    def __init__(self, path: str | PathLike[str], *, long_rope: bool = False) -> None:
        reader = _Reader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._arch = str(self._key("general.architecture", absolute=True))
        self.layers = int(self._key("block_count"))
        self.heads = int(self._key("attention.head_count"))
        self.kv_heads = int(self._key("attention.head_count_kv", self.heads))
        self.head_dim = int(self._key("attention.key_length", self._key("embedding_length") // self.heads))
        self.rotary_dim = int(self._key("rope.dimension_count", self.head_dim))
        self._eps = float(self._key("attention.layer_norm_rms_epsilon"))
        self._frequencies, self._attention_factor = self._rope(long_rope)
        self._embedding = self._tensor("token_embd.weight")
        self._output = self._tensor("output.weight") if "output.weight" in self._tensors else self._embedding
        self._output_norm = self._tensor("output_norm.weight")
        self._layers = [self._layer(index) for index in range(self.layers)]

    @property
    def vocab(self) -> int:
        return len(self._output)

    def logits(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> F32:
        """Logits after each of `tokens` at positions 0, 1, ...: [n, vocab] float32."""
        return self._head(self._hidden(tokens, self._empty()))

    def kv(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> list[tuple[F32, F32]]:
        """Per layer the keys after RoPE and the values, each [kv_heads, n, head_dim] float32."""
        cache = self._empty()
        self._hidden(tokens, cache)
        return cache

    def greedy(self, tokens: Sequence[int] | NDArray[np.integer[Any]], n: int) -> list[int]:
        """The `n` most likely tokens after `tokens`, one by one; end-of-text tokens do not stop it."""
        cache = self._empty()
        step: list[int] = [int(token) for token in tokens]
        chosen: list[int] = []
        for _ in range(n):
            hidden = self._hidden(step, cache)[-1:]
            step = [int(self._head(hidden)[0].argmax())]
            chosen += step
        return chosen

    def _empty(self) -> list[tuple[F32, F32]]:
        nothing = np.zeros((self.kv_heads, 0, self.head_dim), np.float32)
        return [(nothing, nothing)] * self.layers

    def _head(self, hidden: F32) -> F32:
        return self._normed(hidden, self._output_norm) @ self._output.T

    def _hidden(self, tokens: Sequence[int] | NDArray[np.integer[Any]], cache: list[tuple[F32, F32]]) -> F32:
        """Run `tokens` behind what `cache` holds and append their KV to it: [n, hidden]."""
        held = cache[0][0].shape[1]
        count = len(tokens)
        positions = np.arange(held, held + count)
        visible = np.arange(held + count)[None, :] <= positions[:, None]
        x = self._embedding[np.asarray(tokens)]
        for index, layer in enumerate(self._layers):
            normed = self._normed(x, layer.attn_norm)
            q = self._split(normed @ layer.q.T + layer.q_bias, self.heads)
            k = self._split(normed @ layer.k.T + layer.k_bias, self.kv_heads)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            q, k = self._turned(q, positions), self._turned(k, positions)
            v = self._split(normed @ layer.v.T + layer.v_bias, self.kv_heads)
            k = np.concatenate([cache[index][0], k], axis=1)
            v = np.concatenate([cache[index][1], v], axis=1)
            cache[index] = (k, v)

            group = q.reshape(self.kv_heads, -1, count, self.head_dim)  # the query heads of one KV head
            scores = group @ k[:, None].swapaxes(-1, -2) / np.float32(np.sqrt(self.head_dim))
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            mixed = (weights @ v[:, None]).reshape(self.heads, count, self.head_dim)
            x = x + mixed.swapaxes(0, 1).reshape(count, -1) @ layer.output.T

            normed = self._normed(x, layer.ffn_norm)
            gate = normed @ layer.gate.T
            x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer.up.T)) @ layer.down.T
        return x

    def _normed(self, x: F32, weight: F32) -> F32:
        scale = np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + self._eps)
        return (x / scale).astype(np.float32) * weight

    def _split(self, x: F32, heads: int) -> F32:
        return x.reshape(len(x), heads, self.head_dim).swapaxes(0, 1)

    def _turned(self, x: F32, positions: NDArray[np.int64]) -> F32:
        angles = np.multiply.outer(positions, self._frequencies)
        cos = (np.cos(angles) * self._attention_factor).astype(np.float32)
        sin = (np.sin(angles) * self._attention_factor).astype(np.float32)
        half = self.rotary_dim // 2
        first, second, kept = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, kept], axis=-1)

    def _rope(self, long_rope: bool) -> tuple[NDArray[np.float64], float]:
        """Angle per position for each pair [rotary_dim / 2], and the factor on both cos and sin."""
        dim, theta = self.rotary_dim, float(self._key("rope.freq_base", 10000.0))
        frequencies = theta ** (-np.arange(0, dim, 2) / dim)
        if "rope_freqs.weight" in self._tensors:  # llama3 scaling, as divisors
            return frequencies / self._tensor("rope_freqs.weight").astype(np.float64), 1.0
        kind = str(self._key("rope.scaling.type", "none"))
        if kind == "none":
            return frequencies, 1.0
        if kind == "longrope":
            name = f"rope_factors_{'long' if long_rope else 'short'}.weight"
            return frequencies / self._tensor(name).astype(np.float64), float(
                self._key("rope.scaling.attn_factor", 1.0)
            )
        factor = float(self._key("rope.scaling.factor"))
        if kind == "linear":
            return frequencies / factor, 1.0
        if kind != "yarn":
            raise ValueError(f"the reference knows no rope scaling {kind!r}")
        original = float(self._key("rope.scaling.original_context_length"))
        turns = original * frequencies / (2 * np.pi)  # of each pair over the original context
        pair = np.arange(dim // 2)
        # Pairs that turn more than 32 times keep their frequency, less than once are interpolated. The ramp is
        # linear in the pair's number between the two whole pairs around those (YaRN, section 3.2 and appendix A).
        steepness = np.log(theta) * 2 / dim  # of log(turns) a pair
        low = max(np.floor((np.log(turns[0]) - np.log(32.0)) / steepness), 0)
        high = min(np.ceil(np.log(turns[0]) / steepness), dim - 1)
        interpolated = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
        return frequencies * (1 - interpolated + interpolated / factor), 1 + 0.1 * np.log(factor)

    def _layer(self, index: int) -> _Layer:
        def get(name: str) -> F32:
            return self._tensor(f"blk.{index}.{name}")

        def optional(name: str) -> F32 | None:
            return get(name) if f"blk.{index}.{name}" in self._tensors else None

        def bias(name: str, width: int) -> F32:
            held = optional(name)
            return np.zeros(width, np.float32) if held is None else held

        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return _Layer(
            attn_norm=get("attn_norm.weight"),
            q=self._half_split(get("attn_q.weight"), self.heads),
            k=self._half_split(get("attn_k.weight"), self.kv_heads),
            v=get("attn_v.weight"),
            q_bias=self._half_split(bias("attn_q.bias", q_width), self.heads),
            k_bias=self._half_split(bias("attn_k.bias", kv_width), self.kv_heads),
            v_bias=bias("attn_v.bias", kv_width),
            q_norm=optional("attn_q_norm.weight"),
            k_norm=optional("attn_k_norm.weight"),
            output=get("attn_output.weight"),
            ffn_norm=get("ffn_norm.weight"),
            gate=get("ffn_gate.weight"),
            up=get("ffn_up.weight"),
            down=get("ffn_down.weight"),
        )

    def _half_split(self, rows: F32, heads: int) -> F32:
        """Rows of Q or K in half-split order: llama files hold pairs side by side, (0, d/2, 1, d/2 + 1, ...)."""
        if self._arch != "llama":
            return rows
        dim = self.rotary_dim
        order = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2), np.arange(dim, self.head_dim)])
        return rows[(np.arange(heads)[:, None] * self.head_dim + order).ravel()]

    def _tensor(self, name: str) -> F32:
        tensor = self._tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)

    def _key(self, name: str, default: Any = None, *, absolute: bool = False) -> Any:
        field = self._fields.get(name if absolute else f"{self._arch}.{name}")
        if field is not None:
            return field.contents()
        if default is None:
            raise KeyError(f"the GGUF has no key {name!r}")
        return default


class _Reader(GGUFReader):
    """Steps over arrays of strings: the vocabulary takes the plain reader seconds, and the oracle needs none."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY or self.data[orig_offs] != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        raw = self.data.data
        count = int.from_bytes(raw[orig_offs + 4 : orig_offs + 12], "little")
        end = orig_offs + 12
        for _ in range(count):
            end += 8 + int.from_bytes(raw[end : end + 8], "little")
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType.STRING]
