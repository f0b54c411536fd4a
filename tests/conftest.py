"""Fixtures that several test folders share: the real model and real text."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

import pytest
from hypothesis import HealthCheck, settings

from kvstore.models import smollm2 as fetch_smollm2
from tests.reference import Reference

# How fast a machine draws and runs examples is no property of the store: a busy one failed tests by it.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF; downloaded by the first test run on a machine."""
    return fetch_smollm2()


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: Path) -> Reference:
    """The fp32 oracle of the real model: 0.5 GB, loaded once."""
    return Reference(smollm2)


@pytest.fixture(scope="session")
def pydoc_text() -> str:
    """English prose with code and tables, 465 kB: the language reference that Python's help() prints."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
