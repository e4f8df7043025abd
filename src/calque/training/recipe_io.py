"""Reading YAML as people write it: plain exponents are numbers, and no key comes twice.

What is wrong with a recipe, in one line that names the key.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from calque.errors import first_line

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-4 is a number, although YAML 1.1 wants 1.0e-4.

    A key that comes twice is an error, as YAML has it: otherwise all of the first would be lost.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                problem = f"the key {key.value} comes twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str) -> Any:
    """Read a recipe or a value of one; whatever is wrong with it is a YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)  # _Loader is a safe one
    except ValueError as error:  # of what looks like a date, and is none
        raise yaml.YAMLError(first_line(error)) from error


def describe_error(error: ValidationError, content: Any, schema: type[BaseModel]) -> str:
    """Say what is wrong with a recipe's first bad key, and what may have been meant."""
    first = error.errors()[0]
    loc = first["loc"]
    key = ".".join(map(str, _place_of(first, content)))
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key" + suggest(str(loc[-1]), _known_keys(loc, schema))
    if first["type"] == "missing":
        return f"{key}: this key is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # found by looking at several keys together
        return f"{key}: {message}" if key else message
    return f"{key}: {message}, got {reprlib.repr(first.get('input'))}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Name the known key that a misspelt one resembles, as the end of a message."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _place_of(first: ErrorDetails, content: Any) -> list[int | str]:
    """Keep the keys of an error's place; pydantic also names the branches of unions there."""
    place: list[int | str] = []
    for part in first["loc"]:
        is_key = isinstance(content, dict) and part in content
        is_index = isinstance(content, list) and isinstance(part, int)
        if is_key or is_index:
            place.append(part)
            content = content[part]
    return [*place, first["loc"][-1]] if first["type"] == "missing" else place


def _known_keys(location: Sequence[int | str], schema: type[BaseModel]) -> list[str]:
    """List the keys allowed where an unknown one was found."""
    kinds: list[Any] = [schema]
    for part in location[:-1]:
        named = [kind for kind in kinds if kind.model_fields.get("kind") and part == _tag(kind)]
        below = [kind.model_fields[part].annotation for kind in kinds if part in kind.model_fields]
        kinds = named or [kind for one in below for kind in _sections_in(one)] or kinds
    return sorted({key for kind in kinds for key in kind.model_fields})


def _tag(kind: type[BaseModel]) -> Any:
    return kind.model_fields["kind"].default


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Find the sections in a type such as list[A | B]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _sections_in(part)]
