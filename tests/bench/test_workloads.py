"""The streams of prompts, over Python's documentation; a token is a word here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.workloads import HELD, KINDS, Request, by_words, workload


def words(text: str) -> int:
    return len(text.split())


def all_words(request: Request) -> int:
    return words(request.system) + words(request.user)


def held(requests: list[Request]) -> Iterator[float]:
    """Of each measured request, the share of its words in segments that came before."""
    seen: set[str] = set()
    for request in requests:
        if request.measured:
            yield sum(words(each) for each in request.segments if each in seen) / all_words(request)
        seen.update(request.segments)


@pytest.mark.parametrize("name", KINDS)
def test_a_stream_has_what_is_asked_for(name: str) -> None:
    requests = workload(name, None, words, 20)
    assert sum(request.measured for request in requests) == 20
    assert not requests[0].measured
    assert max(map(all_words, requests)) <= KINDS[name][1]
    assert requests == workload(name, None, words, 20)
    assert requests != workload(name, None, words, 20, seed=2)


@pytest.mark.parametrize("name", ["notes-1000", "notes-2000"])
def test_four_fifths_of_a_notes_prompt_were_shown_before(name: str) -> None:
    requests = workload(name, None, words, 30)
    shares = list(held(requests))
    assert sum(shares) / len(shares) == pytest.approx(HELD, abs=0.08)
    assert min(shares) > 0.5
    assert len({request.segments[0] for request in requests}) > 20  # another order, so hardly any prefix


def test_nothing_comes_twice_in_unseen() -> None:
    segments = [each for request in workload("unseen", None, words, 20) for each in request.segments]
    assert len(set(segments)) == len(segments)


def test_a_second_hop_follows_the_first_and_finds_more() -> None:
    requests = workload("hops", None, words, 10)
    for first, second in zip(requests[::2], requests[1::2], strict=True):
        assert (first.measured, second.measured) == (False, True)
        assert first.question == second.question
        assert first.segments != second.segments
        assert set(first.segments) & set(second.segments)


def test_a_meeting_was_read_before_it_is_asked_about() -> None:
    assert min(held(workload("meeting", None, words, 20))) > 0.5


def test_a_call_is_opened_so_that_its_first_token_is_the_name_of_a_function_shown() -> None:
    for request in workload("tools", None, words, 20):
        shown = [segment.partition(request.opening)[2] for segment in request.segments]
        assert request.opening
        assert any(each.startswith(answer) for each in shown for answer in request.question.answers)


def test_search_by_words_prefers_rare_ones() -> None:
    passages = ["the cat and the dog", "the zebra", "nothing of all that"]
    assert by_words("where is the zebra", passages) == [passages[1], passages[0], passages[2]]
