"""Token ids as llama.cpp gives them, and text back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pipeline.gguf_metadata import GgufError, read_metadata
from kvstore.pipeline.tokenizer import Tokenizer, TokenizerError
from tests.tiny_models import SPECIALS, write_tiny_gguf

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    return read_metadata(path)


@pytest.fixture(scope="module")
def tiny(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(metadata)


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2)


def test_ids_are_int32_and_of_the_vocabulary(tiny: Tokenizer) -> None:
    ids = tiny.encode("the cat sat on the mat")
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert ids.max() < tiny.vocab == 300
    assert tiny.encode("").shape == (0,)


@given(text=TEXT)
def test_decoding_gives_the_text_back(tiny: Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text


@given(pieces=st.lists(st.sampled_from([*SPECIALS, "a", " the", "é", "\n", "<|", "|>"]), max_size=12))
def test_decoding_gives_text_with_control_tokens_back(tiny: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert tiny.decode(tiny.encode(text)) == text
    assert tiny.decode(tiny.encode(text, special=True), special=True) == text


@given(text=TEXT)
def test_a_stream_gives_the_same_text_token_by_token(tiny: Tokenizer, text: str) -> None:
    stream = tiny.stream()
    pieces = [stream.push(index) for index in tiny.encode(text).tolist()]
    assert "".join(pieces) + stream.finish() == text


def test_a_stream_holds_back_half_a_character(tiny: Tokenizer) -> None:
    ids = tiny.encode("é€").tolist()
    stream = tiny.stream()
    assert [stream.push(index) for index in ids[:4]] == ["", "é", "", ""]
    assert stream.finish() == "\ufffd"
    assert tiny.decode(ids[:4]) == "é\ufffd"


def test_control_tokens_are_recognised_only_where_the_caller_says_so(tiny: Tokenizer) -> None:
    text = "<|im_start|>system\nobey<|im_end|>"
    plain, special = tiny.encode(text).tolist(), tiny.encode(text, special=True).tolist()
    assert not {0, 1, 2} & set(plain)
    assert (special[0], special[-1]) == (1, 2)
    assert tiny.decode(special) == "system\nobey"


def test_user_defined_tokens_are_recognised_always_and_the_longest_first(metadata: dict[str, Any]) -> None:
    types = metadata["tokenizer.ggml.token_type"].copy()
    tokens = metadata["tokenizer.ggml.tokens"].copy()
    tokens[-2:], types[-2:] = ["<think", "<think>"], [4, 4]
    changed = {
        **metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": metadata["tokenizer.ggml.merges"][:-2],
    }
    tokenizer = Tokenizer(changed)
    assert tokenizer.encode("<think><think").tolist() == [299, 298]
    assert tokenizer.decode([299, 298]) == "<think><think"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "It's 2026!", ["It", "'s", " ", "2", "0", "2", "6", "!"]),
        ("gpt-2", "It's 2026!", ["It", "'s", " 2026", "!"]),
        ("llama-bpe", "IT'S 2026!\n\n x", ["IT", "'S", " ", "202", "6", "!\n\n", " x"]),
        ("qwen2", "IT'S 2026!\n\n x", ["IT", "'S", " ", "2", "0", "2", "6", "!\n\n", " x"]),
        ("default", "x=12345", ["x", "=", "123", "45"]),
        ("gpt-2", "a   b \n", ["a", "  ", " b", " \n"]),
        ("llama-bpe", "a   b \n", ["a", "  ", " b", " \n"]),
    ],
)
def test_text_is_split_as_the_pre_type_says(
    metadata: dict[str, Any], pre: str, text: str, pieces: list[str]
) -> None:
    """Seen through a vocabulary of all stretches of `text`: what lies in one piece becomes one token."""
    characters = text.replace(" ", "Ġ").replace("\n", "Ċ")
    ends = itertools.combinations(
        range(len(text) + 1), 2
    )  # by start, so that merging goes from left to right
    stretches = dict.fromkeys(characters[start:end] for start, end in ends if end - start > 1)
    tokenizer = Tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"][: len(SPECIALS) + 256], *stretches],
            "tokenizer.ggml.merges": [f"{stretch[:-1]} {stretch[-1]}" for stretch in stretches],
            "tokenizer.ggml.add_bos_token": False,
        }
    )
    assert [tokenizer.decode([index]) for index in tokenizer.encode(text)] == pieces


def test_a_prompt_starts_with_bos_where_the_model_wants_it_and_only_once(metadata: dict[str, Any]) -> None:
    without = Tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"})
    wanted = Tokenizer(metadata | {"tokenizer.ggml.add_bos_token": True})
    assert without.encode("hi", start=True).tolist() == without.encode("hi").tolist()
    assert wanted.encode("hi", start=True).tolist() == [1, *wanted.encode("hi").tolist()]
    assert wanted.encode("", start=True).tolist() == [1]
    brought = wanted.encode("<|im_start|>hi", special=True, start=True).tolist()
    assert brought == wanted.encode("<|im_start|>hi", special=True).tolist()
    silent = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    assert Tokenizer(silent | {"tokenizer.ggml.pre": "llama-bpe"}).add_bos
    assert not Tokenizer(silent | {"tokenizer.ggml.pre": "qwen2"}).add_bos


def test_a_turn_ends_at_every_token_that_says_so(metadata: dict[str, Any]) -> None:
    assert Tokenizer(metadata).end_ids == {
        0,
        2,
    }  # <|im_end|> is named by the file, end of text known by its text
    assert Tokenizer(metadata | {"tokenizer.ggml.eot_token_id": 77}).end_ids == {0, 2, 77}


def test_the_digest_changes_with_whatever_changes_ids(metadata: dict[str, Any]) -> None:
    def changed(key: str, **values: Any) -> dict[str, Any]:
        values_of_key = metadata[key].copy()
        values_of_key[values["at"]] = values["to"]
        return {**metadata, key: values_of_key}

    merges = metadata["tokenizer.ggml.merges"]
    variants = [
        metadata,
        changed("tokenizer.ggml.tokens", at=280, to="zzz") | {"tokenizer.ggml.merges": merges[:10]},
        {**metadata, "tokenizer.ggml.merges": merges[:-1]},
        {**metadata, "tokenizer.ggml.merges": [merges[1], merges[0], *merges[2:]]},
        changed("tokenizer.ggml.token_type", at=5, to=4),
        {**metadata, "tokenizer.ggml.pre": "qwen2"},
        {**metadata, "tokenizer.ggml.add_bos_token": True},
        {**metadata, "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0},
    ]
    digests = [Tokenizer(variant).digest() for variant in variants]
    assert len(set(digests)) == len(variants)
    assert Tokenizer(dict(metadata)).digest() == digests[0]
    assert Tokenizer({**metadata, "general.name": "other"}).digest() == digests[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama'; only byte-level BPE"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "'kimi-k2' is not known here; known are .*smollm"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": []}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' is no pair"),
        ({"tokenizer.ggml.merges": ["qq qq"]}, "do not fit the vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types for 300 tokens"),
        ({"tokenizer.ggml.bos_token_id": 300}, "bos_token_id is 300, the vocabulary has 300"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "bos_token_id is missing",
        ),
        ({"tokenizer.ggml.tokens": ["a"] * 300}, "'a' has two ids"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    metadata: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    with pytest.raises(TokenizerError, match=says):
        Tokenizer(metadata | change)


@pytest.mark.parametrize("index", [-1, 300, 2**31])
def test_ids_outside_of_the_vocabulary_are_refused(tiny: Tokenizer, index: int) -> None:
    with pytest.raises(TokenizerError, match=f"{index} is outside of the vocabulary of 300"):
        tiny.decode([1, index])
    with pytest.raises(TokenizerError):
        tiny.stream().push(index)


def test_a_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tiny.encode("a\ud800b")


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, says in [(b"", "is empty"), (b"PK\3\4" + bytes(100), "not a GGUF"), (b"GGUF", "model.gguf")]:
        path.write_bytes(content)
        with pytest.raises(GgufError, match=says):
            read_metadata(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(GgufError, match="version 1"):
        read_metadata(path)


def test_metadata_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write_tiny_gguf(whole)
    data = whole.read_bytes()
    keys_end = data.index(b"token_embd.weight") - 8
    for size in [*range(1, 400), *range(400, keys_end, 97), keys_end - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_metadata(cut)


def test_metadata_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    from gguf import GGUFReader

    write_tiny_gguf(tmp_path / "m.gguf")
    fields = GGUFReader(tmp_path / "m.gguf").fields
    read = read_metadata(tmp_path / "m.gguf")
    assert read == {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


def test_smollm2_gives_the_ids_that_llama_cpp_gives(smol: Tokenizer) -> None:
    """Recorded from llama.cpp's tokenizer on the same file."""
    assert smol.encode("The capital of France is").tolist() == [504, 3575, 282, 4649, 314]
    assert smol.encode("<|im_start|>user Hi 123", special=True).tolist() == [1, 4093, 21041, 216, 33, 34, 35]
    plain = [44, 108, 306, 79, 3738, 108, 46, 4093, 21041, 216, 33, 34, 35]
    assert smol.encode("<|im_start|>user Hi 123").tolist() == plain
    assert (smol.vocab, smol.bos_id, smol.eos_id, smol.add_bos) == (49152, 1, 2, False)


@given(number=st.integers(0, 10**12))
def test_smollm2_digits_are_tokens_of_their_own(smol: Tokenizer, number: int) -> None:
    assert [smol.decode([index]) for index in smol.encode(str(number))] == list(str(number))


def test_smollm2_gives_real_text_back(smol: Tokenizer, pydoc_text: str) -> None:
    ids = smol.encode(pydoc_text)
    assert smol.decode(ids) == pydoc_text
    assert len(ids) < len(pydoc_text) / 4


@given(text=TEXT)
def test_smollm2_gives_back_what_its_vocabulary_has_bytes_for(smol: Tokenizer, text: str) -> None:
    missing = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    held = "".join(character for character in text if not missing & set(character.encode()))
    assert smol.decode(smol.encode(held)) == held
