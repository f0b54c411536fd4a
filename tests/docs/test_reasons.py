"""The page of reasons names every reason that the code gives, and none that it does not give."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.reasons import reasons

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"


def named() -> set[str]:
    """What the page has in the first column of its tables."""
    rows = re.findall(r"^\| `+ ?(.+?) ?`+ \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return set(rows)


def test_every_reason_in_the_code_is_on_the_page() -> None:
    missing = {reason: where for reason, where in reasons().items() if reason not in named()}
    assert not missing, f"docs/reasons.md says nothing of {missing}"


def test_every_reason_on_the_page_is_in_the_code() -> None:
    surplus = sorted(named() - reasons().keys())
    assert not surplus, f"docs/reasons.md names what the code does not give: {surplus}"


def test_reasons_are_found_where_they_are_given() -> None:
    found = reasons()
    assert found["evicted between look-up and lease"] == "kvstore/store.py"
    assert found["frame checksum"] == "kvstore/flash/record.py"
    assert found["exactness"] == "kvstore/tiers/block_record.py"
    assert "diverges at …: token … here, … in the held block" in found
    assert "bad record: …" in found
    assert found["embedder failed"] == found["text not made"] == "index/semantic.py"
    assert "text without content" in found
