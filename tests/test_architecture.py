"""The import rule and the size limits, read off the syntax trees of src/calque."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

# The order types < {text | align} < models < objectives < training < tools < tasks < cli, and its
# side branches. "" is the package itself: the public face, with calque.api.
FACE = {"", "api"}
TO_MODELS = {"types", "text", "align", "models"}
TO_TRAINING = TO_MODELS | {"objectives", "training"}
TO_TASKS = TO_TRAINING | {"tools", "tasks"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "text": {"types"},
    "align": {"types"},
    "models": TO_MODELS,
    "objectives": TO_MODELS,
    "training": TO_TRAINING,
    "tools": TO_TRAINING,
    "tasks": TO_TASKS,
    "report": {"types"},
    "": TO_TRAINING | {"tools", "api"},
    "api": TO_TRAINING | {"tools", ""},
    "serve": {"types", "tools", "report"} | FACE,
    "cli": TO_TASKS | {"report"} | FACE,
    "__main__": {"cli"},
}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve"}
UNSAFE_FLAGS = {"trust_remote_code", "allow_pickle"}
MAX_CLASS_LINES, MAX_BODY_LINES = 150, 60


@dataclass(frozen=True)
class Module:
    """One parsed file."""

    name: str
    package: str
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The part of Calque it belongs to: `text` for calque.text.bitext."""
        return unit_of(self.name)


@dataclass(frozen=True)
class Import:
    """One import: where it stands and which module it reaches."""

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
    """Name the modules that one statement or `import_module("…")` call reaches."""
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
    return []


def list_imports(modules: dict[str, Module]) -> list[Import]:
    """List the imports of calque itself, at any depth: functions and TYPE_CHECKING count."""
    return [
        Import(module, node.lineno, target)
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
        for target in targets(node, module, modules)
        if target.split(".")[0] == "calque"
    ]


def find_wrong_directions(modules: dict[str, Module]) -> list[str]:
    unknown = [
        f"{module.name}: {module.unit} has no place in MAY_IMPORT"
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


def count_body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def find_oversized(modules: dict[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                n_lines, limit = (node.end_lineno or 0) - node.lineno + 1, MAX_CLASS_LINES
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                n_lines, limit = count_body_lines(node), MAX_BODY_LINES
            else:
                continue
            if n_lines > limit:
                found.append(f"{module.name}:{node.lineno} {node.name}: {n_lines} > {limit} lines")
    return found


def runs_foreign_code(node: ast.AST, torch_names: set[str]) -> bool:
    """Tell whether a node can execute code that came with a file."""
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
    assert "calque.types" in calque_modules
    assert any(found.target == "calque.types" for found in list_imports(calque_modules))
    assert find_wrong_directions(calque_modules) == []


def test_no_import_cycle(calque_modules: dict[str, Module]) -> None:
    assert find_cycle(calque_modules) == []


def test_classes_and_functions_stay_small(calque_modules: dict[str, Module]) -> None:
    assert find_oversized(calque_modules) == []


def test_no_file_can_run_code(calque_modules: dict[str, Module]) -> None:
    assert find_foreign_code(calque_modules) == []


def test_import_calque_is_light() -> None:
    code = "import calque, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "calque" in loaded
    assert loaded.isdisjoint({"numpy", "pydantic", "rich", "torch", "transformers", "typer"})


# The checker itself, on small trees.


def plant(src: Path, files: dict[str, str]) -> dict[str, Module]:
    """Write src/calque/tools/miner.py for `tools/miner`, and the packages around it."""
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
        "import calque.tasks.suite",
        "import calque.tasks.suite as suite",
        "from calque.tasks.suite import TASKS",
        "from calque.tasks import suite",
        "from calque import tasks",
        "from ..tasks.suite import TASKS",
        "from ..tasks import suite",
        "from .. import tasks",
        "def mine():\n    from ..tasks import suite",
        "if TYPE_CHECKING:\n    from calque.tasks import suite",
        "importlib.import_module('calque.tasks.suite')",
        "import_module('..tasks.suite', __package__)",
    ],
)
def test_checker_sees_every_kind_of_import(tmp_path: Path, source: str) -> None:
    modules = plant(tmp_path, {"tasks/suite": "TASKS = {}", "tools/miner": source})
    (problem,) = find_wrong_directions(modules)
    assert problem.startswith("calque.tools.miner:")
    assert "imports calque.tasks" in problem


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("types", "from calque.text import bitext"),
        ("text/bitext", "from calque.align import matching"),
        ("align/matching", "from ..text import bitext"),
        ("objectives/tlm", "from calque.training import loop"),
        ("report/page", "from calque.tools import miner"),
        ("serve/app", "from calque.tasks import suite"),
        ("api", "from calque.tasks import suite"),
        ("tasks/study", "from calque.cli import main"),
        ("cli/web", "from calque.serve import app"),
        ("tools/miner", "import calque"),
        ("tasks/mining", "from calque import load"),
        ("training/loop", "from .. import api"),
        ("utils", ""),
    ],
)
def test_checker_refuses(tmp_path: Path, importer: str, source: str) -> None:
    modules = plant(tmp_path, {"api": "", importer: source})
    assert len(find_wrong_directions(modules)) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("models/encoder", "from ..text import batching\nfrom ..align import matching"),
        ("text/bitext", "import types\nfrom . import cleaning\nfrom ..types import InputError"),
        ("tools/miner", "from calque.training import loop\nimport torch, numpy as np"),
        ("serve/app", "import calque\nfrom calque.report import page"),
        ("cli/demo", "import calque\nfrom calque.tasks import suite\nfrom ..report import page"),
        ("__main__", "from calque.cli import main"),
        ("api", "def load():\n    from .tools import embedder"),
    ],
)
def test_checker_accepts(tmp_path: Path, importer: str, source: str) -> None:
    assert find_wrong_directions(plant(tmp_path, {importer: source})) == []


def test_checker_finds_a_cycle(tmp_path: Path) -> None:
    files = {"text/a": "from . import b", "text/b": "def f():\n    from calque.text.c import g"}
    assert find_cycle(plant(tmp_path, files | {"text/c": ""})) == []
    cycle = find_cycle(plant(tmp_path, files | {"text/c": "from .a import h"}))
    assert set(cycle) == {"calque.text.a", "calque.text.b", "calque.text.c"}


def test_checker_finds_a_cycle_through_a_package(tmp_path: Path) -> None:
    files = {"text/__init__": "from .a import x"}
    assert find_cycle(plant(tmp_path, files | {"text/a": ""})) == []
    cycle = find_cycle(plant(tmp_path, files | {"text/a": "from . import y"}))
    assert set(cycle) == {"calque.text", "calque.text.a"}


def test_checker_measures_size(tmp_path: Path) -> None:
    def body(n_lines: int) -> str:
        return '\n    """Say why."""' + "\n    x = 1" * n_lines + "\n"

    fits = f"class A:{body(MAX_CLASS_LINES - 2)}def f():{body(MAX_BODY_LINES)}"
    assert find_oversized(plant(tmp_path, {"types": fits})) == []
    bursts = f"class A:{body(MAX_CLASS_LINES - 1)}async def f():{body(MAX_BODY_LINES + 1)}"
    assert len(find_oversized(plant(tmp_path, {"types": bursts}))) == 2


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
