"""Alignment against a dynamic program over all matches, and on text that was edited."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.alignment import Span, align
from kvstore.index.errors import TokenError


def check(prompt: Sequence[int], held: Sequence[Sequence[int]], spans: list[Span], min_span: int) -> None:
    """What a caller relies on whatever was found: equal tokens, long enough, disjoint and in order."""
    end = 0
    for span in spans:
        assert span.target >= end
        assert span.length >= min_span
        assert 0 <= span.offset <= len(held[span.source]) - span.length
        end = span.target + span.length
        there = held[span.source][span.offset : span.offset + span.length]
        assert list(prompt[span.target : end]) == list(there)
    assert end <= len(prompt)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are equal."""
    both = list(zip(one, other, strict=False))
    return next((n for n, (a, b) in enumerate(both) if a != b), len(both))


def best_cover(prompt: Sequence[int], held: Sequence[Sequence[int]], min_span: int) -> tuple[int, int]:
    """Most tokens that disjoint spans can cover, and the fewest spans that do: every span is tried."""
    best = [(0, 0)] * (
        len(prompt) + 1
    )  # tokens and spans behind each position; spans negative: fewer is more
    for i in reversed(range(len(prompt))):
        longest = max((common(prompt[i:], text[j:]) for text in held for j in range(len(text))), default=0)
        taken = [(best[i + n][0] + n, best[i + n][1] - 1) for n in range(min_span, longest + 1)]
        best[i] = max([best[i + 1], *taken])
    return best[0][0], -best[0][1]


texts = st.lists(st.integers(0, 2), max_size=60)


@st.composite
def versions(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """A prompt made of pieces of held texts, with other tokens between."""
    held = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=60), min_size=1, max_size=4))
    prompt: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        text = held[draw(st.integers(0, len(held) - 1))]
        start = draw(st.integers(0, len(text) - 1))
        prompt += text[start : draw(st.integers(start + 1, len(text)))]
        prompt += draw(st.lists(st.integers(0, 9), max_size=3))
    return prompt, held


@given(versions(), st.sampled_from([8, 11, 16, 32]))
def test_covers_as_much_as_can_be_with_as_few_spans(
    case: tuple[list[int], list[list[int]]], min_span: int
) -> None:
    prompt, held = case
    spans = align(prompt, held, min_span=min_span)
    check(prompt, held, spans, min_span)
    assert (sum(span.length for span in spans), len(spans)) == best_cover(prompt, held, min_span)


@given(texts, st.lists(texts, max_size=3))
def test_covers_as_much_as_can_be_where_texts_repeat_themselves(
    prompt: list[int], held: list[list[int]]
) -> None:
    spans = align(prompt, held, min_span=8)
    check(prompt, held, spans, 8)
    assert (sum(span.length for span in spans), len(spans)) == best_cover(prompt, held, 8)


def test_one_token_changed_inserted_or_lost_costs_no_other() -> None:
    old = list(range(100))
    halves = [Span(0, 40, 0, 0), Span(41, 59, 0, 41)]
    assert align([*old[:40], 500, *old[41:]], [old]) == halves
    assert align([*old[:40], 500, *old[40:]], [old]) == [Span(0, 40, 0, 0), Span(41, 60, 0, 40)]
    assert align([*old[:40], *old[41:]], [old]) == [Span(0, 40, 0, 0), Span(40, 59, 0, 41)]


def test_finds_pieces_that_changed_places() -> None:
    first, second = list(range(50)), list(range(100, 140))
    assert align([*second, 7, *first], [[*first, *second]]) == [Span(0, 40, 0, 50), Span(41, 50, 0, 0)]


def test_no_span_crosses_from_one_text_into_the_next() -> None:
    tokens = list(range(64))
    assert align(tokens, [tokens[:40], tokens[40:]]) == [Span(0, 40, 0, 0)]
    assert align(tokens, [tokens[:20], tokens[20:40], tokens[40:]], min_span=20) == [
        Span(0, 20, 0, 0),
        Span(20, 20, 1, 0),
        Span(40, 24, 2, 0),
    ]


def test_takes_the_text_that_holds_most_around_and_else_the_first() -> None:
    tokens = list(range(60))
    short, whole = tokens[10:50], [9, 9, *tokens]
    assert align(tokens, [short, whole, tokens]) == [Span(0, 60, 1, 2)]
    assert align(short, [tokens, short]) == [Span(0, 40, 0, 10)]
    assert align(tokens, [tokens[:40], tokens[20:], tokens[18:]], min_span=16) == [
        Span(0, 40, 0, 0),
        Span(40, 20, 2, 22),
    ]


@pytest.mark.parametrize("min_span", [8, 31, 32, 33])
def test_a_span_just_long_enough_is_found_and_one_just_too_short_is_not(min_span: int) -> None:
    shared = list(range(min_span))
    assert align([90, *shared, 91], [[92, *shared, 93]], min_span=min_span) == [Span(1, min_span, 0, 1)]
    assert align([90, *shared[1:], 91], [[92, *shared[1:], 93]], min_span=min_span) == []


@pytest.mark.parametrize("period", [1, 11, 40])
def test_text_that_repeats_itself_beyond_the_bound_is_still_covered(period: int) -> None:
    text = np.resize(np.arange(period, dtype=np.int32), 6000)
    spans = align(text, [text, text], min_span=32)
    check(text.tolist(), [text.tolist()] * 2, spans, 32)
    assert sum(span.length for span in spans) == len(text)


def test_a_common_phrase_beyond_the_bound_does_not_tear_what_is_around_it() -> None:
    phrase = list(range(40))
    before, after = list(range(100, 140)), list(range(200, 240))
    others = [token for copy in range(200) for token in (*phrase, 1000 + copy)]
    prompt = [*before, *phrase, *after, *others]
    held = [[token + 5000 * (token >= 1000) for token in others], [*before, *phrase, *after]]
    spans = align(prompt, held)
    check(prompt, held, spans, 32)
    assert spans[0] == Span(0, 120, 1, 0)
    assert len(spans) == 201


@pytest.mark.parametrize(
    ("prompt", "held"), [([], [[1] * 40]), ([1] * 40, []), ([1] * 40, [[]]), ([1] * 31, [[1] * 31])]
)
def test_nothing_to_find(prompt: list[int], held: list[list[int]]) -> None:
    assert align(prompt, held) == []


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="at least 8 tokens can be asked for, got min_span=7"):
        align([1], [[1]], min_span=7)
    with pytest.raises(TokenError, match="-1 at position 2"):
        align([1, 2, -1], [[1]])
    with pytest.raises(TokenError, match="integer dtype"):
        align([1], [np.ones(4)])


def test_an_edited_text_is_found_but_for_its_edits(pydoc_text: str) -> None:
    rng = random.Random(5)
    words = re.findall(r"\w+|\W", pydoc_text)[:20_000]
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    old = [ids[word] for word in words]
    new, kept = [], []
    for token in old:
        edit = rng.random() < 0.01
        new += [len(ids), len(ids) + 1] if edit else [token]  # tokens that nothing held has
        kept += [False, False] if edit else [True]
    spans = align(new, [old], min_span=8)
    check(new, [old], spans, 8)
    expected = sum(len(run) for run in re.findall("x{8,}", "".join("x" if keep else "." for keep in kept)))
    assert sum(span.length for span in spans) >= expected
    assert sum(span.length for span in spans) <= sum(kept)
