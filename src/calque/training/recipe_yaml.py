"""Reading YAML as people write it: plain exponents are numbers, and no key comes twice."""

from __future__ import annotations

import re
from typing import Any

import yaml

from calque.types import first_line


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
