"""The README stays short and its links lead somewhere; test_release.py runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")


def test_it_fits_two_screens() -> None:
    assert len(TEXT.splitlines()) <= 150
    assert len(TEXT.encode()) <= 8000


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)", TEXT))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()
