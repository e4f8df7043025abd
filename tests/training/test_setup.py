"""Getting ready: tokenizers found or trained, encoders built as the recipe says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.toy_tokenizers import sentence_piece

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.sentences.embed import embed_sentences
from calque.tokens.tokenizer import encode_sentences, load_tokenizer
from calque.training.distributed import main_process_first
from calque.training.loop import Trainer, train
from calque.training.recipe import Recipe
from calque.training.start import (
    anchor_paths,
    build_encoder,
    describe_cleaning,
    find_tokenizer,
    make_accelerator,
    open_text,
    prepare_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]


@pytest.mark.parametrize("architecture", ["xlm-roberta", "roberta", "bert", "modernbert"])
def test_every_architecture_trains_and_reads_a_whole_window(
    architecture: str, tiny_recipe: MakeRecipe, tiny_text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    recipe = tiny_recipe(f"model.architecture={architecture}", "schedule.steps=3")
    model = train(recipe, tiny_text, tmp_path)
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
    """Processes wait for all gradients; a head that is not tied has a bias that never gets one."""
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
    trainer = Trainer(recipe, tiny_text, tmp_path / "run")
    loss, _ = trainer.module([next(loader)[1] for loader in trainer._open_loaders()])
    loss.backward()
    assert [
        n for n, p in trainer.module.named_parameters() if p.requires_grad and p.grad is None
    ] == []


@pytest.mark.parametrize(
    ("changes", "waits_for_all"),
    [
        ([], True),
        (["model.decoder={}"], False),
        (["model.decoder={}", "objectives.1={kind: translation}"], True),
    ],
)
def test_processes_do_not_wait_for_a_decoder_that_nothing_teaches(
    changes: list[str], waits_for_all: bool, tiny_recipe: MakeRecipe, tiny_encoder: Encoder
) -> None:
    handler = make_accelerator(tiny_recipe(*changes), tiny_encoder).ddp_handler
    assert handler is not None
    assert handler.find_unused_parameters != waits_for_all


def dropouts(encoder: Encoder, in_attention: bool) -> set[float]:
    return {
        module.p
        for name, module in encoder.model.named_modules()
        if isinstance(module, torch.nn.Dropout)
        and name.endswith("attention.self.dropout") == in_attention
    }


def test_dropout_is_that_of_the_recipe(
    tiny_recipe: MakeRecipe, tiny_tokenizer: PreTrainedTokenizerFast, tiny_folder: Path
) -> None:
    changes = ("model.dropout=0.3", "model.attention_dropout=0.2")
    for start in ((), (f"model.start={tiny_folder}",)):
        encoder = build_encoder(tiny_recipe(*changes, *start), tiny_tokenizer)
        assert dropouts(encoder, in_attention=False) == {0.3}
        assert dropouts(encoder, in_attention=True) == {0.2}
        assert encoder.model.config.hidden_dropout_prob == 0.3
        assert encoder.model.config.attention_probs_dropout_prob == 0.2


def test_a_start_may_be_of_distilbert(
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    """Its dropouts have names of their own; what is saved is of its kind, and has learnt."""
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
    loaded = AutoModelForMaskedLM.from_pretrained(train(recipe, tiny_text, tmp_path / "run"))
    assert loaded.config.model_type == "distilbert"
    before = AutoModelForMaskedLM.from_pretrained(start).state_dict()
    assert all(not torch.equal(w, before[n]) for n, w in loaded.named_parameters() if "lin" in n)


def test_weights_depend_on_the_seed_alone(
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


def test_a_model_brings_its_tokenizer(
    tiny_recipe: MakeRecipe, tiny_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for change in (f"model.start={tiny_folder}", f"tokenizer.path={tiny_folder}"):
        found = find_tokenizer(tiny_recipe(change), Path("nowhere"))
        assert found is not None
        assert found.get_vocab() == tiny_tokenizer.get_vocab()
    assert find_tokenizer(tiny_recipe(), Path("nowhere")) is None


def test_paths_beside_the_recipe_are_anchored(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    recipe = tiny_recipe("model.start=model", "tokenizer.path=some/hub-name")
    anchored = anchor_paths(recipe, tmp_path)
    assert anchored.model.start == str(tmp_path / "model")
    assert anchored.tokenizer.path == "some/hub-name"
    assert anchor_paths(tiny_recipe(), tmp_path) == tiny_recipe()
    monkeypatch.chdir(tmp_path)
    assert anchor_paths(recipe, tmp_path / "elsewhere").model.start == "model"


def write_sources(folder: Path) -> None:
    lines = [f"The number is {k}.\tDie Zahl ist {k}.\n" for k in range(60)]
    (folder / "en-de.tsv").write_text("".join([*lines, "\tleer\n", lines[0]]))


def test_text_is_prepared_and_told(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_sources(tmp_path)
    source = "data.sources=[{path: en-de.tsv, kind: bitext}]"
    recipe = tiny_recipe(source, "tokenizer.vocab_size=80")
    said: list[str] = []
    progress: list[tuple[str, int]] = []
    (corpus,) = prepare_text(
        recipe,
        tmp_path,
        tmp_path / "text",
        say=said.append,
        n_workers=1,
        on_progress=lambda name, n_examples: progress.append((name, n_examples)),
    )
    assert said[0] == "training a tokenizer of 80 entries"
    assert said[1] == f"{corpus.name}: {describe_cleaning(corpus)}"
    assert "60 of 62 examples kept; dropped: " in said[1]
    assert progress == [(corpus.name, 60)]
    (opened,), tokenizer = open_text(tmp_path / "text")
    assert opened == corpus
    assert len(tokenizer) <= 80


def test_a_tokenizer_is_trained_again_when_its_recipe_changes(
    tiny_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    folder = tmp_path / "text"

    def is_trained(*changes: str) -> bool:
        source = "data.sources=[{path: en-de.tsv, kind: bitext}]"
        recipe, said = tiny_recipe(source, "tokenizer.vocab_size=80", *changes), list[str]()
        prepare_text(recipe, tmp_path, folder, say=said.append, n_workers=1)
        return said[0].startswith("training a tokenizer")

    assert is_trained()
    assert not is_trained()
    assert not is_trained("data.sources.0.weight=2.0", "data.alpha=0.2", "schedule.steps=9")
    assert is_trained("tokenizer.vocab_size=70")
    assert is_trained("data.cleaning.max_chars=18")
    assert not is_trained(f"tokenizer.path={tiny_folder}")
    assert is_trained()


def test_half_a_tokenizer_is_not_left(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for the one that was trained, and could not be read."""
    from transformers import PreTrainedTokenizerFast

    def run_out_of_space(tokenizer: object, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text('{"version": ')
        raise Exception("File too large (os error 27)")

    write_sources(tmp_path)
    source = "data.sources=[{path: en-de.tsv, kind: bitext}]"
    recipe = tiny_recipe(source, "tokenizer.vocab_size=80")
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", run_out_of_space)
        with pytest.raises(InputError, match=r"text/tokenizer: cannot be written: File too large"):
            prepare_text(recipe, tmp_path, tmp_path / "text", say=print, n_workers=1)
    assert list((tmp_path / "text").iterdir()) == []
    assert prepare_text(recipe, tmp_path, tmp_path / "text", say=print, n_workers=1)


def test_text_is_not_prepared_into_a_file(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_sources(tmp_path)
    recipe = tiny_recipe("data.sources=[{path: en-de.tsv, kind: bitext}]")
    with pytest.raises(InputError, match=r"en-de\.tsv: is not a folder"):
        prepare_text(recipe, tmp_path, tmp_path / "en-de.tsv", say=print, n_workers=1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no mask", "the tokenizer lacks a first, last, padding or mask token"),
        ("too many", "entries but the model [0-9]+ embeddings"),
        ("another", "another vocabulary than this model's"),
    ],
)
def test_a_tokenizer_that_does_not_do_is_refused_before_text_is_prepared(
    fault: str, message: str, tiny_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    start, theirs = tmp_path / "start", tmp_path / "theirs"
    shutil.copytree(tiny_folder, start)
    tokenizer = load_tokenizer(start)
    if fault == "no mask":
        tokenizer.mask_token = None
    if fault == "too many":
        tokenizer.add_tokens([f"<{number}>" for number in range(9999)])
    changes = [f"model.start={start}"]
    if fault == "another":
        sentence_piece(["▁a", "▁b"]).save_pretrained(theirs)
        changes.append(f"tokenizer.path={theirs}")
    else:
        tokenizer.save_pretrained(start)
    recipe = tiny_recipe("data.sources=[{path: en-de.tsv, kind: bitext}]", *changes)
    with pytest.raises(InputError, match=message):
        prepare_text(recipe, tmp_path, tmp_path / "text", say=print, n_workers=1)
    assert not (tmp_path / "text").exists()


def test_a_missing_hold_out_is_named(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_sources(tmp_path)
    source = "data.sources=[{path: en-de.tsv, kind: bitext}]"
    recipe = tiny_recipe(source, "data.hold_out=no.tsv")
    with pytest.raises(InputError, match=r"no\.tsv: .*\(correct data\.hold_out, or go without"):
        prepare_text(recipe, tmp_path, tmp_path / "text", say=print, n_workers=1)
    assert not (tmp_path / "text").exists()


def test_alone_a_process_is_the_main_one() -> None:
    with main_process_first() as is_main:
        assert is_main


def test_a_process_whose_main_one_has_stopped_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(group: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:30593.")

    state = SimpleNamespace(num_processes=2, is_main_process=False)
    monkeypatch.setattr("calque.io.outputs.join_processes", lambda: state)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: None)
    monkeypatch.setattr(torch.distributed, "barrier", end)
    with pytest.raises(InputError, match="another process has stopped"), main_process_first():
        pass
