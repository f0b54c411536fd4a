"""Trials ask for what stands in their prompts, and capture what stands there as they say."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
import pytest

from kvstore.language_model import LanguageModel
from kvstore.quality.trials import CONTEXTS, SYSTEM, TASKS, Task, Trial, trials
from tests.tiny_models import write_tiny_gguf

TOKENS = 1200  # nearly a byte each here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", context=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_CACHE_DIR", str(folder / "cache"))
        return LanguageModel(folder / "tiny.gguf")


def some(model: LanguageModel, text: str, task: Task, count: int = 3) -> list[Trial]:
    found = (trial for trial in trials(model, text, 60, tokens=TOKENS, seed=3) if trial.task == task)
    return list(islice(found, count))


def said(model: LanguageModel, trial: Trial) -> str:
    return model.tokenizer.decode(trial.prompt)


def captured(model: LanguageModel, trial: Trial) -> list[str]:
    return [model.tokenizer.decode(each).strip() for each in trial.captures["alone"]]


def test_half_are_open_and_the_others_take_turns(model: LanguageModel, pydoc_text: str) -> None:
    tasks = [trial.task for trial in trials(model, pydoc_text, 24, tokens=TOKENS)]
    assert tasks[1::2] == ["open"] * 12
    assert tasks[::2] == [task for task in TASKS if task != "open"] * 2


def test_the_same_seed_gives_the_same_trials(model: LanguageModel, pydoc_text: str) -> None:
    one, again = (list(trials(model, pydoc_text, 4, tokens=TOKENS, seed=7)) for _ in range(2))
    other = next(trials(model, pydoc_text, 1, tokens=TOKENS, seed=8))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a.prompt, b.prompt)
    assert not np.array_equal(one[0].prompt, other.prompt)


@pytest.mark.parametrize("task", ["start", "middle", "end", "edited", "twins"])
def test_one_of_several_similar_facts_is_asked_for(model: LanguageModel, pydoc_text: str, task: Task) -> None:
    for trial in some(model, pydoc_text, task):
        told = dict(re.findall(r"code of the (\w+) gate is (\d{4})\.", said(model, trial)))
        assert len(told) == 5
        asked = re.findall(r"code of the (\w+) gate\?", said(model, trial))
        assert [told[place] for place in asked] == [trial.fact]


@pytest.mark.parametrize(("task", "where"), [("start", 0.0), ("middle", 0.5), ("end", 1.0)])
def test_the_fact_stands_where_the_task_says(
    model: LanguageModel, pydoc_text: str, task: Task, where: float
) -> None:
    for trial in some(model, pydoc_text, task):
        assert trial.fact is not None
        assert said(model, trial).count(trial.fact) == 1
        (passage,) = (each for each in captured(model, trial) if trial.fact in each)
        sentence = re.search(r"The code of the \w+ gate is \d{4}\.", passage)
        assert sentence is not None
        if where == 0.5:
            assert sentence.start() > 0
            assert sentence.end() < len(passage)
        else:
            assert (sentence.start() == 0, sentence.end() == len(passage)) == (where == 0, where == 1)


def test_a_reference_leads_through_two_passages(model: LanguageModel, pydoc_text: str) -> None:
    for trial in some(model, pydoc_text, "reference"):
        text = said(model, trial)
        (person,) = re.findall(r"gate that (\w+) guards\?", text)
        (place,) = re.findall(rf"{person} guards the (\w+) gate\.", text)
        assert re.findall(rf"code of the {place} gate is (\d+)\.", text) == [trial.fact]
        passages = captured(model, trial)
        assert not any(person in each and trial.fact in each for each in passages)  # type: ignore[operator]


def test_an_edited_passage_was_captured_with_another_number(model: LanguageModel, pydoc_text: str) -> None:
    for trial in some(model, pydoc_text, "edited"):
        text = said(model, trial)
        assert trial.fact is not None
        assert trial.fact in text
        for context in CONTEXTS:
            assert not any(trial.fact in model.tokenizer.decode(each) for each in trial.captures[context])
        (old,) = (passage for passage in captured(model, trial) if passage not in text)
        codes = re.findall(r"gate is (\d{4})", old)
        assert any(old.replace(code, trial.fact) in text for code in codes)


def test_twins_are_two_passages_that_differ_in_place_and_number(
    model: LanguageModel, pydoc_text: str
) -> None:
    for trial in some(model, pydoc_text, "twins"):
        assert trial.fact is not None
        one, other, *rest = captured(model, trial)
        assert trial.fact in one
        told = [re.findall(r"code of the (\w+) gate is (\d{4})\.", each) for each in (one, other)]
        ((place, code),), ((other_place, other_code),) = told
        assert place != other_place
        assert other == one.replace(f"{place} gate is {code}", f"{other_place} gate is {other_code}") != one
        assert all(passage in said(model, trial) for passage in (one, other, *rest))


def test_every_passage_is_captured_in_each_context(model: LanguageModel, pydoc_text: str) -> None:
    for trial in trials(model, pydoc_text, 14, tokens=TOKENS):
        passages = captured(model, trial)
        if trial.task != "edited":
            assert all(passage in said(model, trial) for passage in passages)
        for context in ("system", "traffic", "filler"):
            shown = [model.tokenizer.decode(each) for each in trial.captures[context]]
            assert all(each.index(SYSTEM) < 60 for each in shown)
            assert all(any(passage in each for each in shown) for passage in passages)
        shown = [model.tokenizer.decode(each) for each in trial.captures["filler"]]
        before = {each.removesuffix(passage) for each, passage in zip(shown, passages, strict=True)}
        assert len(before) == 1
        assert not any(passage in "".join(before) for passage in passages)


def test_a_text_too_short_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="longer"):
        next(trials(model, "A short text. " * 20, 1, tokens=TOKENS))
