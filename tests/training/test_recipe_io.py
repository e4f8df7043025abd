"""Reading recipes: bundled ones, YAML files, changed settings, and every mistake by name."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calque.errors import InputError
from calque.training.recipe import ProbeSection, Recipe
from calque.training.recipe_io import (
    anchor_paths,
    anchor_probe,
    apply_setting,
    bundled_recipes,
    find_recipe,
    load_recipe,
    parse_recipe,
    resolve_recipe,
)

MakeRecipe = Callable[..., Recipe]
BUNDLED = sorted(bundled_recipes())
TAGGED = Path(__file__).parent.parent / "data" / "tagged"


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_recipe_loads_and_reads_back(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe == load_recipe(f"{name}.yaml") == load_recipe(bundled_recipes()[name])
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(copy) == recipe
    assert load_recipe(copy).fingerprint() == recipe.fingerprint()


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_recipe_explains_itself(name: str) -> None:
    text = bundled_recipes()[name].read_text(encoding="utf-8")
    assert text.startswith("#")
    assert "  # " in text


def load(tmp_path: Path, text: str) -> Recipe:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(file)


def fail(change: str) -> str:
    """Change the xlm-tlm recipe and return the error, without the file's name."""
    with pytest.raises(InputError) as caught:
        load_recipe("xlm-tlm", [change])
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{find_recipe('xlm-tlm')}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scedule.steps=3", "scedule: unknown key; did you mean schedule?"),
        ("schedule.step=3", "schedule.step: unknown key; did you mean steps?"),
        ("objectives.0.weigth=2", "objectives.0.weigth: unknown key; did you mean weight?"),
        ("objectives.0.positions=reset", "objectives.0.positions: unknown key"),
        ("data.sources.0.pathe=a", "data.sources.0.pathe: unknown key; did you mean path?"),
        (
            "data.cleaning.max_char=3",
            "data.cleaning: max_char: no such rule; did you mean max_chars?",
        ),
        ("data.zzz=1", "data.zzz: unknown key"),
    ],
)
def test_unknown_key_is_named(change: str, message: str) -> None:
    assert fail(change) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("schedule.steps=many", "schedule.steps: Input should be a valid integer, got 'many'"),
        ("schedule.steps=1.5", "schedule.steps: Input should be a valid integer, got 1.5"),
        ("schedule.steps=0", "schedule.steps: Input should be greater than 0, got 0"),
        ("name=5", "name: Input should be a valid string, got 5"),
        ("model.dropout='0.1'", "model.dropout: Input should be a valid number, got '0.1'"),
        (
            "telemetry.tensorboard=1",
            "telemetry.tensorboard: Input should be a valid boolean, got 1",
        ),
        ("objectives.1.weight=x", "objectives.1.weight: Input should be a valid number, got 'x'"),
        ("data.sources.0.path=3", "data.sources.0.path: Input should be a valid string, got 3"),
        ("engine.workers=some", "engine.workers: Input should be a valid integer, got 'some'"),
        ("optimizer.betas=[0.9]", "optimizer.betas: List should have at least 2 items"),
        ("objectives=[]", "objectives: List should have at least 1 item"),
        ("objectives.0.kind=foo", "objectives.0: Input tag 'foo' found using 'kind'"),
        ("data.cleaning.max_chars=x", "data.cleaning: max_chars: Input should be a valid integer"),
        ("seed=-1", "seed: Input should be greater than or equal to 0, got -1"),
        (f"seed={2**64}", f"seed: Input should be less than {2**63}, got {2**64}"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1: Input should be less than 1, got 1.0"),
        ("optimizer.betas=[-1, 0.9]", "optimizer.betas.0: Input should be greater than or equal"),
        ("engine.workers=-1", "engine.workers: Input should be greater than or equal to 0, got -1"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: Input should be a finite"),
        ("optimizer.learning_rate=1e400", "optimizer.learning_rate: Input should be a finite"),
        ("optimizer.clip=.nan", "optimizer.clip: Input should be greater than 0, got nan"),
        ("objectives.0.weight=.nan", "objectives.0.weight: Input should be a finite number"),
        ("model.layers=10000000", "model: the encoder would have 70,779 billion parameters"),
        ("name=../../travel", "name: '../../travel' cannot be the name of a folder"),
        ("name=/tmp/x", "name: '/tmp/x' cannot be the name of a folder"),
        ("name=.hidden", "name: '.hidden' cannot be the name of a folder"),
        (r'name="a\nb"', r"name: 'a\nb' cannot be the name of a folder"),
        (f"name={'x' * 101}", "name: 'xxxxxxxxxxxx...xxxxxxxxxxxxx' cannot be the name of"),
    ],
)
def test_wrong_value_is_named(change: str, message: str) -> None:
    assert fail(change).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"objectives": [{"kind": "masked_lm"}]}, "name: this key is required"),
        ({"name": "x"}, "objectives: this key is required"),
        ({"name": "x", "objectives": [{}]}, "objectives.0: Unable to extract tag"),
        (
            {"name": "x", "objectives": [{"kind": "masked_lm"}], "data": {"sources": [{}]}},
            "data.sources.0.path: this key is required",
        ),
    ],
)
def test_missing_key_is_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe(content, "r")
    assert str(caught.value).startswith(f"r: {message}")


