"""Translation: order of lines, long lines, and the same words as `generate()`."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.toy_tokenizers import KINDS, make_tokenizer

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, random_weights
from calque.tokens.windows import split_lines_for_translation, split_tokens
from calque.translation import translate
from calque.translation.translate import Hypothesis, Translator, join_parts

Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def model(translator_folder: Path) -> Seq2Seq:
    return Seq2Seq.load(translator_folder)


@pytest.fixture(scope="module")
def translator(model: Seq2Seq) -> Translator:
    return Translator(model, tgt_lang="de")


def test_training_pairs_in_both_directions(model: Seq2Seq, taught_pairs: Pairs) -> None:
    english, german = ([pair[side] for pair in taught_pairs] for side in (0, 1))
    assert list(Translator(model, tgt_lang="de").translate(english)) == german
    assert list(Translator(model, tgt_lang="en").translate(german)) == english


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("tokenizer_config.json", {"sep_token": None}, "the tokenizer has no sep token"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id is not one of the model"),
        ("generation_config.json", {"eos_token_id": [2, 10**18]}, "eos_token_id is not one of"),
        ("generation_config.json", {"pad_token_id": [[1]]}, "pad_token_id is not one of"),
    ],
)
def test_invalid_special_tokens(
    file: str, change: dict[str, Any], problem: str, translator_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(translator_folder, folder)
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))
    with pytest.raises(InputError, match=problem):
        Translator(folder, tgt_lang="de")


def test_the_order_of_lines_does_not_depend_on_batches(
    model: Seq2Seq, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [src for src, _ in taught_pairs] * 3
    wanted = [tgt for _, tgt in taught_pairs] * 3
    monkeypatch.setattr(translate, "BLOCK_LINES", 5)
    for batch_tokens in (1, 60, 10_000):
        translator = Translator(model, tgt_lang="de", batch_tokens=batch_tokens)
        assert list(translator.translate(lines)) == wanted


def test_lines_are_read_block_by_block(
    translator: Translator, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translate, "BLOCK_LINES", 2)
    n_read = 0

    def read() -> Iterator[str]:
        nonlocal n_read
        for src, _ in taught_pairs:
            n_read += 1
            yield src

    stream = translator.translate(read())
    assert next(stream) == taught_pairs[0][1]
    assert n_read == 2


def test_empty_lines_stay_empty_and_in_place(translator: Translator, taught_pairs: Pairs) -> None:
    lines = ["", taught_pairs[0][0], "  \t", taught_pairs[1][0], "\u200b"]
    found, report = translator.translate_block(lines)
    wanted = ["", taught_pairs[0][1], "", taught_pairs[1][1], ""]
    assert [group[0].text for group in found] == wanted
    assert (report.n_lines, report.n_empty, report.n_segments, report.n_unfinished) == (5, 3, 2, 0)
    assert translator.translate_block([]) == ([], translate.TranslationCounts())


def test_long_lines_are_split_by_sentence_and_joined(
    translator: Translator, taught_pairs: Pairs
) -> None:
    ended = [pair for pair in taught_pairs if pair[0][-1] in ".!?"][:7]
    line = " ".join(src for src, _ in ended)
    found, report = translator.translate_block(["", line, ended[0][0]])
    assert found[1][0].text == " ".join(tgt for _, tgt in ended)
    assert found[2][0].text == ended[0][1]
    assert (report.n_long, report.n_cut, report.n_segments) == (1, 0, len(ended) + 1)


def test_very_long_sentences_are_split_between_words(
    translator: Translator, taught_pairs: Pairs
) -> None:
    endless = " ".join(src.rstrip(".!?") for src, _ in taught_pairs)
    segments = split_lines_for_translation(
        translator.model.tokenizer, [endless], translator.max_source_tokens, "en"
    )
    assert segments.n_long_sentences == 1
    assert len(segments.ids) > 1
    assert segments.lengths.max() <= translator.max_source_tokens
    decoded = [translator.model.tokenizer.decode(ids) for ids in segments.ids]
    assert " ".join(decoded).split() == endless.split()
    found, report = translator.translate_block([endless])
    assert found[0][0].text
    assert report.n_cut == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [7, 8, 9])
def test_characters_are_not_split(kind: str, longest: int, demo_rows: Any) -> None:
    """A byte-level vocabulary has three tokens for an unknown Chinese character."""
    tokenizer = make_tokenizer(kind, [english for _, english, _ in demo_rows] + ["请坐下休"], 300)
    text = "请坐下休息一下再走好不好" * 4 + " and then " + "我们的客人几分钟后就到" * 2
    segments = split_lines_for_translation(tokenizer, [text], longest, "zh")
    assert segments.n_long_sentences == 1
    assert segments.lengths.max() <= longest
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert np.concatenate(segments.ids).tolist() == whole
    decoded = [tokenizer.decode(ids) for ids in segments.ids]
    assert "\ufffd" not in "".join(decoded)
    assert "".join("".join(decoded).split()) == "".join(tokenizer.decode(whole).split())


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 9))
def test_windows_cover_all_tokens(flags: list[bool], longest: int) -> None:
    ids = np.arange(len(flags))
    windows = split_tokens(ids, longest, np.array(flags))
    assert np.concatenate(windows).tolist() == ids.tolist()
    assert max(map(len, windows)) <= longest
    for window in windows[1:]:
        first = int(window[0])
        assert flags[first] or not any(flags[first - longest + 1 : first + 1])


def test_same_translations_as_generate(model: Seq2Seq, taught_pairs: Pairs) -> None:
    """Also for new sentences, with the padding and the attention of Hugging Face."""
    from transformers import AutoTokenizer, EncoderDecoderModel

    lines = [" ".join(src.split()[1:]) for src, _ in taught_pairs] + ["Who is it?", "No"]
    bare = EncoderDecoderModel.from_pretrained(model.folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    translator = Translator(model, beams=4, length_penalty=0.6, tgt_lang="en", batch_tokens=10_000)
    encoded = tokenizer(lines, padding=True, return_tensors="pt")
    written = bare.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        num_beams=4,
        length_penalty=0.6,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<2en>"),
        max_new_tokens=translator.max_length(encoded["input_ids"].shape[1]),
    )
    wanted = [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
    assert list(translator.translate(lines)) == wanted


@pytest.mark.parametrize(
    ("beams", "length_penalty", "nbest"), [(1, 1.0, 1), (3, 1.0, 1), (3, 0.5, 2)]
)
def test_the_maximum_length_does_not_depend_on_the_batch(
    beams: int, length_penalty: float, nbest: int, tiny_encoder: Encoder
) -> None:
    """A random model never stops: each line is what Hugging Face generates for it alone."""
    from transformers import EncoderDecoderModel

    plan, start = DecoderPlan(tie="all"), random_weights(tiny_encoder.config)
    random_model = build_seq2seq(plan, start, tiny_encoder.tokenizer).eval()
    bare: Any = random_model.model
    assert isinstance(bare, EncoderDecoderModel)
    lines = ["No", "Who is it?", "He asked me who had painted the picture."]
    translator = Translator(
        random_model, beams=beams, length_penalty=length_penalty, nbest=nbest, batch_tokens=10_000
    )
    groups = list(translator.translate_nbest(lines))
    for line, group in zip(lines, groups, strict=True):
        encoded = random_model.tokenizer(line, return_tensors="pt")["input_ids"]
        written = bare.generate(
            input_ids=encoded,
            attention_mask=torch.ones_like(encoded),
            num_beams=beams,
            num_return_sequences=nbest,
            length_penalty=length_penalty if beams > 1 else None,
            max_new_tokens=2 * encoded.shape[1] + 20,
        )
        texts = random_model.tokenizer.batch_decode(written, skip_special_tokens=True)
        assert [each.text for each in group] == [text.strip() for text in texts]
        assert written.shape[1] == 1 + 2 * encoded.shape[1] + 20  # the maximum length


def test_a_decoder_with_fewer_positions_than_the_encoder(
    tiny_encoder: Encoder, taught_pairs: Pairs, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoModelForCausalLM, EncoderDecoderModel

    short = copy.deepcopy(tiny_encoder.config)
    short.is_decoder = short.add_cross_attention = True
    short.max_position_embeddings = 22
    halves = AutoModel.from_config(tiny_encoder.config), AutoModelForCausalLM.from_config(short)
    made = EncoderDecoderModel(encoder=halves[0], decoder=halves[1])
    marks = {"decoder_start_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    made.generation_config.update(**marks)
    made.save_pretrained(tmp_path)
    tiny_encoder.tokenizer.save_pretrained(tmp_path)
    model = Seq2Seq.load(tmp_path)
    assert model.max_tokens == 20
    lines = [src for src, _ in taught_pairs] + [" ".join(src for src, _ in taught_pairs)]
    found, report = Translator(model, beams=2).translate_block(lines)
    assert len(found) == len(lines)
    assert report.n_segments > report.n_lines == len(lines)


def test_n_best_lists(model: Seq2Seq, taught_pairs: Pairs) -> None:
    line = taught_pairs[0][0]
    alone = list(Translator(model, tgt_lang="de").translate([line]))
    (group,) = Translator(model, nbest=3, tgt_lang="de").translate_nbest([line])
    assert len(group) == 3
    assert group[0].text == alone[0]
    scores = [each.score for each in group]
    assert all(score is not None and score < 0 for score in scores)
    assert scores == sorted(scores, key=lambda score: -(score or 0))
    empty = next(Translator(model, nbest=3, tgt_lang="de").translate_nbest([""]))
    assert [each.text for each in empty] == ["", "", ""]


def test_scores_are_mean_log_probabilities(model: Seq2Seq, taught_pairs: Pairs) -> None:
    """Compare with the log-probabilities of a forward pass over the translation."""
    translator = Translator(model, nbest=2, tgt_lang="de")
    src = taught_pairs[2][0]
    ids = model.tokenizer(src, add_special_tokens=False)["input_ids"]
    written, scores = translator.generate([np.array(ids)])
    assert scores is not None
    for row, score in zip(written, scores, strict=True):
        tokens = row[: int((row == 2).nonzero()[0]) + 1][None]
        with torch.no_grad():
            encoded = model.tokenizer(src, return_tensors="pt")["input_ids"]
            logits = model.model(input_ids=encoded, decoder_input_ids=tokens[:, :-1]).logits
        likely = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum()
        assert score == pytest.approx(float(likely) / (tokens.shape[1] - 1), rel=1e-4)


def test_joining_parts() -> None:
    parts = [[Hypothesis("はい。")], [Hypothesis("")], [Hypothesis("いいえ。")]]
    assert join_parts(parts, "", 1) == [Hypothesis("はい。いいえ。")]
    assert join_parts([], " ", 2) == [Hypothesis("", 0.0)] * 2


@pytest.mark.parametrize(
    ("target", "gap"),
    [("zho", ""), ("ja", ""), ("zh_Hant", ""), ("th", " "), ("tha", " "), ("my", " "), ("de", " ")],
)
def test_the_separator_of_sentences_depends_on_the_language(
    translator: Translator, target: str, gap: str
) -> None:
    """Thai has spaces between sentences, but not between words."""
    segments = split_lines_for_translation(translator.model.tokenizer, ["A. B."], 99, "en")
    twice = replace(segments, ids=segments.ids * 2, line_numbers=np.array([0, 0]))
    writer = copy.copy(translator)
    writer.tgt_lang = target
    parts = [[Hypothesis("x.")], [Hypothesis("y.")]]
    assert writer._join(twice, parts) == [[Hypothesis(f"x.{gap}y.")]]


def test_unfinished_translations_are_counted(
    model: Seq2Seq, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Translator, "max_length", lambda self, n_source: 3)
    _, report = Translator(model, tgt_lang="de").translate_block([src for src, _ in taught_pairs])
    assert report.n_unfinished == len(taught_pairs)


def test_a_batch_too_large_for_the_memory_is_halved(
    model: Seq2Seq, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, sizes = Translator.generate, []

    def fill_memory(self: Translator, sources: Sequence[Any]) -> Any:
        sizes.append(len(sources))
        if len(sources) > 2:
            raise torch.OutOfMemoryError
        return generate(self, sources)

    monkeypatch.setattr(Translator, "generate", fill_memory)
    translator = Translator(model, tgt_lang="de", batch_tokens=10_000)
    sources, wanted = zip(*taught_pairs, strict=True)
    assert tuple(translator.translate(sources)) == wanted
    assert sizes == [8, 4, 2, 2, 4, 2, 2]
    with pytest.raises(InputError, match="a single line does not fit into memory"):
        translate.halve_batch(np.array([3]))


def test_invalid_options(model: Seq2Seq) -> None:
    with pytest.raises(InputError, match=r"several target languages.*choose one of de, en"):
        Translator(model)
    with pytest.raises(InputError, match=r"does not translate into fr \(choose one of de, en\)"):
        Translator(model, tgt_lang="fr")
    with pytest.raises(InputError, match="the length penalty is nan"):
        Translator(model, length_penalty=float("nan"))
    with pytest.raises(InputError, match="3 translations are requested from 2 beams"):
        Translator(model, beams=2, nbest=3)
    with pytest.raises(InputError, match="a single string"):
        list(Translator(model, tgt_lang="de").translate("Hello."))


def test_default_languages_are_a_training_direction(model: Seq2Seq, tiny_encoder: Encoder) -> None:
    """Long lines are split by the rules of the source language of that direction."""
    found = {target: Translator(model, tgt_lang=target).src_lang for target in ("de", "en")}
    assert found == {"de": "en", "en": "de"}
    for plan in (DecoderPlan(), DecoderPlan(languages=("fr", "de"))):
        one = build_seq2seq(plan, random_weights(tiny_encoder.config), tiny_encoder.tokenizer)
        one.add_directions([("en", "de")])
        translator = Translator(one)
        assert (translator.src_lang, translator.tgt_lang) == ("en", "de")
        assert translator.start_token == one.start_tokens.get("de", 0)
        with pytest.raises(InputError, match=r"does not translate into ja \(choose one of"):
            Translator(one, tgt_lang="ja")
