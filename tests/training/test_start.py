"""The start of a run: encoders, dropout, frozen weights and processes as the recipe says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.veco import Veco
from calque.sentences.embed import embed_sentences
from calque.tokens.tokenizer import encode_sentences
from calque.training.loop import train
from calque.training.recipe import Recipe
from calque.training.run import Run
from calque.training.sources import prepare_text
from calque.training.start import build_accelerator, build_encoder, build_meta_step, check_freeze

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]
CA_MLM = "objectives=[{kind: cross_attention_lm, batch_tokens: 512}]"
TRANSLATION = "objectives=[{kind: translation, batch_tokens: 512}]"
ALIGNMENT = "objectives=[{kind: denoising_alignment, batch_tokens: 512}]"
SENTENCES = "kind: sentence_contrastive, batch_tokens: 1024"


@pytest.mark.parametrize("architecture", ["xlm-roberta", "roberta", "bert", "modernbert"])
def test_every_architecture_is_trained_and_reads_long_text(
    architecture: str, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    recipe = tiny_recipe(f"model.architecture={architecture}", "schedule.steps=3")
    model = train(recipe, output=tmp_path, prepared=tiny_text).model
    loaded = AutoModelForMaskedLM.from_pretrained(model)
    assert loaded.config.model_type == architecture
    encoder = Encoder.load(model)
    assert encoder.max_tokens == recipe.model.positions
    words = "Tom " * 200
    assert len(encode_sentences(encoder.tokenizer, [words])[0]) > recipe.model.positions
    assert embed_sentences(encoder, [words, "Tom"]).shape == (2, recipe.model.hidden)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize(
    "changes",
    [
        [],
        [
            "objectives=[{kind: cross_attention_lm, batch_tokens: 512}]",
            "model.cross_attention=random",
        ],
        [
            "objectives=[{kind: denoising_seq2seq, batch_tokens: 512}]",
            "model.decoder={languages: [LANGUAGES]}",
        ],
    ],
)
def test_every_weight_that_is_trained_gets_a_gradient(
    kind: str,
    changes: list[str],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tiny_text: Path,
    demo_rows: list[tuple[str, str, str]],
    tmp_path: Path,
) -> None:
    """DDP waits for all gradients; a head that is not tied has a bias that never gets one."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=66,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    Encoder(build_model(config), tiny_tokenizer).save(tmp_path / "untied")
    languages = ", ".join(dict.fromkeys(["en", *(row[0] for row in demo_rows)]))
    changes = [change.replace("LANGUAGES", languages) for change in changes]
    recipe = tiny_recipe(*changes, f"model.start={tmp_path / 'untied'}")
    run = Run(recipe, tiny_text, tmp_path / "run")
    loss, _ = run.module([next(loader)[1] for loader in run.open_loaders()])
    loss.backward()
    assert [n for n, p in run.module.named_parameters() if p.requires_grad and p.grad is None] == []


@pytest.mark.parametrize(
    ("changes", "has_unused"),
    [
        ([], False),
        (["model.decoder={}"], True),
        (["model.decoder={}", "objectives.1={kind: translation}"], False),
        ([f"objectives=[{{{SENTENCES}}}]"], True),
        (["objectives=[{kind: word_contrastive, parameter_weight: 0.0}]"], True),
        # The distance from the start has a gradient for every weight.
        (["objectives=[{kind: word_contrastive}]"], False),
        ([f"objectives=[{{{SENTENCES}}}, {{kind: masked_lm}}]"], False),
        (["objectives=[{kind: translation_lm}]"], False),
    ],
)
def test_ddp_searches_unused_weights_where_there_are_some(
    changes: list[str], has_unused: bool, tiny_recipe: MakeRecipe, tiny_encoder: Encoder
) -> None:
    """The search takes time, and PyTorch warns where there are none."""
    handler = build_accelerator(tiny_recipe(*changes), tiny_encoder).ddp_handler
    assert handler is not None
    assert handler.find_unused_parameters == has_unused


def test_runs_of_one_process_may_have_different_precisions(
    tiny_recipe: MakeRecipe, tiny_encoder: Encoder
) -> None:
    for precision, mixed in (("fp32", "no"), ("bf16", "bf16"), ("fp32", "no")):
        recipe = tiny_recipe(f"engine.precision={precision}")
        assert build_accelerator(recipe, tiny_encoder).mixed_precision == mixed


def dropouts(encoder: Encoder, in_attention: bool) -> set[float]:
    return {
        module.p
        for name, module in encoder.model.named_modules()
        if isinstance(module, torch.nn.Dropout)
        and name.endswith("attention.self.dropout") == in_attention
    }


