"""What is published: the wheel, the source archive, their metadata, and files about the release."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import calque

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSION = PROJECT["version"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# Ends a process of the fresh environment that opens a connection or looks up a host.
NO_NETWORK = """
import os, sys

def refuse(event, arguments):
    if event == "socket.getaddrinfo" or (
        event == "socket.connect" and isinstance(arguments[1], tuple)
    ):
        os.write(2, f"network: {event} {arguments[1:]}".encode())
        os._exit(9)

sys.addaudithook(refuse)
"""
# A training as in the README, but for two steps.
SHORT = (
    "schedule.steps=2 schedule.warmup=1 objectives.0.batch_examples=8 data.validation_examples=4"
)

# Packages whose name differs from that of their distribution.
DISTRIBUTIONS = {
    "faiss": "faiss-cpu",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
# Imported by torch.utils.tensorboard and by fugashi.
IMPORTED_BY_OTHERS = {"tensorboard", "unidic-lite"}


def readme_session() -> Iterator[tuple[str, list[str]]]:
    """Yield the README's commands, each with the lines it prints."""
    for block in README.split("```")[1::2]:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.splitlines()
            yield command, lines


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel built from it, by the command of `make wheel`."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    name = f"calque-{VERSION}"
    found = folder / f"{name}.tar.gz", folder / f"{name}-py3-none-any.whl"
    assert sorted(folder.iterdir()) == sorted(found)
    return found


@pytest.fixture(scope="module")
def fresh(dist: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(dist[1])]
    subprocess.run(install, check=True, capture_output=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Only the folder: the .pth file in it, which leads to the checkout, is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "sitecustomize.py").write_text(NO_NETWORK)
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    return python.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README's commands read."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("news.de", "news.en"):
        shutil.copy(DATA / name, folder)
    pairs = [line.split("\t")[:2] for line in (DATA / "en-de.tsv").read_text("utf-8").splitlines()]
    tatoeba, linked = folder / "DATA" / "tatoeba", folder / "linked"
    tatoeba.mkdir(parents=True)
    for side, texts in zip(("eng", "deu"), zip(*pairs, strict=True), strict=True):
        (tatoeba / f"tatoeba.deu-eng.{side}").write_text("\n".join(texts) + "\n", "utf-8")
    linked.mkdir()
    (linked / "en-de.text").write_text("".join(f"{en} ||| {de}\n" for en, de in pairs), "utf-8")
    (linked / "en-de.links").write_text("0-0\n" * len(pairs))
    return folder


def run_fresh(command: str, fresh: Path, place: Path) -> str:
    """Run a shell command in the fresh environment and return what it prints."""
    settings = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    settings |= {"PATH": f"{fresh}{os.pathsep}{os.environ['PATH']}", "HOME": str(place)}
    settings |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        command, shell=True, cwd=place, env=settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def assert_same_lines(found: list[str], expected: list[str]) -> None:
    """Compare lines; the last digits of decimals may differ from machine to machine."""
    decimal = r"\d+\.\d+"
    assert [re.sub(decimal, "#", line) for line in found] == [
        re.sub(decimal, "#", line) for line in expected
    ]
    numbers = [[float(x) for x in re.findall(decimal, "\n".join(t))] for t in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "expected"), list(readme_session()))
def test_commands_of_the_readme_run_where_the_wheel_is_installed(
    command: str, expected: list[str], fresh: Path, place: Path
) -> None:
    settings = "".join(f" --set {setting}" for setting in SHORT.split())
    printed = run_fresh(re.sub("calque train [a-z]+", rf"\g<0>{settings}", command), fresh, place)
    if expected:
        assert_same_lines(printed.splitlines(), expected)
    else:
        assert "run/model" in printed  # the table of scores


def test_the_session_of_the_readme_is_found() -> None:
    commands = [command for command, _ in readme_session()]
    assert [re.findall(r"calque ([a-z]+)", command) for command in commands] == [
        ["align"],
        ["mine"],
        ["train", "evaluate"],
    ]


@pytest.mark.slow
def test_wheel_has_the_python_example_the_demonstration_recipes_and_version(
    fresh: Path, place: Path
) -> None:
    """In one process, since importing torch takes seconds."""
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    lines = []
    for line in source.splitlines():
        code, _, comment = line.partition("  # ")
        is_shown = code and isinstance(ast.parse(code).body[0], ast.Expr)
        lines.append(f"assert {code} == {comment}" if is_shown else code)
    assert sum(line.startswith("assert") for line in lines) == 2
    commands = ["demo", "recipes", "data", "--version"]
    lines += ["from calque.cli import run", *(f"assert run([{name!r}]) == 0" for name in commands)]
    (place / "example.py").write_text("\n".join([*lines, "print(calque.__file__)"]), "utf-8")
    printed = run_fresh("python example.py", fresh, place)
    for name in ("Gäste", "xlm-align", "xnli"):
        assert name in printed
    version, file = printed.splitlines()[-2:]
    assert version == f"calque {VERSION}"
    assert Path(file).is_relative_to(fresh.parent)


