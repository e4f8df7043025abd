"""The README stays short, its links lead somewhere, and its Python example gives what it says."""

from __future__ import annotations

import ast
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


def test_the_python_example_gives_what_it_says() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {}
    n_results = 0
    for line in source.splitlines():
        code, _, comment = line.partition("  # ")
        node = ast.parse(code)
        if node.body and isinstance(node.body[0], ast.Expr):
            assert eval(code, names) == ast.literal_eval(comment)
            n_results += 1
        else:
            exec(code, names)
    assert n_results == 2
