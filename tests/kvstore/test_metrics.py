"""Metrics add up in every scrape, whatever happens meanwhile, and are what their readers expect."""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvstore.store import KVStore, open_store
from kvstore.watch.metrics import Metrics, exposition
from tests.known_kv import identity, known_kv, load, prompt, put, small_profile

_OPEN = "application/openmetrics-text; version=1.0.0"
Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(store: KVStore) -> Scrape:
    """All samples by name and labels, as a scraper parses them."""
    body, content_type = exposition(store.snapshot, _OPEN)
    assert content_type.startswith("application/openmetrics-text")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def of(found: Scrape, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def total(found: Scrape, name: str) -> float:
    return sum(value for (each, _), value in found.items() if each == name)


def adds_up(found: Scrape) -> None:
    for stage in ("lookup", "lease", "put", "place", "read"):
        infinite = of(found, "kvstore_stage_seconds_bucket", stage=stage, le="+Inf")
        assert infinite == of(found, "kvstore_stage_seconds_count", stage=stage)
    for tier in ("hot", "warm", "cold"):
        used, free = (of(found, "kvstore_tier_bytes", tier=tier, state=state) for state in ("used", "free"))
        assert used >= 0
        assert used + free == BUDGETS[f"{tier}_bytes"]
        held, leased = (of(found, "kvstore_tier_blocks", tier=tier, state=s) for s in ("held", "leased"))
        assert 0 <= leased <= held


BUDGETS: dict[str, Any] = {"hot_bytes": 4 * 4096, "warm_bytes": 12 * 4096, "cold_bytes": 640 * 1024}

prompts = st.builds(
    lambda family, length, change: np.where(np.arange(length) == change, 9, family),
    st.integers(0, 2),
    st.integers(1, 90),
    st.integers(0, 120),
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["look", "load", "put", "serve", "flush", "forget", "explain"]),
        prompts,
        st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps)
def test_they_add_up_over_random_traffic(traffic: list[tuple[str, Any, bool]]) -> None:
    """Hits + misses = tokens asked, and the kinds = tokens of prompts, beside a model that counts what it asked."""
    counted = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(
            Path(folder) / "kv",
            identity=identity("a"),
            profile=small_profile(**BUDGETS, cold_bytes_per_day=1 << 20),
        )
        with store:
            views = [store, store.view(identity("b"))]
            before: Scrape = {}
            for what, tokens, other in traffic:
                view = views[other]
                match what:
                    case "look":
                        counted["hits"] += view.lookup(tokens, moved=other).length
                        counted["asked"] += len(tokens)
                    case "load":
                        match = view.lookup(tokens)
                        counted["hits"] += match.length
                        counted["asked"] += len(tokens)
                        with view.lease(match) as lease:
                            lease.load_into(known_kv(tokens, view.identity))
                    case "put":
                        put(view, tokens)
                    case "serve":
                        prefix = view.lookup(tokens).length
                        counted["hits"] += prefix
                        counted["asked"] += len(tokens)
                        computed = len(tokens) - prefix
                        view.served(
                            prefix=prefix, moved=0, recomputed=0, computed=computed, seconds=1, without=1.5
                        )
                        counted["served"] += len(tokens)
                        counted["requests"] += 1
                    case "flush":
                        store.flush(60)
                    case "forget":
                        view.invalidate(prefix=tokens)
                    case "explain":
                        view.explain(tokens)
                found = scrape(store)
                adds_up(found)
                assert of(found, "kvstore_asked_tokens_total", result="hit") == counted["hits"]
                assert total(found, "kvstore_asked_tokens_total") == counted["asked"]
                assert total(found, "kvstore_lookup_tokens_total") == counted["served"]
                assert of(found, "kvstore_requests_total") == counted["requests"]
                assert of(found, "kvstore_ttft_saved_seconds_total") == counted["requests"] / 2
                spent, left = (
                    of(found, "kvstore_flash_write_budget_bytes", state=state) for state in ("spent", "left")
                )
                assert spent + left == 1 << 20
                for (name, labels), value in before.items():
                    if name.endswith(("_total", "_count", "_bucket")):
                        assert found[name, labels] >= value, "what only grows"
                before = found