def list_files(folder: Path, prefix: str) -> set[str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {f"{prefix}{path.relative_to(folder).as_posix()}" for path in paths}


def test_wheel_holds_the_package_and_nothing_else(dist: tuple[Path, Path]) -> None:
    expected = list_files(ROOT / "src" / "calque", "calque/")
    expected |= list_files(ROOT / "recipes", "calque/recipes/")
    kinds = {"css", "html", "js", "json", "md", "py", "safetensors", "svg", "toml", "tsv"}
    kinds |= {"typed", "yaml"}
    assert {name.rpartition(".")[2] for name in expected} == kinds
    with zipfile.ZipFile(dist[1]) as archive:
        info = f"calque-{VERSION}.dist-info/"
        found = {name for name in archive.namelist() if not name.startswith(info)}
        assert found == expected
        assert f"{info}licenses/LICENSE" in archive.namelist()


def test_source_archive_holds_what_is_versioned(dist: tuple[Path, Path]) -> None:
    with tarfile.open(dist[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    versioned = set(listing.stdout.splitlines())
    if not versioned:
        pytest.skip("not a checkout")
    missing = {name for name in versioned - names if (ROOT / name).exists()}
    assert {name.partition("/")[0] for name in missing} <= {".ci"}
    folders = {name.partition("/")[0] for name in versioned}
    assert {name.partition("/")[0] for name in names} <= folders | {"PKG-INFO"}


def imported_packages(tree: ast.Module, *, everywhere: bool) -> set[str]:
    """Return the packages that a module needs to run, or only those that its import needs."""
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    typing = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    ignored = {id(node) for block in typing for node in ast.walk(block)}
    nodes: Iterable[ast.AST] = ast.walk(tree) if everywhere else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import) and id(node) not in ignored:
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and id(node) not in ignored:
            names.add((node.module or "").partition(".")[0])
    return names - sys.stdlib_module_names - {"calque"}


def test_dependencies_are_those_that_the_code_imports() -> None:
    paths = sorted((ROOT / "src" / "calque").rglob("*.py"))
    # Loaded by `calque.serve` alone, which names the extra if it is missing.
    server = [path for path in paths if path.parent.name == "server"]

    def imported(*, everywhere: bool, paths: list[Path] = paths) -> set[str]:
        trees = [ast.parse(path.read_text("utf-8")) for path in paths]
        names = set().union(*(imported_packages(tree, everywhere=everywhere) for tree in trees))
        return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in names}

    def declared(requirements: list[str]) -> set[str]:
        return {canonicalize_name(Requirement(text).name) for text in requirements}

    needed = declared(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    optional = set().union(*(declared(extras[name]) for name in extras if name != "dev"))
    others = [path for path in paths if path not in server]
    assert imported(everywhere=False, paths=others) <= needed
    assert imported(everywhere=False, paths=server) <= needed | declared(extras["serve"])
    assert imported(everywhere=True) | IMPORTED_BY_OTHERS == needed | optional


def test_version_is_written_once() -> None:
    assert calque.__version__ == VERSION
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased") == VERSION
    sources = (ROOT / "src" / "calque").rglob("*.py")
    assert not [path for path in sources if f'"{VERSION}"' in path.read_text("utf-8")]


# Files of the repository about the release


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_steps_exist(path: Path) -> None:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
        elif step["run"].startswith("make "):
            words = step["run"].split()[1:]
            assert {word for word in words if "=" not in word} <= make_targets()


def test_workflow_covers_what_is_published() -> None:
    (path,) = WORKFLOWS
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    made = {word for command in commands for word in command.split() if word in make_targets()}
    assert {"lint", "test", "docs", "wheel"} <= made
    classifiers = "\n".join(PROJECT["classifiers"])
    versions = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.M)
    assert versions == ["3.11", "3.12", "3.13"]
    assert jobs["test"]["strategy"]["matrix"]["python-version"] == versions


def test_images_are_built_from_what_the_wheel_needs() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    for target in ("cpu", "cuda"):
        (stage,) = re.findall(rf"^FROM base AS {target}\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
        assert stage.strip().endswith("USER 1000\nRUN --network=none calque demo")
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    needed = {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "recipes", "src"}
    assert {line[1:] for line in ignored if line.startswith("!")} == needed


def test_citation_names_the_project_and_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    assert citation["title"].startswith("Calque") and citation["authors"]
    assert len(citation["references"]) == 5
    for paper in citation["references"]:
        assert paper.keys() >= {"type", "title", "authors", "year"}
        assert paper["authors"][0]["family-names"] in README
