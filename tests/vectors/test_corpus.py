"""The corpus: text, filter and vocabulary."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.tokens.ragged import Ragged
from calque.vectors.corpus import (
    CorpusFilter,
    CorpusReader,
    CorpusReport,
    TruncationCounts,
    VocabularyLimits,
    WordCorpus,
    choose_words,
    number_corpus,
    truncate_sentences,
)
from calque.vectors.occurrences import find_occurrences

# The vocabulary.


def test_word_counts(corpus: WordCorpus, sentences: list[list[str]]) -> None:
    counts = Counter(itertools.chain.from_iterable(sentences))
    frequent = {word: count for word, count in counts.items() if count >= 3}
    assert dict(zip(corpus.words, corpus.counts.tolist(), strict=True)) == frequent
    # Python's sort is stable, and a Counter keeps the order of insertion.
    assert list(corpus.words) == sorted(frequent, key=lambda word: -frequent[word])


def test_vocabulary_by_hand(tiny_encoder: Encoder, tmp_path: Path) -> None:
    text = [["b", "a", "b", "c"], ["a", "b", "d"], ["c"]]
    limits = VocabularyLimits(max_words=2, min_count=2)
    found = number_corpus(tiny_encoder.tokenizer, text, tmp_path, max_subwords=126, limits=limits)
    assert (found.words, found.counts.tolist()) == (("b", "a"), [3, 2])
    assert found.rows[found.sentences.gather(np.arange(3)).ids].tolist() == [
        0,
        1,
        0,
        -1,
        1,
        0,
        -1,
        -1,
    ]


def test_no_word_is_frequent_enough(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no word occurs 10 times or more: the most frequent one occurs 2 times"
    ):
        number_corpus(
            tiny_encoder.tokenizer,
            [["a", "a"]],
            tmp_path,
            max_subwords=9,
            limits=VocabularyLimits(),
        )
    with pytest.raises(InputError, match="no words"):
        choose_words([], np.zeros(0, dtype=np.int64), VocabularyLimits())


def test_truncated_words_are_not_targets(tiny_encoder: Encoder, tmp_path: Path) -> None:
    """They are neither counted nor found, nor is a part of them in a context."""
    n_pieces = {
        word: len(tiny_encoder.tokenizer(word, add_special_tokens=False)["input_ids"])
        for word in ("one", "extraordinarily", "last")
    }
    assert n_pieces["extraordinarily"] > 1
    sentence = ["one", "extraordinarily", "last"]
    n_fitting = n_pieces["one"] + n_pieces["extraordinarily"] - 1
    found = number_corpus(
        tiny_encoder.tokenizer,
        [sentence, ["last"]],
        tmp_path,
        max_subwords=n_fitting,
        limits=VocabularyLimits(min_count=1),
    )
    assert (found.words, found.counts.tolist()) == (("one", "last"), [1, 1])
    assert found.truncated == TruncationCounts(n_sentences=1, n_words=2)
    occurrences = find_occurrences(found, np.array([0, 1]), lambda rows, n_others: rows >= 0)
    assert occurrences.rows.tolist() == [0, 1]
    assert occurrences.n_subwords.tolist() == [n_pieces["one"], n_pieces["last"]]


def test_sentences_without_a_word_that_fits_are_dropped() -> None:
    text = Ragged(np.array([1, 0, 0]), np.array([2, 1]))
    kept, cut = truncate_sentences(text, np.array([1, 9]), max_subwords=5)
    assert (kept.ids.tolist(), kept.lengths.tolist()) == ([0], [1])
    assert cut == TruncationCounts(n_empty=1)


def test_byte_level_forms_are_one_word(tmp_path: Path) -> None:
    """RoBERTa's tokenizer includes the space before a word, except at the start of a sentence."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(["the cat sat on the mat"] * 9, vocab_size=300, min_frequency=1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)
    text = [["the", "cat"], ["cat", "the"]]
    limits = VocabularyLimits(min_count=2)
    found = number_corpus(tokenizer, text, tmp_path, max_subwords=99, limits=limits)
    assert (found.words, found.counts.tolist()) == (("the", "cat"), [2, 2])
    pieces = [found.pieces.gather(found.sentences.gather(np.array([k])).ids).ids for k in (0, 1)]
    assert [tokenizer.decode(ids) for ids in pieces] == ["the cat", "cat the"]
    assert pieces[0].tolist() == tokenizer("the cat")["input_ids"]


# The text.


def read(text: str, tmp_path: Path, **options: object) -> tuple[list[list[str]], CorpusReport]:
    (tmp_path / "text").write_text(text, "utf-8")
    report = CorpusReport()
    reader = CorpusReader(
        options.pop("language", "en"), CorpusFilter(**options.pop("filter", {})), **options
    )
    return list(reader.read([tmp_path / "text"], report)), report


LONG = "This is a sentence of several words."


def test_filter_of_the_paper(tmp_path: Path) -> None:
    """Seven tokens including the full stop, two sentences per paragraph."""
    text = f"A headline of more than enough words here\n{LONG} Too short. {LONG}\n\nOne. Two.\n"
    kept, report = read(text, tmp_path)
    assert kept == [["this", "is", "a", "sentence", "of", "several", "words", "."]] * 2
    assert report == CorpusReport(n_lines=4, n_sentences=2, n_in_short_paragraphs=1, n_short=3)
    assert len(read("One two three four five six. One two three four five.\n", tmp_path)[0]) == 1


def test_sentence_lines(tmp_path: Path) -> None:
    text = f"{LONG} {LONG}\n{LONG}\n \n{LONG}\n\n\n{LONG}\n{LONG}\n{LONG}"
    kept, report = read(text, tmp_path, sentence_lines=True)
    assert [len(words) for words in kept] == [16, 8, 8, 8, 8]
    assert (report.n_in_short_paragraphs, report.n_lines) == (1, 9)


def test_max_sentences(tmp_path: Path) -> None:
    text = f"{LONG} {LONG}\n" * 3
    kept, report = read(text, tmp_path, filter={"max_sentences": 5})
    assert len(kept) == 5
    assert report.is_full
    kept, report = read(text, tmp_path, filter={"max_sentences": 6})
    assert (len(kept), report.is_full) == (6, False)


def test_case_and_tokenized_text(tmp_path: Path) -> None:
    off = {"min_tokens": 1, "min_sentences": 1}
    assert read("IRMAK İyi", tmp_path, filter=off, language="tr")[0] == [["ırmak", "iyi"]]
    assert read("IRMAK Iyi", tmp_path, filter=off)[0] == [["irmak", "iyi"]]
    assert read("Well-known U.S.", tmp_path, filter=off, keep_case=True)[0] == [
        ["Well-known", "U.S."]
    ]
    assert read("a, b", tmp_path, filter=off, tokenized=True)[0] == [["a,", "b"]]


def test_languages_without_spaces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Thai has no spaces between words.*--tokenized"):
        read("ภาษาไทย", tmp_path, language="th")
    assert read(
        "ภาษา ไทย",
        tmp_path,
        language="th",
        tokenized=True,
        filter={"min_tokens": 1, "min_sentences": 1},
    )[0] == [["ภาษา", "ไทย"]]
