"""Recipes: every bundled one loads, every mistake is named, and what is written reads back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from calque.errors import InputError
from calque.training.recipe import (
    Recipe,
    apply_override,
    bundled_recipes,
    check_recipe,
    find_recipe,
    load_recipe,
)

BUNDLED = sorted(bundled_recipes())


def test_the_bundled_recipes_are_found() -> None:
    assert {"xlm", "xlm-tlm", "calque-mini", "calque-mini-align"} <= set(BUNDLED)


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


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    file = tmp_path / "r.yaml"
    file.write_text(text, encoding="utf-8")
    return load_recipe(file, overrides)


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
def test_an_unknown_key_is_named(change: str, message: str) -> None:
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
    ],
)
def test_a_wrong_value_is_named(change: str, message: str) -> None:
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
def test_a_missing_key_is_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_recipe(content, "r")
    assert str(caught.value).startswith(f"r: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.heads=7"], "model: hidden=768 is not a multiple of heads=7"),
        (["schedule.steps=100"], "schedule: warmup=10000 exceeds steps=100"),
        (["data.cleaning.min_chars=5000"], "data.cleaning: min_chars=5000 exceeds max_chars=1000"),
        (["average.kind=ema", "checkpoints.final=best"], "exclude each other"),
        (["objectives.0.weight=0", "objectives.1.weight=0.0"], "objectives: every weight is 0"),
        (["model.architecture=modernbert", "model.hidden=36"], "hidden=36 gives each of heads=12"),
    ],
)
def test_keys_that_do_not_fit_together(changes: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("xlm-tlm", changes)


def test_overrides_reach_into_lists_and_make_sections() -> None:
    recipe = load_recipe(
        "xlm-tlm",
        [
            "objectives.1.weight=0.5",
            "data.sources.0.path=[a.en, a.de]",
            "average.kind=last",
            "model.start=",
            "optimizer.learning_rate=1e-4",
            "data.cleaning.max_words=40",
        ],
    )
    assert [objective.weight for objective in recipe.objectives] == [1.0, 0.5]
    assert recipe.data.sources[0].path == ["a.en", "a.de"]
    assert recipe.average.kind == "last"
    assert recipe.model.start is None
    assert recipe.optimizer.learning_rate == 1e-4
    assert recipe.data.cleaning == {"max_words": 40}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps", "--set steps: not of the form key=value (write a.b=c)"),
        ("=3", "--set =3: not of the form key=value (write a.b=c)"),
        ("a=[1", "--set a=[1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("name.x=3", "--set name.x=3: name holds a value, not keys"),
        ("name.x.y=3", "--set name.x.y=3: nothing lies above 'x'"),
        ("objectives.2.weight=3", "--set objectives.2.weight=3: '2' is not one of the 2 entries"),
        ("objectives.x=3", "--set objectives.x=3: 'x' is not one of the 2 entries"),
        ("objectives.²=3", "--set objectives.²=3: '²' is not one of the 2 entries"),
        ("name=2026-13-45", "--set name=2026-13-45: not valid YAML: month must be in 1..12"),
        ("data={alpha: 1, alpha: 0}", "--set data={alpha: 1, alpha: 0}: not valid YAML: the key"),
    ],
)
def test_a_bad_override_is_named(change: str, message: str) -> None:
    assert fail(change).startswith(message)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E5", 1e5), ("2.5e-3", 2.5e-3), ("-1e+2", -100.0), ("1.e2", 100.0)],
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    content: dict[str, Any] = {}
    apply_override(content, f"a={text}")
    assert content == {"a": value}


@pytest.mark.parametrize("text", ["1e", "e4", "1e-4x", "v1e4"])
def test_words_that_look_like_numbers_stay_words(text: str) -> None:
    content: dict[str, Any] = {}
    apply_override(content, f"a={text}")
    assert content == {"a": text}


def test_a_yaml_error_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"r\.yaml, line 4: not valid YAML: "):
        load(tmp_path, "name: x\nmodel:\n  layers: [1, 2\nseed: 3\n")
    with pytest.raises(InputError, match=r"r\.yaml: a recipe is a mapping"):
        load(tmp_path, "- a\n- b\n")
    with pytest.raises(InputError, match=r"r\.yaml: a recipe is a mapping"):
        load(tmp_path, "")
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.yaml: not valid YAML"):
        load_recipe(tmp_path / "latin.yaml")


def test_a_yaml_error_is_one_line(tmp_path: Path) -> None:
    for text in ("name: a\x00b\n", "name: 2026-13-45\n"):
        with pytest.raises(InputError, match="not valid YAML: ") as caught:
            load(tmp_path, text)
        assert "\n" not in str(caught.value)


def test_a_key_that_comes_twice_is_named(tmp_path: Path) -> None:
    """PyYAML would take the second section, and lose what the first one says."""
    text = "name: x\noptimizer: {clip: 2.0}\nobjectives: [{kind: masked_lm}]\n"
    assert load(tmp_path, text).optimizer.clip == 2.0
    with pytest.raises(InputError, match="line 4: not valid YAML: the key optimizer comes twice"):
        load(tmp_path, text + "optimizer: {weight_decay: 0.1}\n")


def test_a_merged_section_may_be_overridden(tmp_path: Path) -> None:
    """The keys of `<<` are defaults: one that comes again is not there twice."""
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


def test_an_unknown_recipe_lists_those_there_are(tmp_path: Path) -> None:
    for name in ("nope", "xlm.foo", str(tmp_path), "recipes/nope.yaml"):
        with pytest.raises(InputError, match=r"no such recipe .*calque-mini, .*xlm"):
            find_recipe(name)


def test_a_file_comes_before_a_bundled_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(bundled_recipes()["xlm"], tmp_path / "mine.yaml")
    (tmp_path / "xlm").write_text("name: mine\nobjectives: [{kind: masked_lm}]\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("xlm").name == "mine"
    assert load_recipe("mine.yaml").name == "xlm"


def test_the_fingerprint_tells_what_is_learnt() -> None:
    plain = load_recipe("xlm-tlm")
    for change in (
        "seed=2",
        "model.layers=6",
        "schedule.steps=20000",
        "freeze=[a]",
        "data.alpha=0.1",
    ):
        assert load_recipe("xlm-tlm", [change]).fingerprint() != plain.fingerprint()
    for change in ("telemetry.every=5", "engine.workers=3", "checkpoints.keep=9"):
        assert load_recipe("xlm-tlm", [change]).fingerprint() == plain.fingerprint()


def test_links_belong_to_bitext(tmp_path: Path) -> None:
    text = "name: a\nobjectives: [{kind: masked_lm}]\ndata: {sources: [{path: x, kind: text}]}\n"
    with pytest.raises(InputError, match=r"data\.sources\.0.*only bitext has links"):
        load(tmp_path, text, "data.sources.0.links=y")


def test_sources_without_links_are_written_as_they_ever_were() -> None:
    """Tokenizers and runs made before there were links still count as those of their recipe."""
    plain, linked = load_recipe("calque-mini"), load_recipe("calque-mini-align")
    assert "links" not in plain.to_yaml()
    dumped = [source.model_dump(exclude={"weight"}) for source in linked.data.sources]
    assert [("links" in source, "weight" in source) for source in dumped] == [
        (True, False),
        (False, False),
        (False, False),
    ]


def test_only_vectors_are_cut_by_words(tmp_path: Path) -> None:
    text = "name: a\nobjectives: [{kind: masked_lm}]\ndata: {sources: [{path: x, kind: text}]}\n"
    with pytest.raises(InputError, match=r"data\.sources\.0.*only vectors are cut by words"):
        load(tmp_path, text, "data.sources.0.max_words=9")
    found = load(tmp_path, text, "data.sources.0.max_words=9", "data.sources.0.kind=vectors")
    assert "max_words: 9" in found.to_yaml()
    assert "max_words" not in load(tmp_path, text, "data.sources.0.kind=vectors").to_yaml()


# Of recipes as they were before there were vectors: a run of that time can still go on.
FINGERPRINTS = {
    "calque-mini": "6a646b3f50f68b0e",
    "calque-mini-align": "05de5e4c9b9769d0",
    "xlm-tlm": "4764a21bbbdfcc6a",
    "l2": "aa6ee3cb4e9387de",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_older_recipes_keep_their_fingerprints(name: str) -> None:
    assert load_recipe(name).fingerprint() == FINGERPRINTS[name]


def test_what_is_written_is_plain_yaml() -> None:
    content = yaml.safe_load(load_recipe("calque-mini").to_yaml())
    assert content["optimizer"]["epsilon"] == 1e-6
    assert content["objectives"][1]["kind"] == "translation_lm"
