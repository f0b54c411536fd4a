"""How far an engine or user lets moved runs stand in for computed tokens, and what a model was measured to bear.

    exact     prefix runs only: bit-identical KV
    careful   moved runs, repaired so that facts in them are still found; exact where no repair achieves that
    fast      moved runs at the cheapest repair whose answers stay close to those of full prefill

Which repair that is differs from model to model, so it is measured (see `calibrate`), and the verdict is kept with
the identity. Without a verdict nothing is approximated.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstore.pipeline.recompute import AnyRepair

Policy = Literal["exact", "careful", "fast"]


class Measurement(msgspec.Struct, frozen=True):
    """What one repair did to the answers, over `prompts` prompts, against full prefill.

    kl_first, kl_mean: KL(full || reuse) in nats at the first token, and over 16 teacher-forced ones.
    first_agrees, all_agree: share of first tokens, and of the 16, that stay the most likely one.
    recall: of the facts that full prefill finds, the share still found; recall_prompts says of how many.
    recomputed: share of the moved tokens computed again.
    """

    repair: AnyRepair
    prompts: int
    kl_first: float
    kl_mean: float
    first_agrees: float
    all_agree: float
    recall: float
    recall_prompts: int
    recomputed: float


class Verdict(msgspec.Struct, frozen=True):
    """The repair that each policy uses for one identity; None means prefix runs only, `reasons` say why."""

    fast: AnyRepair | None
    careful: AnyRepair | None
    measurements: tuple[Measurement, ...] = ()
    reasons: tuple[str, ...] = ()

    def repair(self, policy: Policy) -> AnyRepair | None:
        """What `policy` recomputes of moved runs; None: it uses none."""
        return {"exact": None, "careful": self.careful, "fast": self.fast}[policy]


NOT_MEASURED = Verdict(None, None, reasons=("this identity was never measured; run `kvstore calibrate`",))

_MOST_KL, _LEAST_AGREEMENT, _LEAST_RECALL = 0.04, 0.97, 0.90


def judge(measurements: tuple[Measurement, ...]) -> Verdict:
    """The cheapest repair that passes each policy's bars; `measurements` of all that may be chosen, in any order.

    fast: mean KL <= 0.04 and first tokens agree in >= 97 %. careful: that, and recall >= 0.90 of full prefill.
    """
    by_cost = sorted(measurements, key=lambda each: (each.recomputed, each.repair.evidence is not None))
    close = [each for each in by_cost if each.kl_mean <= _MOST_KL and each.first_agrees >= _LEAST_AGREEMENT]
    recalling = [each for each in close if each.recall >= _LEAST_RECALL]
    reasons = []
    if not close:
        reasons.append(f"fast: no repair keeps mean KL <= {_MOST_KL} and agreement >= {_LEAST_AGREEMENT:.0%}")
    if not recalling:
        best = max((each.recall for each in measurements), default=0.0)
        reasons.append(f"careful: no repair keeps {_LEAST_RECALL:.0%} of the recall, the best {best:.0%}")
    return Verdict(
        close[0].repair if close else None,
        recalling[0].repair if recalling else None,
        measurements,
        tuple(reasons),
    )