def test_settings_change_list_entries_and_create_sections() -> None:
    recipe = load_recipe(
        "xlm-tlm",
        [
            "objectives.1.weight=0.5",
            "data.sources.0.path=[a.en, a.de]",
            "average.kind=last",
            "model.start=",
            "optimizer.learning_rate=1e-4",
            "optimizer.clip=.inf",
            "data.cleaning.max_words=40",
        ],
    )
    assert [objective.weight for objective in recipe.objectives] == [1.0, 0.5]
    assert recipe.data.sources[0].path == ["a.en", "a.de"]
    assert recipe.average.kind == "last"
    assert recipe.model.start is None
    assert recipe.optimizer.learning_rate == 1e-4
    assert recipe.data.cleaning == {"max_words": 40}


def test_settings_may_be_a_mapping_and_change_a_recipe_object(tiny_recipe: MakeRecipe) -> None:
    recipe, base = resolve_recipe(tiny_recipe(), {"schedule.steps": 4, "objectives.0.weight": 2.0})
    assert (recipe.schedule.steps, recipe.objectives[0].weight, base) == (4, 2.0, Path())
    assert (
        recipe == resolve_recipe(tiny_recipe(), ["schedule.steps=4", "objectives.0.weight=2.0"])[0]
    )
    assert resolve_recipe(tiny_recipe())[0] == tiny_recipe()
    with pytest.raises(InputError, match=r"schedule\.step: unknown key; did you mean steps"):
        resolve_recipe(tiny_recipe(), {"schedule.step": 4})
    with pytest.raises(InputError, match=r"objectives\.7\.weight=1: '7' is not one of the 2"):
        resolve_recipe("xlm-tlm", {"objectives.7.weight": 1})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps", "--set steps does not have the form key=value (write it as a.b=c)"),
        ("=3", "--set =3 does not have the form key=value (write it as a.b=c)"),
        ("a=[1", "--set a=[1: this is not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("name.x=3", "--set name.x=3: name is a value, not a section"),
        ("name.x.y=3", "--set name.x.y=3: there is no section above 'x'"),
        ("objectives.2.weight=3", "--set objectives.2.weight=3: '2' is not one of the 2 entries"),
        ("objectives.x=3", "--set objectives.x=3: 'x' is not one of the 2 entries"),
        ("objectives.²=3", "--set objectives.²=3: '²' is not one of the 2 entries"),
        (
            "name=2026-13-45",
            "--set name=2026-13-45: this is not valid YAML: month must be",
        ),
        ("data={alpha: 1, alpha: 0}", "--set data={alpha: 1, alpha: 0}: this is not valid YAML"),
    ],
)
def test_wrong_setting_is_named(setting: str, message: str) -> None:
    assert fail(setting).startswith(message)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E5", 1e5), ("2.5e-3", 2.5e-3), ("-1e+2", -100.0), ("1.e2", 100.0)],
)
def test_exponents_are_numbers(text: str, value: float) -> None:
    content: dict[str, Any] = {}
    apply_setting(content, f"a={text}")
    assert content == {"a": value}


@pytest.mark.parametrize("text", ["1e", "e4", "1e-4x", "v1e4"])
def test_words_that_resemble_numbers_stay_words(text: str) -> None:
    content: dict[str, Any] = {}
    apply_setting(content, f"a={text}")
    assert content == {"a": text}


def test_yaml_error_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"r\.yaml, line 4: this is not valid YAML: "):
        load(tmp_path, "name: x\nmodel:\n  layers: [1, 2\nseed: 3\n")
    with pytest.raises(InputError, match=r"r\.yaml: a recipe must be a mapping"):
        load(tmp_path, "- a\n- b\n")
    with pytest.raises(InputError, match=r"r\.yaml: a recipe must be a mapping"):
        load(tmp_path, "")
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.yaml: this is not valid YAML"):
        load_recipe(tmp_path / "latin.yaml")


def test_yaml_error_is_one_line(tmp_path: Path) -> None:
    for text in ("name: a\x00b\n", "name: 2026-13-45\n"):
        with pytest.raises(InputError, match="not valid YAML: ") as caught:
            load(tmp_path, text)
        assert "\n" not in str(caught.value)


