"""Writes tiny GGUF models with random weights, so that end-to-end tests take milliseconds.

The files follow llama.cpp's conventions, so what reads them reads real ones: arch "llama" stores the rows of Q
and K of each head interleaved, (0, d/2, 1, d/2 + 1, ...); other architectures store them in half-split order.
Weights are drawn before that permutation: one seed gives one function, whatever the architecture.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_gguf(
    path: str | PathLike[str],
    *,
    arch: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    rotary_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 300,
    context: int = 2048,
    theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    tied: bool = True,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    quantise: str | None = None,
    pre: str = "smollm",
    chat_template: str | None = CHAT_TEMPLATE,
    add_bos: bool = False,
    seed: int = 0,
) -> None:
    """Write a llama-family model to `path`; the same arguments give the same bytes.

    arch: "llama", "qwen2" (give it qkv_bias) or "qwen3" (give it qk_norm: a norm over each head of Q and K).
    rope_scaling is as in a Hugging Face config: {"rope_type": "linear" | "yarn" | "llama3" | "longrope",
    "factor": ..., ...}, with "short_factor" and "long_factor" (rotary_dim / 2 numbers each) for longrope.
    quantise names a ggml type that the gguf package can write (F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) for
    every matrix; the embedding and the output matrix become Q8_0 where that is finer, as in published files.
    Norms and biases are F32. None: all F32. pre, chat_template and add_bos are the tokenizer's.
    Raises ValueError where no file can say it.
    """
    rotary_dim = rotary_dim or head_dim
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, arch)
    writer.add_name(f"tiny-{arch}-{seed}")
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(vocab)
    _add_tokenizer(writer, vocab, pre, chat_template, add_bos)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)).astype(np.float32)

    def add(name: str, values: NDArray[np.float32], kind: str | None = None) -> None:
        if kind is None:
            writer.add_tensor(name, values)
        else:
            ggml = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, ggml), raw_dtype=ggml)

    def rows_as_stored(values: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """Rows of `count` heads, from half-split order to the order the architecture is stored in."""
        if arch != "llama":
            return values
        head = values.reshape(count, head_dim, -1)
        turned, kept = head[:, :rotary_dim], head[:, rotary_dim:]
        turned = turned.reshape(count, 2, rotary_dim // 2, -1).swapaxes(1, 2).reshape(turned.shape)
        return np.ascontiguousarray(np.concatenate([turned, kept], axis=1).reshape(values.shape))

    edge = "Q8_0" if quantise and quantise.startswith(("Q4", "Q5")) else quantise
    # Small embeddings against large branches: else a tied random model just repeats its last token.
    add("token_embd.weight", matrix(vocab, hidden, gain=2.5), edge)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        q_width, kv_width = heads * head_dim, kv_heads * head_dim
        add(prefix + "attn_norm.weight", _around(rng, 1.0, 0.1, hidden))
        add(prefix + "attn_q.weight", rows_as_stored(matrix(q_width, hidden, gain=2), heads), quantise)
        add(prefix + "attn_k.weight", rows_as_stored(matrix(kv_width, hidden), kv_heads), quantise)
        add(prefix + "attn_v.weight", matrix(kv_width, hidden), quantise)
        if qkv_bias:
            q_bias, k_bias, v_bias = (
                _around(rng, 0.0, 0.3, width) for width in (q_width, kv_width, kv_width)
            )
            add(prefix + "attn_q.bias", rows_as_stored(q_bias, heads))
            add(prefix + "attn_k.bias", rows_as_stored(k_bias, kv_heads))
            add(prefix + "attn_v.bias", v_bias)
        if qk_norm:
            add(prefix + "attn_q_norm.weight", _around(rng, 1.0, 0.3, head_dim))
            add(prefix + "attn_k_norm.weight", _around(rng, 1.0, 0.3, head_dim))
        add(prefix + "attn_output.weight", matrix(hidden, q_width, gain=3), quantise)
        add(prefix + "ffn_norm.weight", _around(rng, 1.0, 0.1, hidden))
        add(prefix + "ffn_gate.weight", matrix(ffn, hidden), quantise)
        add(prefix + "ffn_up.weight", matrix(ffn, hidden), quantise)
        add(prefix + "ffn_down.weight", matrix(hidden, ffn, gain=3), quantise)
    add("output_norm.weight", _around(rng, 1.0, 0.1, hidden))
    if not tied:
        add("output.weight", matrix(vocab, hidden, gain=2.5), edge)
    if rope_scaling is not None:
        _add_rope_scaling(writer, rope_scaling, theta, rotary_dim, context)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _around(rng: np.random.Generator, mean: float, spread: float, size: int) -> NDArray[np.float32]:
    return (mean + spread * rng.standard_normal(size)).astype(np.float32)


def _add_rope_scaling(
    writer: GGUFWriter, scaling: Mapping[str, Any], theta: float, rotary_dim: int, context: int
) -> None:
    """As llama.cpp's converter does: llama3 becomes a tensor of divisors, longrope two, the others are keys."""
    original = int(scaling.get("original_max_position_embeddings", context))
    match scaling["rope_type"]:
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling["factor"])
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(original)
        case "llama3":
            wavelength = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = np.clip((original / wavelength - low) / (high - low), 0, 1)
            divisors = 1 / (kept + (1 - kept) / scaling["factor"])
            writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        case "longrope":
            writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(original)
            writer.add_rope_scaling_attn_factors(
                float(np.sqrt(1 + np.log(context / original) / np.log(original)))
            )
            writer.add_tensor("rope_factors_short.weight", np.asarray(scaling["short_factor"], np.float32))
            writer.add_tensor("rope_factors_long.weight", np.asarray(scaling["long_factor"], np.float32))
        case other:
            raise ValueError(f"rope_type {other!r} has no form in a GGUF")


def _add_tokenizer(
    writer: GGUFWriter, vocab: int, pre: str, chat_template: str | None, add_bos: bool
) -> None:
    """Specials, the 256 bytes, then pairs of frequent letters, those after a space first."""
    letters = "etaoinshrdlucmfwygpbvkxqjz"
    merges = list(itertools.product("Ġ" + letters, letters))
    count = vocab - len(SPECIALS) - 256
    if not 0 <= count <= len(merges):
        low = len(SPECIALS) + 256
        raise ValueError(f"vocab {vocab} must be between {low} and {low + len(merges)}")
    merges = merges[:count]
    tokens = [*SPECIALS, *byte_characters(), *("".join(pair) for pair in merges)]
    types = [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * (256 + count)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges] or ["e t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2).

    Printable Latin-1 bytes stand for themselves, the others take the characters from U+0100 on in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