def test_dropout_is_set_in_modules_and_config(
    tiny_recipe: MakeRecipe, tiny_tokenizer: PreTrainedTokenizerFast, tiny_folder: Path
) -> None:
    changes = ("model.dropout=0.3", "model.attention_dropout=0.2")
    for start in ((), (f"model.start={tiny_folder}",)):
        encoder = build_encoder(tiny_recipe(*changes, *start), tiny_tokenizer)
        assert dropouts(encoder, in_attention=False) == {0.3}
        assert dropouts(encoder, in_attention=True) == {0.2}
        assert encoder.model.config.hidden_dropout_prob == 0.3
        assert encoder.model.config.attention_probs_dropout_prob == 0.2


def test_dropout_of_deberta_is_set(
    tiny_recipe: MakeRecipe, deberta_folder: Path, deberta_encoder: Encoder
) -> None:
    changes = ("model.dropout=0.3", "model.attention_dropout=0.2", f"model.start={deberta_folder}")
    encoder = build_encoder(tiny_recipe(*changes), deberta_encoder.tokenizer)
    found = {
        name: module.p
        for name, module in encoder.model.named_modules()
        if isinstance(module, torch.nn.Dropout)
    }
    assert {name.rpartition(".")[2] for name in found} == {"dropout", "pos_dropout"}
    for name, share in found.items():
        assert share == (0.2 if name.endswith("attention.self.dropout") else 0.3), name
    assert encoder.config.hidden_dropout_prob == 0.3
    assert encoder.config.attention_probs_dropout_prob == 0.2
    # Relative distances have no limit, but the model was not trained on longer text.
    with pytest.raises(InputError, match=r"data\.max_length=129 exceeds the model's 128"):
        build_encoder(tiny_recipe(*changes, "data.max_length=129"), deberta_encoder.tokenizer)


@pytest.mark.parametrize("method", ["probability", "itermax"])
def test_what_training_makes_invalid_is_not_kept(
    tiny_recipe: MakeRecipe, tiny_encoder: Encoder, tmp_path: Path, method: str
) -> None:
    calibration = {"slope": 0.5, "intercept": 0.0, "threshold": 0.3}
    alignment = {"method": method, "layer": 2, "calibration": calibration}
    before = deepcopy(tiny_encoder)  # the fixture is shared
    before.config.calque = {"alignment": alignment, "scores": {"x": 1}, "languages": ["de"]}
    before.save(tmp_path)
    encoder = build_encoder(tiny_recipe(f"model.start={tmp_path}"), tiny_encoder.tokenizer)
    kept = {"method": "argmax" if method == "probability" else method, "layer": 2}
    assert encoder.settings["alignment"] == kept
    assert encoder.settings["languages"] == ["de"] and "scores" not in encoder.settings