ALIASES = "".join(f"a{k}: &a{k} [{', '.join(9 * [f'*a{k - 1}'])}]\n" for k in range(1, 9))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 3000, "nested too deeply"),
        ("seed: " + "9" * 5000, "a number of 5000 digits"),
        ("seed: 0x" + "f" * 50, "a number of 52 digits"),
        (f"a0: &a0 [1]\n{ALIASES}", "more than 100,000 values"),
        ("seed: &a [*a]", "an alias refers to itself"),
        ("name: " + "x" * 200_000, "more than 200,000 characters"),
    ],
)
def test_document_that_would_take_all_time_or_memory_is_an_error(
    text: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(
        InputError, match=f"r.yaml.*: this is not valid YAML: .*{problem}"
    ) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=rf"--set seed=.{{1,95}}: this is not .*{problem}"):
        apply_setting({}, f"seed={text}")


def test_recipe_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "r.yaml").touch()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=r"r\.yaml: permission denied \(check the permissions"):
        load_recipe(tmp_path / "r.yaml")


def test_repeated_key_is_an_error(tmp_path: Path) -> None:
    """PyYAML would use the second section and ignore the first one."""
    text = "name: x\noptimizer: {clip: 2.0}\nobjectives: [{kind: masked_lm}]\n"
    assert load(tmp_path, text).optimizer.clip == 2.0
    with pytest.raises(InputError, match=r"line 4: .*the key optimizer occurs twice"):
        load(tmp_path, text + "optimizer: {weight_decay: 0.1}\n")


def test_merged_section_may_be_overridden(tmp_path: Path) -> None:
    """The keys of `<<` are defaults, which do not count as repeated."""
    text = """
name: x
objectives:
- &first {kind: masked_lm, weight: 2.0, batch_tokens: 512}
- &second {<<: *first, weight: 3.0}
- {<<: *second, weight: 4.0}
"""
    recipe = load(tmp_path, text)
    assert [each.weight for each in recipe.objectives] == [2.0, 3.0, 4.0]
    assert {each.batch_tokens for each in recipe.objectives} == {512}


def test_nothing_in_a_recipe_is_executed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not valid YAML: could not determine a constructor"):
        load(tmp_path, "name: !!python/object/apply:os.getcwd []\n")


def test_unknown_recipe_lists_the_bundled_ones(tmp_path: Path) -> None:
    for name in ("nope", "xlm.foo", str(tmp_path), "recipes/nope.yaml"):
        with pytest.raises(InputError, match=r"no such recipe .*calque-mini, .*xlm"):
            find_recipe(name)


def test_file_has_precedence_over_a_bundled_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(bundled_recipes()["xlm"], tmp_path / "mine.yaml")
    (tmp_path / "xlm").write_text("name: mine\nobjectives: [{kind: masked_lm}]\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("xlm").name == "mine"
    assert load_recipe("mine.yaml").name == "xlm"


# Paths beside the recipe


def test_paths_beside_the_recipe_become_absolute(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model", "teacher"):
        (tmp_path / name).mkdir()
    distillation = "{kind: distillation, teacher: teacher, languages: [en]}"
    recipe = tiny_recipe(
        "model.start=model", "tokenizer.path=some/hub-name", f"objectives.0={distillation}"
    )
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    anchored, base = resolve_recipe(tmp_path / "r.yaml")
    assert base == tmp_path
    assert anchored == anchor_paths(recipe, tmp_path)
    assert anchored.model.start == str(tmp_path / "model")
    assert anchored.tokenizer.path == "some/hub-name"
    assert anchored.objectives[0].teacher == str(tmp_path / "teacher")  # type: ignore[union-attr]
    assert anchor_paths(tiny_recipe(), tmp_path) == tiny_recipe()
    monkeypatch.chdir(tmp_path)
    assert anchor_paths(recipe, tmp_path / "elsewhere").model.start == "model"


def section(**changes: Any) -> ProbeSection:
    usual = {"train": f"{TAGGED}/en_ewt-train.conllu", "test": f"{TAGGED}/dev-{{language}}.tsv"}
    return ProbeSection(**(usual | changes))


def test_files_of_a_probe_beside_the_recipe_become_absolute(tiny_recipe: MakeRecipe) -> None:
    beside = section(train="en_ewt-train.conllu", test="dev-{language}.tsv")
    assert anchor_probe(beside, TAGGED) == section()
    named = section(test={"en": "dev-en.tsv", "zh": "dev-zh.tsv"})
    assert anchor_probe(named, TAGGED) == section(
        test={name: str(TAGGED / f"dev-{name}.tsv") for name in ("en", "zh")}
    )
    assert anchor_probe(section(train="elsewhere.tsv"), TAGGED) == section(train="elsewhere.tsv")
    recipe = tiny_recipe("probe.train=en_ewt-train.conllu", "probe.test=dev-{language}.tsv")
    assert anchor_paths(recipe, TAGGED).probe == section()
