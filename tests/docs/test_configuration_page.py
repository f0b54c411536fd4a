"""The page of configuration names every setting, and every profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import Settings
from kvstore.profile import PROFILES

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_every_setting_is_on_the_page() -> None:
    missing = [name for name in Settings.__struct_fields__ if f"`{name}`" not in PAGE]
    assert not missing


@pytest.mark.parametrize("name", ["KVSTORE_CACHE_DIR", "KVSTORE_CONFIG", "KVSTORE_DAEMON", "KVSTORE_KERNELS"])
def test_every_other_variable_is_on_the_page(name: str) -> None:
    assert name in PAGE


def test_every_profile_is_on_the_page() -> None:
    missing = [name for name in PROFILES if f"`{name}`" not in PAGE]
    assert not missing
