"""What a verdict allows, and what it says where it allows nothing."""

from __future__ import annotations

import pytest

from kvstore.pipeline.recompute import Attended, FirstTokens
from kvstore.quality.reuse import Measurement, judge

NEAR, FAR = 0.01, 0.2


def measured(k: int, kl: float, recall: float, prompts: int = 32) -> Measurement:
    return Measurement(
        repair=FirstTokens(k) if k < 100 else Attended(k / 1000),
        prompts=32,
        kl_first=kl,
        kl_mean=kl,
        first_agrees=1.0,
        all_agree=1.0,
        recall=recall,
        recall_prompts=prompts,
        recomputed=k / 1000,
    )


def test_the_cheapest_that_keeps_close_and_the_cheapest_that_keeps_facts_too() -> None:
    verdict = judge((measured(400, NEAR, 0.95), measured(8, NEAR, 0.5), measured(4, FAR, 0.4)))
    assert (verdict.fast, verdict.careful, verdict.reasons) == (FirstTokens(8), Attended(0.4), ())


@pytest.mark.parametrize(
    ("measurements", "careful", "fast"),
    [
        # Was: "no repair keeps 90% of the recall, the best 94%", of one that keeps facts and not close.
        ((measured(8, FAR, 0.94),), "no repair keeps mean KL <= 0.04 and agreement >= 97%", "the same"),
        (
            (measured(8, NEAR, 0.5),),
            "careful: no repair keeps 90% of the recall, the best 50% of 32 prompts",
            None,
        ),
        (
            (measured(8, NEAR, 1.0, prompts=3),),
            "careful: recall over 3 prompts, 16 are needed; give more trials",
            None,
        ),
        (
            (measured(8, NEAR, 0.5), measured(16, FAR, 0.94)),
            "careful: no repair keeps 90% of the recall, the best 50% of 32 prompts",
            None,
        ),
    ],
)
def test_a_policy_without_a_repair_says_why(
    measurements: tuple[Measurement, ...], careful: str, fast: str | None
) -> None:
    verdict = judge(measurements)
    assert verdict.careful is None
    assert verdict.why_none("careful") == careful
    assert verdict.why_none("fast") == (careful if fast == "the same" else fast)


def test_nothing_measured_allows_nothing() -> None:
    verdict = judge(())
    assert (verdict.fast, verdict.careful) == (None, None)
    assert verdict.why_none("careful")
