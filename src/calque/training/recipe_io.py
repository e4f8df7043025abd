"""Reading recipes: bundled or from YAML files, with changed settings and resolved paths."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import yaml
from pydantic import BaseModel, ValidationError

from calque.errors import InputError, first_line, printable
from calque.io.structured import read_document
from calque.objectives.distillation import DistillationSettings
from calque.training.recipe import ProbeSection, Recipe, glob_language, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Changes of a recipe: {"schedule.steps": 100}, or ["schedule.steps=100"] as on the command line.
Settings: TypeAlias = Mapping[str, Any] | Sequence[str]
# Limits of a recipe, and of a whole number in it.
MAX_CHARACTERS, MAX_VALUES, MAX_DIGITS = 200_000, 100_000, 20
SHOWN = 100  # characters of a setting in a message


def resolve_recipe(recipe: str | Path | Recipe, settings: Settings = ()) -> tuple[Recipe, Path]:
    """Return a recipe with changed settings, and the folder that its relative paths start from.

    Paths of the model, the tokenizer, a teacher and the probe become absolute if they exist beside
    the recipe file.
    """
    if isinstance(recipe, Recipe):
        if not settings:
            return recipe, Path()
        content = recipe.model_dump()
        apply_settings(content, settings)
        return parse_recipe(content, recipe.name), Path()
    path = find_recipe(recipe)
    return anchor_paths(load_recipe(path, settings), path.parent), path.parent


def load_recipe(name: str | Path, settings: Settings = ()) -> Recipe:
    """Read a recipe from a file or, by its name alone, from the bundled ones."""
    path = find_recipe(name)
    try:
        content = parse_yaml(read_document(path).decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or first_line(error)
        raise InputError(
            f"this is not valid YAML: {problem}", file=path, line=mark.line + 1 if mark else None
        ) from error
    if not isinstance(content, dict):
        raise InputError(
            "a recipe must be a mapping of keys to values",
            file=path,
            fix="`calque recipes xlm` prints an example",
        )
    apply_settings(content, settings)
    return parse_recipe(content, path)


def parse_recipe(content: dict[str, Any], source: object) -> Recipe:
    """Validate the content of a recipe; an InputError names the first key that is wrong."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(describe_error(error, content, Recipe), file=source) from error


def find_recipe(name: str | Path) -> Path:
    """Return the path of a recipe file, given by its path or by the name of a bundled recipe."""
    path = Path(name)
    if path.is_file():
        return path
    bundled = bundled_recipes()
    stem = str(name).removesuffix(".yaml")
    if stem in bundled:
        return bundled[stem]
    raise InputError(
        "no such recipe", file=name, fix=f"pass a YAML file or one of {', '.join(bundled)}"
    )


