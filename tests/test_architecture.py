"""The import order, unique names and safe loading, read from the syntax trees of src/calque."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# What each package may import beside itself, in the order of docs/architecture.md.
# "" is the package itself: the public names of `import calque`.
BASE = {"types", "errors"}
TO_TOKENS = BASE | {"io", "algorithms", "tokens"}
TO_MODELS = TO_TOKENS | {"models"}
TO_TRAINING = TO_MODELS | {"objectives", "training"}
USES = {"word_alignment", "sentences", "vectors", "growth", "translation"}
TO_EVALUATION = TO_TRAINING | USES | {"evaluation"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "io": BASE,
    "algorithms": BASE,
    "tokens": TO_TOKENS,
    "models": TO_MODELS,
    "objectives": TO_MODELS,
    "training": TO_TRAINING,
    **dict.fromkeys(USES, TO_TRAINING),
    "evaluation": TO_EVALUATION,
    "report": BASE | {"io"},
    "": TO_EVALUATION | {"report", "api", "server"},
    "api": TO_EVALUATION | {"report", ""},
    "server": TO_EVALUATION | {"report", "api"},
    "cli": TO_EVALUATION | {"report", "api", "server", ""},
    "__main__": {"cli"},
}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}
UNSAFE_FLAGS = {"trust_remote_code", "allow_pickle"}
HEAVY = {"numpy", "pydantic", "rich", "torch", "transformers", "typer"}


@dataclass(frozen=True)
class Module:
    """One parsed file."""

    name: str
    package: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The top-level package it belongs to: `io` for calque.io.bitext."""
        return unit_of(self.name)


@dataclass(frozen=True)
class Import:
    """One import statement, or one module that is named in a string, and what it reaches."""

    module: Module
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.module.name}:{self.line} imports {self.target}"


def unit_of(name: str) -> str:
    return [*name.split("."), ""][1]