def test_scrapes_add_up_while_requests_are_served(tmp_path: Path) -> None:
    """Each look-up asks for as many tokens as it finds, or for as many that it does not: any scrape sees both equal."""
    profile = small_profile(**BUDGETS)
    with open_store(tmp_path / "kv", identity=identity("a"), profile=profile) as store:
        held, unheld = prompt(1, 48), prompt(2, 48)
        put(store, held)
        asked = np.concatenate([held, unheld])
        done = threading.Event()
        failures: list[BaseException] = []

        def guarded(work: Any) -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                failures.append(error)

        def request() -> None:
            with store.find(asked) as lease:
                lease.load_into(known_kv(asked, store.identity))

        def one_scrape() -> None:
            found = scrape(store)
            adds_up(found)
            hit, miss = (of(found, "kvstore_asked_tokens_total", result=result) for result in ("hit", "miss"))
            assert hit == miss

        threads = [
            threading.Thread(target=guarded, args=(work,))
            for work in (request, request, one_scrape, one_scrape)
        ]
        for thread in threads:
            thread.start()
        for number in range(40):
            put(store, prompt(3 + number, 64))
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert scrape(store)["kvstore_lookups_total", ()] > 0


def test_stages_of_a_request_are_timed(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", identity=identity("a"), profile=small_profile()) as store:
        scrape(store)
        put(store, prompt(1, 64))
        load(store, prompt(1, 64))
        store.flush(60)
        store.demote(store.lookup(prompt(1, 64)))
        load(store, prompt(1, 64))
        found = scrape(store)
        runs = {
            stage: of(found, "kvstore_stage_seconds_count", stage=stage)
            for stage in ("lookup", "lease", "place", "read", "put", "write")
        }
        frames = 4 * len(store.layer_groups)
        assert runs == {"lookup": 3, "lease": 2, "place": frames, "read": frames, "put": 1, "write": 4}
        assert of(found, "kvstore_stage_seconds_sum", stage="read") > 0


def test_beside_an_applications_own_metrics() -> None:
    with open_store(None, identity=identity("a"), profile=small_profile()) as store:
        registry = CollectorRegistry()
        registry.register(Metrics(store.snapshot))
        put(store, prompt(1, 40))
        store.lookup(prompt(1, 40))
        assert registry.get_sample_value("kvstore_asked_tokens_total", {"result": "hit"}) == 40
        assert registry.get_sample_value("kvstore_stored_tokens_total") == 40


def test_reasons_become_labels() -> None:
    with open_store(None, identity=identity("a"), profile=small_profile()) as store:
        tokens = prompt(1, 64)
        store.put(tokens, known_kv(tokens, store.identity, 32), start=32)
        found = scrape(store)
        assert of(found, "kvstore_refused_total", reason="prefix not held") == 32


def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", identity=identity("a"), profile=small_profile()) as store:
        put(store, prompt(1, 40))
        load(store, prompt(1, 40))
        store.flush(60)
        tokens = prompt(2, 64)
        store.put(tokens, known_kv(tokens, store.identity, 32), start=32)
        known = (
            {name for name, _ in scrape(store)}
            | {
                f"kvstore_{name}"
                for name in ("flash_bytes_per_second", "unusable_total", "bad_records_total")
            }
            | {"kvstore_flash_write_budget_bytes"}
        )
    text = resources.files("kvstore.web").joinpath("grafana.json").read_text("utf-8")
    dashboard = json.loads(text)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 10
    asked = {name for each in expressions for name in re.findall(r"kvstore_\w+", each)}
    assert asked <= known
    assert {"kvstore_lookup_tokens_total", "kvstore_tier_bytes", "kvstore_stage_seconds_bucket"} <= asked


@pytest.mark.parametrize("accept", ["", "text/plain", "*/*"])
def test_what_knows_no_openmetrics_gets_text(accept: str) -> None:
    with open_store(None, identity=identity("a"), profile=small_profile()) as store:
        body, content_type = exposition(store.snapshot, accept)
        assert content_type.startswith("text/plain")
        assert b"# TYPE kvstore_lookup_tokens_total counter" in body
