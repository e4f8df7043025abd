"""The README's tree is the tree: one line a file, in the words of the file's own docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "calque"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if not path.name.startswith("__"))


def listed_files() -> dict[str, str]:
    tree = re.search(r"## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert tree is not None
    folder, found = "", {}
    for line in tree[1].splitlines():
        match = re.fullmatch(r"( {2}| {4})([\w/]+(?:\.py)?) +(.*)", line)
        if match and match[2].endswith("/"):
            folder = match[2]
        elif match:
            found[(folder if match[1] == "    " else "") + match[2]] = match[3]
    return found


def test_no_line_is_left_of_a_file_that_is_gone() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in FILES}
    assert set(listed_files()) == names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_line_is_the_docstring(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert docstring is not None
    expected = docstring.splitlines()[0].rstrip(".")
    assert listed_files()[path.relative_to(PACKAGE).as_posix()] == expected