def read_modules(src: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((src / "calque").rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        package = name if is_package else name.rpartition(".")[0]
        modules[name] = Module(name, package, ast.parse(path.read_text("utf-8"), str(path)))
    return modules


def targets(node: ast.AST, module: Module, modules: dict[str, Module]) -> list[str]:
    """List the modules that one statement, call or string reaches.

    Code that is dispatched by name writes "calque.package.module" or
    "calque.package.module:function" in a string; both count as imports.
    """
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=base, names=names, level=level):
            base = importlib.util.resolve_name("." * level + (base or ""), module.package)
            members = [f"{base}.{alias.name}" for alias in names]
            return [member if member in modules else base for member in members]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__")
            | ast.Attribute(attr="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [importlib.util.resolve_name(name, module.package)]
        case ast.Constant(value=str(text)) if "." in text and text.partition(":")[0] in modules:
            return [text.partition(":")[0]]
    return []


def list_imports(modules: dict[str, Module]) -> list[Import]:
    """List the imports of calque itself at any depth, functions and TYPE_CHECKING included."""
    found = {
        (module.name, getattr(node, "lineno", 0), target)
        for module in modules.values()
        for node in ast.walk(module.tree)
        for target in targets(node, module, modules)
        if target.split(".")[0] == "calque" and target != module.name
    }
    return [Import(modules[name], line, target) for name, line, target in sorted(found)]


def find_wrong_directions(modules: dict[str, Module]) -> list[str]:
    unknown = [
        f"{module.name}: {module.unit} is missing in MAY_IMPORT"
        for module in modules.values()
        if module.unit not in MAY_IMPORT
    ]
    return unknown + [
        str(found)
        for found in list_imports(modules)
        if (unit := unit_of(found.target)) != found.module.unit
        and unit not in MAY_IMPORT.get(found.module.unit, set())
    ]


def find_cycle(modules: dict[str, Module]) -> list[str]:
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for found in list_imports(modules):
        if found.target in modules:
            graph[found.module.name].add(found.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def find_repeated_names(modules: dict[str, Module]) -> list[str]:
    """List the names of modules and of classes that occur more than once."""
    places: dict[tuple[str, str], set[str]] = defaultdict(set)
    for module in modules.values():
        places["module", module.name.rpartition(".")[2]].add(module.name)
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places["class", node.name].add(module.name)
    return [
        f"{kind} {name}: {', '.join(sorted(found))}"
        for (kind, name), found in places.items()
        if len(found) > 1
    ]


def runs_foreign_code(node: ast.AST, torch_names: set[str]) -> bool:
    """Return whether a node can execute code that came with a file."""
    match node:
        case ast.Import(names=names):
            return any(alias.name.split(".")[0] in PICKLES for alias in names)
        case ast.ImportFrom(module=str(base), names=names):
            loads = base == "torch" and any(alias.name == "load" for alias in names)
            return loads or base.split(".")[0] in PICKLES
        case ast.Attribute(value=ast.Name(id=owner), attr="load"):
            return owner in torch_names
        case ast.keyword(arg=str(flag), value=value):
            is_off = isinstance(value, ast.Constant) and value.value is False
            return flag in UNSAFE_FLAGS and not is_off
    return False


def find_foreign_code(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        nodes = list(ast.walk(module.tree))
        torch_names = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "torch"
        }
        found += [
            f"{module.name}:{getattr(node, 'lineno', '?')} {ast.unparse(node)}"
            for node in nodes
            if runs_foreign_code(node, torch_names)
        ]
    return found


@pytest.fixture(scope="module")
def calque_modules() -> dict[str, Module]:
    return read_modules(SRC)


def test_imports_point_one_way(calque_modules: dict[str, Module]) -> None:
    assert any(found.target == "calque.types" for found in list_imports(calque_modules))
    assert find_wrong_directions(calque_modules) == []


def test_tasks_that_are_dispatched_by_name_are_seen(calque_modules: dict[str, Module]) -> None:
    reached = {
        found.target
        for found in list_imports(calque_modules)
        if found.module.name == "calque.evaluation.registry"
    }
    assert "calque.evaluation.tasks.tatoeba" in reached


def test_no_import_cycle(calque_modules: dict[str, Module]) -> None:
    assert find_cycle(calque_modules) == []


def test_no_module_or_class_name_twice(calque_modules: dict[str, Module]) -> None:
    assert find_repeated_names(calque_modules) == []


def test_no_file_can_run_code(calque_modules: dict[str, Module]) -> None:
    assert find_foreign_code(calque_modules) == []


def loaded_by(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after running some code."""
    code += "\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_import_calque_is_light() -> None:
    loaded = loaded_by("import calque")
    assert "calque" in loaded
    assert loaded.isdisjoint(HEAVY)


# The checker itself, on small trees.


def plant(src: Path, files: dict[str, str]) -> dict[str, Module]:
    """Write src/calque/sentences/mine.py for `sentences/mine`, and the packages around it."""
    for name, source in files.items():
        path = src / "calque" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in {path.parent, src / "calque"}:
            (folder / "__init__.py").touch()
        path.write_text(source, "utf-8")
    return read_modules(src)


@pytest.mark.parametrize(
    "source",
    [
        "import calque.evaluation.registry",
        "import calque.evaluation.registry as registry",
        "from calque.evaluation.registry import TASKS",
        "from calque.evaluation import registry",
        "from calque import evaluation",
        "from ..evaluation.registry import TASKS",
        "from .. import evaluation",
        "def mine():\n    from ..evaluation import registry",
        "if TYPE_CHECKING:\n    from calque.evaluation import registry",
        "importlib.import_module('calque.evaluation.registry')",
        "import_module('..evaluation.registry', __package__)",
        "CODE = 'calque.evaluation.registry:TASKS'",
    ],
)
def test_checker_sees_every_kind_of_import(tmp_path: Path, source: str) -> None:
    modules = plant(tmp_path, {"evaluation/registry": "TASKS = {}", "sentences/mine": source})
    (problem,) = find_wrong_directions(modules)
    assert problem.startswith("calque.sentences.mine:")
    assert "imports calque.evaluation" in problem


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("types", "from calque.io import bitext"),
        ("io/bitext", "from calque.algorithms import matching"),
        ("algorithms/matching", "from ..io import bitext"),
        ("objectives/tlm", "from calque.training import loop"),
        ("report/page", "from calque.sentences import mine"),
        ("server/routes", "from calque.cli import main"),
        ("vectors/mapping", "from calque.sentences import mine"),
        ("evaluation/grid", "from calque.cli import main"),
        ("report/page", "from calque.server import study"),
        ("sentences/mine", "import calque"),
        ("evaluation/bucc", "from calque import load"),
        ("training/loop", "from .. import api"),
        ("utils", ""),
    ],
)
def test_checker_rejects(tmp_path: Path, importer: str, source: str) -> None:
    modules = plant(tmp_path, {"api": "", importer: source})
    assert len(find_wrong_directions(modules)) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("models/encoder", "from ..tokens import ragged\nfrom ..algorithms import matching"),
        ("io/bitext", "import types\nfrom . import cleaning\nfrom ..types import SentencePair"),
        ("sentences/mine", "from calque.training import loop\nimport torch, numpy as np"),
        ("server/study", "from calque.api import load\nfrom calque.report import page"),
        ("cli/serve_commands", "from calque.server import serve"),
        ("cli/demo", "import calque\nfrom calque.evaluation import registry"),
        ("__main__", "from calque.cli import main"),
        ("api", "def load():\n    from .sentences import embed"),
    ],
)
def test_checker_accepts(tmp_path: Path, importer: str, source: str) -> None:
    assert find_wrong_directions(plant(tmp_path, {importer: source})) == []


def test_checker_finds_a_cycle(tmp_path: Path) -> None:
    files = {"io/a": "from . import b", "io/b": "def f():\n    from calque.io.c import g"}
    assert find_cycle(plant(tmp_path, files | {"io/c": ""})) == []
    cycle = find_cycle(plant(tmp_path, files | {"io/c": "from .a import h"}))
    assert set(cycle) == {"calque.io.a", "calque.io.b", "calque.io.c"}


def test_checker_finds_a_cycle_through_a_package(tmp_path: Path) -> None:
    files = {"io/__init__": "from .a import x"}
    assert find_cycle(plant(tmp_path, files | {"io/a": ""})) == []
    cycle = find_cycle(plant(tmp_path, files | {"io/a": "from . import y"}))
    assert set(cycle) == {"calque.io", "calque.io.a"}


def test_checker_finds_repeated_names(tmp_path: Path) -> None:
    files = {"io/a": "class A: ...", "tokens/b": "class B: ..."}
    assert find_repeated_names(plant(tmp_path, files)) == []
    found = find_repeated_names(plant(tmp_path, files | {"models/a": "class B: ..."}))
    assert {problem.partition(":")[0] for problem in found} == {"module a", "class B"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch as t\nread = t.load",
        "from torch import load",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_checker_finds_foreign_code(tmp_path: Path, source: str) -> None:
    assert len(find_foreign_code(plant(tmp_path, {"models/encoder": source}))) == 1


def test_checker_accepts_safe_loading(tmp_path: Path) -> None:
    source = "np.load(path, allow_pickle=False)\njson.load(file)\nload(trust_remote_code=False)"
    assert find_foreign_code(plant(tmp_path, {"models/encoder": source})) == []
