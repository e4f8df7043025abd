"""Translating lines: order kept, long lines split, and the very words that `generate()` gives."""

from __future__ import annotations

import copy
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
from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, start_afresh
from calque.tokens.windows import cut_segments, cut_windows
from calque.translation import translate as tool
from calque.translation.translate import Candidate, Search, Translator, join_parts

Pairs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def model(translator_folder: Path) -> Seq2Seq:
    return Seq2Seq.load(translator_folder)


@pytest.fixture(scope="module")
def translator(model: Seq2Seq) -> Translator:
    return Translator(model, target="de")


def best(translator: Translator, lines: list[str]) -> list[str]:
    return [group[0].text for group in translator.translate(lines)]


def test_training_pairs_come_back_both_ways(model: Seq2Seq, taught_pairs: Pairs) -> None:
    english, german = ([pair[side] for pair in taught_pairs] for side in (0, 1))
    assert best(Translator(model, target="de"), english) == german
    assert best(Translator(model, target="en"), german) == english


def test_lines_keep_their_order_whatever_the_batches_and_blocks(
    model: Seq2Seq, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [src for src, _ in taught_pairs] * 3
    wanted = [tgt for _, tgt in taught_pairs] * 3
    monkeypatch.setattr(tool, "BLOCK_LINES", 5)
    for batch_tokens in (1, 60, 10_000):
        assert best(Translator(model, target="de", batch_tokens=batch_tokens), lines) == wanted


def test_lines_stream_in_blocks(
    translator: Translator, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "BLOCK_LINES", 2)
    n_read = 0

    def read() -> Iterator[str]:
        nonlocal n_read
        for src, _ in taught_pairs:
            n_read += 1
            yield src

    stream = translator.translate(read())
    assert next(stream)[0].text == taught_pairs[0][1]
    assert n_read == 2


def test_empty_lines_stay_empty_and_in_place(translator: Translator, taught_pairs: Pairs) -> None:
    lines = ["", taught_pairs[0][0], "  \t", taught_pairs[1][0], "\u200b"]
    found, report = translator.translate_block(lines)
    wanted = ["", taught_pairs[0][1], "", taught_pairs[1][1], ""]
    assert [group[0].text for group in found] == wanted
    assert (report.n_lines, report.n_empty, report.n_segments, report.n_unfinished) == (5, 3, 2, 0)
    assert translator.translate_block([]) == ([], tool.TranslateReport())


def test_long_lines_are_split_by_sentence_and_joined(
    translator: Translator, taught_pairs: Pairs
) -> None:
    ended = [pair for pair in taught_pairs if pair[0][-1] in ".!?"][:7]
    line = " ".join(src for src, _ in ended)
    found, report = translator.translate_block(["", line, ended[0][0]])
    assert found[1][0].text == " ".join(tgt for _, tgt in ended)
    assert found[2][0].text == ended[0][1]
    assert (report.n_long, report.n_cut, report.n_segments) == (1, 0, len(ended) + 1)


def test_a_sentence_longer_than_the_model_is_cut_between_words(
    translator: Translator, taught_pairs: Pairs
) -> None:
    endless = " ".join(src.rstrip(".!?") for src, _ in taught_pairs)
    segments = cut_segments(translator.model.tokenizer, [endless], translator.longest, "en")
    assert segments.n_cut == 1
    assert len(segments.ids) > 1
    assert segments.lengths.max() <= translator.longest
    decoded = [translator.model.tokenizer.decode(ids) for ids in segments.ids]
    assert " ".join(decoded).split() == endless.split()
    found, report = translator.translate_block([endless])
    assert found[0][0].text
    assert report.n_cut == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [7, 8, 9])