def test_training_starts_from_distilbert(
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    """Its dropouts have names of their own; what is saved is a trained DistilBERT."""
    from transformers import AutoModelForMaskedLM, DistilBertConfig

    config = DistilBertConfig(
        vocab_size=len(tiny_tokenizer),
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=48,
        max_position_embeddings=64,
        pad_token_id=1,
    )
    start = tmp_path / "start"
    Encoder(build_model(config), tiny_tokenizer).save(start)
    changes = ("model.dropout=0.3", "model.attention_dropout=0.2", f"model.start={start}")
    recipe = tiny_recipe(*changes, "schedule.steps=3")
    encoder = build_encoder(recipe, tiny_tokenizer)
    assert encoder.model.config.dropout == encoder.model.distilbert.embeddings.dropout.p == 0.3
    layer = encoder.model.distilbert.transformer.layer[0]
    assert (layer.attention.dropout.p, layer.ffn.dropout.p) == (0.2, 0.3)
    assert encoder.model.config.attention_dropout == 0.2
    loaded = AutoModelForMaskedLM.from_pretrained(
        train(recipe, output=tmp_path / "run", prepared=tiny_text).model
    )
    assert loaded.config.model_type == "distilbert"
    before = AutoModelForMaskedLM.from_pretrained(start).state_dict()
    assert all(not torch.equal(w, before[n]) for n, w in loaded.named_parameters() if "lin" in n)


def test_weights_depend_on_the_seed_only(
    tiny_recipe: MakeRecipe, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    state = torch.get_rng_state()
    first, again, other = (
        build_encoder(tiny_recipe(f"seed={seed}"), tiny_tokenizer).model.state_dict()
        for seed in (4, 4, 5)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# Names of parameters without memory for them


@pytest.fixture(scope="module")
def veco_folder(tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "veco"
    veco = Veco.plug(tiny_encoder)
    veco.publish(folder, dtype=torch.float32, state=veco.model.state_dict())
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        ["model.architecture=bert"],
        ["model.start={plain}", ALIGNMENT],
        [CA_MLM, "model.cross_attention=random", "model.architecture=bert"],
        [CA_MLM, "model.cross_attention=self", "model.start={plain}"],
        [CA_MLM, "model.cross_attention=start", "model.start={veco}"],
        ["model.start={veco}/veco"],
        [TRANSLATION, "model.decoder={layers: 1, languages: [LANGUAGES]}"],
        [TRANSLATION, "model.start={veco}", "model.decoder={layers: 3, languages: [LANGUAGES]}"],
        [
            TRANSLATION,
            "model.start={writer}",
            "model.decoder={layers: 1, tie: all, languages: [LANGUAGES]}",
        ],
    ],
)
def test_meta_model_has_the_parameters_of_the_run(
    changes: list[str],
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tiny_folder: Path,
    veco_folder: Path,
    translator_folder: Path,
    demo_rows: list[tuple[str, str, str]],
    tmp_path: Path,
) -> None:
    languages = ", ".join(dict.fromkeys(row[0] for row in demo_rows))
    places = {
        "{plain}": str(tiny_folder),
        "{veco}": str(veco_folder),
        "{writer}": str(translator_folder),
        "LANGUAGES": f"{languages}, en",
    }
    for name, place in places.items():
        changes = [change.replace(name, place) for change in changes]
    recipe = tiny_recipe(*changes)
    expected = Run(recipe, tiny_text, tmp_path).module
    found = build_meta_step(recipe)
    names: list[dict[str, Any]] = [
        {name: tuple(value.shape) for name, value in each.named_parameters(remove_duplicate=False)}
        for each in (found, expected)
    ]
    assert names[0].keys() == names[1].keys()
    without_words = [name for name in names[0] if "layer" in name]
    assert {n: names[0][n] for n in without_words} == {n: names[1][n] for n in without_words}


def test_linear_maps_count_as_trained_before_they_exist(tiny_recipe: MakeRecipe) -> None:
    change = "objectives=[{kind: linear_map, solver: gradient, batch_tokens: 512}]"
    check_freeze(tiny_recipe(change, "freeze=['encoder.*']"))


def test_meta_model_does_not_use_the_global_generator(tiny_recipe: MakeRecipe) -> None:
    before = torch.get_rng_state()
    check_freeze(tiny_recipe("freeze=['*.bias']"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [CA_MLM, "freeze=['encoder.*', '!*.crosattention.*']"],
            r"'!\*.crosattention.\*' matches no",
        ),
        ([CA_MLM, "freeze=[roberta.*]", "freeze_steps=2"], r"'roberta.\*' matches no parameter"),
        ([CA_MLM, "freeze=['encoder.*']"], "every parameter is frozen"),
        ([CA_MLM, "model.architecture=modernbert"], "modernbert.* no cross-attention"),
        (["model.decoder={layers: 5}"], "decoder.layers=5, but "),
        (["model.decoder={}", "model.architecture=modernbert"], "modernbert.* no cross-"),
        (["model.decoder={layers: 5}", "model.start={start}"], "decoder.layers=5, but .* 4"),
        (["model.decoder={}", "model.start={start}", "data.max_length=129"], "the model's 128"),
        (["model.decoder={layers: 3}", "model.start={writer}"], "decoder.layers=3, but .* 2"),
        (["model.decoder={}", "model.start={writer}", "data.max_length=65"], "the model's 64"),
    ],
)
def test_errors_are_found_before_text_is_prepared(
    changes: list[str],
    message: str,
    tiny_recipe: MakeRecipe,
    tiny_folder: Path,
    translator_folder: Path,
    tmp_path: Path,
) -> None:
    """Preparing text may take hours."""
    (tmp_path / "en-de.tsv").write_text("One.\tEins.\n", encoding="utf-8")
    if CA_MLM in changes:
        changes = [*changes, "model.cross_attention=self"]
    folders = {"{start}": str(tiny_folder), "{writer}": str(translator_folder)}
    for name, folder in folders.items():
        changes = [change.replace(name, folder) for change in changes]
    recipe = tiny_recipe(*changes, "data.sources=[{path: en-de.tsv, kind: bitext}]")
    with pytest.raises(InputError, match=message):
        prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize(
    "changes",
    [
        ["model.start={bad}"],
        ["model.start={bad}", "objectives=[{{kind: linear_map, solver: procrustes}}]"],
        ["model.start={bad}", "model.decoder={{layers: 1}}"],
        ["objectives.0={{kind: distillation, teacher: {bad}, languages: [en]}}"],
    ],
)
def test_weights_that_are_not_finite_are_an_error(
    changes: list[str], tiny_recipe: MakeRecipe, tiny_text: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(tiny_folder, bad)
    weights = load_file(bad / "model.safetensors")
    name = next(name for name in weights if "layer.1" in name)
    weights[name].view(-1)[0] = torch.inf
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    recipe = tiny_recipe(*(change.format(bad=bad) for change in changes))
    with pytest.raises(InputError, match=rf"the tensor {name} has numbers that are not finite"):
        train(recipe, output=tmp_path / "run", prepared=tiny_text)
    assert not (tmp_path / "run").exists()
