"""The typed recipe: keys that must fit together, fingerprints, and the papers' published values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from calque.errors import InputError
from calque.training.recipe import ProbeSection, Recipe
from calque.training.recipe_io import bundled_recipes, load_recipe, parse_recipe

MakeRecipe = Callable[..., Recipe]
TAGGED = Path(__file__).parent.parent / "data" / "tagged"
VECO = (
    "objectives=[{kind: cross_attention_lm, batch_tokens: 512}]",
    "model.cross_attention=self",
    "freeze=['encoder.*', '!*.crossattention.*']",
    "freeze_steps=4",
)
PROBE = ("probe.train=a.conllu", "probe.test=b-{language}.conllu")
TEXT = "data.sources=[{path: x, kind: text}]"


# The values that the papers publish (and, where marked, those of their code). Key → value, where
# `objectives.0` is the first objective of the recipe.
ADAM = {"optimizer.betas": [0.9, 0.999], "optimizer.epsilon": 1e-8}
ADAM_098 = {"optimizer.betas": [0.9, 0.98], "optimizer.epsilon": 1e-6}
# Wu and Dredze (2020), Section 3 and Appendix A.
EXPLICIT = ADAM | {
    "optimizer.learning_rate": 1e-4,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 1.0,
    "schedule": {"kind": "linear", "steps": 100_000, "warmup": 4000},
    "data.max_length": 96,
    "data.alpha": 0.7,
    "model.dropout": 0.1,
    "objectives.0.batch_examples": 128,
    "objectives.0.batch_tokens": 2 * 96 * 128,  # never fewer than 128 pairs
    "objectives.0.words": "first",
    "objectives.0.weight": 1.0,
    "objectives.0.parameter_weight": 1.0,
}
CONTRASTIVE = EXPLICIT | {
    "objectives.0.kind": "word_contrastive",
    "objectives.0.temperature": 0.1,
    "objectives.0.features": 128,
}
# Hämmerl et al. (2022), Section 4.
CONTINUED = ADAM | {
    "optimizer.learning_rate": 5e-5,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 1.0,
    "schedule": {"kind": "linear", "steps": 7500, "warmup": 0},
    "data.max_length": 128,
    "data.alpha": 0.7,
    "objectives.0.kind": "masked_lm",
    "objectives.0.probability": 0.15,
    "objectives.0.batch_examples": 64,
    "objectives.0.batch_tokens": 64 * 128,
    "objectives.0.weight": 1.0,
    "checkpoints.final": "best",
    "checkpoints.best_by": ["masked_lm"],
}
STATIC = CONTINUED | {
    "data.sources.1.max_words": 200_000,
    "objectives.1.kind": "static_target",
    "objectives.1.batch_examples": 1024,
    "objectives.1.weight": 1.0,
    "objectives.1.layer": None,
}
# Luo et al. (2021), Section 4 and Appendix A.
VECO_TRAINING = {
    "data.alpha": 0.5,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip": 1.0,
    "model.dropout": 0.1,
    "schedule": {"kind": "linear", "steps": 240_000, "warmup": 12_000},
}
# Chi et al. (2021), "Can monolingual pretrained models help cross-lingual classification?"
META = ADAM_098 | {
    "optimizer.learning_rate": 1e-4,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip": 1.0,
    "schedule": {"kind": "linear", "steps": 200_000, "warmup": 10_000},
    "data.alpha": 0.7,
    "model.dropout": 0.1,
    "objectives.0.batch_examples": 64,
    "objectives.0.probability": 0.15,
    "objectives.0.weight": 1.0,
}
# Chi et al. (2021), "Improving pretrained cross-lingual language models via self-labeled word
# alignment", Section 4.1 and the appendix. XLM's recipes use the same values.
XLM = ADAM_098 | {
    "optimizer.learning_rate": 2e-4,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip": 1.0,
    "schedule": {"kind": "linear", "steps": 150_000, "warmup": 10_000},
    "data.alpha": 0.7,
    "model.dropout": 0.1,
    "objectives.0.kind": "masked_lm",
    "objectives.0.probability": 0.15,
    "objectives.0.batch_tokens": 65_536,
    "objectives.0.weight": 1.0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "weak": CONTRASTIVE | {"objectives.0.negatives": "weak"},
    "strong": CONTRASTIVE | {"objectives.0.negatives": "strong"},
    # With the paper's λ = 1 calque-mini collapses; this is the regularizer of Cao et al. (2020).
    "l2": EXPLICIT
    | {
        "objectives.0.kind": "l2",
        "objectives.0.hidden_weight": 1.0,
        "objectives.0.parameter_weight": 0.0,
    },
    "linear-map": ADAM
    | {
        "objectives.0.kind": "linear_map",
        "objectives.0.beta": 0.01,
        "objectives.0.words": "first",
        "objectives.0.layers": "all",
        "objectives.0.batch_examples": 128,
        "optimizer.learning_rate": 1e-4,
        "optimizer.weight_decay": 0.0,
        "data.max_length": 96,
        "freeze": ["encoder.*"],
    },
    "mlm-only": CONTINUED,
    "x2s-mse": STATIC | {"objectives.1.loss": "mse", "objectives.1.unit": True},
    # Components and layer as in the authors' code; the ridge is ours.
    "x2s-dcca": STATIC
    | {
        "objectives.1.loss": "dcca",
        "objectives.1.components": 10,
        "objectives.1.ridge": 1.0,
        "objectives.1.ridge_unit": "variance",
    },
    "veco": ADAM_098
    | VECO_TRAINING
    | {
        "optimizer.learning_rate": 2e-4,
        "objectives.0.pairs": "neighbors",
        "objectives.0.probability": 0.15,
        "objectives.1.pairs": "translations",
        "objectives.1.probability": 0.25,
        "objectives.2.kind": "translation_lm",
        "objectives.2.probability": 0.25,
        "data.max_length": 128,
        "freeze": ["encoder.*", "!*.crossattention.*"],
    },
    "mbart": VECO_TRAINING
    | {
        "objectives.0.kind": "denoising_seq2seq",
        "objectives.0.rate": 0.35,
        "objectives.0.mean_span": 3.5,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.epsilon": 1e-6,
        "optimizer.learning_rate": 3e-4,
    },
    "translate": ADAM_098
    | {
        "optimizer.learning_rate": 2e-4,
        "schedule": {"kind": "linear", "steps": 100_000, "warmup": 16_000},
        "average.kind": "last",
        "average.last": 10,
        "objectives.0.smoothing": 0.1,
        "objectives.0.batch_tokens": 65_536,
        "model.decoder.tie": "all",
    },
    "metaxlm": META | {"objectives.0.kind": "masked_lm", "model.start": "start"},
    "metaxlm-dict": META | {"objectives.0.kind": "masked_lm", "model.start": "start-dict"},
    "metaxlm-frozen": META | {"freeze": ["encoder.model.*.encoder.layer.*"]},
    "xlm-kd": META
    | {
        "objectives.0.kind": "distillation",
        "objectives.0.teacher": "FacebookAI/roberta-base",
        "objectives.0.languages": ["en"],
        "objectives.0.temperature": 2.0,
        "model.layers": 12,
        "model.hidden": 768,
    },
    "meta-pretrain": XLM | {"model.architecture": "roberta", "model.layers": 12},
    "xlm": XLM | {"model.layers": 12, "model.hidden": 768, "model.heads": 12},
    "xlm-tlm": XLM
    | {
        "model.layers": 12,
        "model.hidden": 768,
        "objectives.1.kind": "translation_lm",
        "objectives.1.batch_tokens": 65_536,
        "objectives.1.weight": 1.0,
    },
    "xlm-align": XLM
    | {
        "engine.accumulation": 2,  # 2 × 65,536 tokens are 2,048 pairs of 64 tokens
        "objectives.1.kind": "denoising_alignment",
        "objectives.1.batch_tokens": 65_536,
        "objectives.1.probability": 0.15,
        "objectives.1.weight": 1.0,
        "objectives.1.reduction": "mean",
        "objectives.1.similarity": "dot",
        "objectives.1.sharpness": 1.0,
        "objectives.1.labels": "transport",
        "objectives.1.iterations": 2,
        "objectives.1.scale_first": "rows",
        "objectives.1.filter": "itermax",
        "objectives.1.rounds": 2,
        "objectives.1.alpha": 0.9,
        "objectives.1.queries": "masked",
        "objectives.1.label_layer": None,  # 10 of 12
    },
}
OWN_RECIPES = {"adapt", "calque-base-mono", "calque-mini", "calque-mini-align"}
OWN_RECIPES |= {"add-languages", "calque-mini-refine", "sentence-contrastive"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bundled_recipe_has_the_published_values(name: str) -> None:
    content: Any = load_recipe(name).model_dump()
    for key, expected in PUBLISHED[name].items():
        value = content
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        assert value == expected, key


def test_every_bundled_recipe_is_a_paper_s_or_ours() -> None:
    assert PUBLISHED.keys() | OWN_RECIPES == bundled_recipes().keys()


def test_mono_start_differs_from_calque_mini_only_in_the_use_of_pairs() -> None:
    mini, mono = load_recipe("calque-mini"), load_recipe("calque-base-mono")
    same = ("seed", "model", "data", "optimizer", "schedule", "engine")
    assert all(getattr(mono, part) == getattr(mini, part) for part in same)
    assert mono.tokenizer.path == "calque-mini"  # which was trained by the other recipe
    (objective,) = mono.objectives
    assert objective.kind == "masked_lm"  # the sides of a pair are never read together
    assert objective.batch_tokens == sum(each.batch_tokens for each in mini.objectives)
    assert mono.checkpoints.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.heads=3"], "model: hidden=32 is not a multiple of heads=3"),
        (["schedule.steps=1"], "schedule: warmup=2 exceeds steps=1"),
        (
            ["data.cleaning.min_chars=5000"],
            "data.cleaning: min_chars is 5000, but max_chars is 1000",
        ),
        (["average.kind=ema", "checkpoints.final=best"], "exclude each other"),
        (["objectives.0.weight=0", "objectives.1.weight=0.0"], "objectives: every weight is 0"),
        (["model.architecture=modernbert", "model.hidden=6"], "hidden=6 gives each of heads=2"),
        ([*VECO, "model.cross_attention=null"], "model.cross_attention is missing"),
        ([*VECO, "model.cross_attention=start"], "cross_attention=start needs a model in `start`"),
        ([*VECO, "freeze=[]"], "freeze_steps=4, but nothing is frozen"),
        (
            ["freeze_rows=9", "optimizer.weight_decay=0.1"],
            "freeze_rows needs optimizer.weight_decay",
        ),
        (
            ["freeze_rows=9", "optimizer.weight_decay=0.0", "engine.distributed=fsdp"],
            "freeze_rows does not work with engine.distributed=fsdp",
        ),
        ([*VECO, "schedule.steps=4"], "freeze_steps=4 leaves none of schedule.steps=4 "),
        ([*VECO, "objectives=[{kind: masked_lm}]"], "is trained by no objective"),
        (["model.decoder={}", "model.cross_attention=self"], "exclude each other"),
        (["model.decoder={tie: all}", "engine.distributed=fsdp"], "cannot share layers"),
        (["model.decoder={layer: 2}"], r"model.decoder.layer: unknown key; did you mean layers"),
        ([TEXT, "data.sources.0.links=y"], r"data\.sources\.0.*only bitext has links"),
        ([TEXT, "data.sources.0.max_words=9"], r"data\.sources\.0.*applies to vectors only"),
        ([*PROBE, "probe.evry=3"], r"probe.evry: unknown key; did you mean every\?"),
        ([*PROBE, "probe.every=0"], "probe.every: Input should be greater than 0, got 0"),
        ([*PROBE, "probe.metric=f1"], "probe.metric: Input should be 'accuracy' or 'span_f1'"),
        (
            [*PROBE, "objectives=[{kind: linear_map, solver: procrustes}]"],
            "linear_map does not change the encoder",
        ),
    ],
)
def test_keys_that_do_not_fit_together_are_an_error(
    changes: list[str], message: str, tiny_recipe: MakeRecipe
) -> None:
    with pytest.raises(InputError, match=message):
        tiny_recipe(*changes)


# Fingerprints


def test_fingerprint_depends_on_what_is_learned() -> None:
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


def test_newer_keys_without_a_value_are_not_written(tiny_recipe: MakeRecipe) -> None:
    """Runs and tokenizers made before these keys existed keep their fingerprints."""
    content = tiny_recipe(TEXT).model_dump()
    assert not {"decoder", "cross_attention"} & content["model"].keys()
    assert not {"links", "max_words"} & content["data"]["sources"][0].keys()
    assert not {"batch_examples", "text"} & content["objectives"][0].keys()
    assert not {"freeze_steps", "freeze_rows"} & content.keys()
    for change in (
        "objectives.0.batch_examples=9",
        "objectives.1.text=raw",
        "data.join_sentences=true",
        "model.decoder={}",
        "data.sources=[{path: x, kind: vectors, max_words: 9}]",
    ):
        changed = tiny_recipe(TEXT, change)
        assert changed.fingerprint() != tiny_recipe(TEXT).fingerprint()
        assert parse_recipe(yaml.safe_load(changed.to_yaml()), "its YAML") == changed


# Recipes as they were before there were vectors: runs of that time can still be resumed.
FINGERPRINTS = {
    "calque-mini": "6a646b3f50f68b0e",
    "calque-mini-align": "05de5e4c9b9769d0",
    "xlm-tlm": "4764a21bbbdfcc6a",
    "l2": "aa6ee3cb4e9387de",
}


# The values of l2.yaml at that time, which are those of the paper.
OLDER_VALUES = {"l2": ["objectives.0.parameter_weight=1.0", "objectives.0.hidden_weight=0.0"]}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_older_recipes_keep_their_fingerprints(name: str) -> None:
    assert load_recipe(name, OLDER_VALUES.get(name, [])).fingerprint() == FINGERPRINTS[name]


def test_probe_does_not_change_the_fingerprint(tiny_recipe: MakeRecipe) -> None:
    with_probe = tiny_recipe(*PROBE)
    assert with_probe.fingerprint() == tiny_recipe().fingerprint()
    assert parse_recipe(with_probe.model_dump(), "itself") == with_probe


# Files of a probe


def section(**changes: Any) -> ProbeSection:
    usual = {"train": f"{TAGGED}/en_ewt-train.conllu", "test": f"{TAGGED}/dev-{{language}}.tsv"}
    return ProbeSection(**(usual | changes))


def test_languages_of_a_probe_are_inferred_from_file_names() -> None:
    assert section().find_tests() == {
        "en": TAGGED / "dev-en.tsv",
        "zh": TAGGED / "dev-zh.tsv",
    }
    test = f"{TAGGED}/{{language}}_*-dev.conllu*"
    assert list(section(test=test).find_tests()) == ["en", "de", "fr"]
    assert list(section(test=test, languages=["fr"]).find_tests()) == ["en", "fr"]
    assert list(section(test=test, source="de").find_tests()) == ["de", "en", "fr"]


def test_files_of_a_probe_may_be_listed() -> None:
    files = {"fr": str(TAGGED / "fr_gsd-dev.conllu"), "en": str(TAGGED / "dev-en.tsv")}
    assert section(test=files).find_tests() == {
        "en": TAGGED / "dev-en.tsv",
        "fr": TAGGED / "fr_gsd-dev.conllu",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": f"{TAGGED}/dev-*.tsv"}, r"does not contain \{language\} once"),
        ({"test": f"{TAGGED}/none-{{language}}.tsv"}, "matches no file"),
        ({"test": {"en": f"{TAGGED}/none.tsv"}}, "no such file"),
        ({"source": "sw"}, "no test of its source 'sw'"),
        ({"languages": ["zh", "sw"]}, r"no test of 'sw' \(choose from: en zh\)"),
        ({"train": f"{TAGGED}/dev-en.tsv"}, "would be trained on its test file"),
        ({"train": f"{TAGGED}/none.tsv"}, r"none.tsv: no such file .*probe.train"),
        ({"test": f"{TAGGED}/{{language}}_*.conllu*"}, "is a test of 'en', too"),
    ],
)
def test_wrong_files_of_a_probe_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        section(**changes).find_tests()