def test_no_character_is_cut_in_two(kind: str, longest: int, demo_rows: Any) -> None:
    """A vocabulary of bytes has three tokens for a Chinese character that it does not know."""
    tokenizer = make_tokenizer(kind, [english for _, english, _ in demo_rows] + ["请坐下休"], 300)
    text = "请坐下休息一下再走好不好" * 4 + " and then " + "我们的客人几分钟后就到" * 2
    segments = cut_segments(tokenizer, [text], longest, "zh")
    assert segments.n_cut == 1
    assert segments.lengths.max() <= longest
    whole = tokenizer.encode(text, add_special_tokens=False)
    assert np.concatenate(segments.ids).tolist() == whole
    decoded = [tokenizer.decode(ids) for ids in segments.ids]
    assert "\ufffd" not in "".join(decoded)
    assert "".join("".join(decoded).split()) == "".join(tokenizer.decode(whole).split())


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 9))
def test_windows_cover_all_tokens(flags: list[bool], longest: int) -> None:
    ids = np.arange(len(flags))
    windows = cut_windows(ids, longest, np.array(flags))
    assert np.concatenate(windows).tolist() == ids.tolist()
    assert max(map(len, windows)) <= longest
    for window in windows[1:]:
        first = int(window[0])
        assert flags[first] or not any(flags[first - longest + 1 : first + 1])