def bundled_recipes() -> dict[str, Path]:
    """Return the recipes that come with Calque: in the wheel, or beside src in a checkout."""
    package = Path(str(resources.files("calque")))
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def apply_settings(content: dict[str, Any], settings: Settings) -> None:
    """Change the content of a recipe by several settings.

    >>> content = {"schedule": {"steps": 10}}
    >>> apply_settings(content, {"schedule.steps": 20, "seed": 2})
    >>> content
    {'schedule': {'steps': 20}, 'seed': 2}
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            _set_value(content, key, value, printable(f"{key}={value}", SHOWN))
    else:
        for setting in settings:
            apply_setting(content, setting)


def apply_setting(content: dict[str, Any], setting: str) -> None:
    """Change the content of a recipe by `a.b=c`; `objectives.0.weight=2` changes a list entry.

    >>> content = {"schedule": {"steps": 10}}
    >>> apply_setting(content, "schedule.steps=20")
    >>> content
    {'schedule': {'steps': 20}}
    """
    key, equals, text = setting.partition("=")
    shown = printable(setting, SHOWN)
    if not equals or not key:
        raise InputError(f"--set {shown} does not have the form key=value", fix="write it as a.b=c")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or first_line(error)
        raise InputError(f"--set {shown}: this is not valid YAML: {problem}") from error
    _set_value(content, key, value, shown)


def anchor_paths(recipe: Recipe, base: Path) -> Recipe:
    """Make paths that exist beside the recipe absolute; leave other paths and hub names alone."""

    def resolve(path: str | None) -> str | None:
        if path is None:
            return None
        found = base / Path(path).expanduser()
        return str(found.resolve()) if found.exists() else path

    model = recipe.model.model_copy(update={"start": resolve(recipe.model.start)})
    tokenizer = recipe.tokenizer.model_copy(update={"path": resolve(recipe.tokenizer.path)})
    objectives = [
        settings.model_copy(update={"teacher": resolve(settings.teacher)})
        if isinstance(settings, DistillationSettings)
        else settings
        for settings in recipe.objectives
    ]
    update = {"model": model, "tokenizer": tokenizer, "objectives": objectives}
    if recipe.probe is not None:
        update["probe"] = anchor_probe(recipe.probe, base)
    return recipe.model_copy(update=update)


def anchor_probe(probe: ProbeSection, base: Path) -> ProbeSection:
    """Make files and patterns of a probe that exist beside the recipe absolute."""

    def resolve(path: str) -> str:
        expanded = os.path.expanduser(path)
        beside = str(base.resolve() / expanded)
        return beside if glob_language(beside) else expanded

    test: str | dict[str, str]
    if isinstance(probe.test, str):
        test = resolve(probe.test)
    else:
        test = {name: resolve(path) for name, path in probe.test.items()}
    return probe.model_copy(update={"train": resolve(probe.train), "test": test})


def parse_yaml(text: str) -> Any:
    """Parse YAML safely: `1e-4` is a number, a repeated key is an error.

    Every problem is raised as a YAMLError.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"it has more than {MAX_CHARACTERS:,} characters")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES:,} values")
        return loader.construct_document(node)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply, or an alias refers to itself") from error
    except ValueError as error:  # raised for invalid dates
        raise yaml.YAMLError(first_line(error)) from error


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values under a node; each alias counts as a copy of what it names."""
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = chain.from_iterable(children) if isinstance(node, yaml.MappingNode) else children
        known[id(node)] = 1 + sum(_count_values(child, known) for child in flat)
    return known[id(node)]


def describe_error(error: ValidationError, content: Any, schema: type[BaseModel]) -> str:
    """Return a line about the first wrong key of a recipe, with a suggestion where one is near."""
    first = error.errors()[0]
    location = first["loc"]
    key = ".".join(map(str, _key_path(first, content)))
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key" + suggest(str(location[-1]), _known_keys(location, schema))
    if first["type"] == "missing":
        return f"{key}: this key is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":  # from a check of several keys together
        return f"{key}: {message}" if key else message
    return f"{key}: {message}, got {reprlib.repr(first.get('input'))}"


class _Loader(yaml.SafeLoader):
    """YAML 1.2 in two respects: `1e-4` is a number (YAML 1.1 wants 1.0e-4), keys are unique.

    PyYAML itself would silently use the last of two sections with the same key.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[tuple[str, str]]()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                problem = f"the key {key.value} occurs twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value)} digits"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _set_value(content: dict[str, Any], key: str, value: Any, setting: str) -> None:
    """Set the value of a dotted key, and create sections on the way."""

    def index(entries: list[Any], part: str) -> int:
        if not part.isdecimal() or int(part[:9]) >= len(entries):
            raise InputError(
                f"--set {setting}: {reprlib.repr(part)} is not one of the {len(entries)} entries",
                fix="entries are numbered from 0",
            )
        return int(part)

    *path, last = key.split(".")
    parent: Any = content
    for part in path:
        if isinstance(parent, list):
            parent = parent[index(parent, part)]
        elif isinstance(parent, dict):
            if parent.get(part) is None:
                parent[part] = {}
            parent = parent[part]
        else:
            raise InputError(f"--set {setting}: there is no section above {part!r}")
    if isinstance(parent, list):
        parent[index(parent, last)] = value
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise InputError(f"--set {setting}: {path[-1]} is a value, not a section")


def _key_path(error: ErrorDetails, content: Any) -> list[int | str]:
    """Return the keys in an error's location; pydantic also puts the branches of unions there."""
    keys: list[int | str] = []
    for part in error["loc"]:
        is_key = isinstance(content, dict) and part in content
        is_index = isinstance(content, list) and isinstance(part, int)
        if is_key or is_index:
            keys.append(part)
            content = content[part]
    return [*keys, error["loc"][-1]] if error["type"] == "missing" else keys


def _known_keys(location: Sequence[int | str], schema: type[BaseModel]) -> list[str]:
    """Return the keys that are allowed where an unknown one was found."""
    sections: list[Any] = [schema]
    for part in location[:-1]:
        tagged = [
            section
            for section in sections
            if "kind" in section.model_fields and section.model_fields["kind"].default == part
        ]
        below = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
        sections = tagged or [s for each in below for s in _sections_in(each)] or sections
    return sorted({key for section in sections for key in section.model_fields})


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections in a type such as list[A | B]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]
