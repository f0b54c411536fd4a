"""The page about watching names only metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path

from kvstore.store import open_store
from kvstore.watch.metrics import Metrics
from tests.known_kv import identity, prompt, put, small_profile

PAGE = (Path(__file__).parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")


def test_every_metric_on_the_page_is_exposed() -> None:
    with open_store(None, identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 64))
        families = list(Metrics(store.snapshot).collect())
    exposed = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    named = set(re.findall(r"`(kvstore_\w+)(?:\{[\w,]+\})?`", PAGE))
    assert len(named) > 8
    assert not named - exposed