def test_it_is_what_generate_gives(model: Seq2Seq, taught_pairs: Pairs) -> None:
    """Unknown sentences too, in Hugging Face's own padding and on its own attention."""
    from transformers import AutoTokenizer, EncoderDecoderModel

    lines = [" ".join(src.split()[1:]) for src, _ in taught_pairs] + ["Who is it?", "No"]
    bare = EncoderDecoderModel.from_pretrained(model.folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    translator = Translator(model, Search(4, length_penalty=0.6), target="en", batch_tokens=10_000)
    encoded = tokenizer(lines, padding=True, return_tensors="pt")
    written = bare.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        num_beams=4,
        length_penalty=0.6,
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<2en>"),
        max_new_tokens=translator.limit(encoded["input_ids"].shape[1]),
    )
    wanted = [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
    assert best(translator, lines) == wanted


@pytest.mark.parametrize("search", [Search(1), Search(3), Search(3, 0.5, n_best=2)])
def test_a_translation_without_end_is_as_long_as_its_own_source_allows(
    search: Search, tiny_encoder: Encoder
) -> None:
    """A model that knows nothing writes on and on: each line as Hugging Face writes it alone."""
    from transformers import EncoderDecoderModel

    plan, start = DecoderPlan(tie="all"), start_afresh(tiny_encoder.config)
    ignorant = build_seq2seq(plan, start, tiny_encoder.tokenizer).eval()
    bare: Any = ignorant.model
    assert isinstance(bare, EncoderDecoderModel)
    lines = ["No", "Who is it?", "He asked me who had painted the picture."]
    translator = Translator(ignorant, search, batch_tokens=10_000)
    groups = list(translator.translate(lines))
    for line, group in zip(lines, groups, strict=True):
        encoded = ignorant.tokenizer(line, return_tensors="pt")["input_ids"]
        written = bare.generate(
            input_ids=encoded,
            attention_mask=torch.ones_like(encoded),
            num_beams=search.beams,
            num_return_sequences=search.n_best,
            length_penalty=search.length_penalty if search.beams > 1 else None,
            max_new_tokens=2 * encoded.shape[1] + 20,
        )
        texts = ignorant.tokenizer.batch_decode(written, skip_special_tokens=True)
        assert [each.text for each in group] == [text.strip() for text in texts]
        assert written.shape[1] == 1 + 2 * encoded.shape[1] + 20  # it has no end


def test_anyone_s_decoder_may_be_shorter_than_its_encoder(
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
    found, report = Translator(model, Search(beams=2)).translate_block(lines)
    assert len(found) == len(lines)
    assert report.n_segments > report.n_lines == len(lines)


def test_n_best_lists_begin_with_the_best(model: Seq2Seq, taught_pairs: Pairs) -> None:
    line = taught_pairs[0][0]
    alone = best(Translator(model, target="de"), [line])
    (group,) = Translator(model, Search(n_best=3), target="de").translate([line])
    assert len(group) == 3
    assert group[0].text == alone[0]
    scores = [each.score for each in group]
    assert all(score is not None and score < 0 for score in scores)
    assert scores == sorted(scores, key=lambda score: -(score or 0))
    empty = next(Translator(model, Search(n_best=3), target="de").translate([""]))
    assert [each.text for each in empty] == ["", "", ""]


def test_scores_are_mean_log_probabilities(model: Seq2Seq, taught_pairs: Pairs) -> None:
    """Against a pass of the model over what it wrote."""
    translator = Translator(model, Search(n_best=2), target="de")
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


def test_parts_without_spaces_between_them() -> None:
    parts = [[Candidate("はい。")], [Candidate("")], [Candidate("いいえ。")]]
    assert join_parts(parts, "", 1) == [Candidate("はい。いいえ。")]
    assert join_parts([], " ", 2) == [Candidate("", 0.0)] * 2


@pytest.mark.parametrize(
    ("target", "gap"),
    [("zho", ""), ("ja", ""), ("zh_Hant", ""), ("th", " "), ("tha", " "), ("my", " "), ("de", " ")],
)
def test_sentences_are_joined_as_the_language_does(
    translator: Translator, target: str, gap: str
) -> None:
    """Thai has no spaces between words, but between sentences."""
    segments = cut_segments(translator.model.tokenizer, ["A. B."], 99, "en")
    twice = replace(segments, ids=segments.ids * 2, owners=np.array([0, 0]))
    writer = copy.copy(translator)
    writer.target = target
    parts = [[Candidate("x.")], [Candidate("y.")]]
    assert writer._join(twice, parts) == [[Candidate(f"x.{gap}y.")]]


def test_an_unfinished_translation_is_counted(
    model: Seq2Seq, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Translator, "limit", lambda self, n_source: 3)
    _, report = Translator(model, target="de").translate_block([src for src, _ in taught_pairs])
    assert report.n_unfinished == len(taught_pairs)


def test_a_batch_too_large_for_memory_is_cut_in_two(
    model: Seq2Seq, taught_pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, sizes = Translator.generate, []

    def fill_memory(self: Translator, sources: Sequence[Any]) -> Any:
        sizes.append(len(sources))
        if len(sources) > 2:
            raise torch.OutOfMemoryError
        return generate(self, sources)

    monkeypatch.setattr(Translator, "generate", fill_memory)
    translator = Translator(model, target="de", batch_tokens=10_000)
    assert best(translator, [src for src, _ in taught_pairs]) == [tgt for _, tgt in taught_pairs]
    assert sizes == [8, 4, 2, 2, 4, 2, 2]
    with pytest.raises(InputError, match="one line does not fit into memory"):
        tool.halve(np.array([3]))


def test_mistakes_are_said(model: Seq2Seq) -> None:
    with pytest.raises(InputError, match=r"several languages.*name one of de, en"):
        Translator(model)
    with pytest.raises(InputError, match=r"does not write fr \(name one of de, en\)"):
        Translator(model, target="fr")
    with pytest.raises(InputError, match="--length-penalty nan"):
        Search(length_penalty=float("nan"))
    with pytest.raises(InputError, match="the 3 best of 2 beams"):
        Search(beams=2, n_best=3)
    with pytest.raises(InputError, match="one string was given"):
        list(Translator(model, target="de").translate("Hello."))


def test_the_languages_are_those_of_a_direction_that_was_taught(
    model: Seq2Seq, tiny_encoder: Encoder
) -> None:
    """How a long line is split is up to the language that is read, not to the first one known."""
    found = {target: Translator(model, target=target).source for target in ("de", "en")}
    assert found == {"de": "en", "en": "de"}
    for plan in (DecoderPlan(), DecoderPlan(languages=("fr", "de"))):
        one = build_seq2seq(plan, start_afresh(tiny_encoder.config), tiny_encoder.tokenizer)
        one.learn_directions([("en", "de")])
        translator = Translator(one)
        assert (translator.source, translator.target) == ("en", "de")
        assert translator.start == one.targets.get("de", 0)
        with pytest.raises(InputError, match=r"does not write ja \(name one of"):
            Translator(one, target="ja")
