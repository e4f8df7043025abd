"""Parsing: encoded trees, windows, training of a parser, and attachment scores."""

from __future__ import annotations

import shutil
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.parsing import (
    ParseExamples,
    Parser,
    encode_trees,
    find_files,
    list_languages,
    measure,
    normalize_relation,
    score_attachments,
)
from calque.io.conllu import ParsedSentence, find_tree_error, read_trees
from calque.models.encoder import Encoder
from calque.models.heads import NO_LABEL
from calque.tokens.layout import fit_batch_shape

DATA = Path(__file__).parents[1] / "data"
UD = DATA / "ud"
SETTINGS = TaskSettings(epochs=1, batch_tokens=256)


def copy_of(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


def encode(
    encoder: Encoder,
    sentences: list[ParsedSentence],
    longest: int = 128,
    max_words: int | None = None,
    one_window: bool = False,
) -> ParseExamples:
    names = sorted({name for sentence in sentences for name in sentence.deprels})
    return encode_trees(
        encoder.tokenizer,
        sentences,
        {name: number for number, name in enumerate(names)},
        longest,
        max_words=max_words,
        overlap=0.25,
        one_window=one_window,
    )


def make_parser(encoder: Encoder, n_relations: int = 40) -> Parser:
    generator = torch.Generator().manual_seed(1)
    parser = Parser(copy_of(encoder), n_relations, 0, SETTINGS, generator).eval()
    with torch.no_grad():
        for weight in (parser.head.arc, parser.head.arc_bias, parser.head.relation):
            weight.normal_(0, 0.05, generator=generator)
    return parser


@pytest.fixture(scope="module")
def trees() -> list[ParsedSentence]:
    return read_trees(UD / "fr_gsd-ud-test.conllu")


def test_a_batch_by_hand(tiny_encoder: Encoder) -> None:
    names = ("nsubj", "root")
    short = ParsedSentence(("dogs", "bark"), ("NOUN", "VERB"), (2, 0), names, "")
    other = ParsedSentence(("go",), ("VERB",), (0,), ("root",), "")
    batch = encode(tiny_encoder, [other, short]).collate(np.array([1, 0]))
    assert batch.is_word.tolist() == [[True, True], [True, False]]
    assert batch.heads.tolist() == [[2, 0], [0, NO_LABEL]]
    tokenizer = tiny_encoder.tokenizer.backend_tokenizer
    pieces = [len(tokenizer.encode([w], is_pretokenized=True).ids) - 2 for w in ("dogs", "bark")]
    dogs, bark = 1, 1 + pieces[0]
    go = bark + pieces[1] + 2  # after the special tokens between two sentences
    n_tokens = len(batch.tokens.ids)
    assert batch.positions.tolist()[:3] == [dogs, bark, go]
    words = {dogs: (0, bark, 0), bark: (1, n_tokens, 1), go: (2, n_tokens, 1)}
    other_tokens = (4, n_tokens, NO_LABEL)  # the cell after the last, the root, no label
    for token in range(n_tokens):
        known = (batch.cells[token], batch.head_rows[token], batch.relations[token])
        assert tuple(map(int, known)) == words.get(token, other_tokens)


def test_fixed_shape_does_not_change_the_loss(
    tiny_encoder: Encoder, trees: list[ParsedSentence]
) -> None:
    examples = encode(tiny_encoder, trees, one_window=True)
    rows = np.random.default_rng(0).permutation(len(trees))[:9]
    plain = examples.collate(rows)
    shape = fit_batch_shape(examples.lengths, [rows])
    padded = examples.collate(rows, replace(shape, sequences=shape.sequences + 3))
    sizes = {f.name: getattr(padded, f.name).shape for f in fields(padded) if f.name != "tokens"}
    others = np.arange(7)  # another batch has tensors of the same sizes
    again = examples.collate(others, replace(shape, sequences=shape.sequences + 3))
    assert sizes == {n: getattr(again, n).shape for n in sizes}
    parser = make_parser(tiny_encoder)
    with torch.no_grad():
        torch.testing.assert_close(parser(padded), parser(plain), rtol=1e-4, atol=1e-5)


def test_batch_gives_the_same_trees_as_single_sentences(
    tiny_encoder: Encoder, trees: list[ParsedSentence]
) -> None:
    parser = make_parser(tiny_encoder)
    together = parser.parse(encode(tiny_encoder, trees), SETTINGS)
    names = sorted({name for sentence in trees for name in sentence.deprels})
    begin = 0
    for tree in trees:
        n = len(tree.words)
        alone = encode_trees(
            tiny_encoder.tokenizer,
            [tree],
            {name: number for number, name in enumerate(names)},
            128,
            max_words=None,
            overlap=0.25,
            one_window=False,
        )
        found = parser.parse(alone, SETTINGS)
        heads = together.heads[begin : begin + n].tolist()
        assert heads == found.heads.tolist()
        assert find_tree_error(heads) is None
        kinds = together.relations[begin : begin + n]
        assert kinds.tolist() == found.relations.tolist()
        # Only the root has the relation of the root, which has number 0 here.
        assert ((kinds == 0) == (np.array(heads) == 0)).all()
        begin += n
    assert begin == len(together.heads)


def test_long_sentences_are_read_in_windows(
    tiny_encoder: Encoder, trees: list[ParsedSentence]
) -> None:
    examples = encode(tiny_encoder, trees, longest=24)
    assert (examples.n_windows > 1).any()
    assert examples.n_cut == 0
    assert examples.windows.lengths.max() <= 24
    assert examples.n_words.tolist() == [len(tree.words) for tree in trees]
    # The position of every word has its first subword.
    batch = examples.collate(np.arange(len(trees)))
    words = [word for tree in trees for word in tree.words]
    ids = batch.tokens.ids[batch.positions[: len(words)]]
    for word, number in zip(words, ids.tolist(), strict=True):
        encoding = tiny_encoder.tokenizer.backend_tokenizer.encode(
            [word], is_pretokenized=True, add_special_tokens=False
        )
        assert encoding.ids[0] == number
    parses = make_parser(tiny_encoder).parse(examples, SETTINGS)
    for begin, n in zip(
        np.cumsum(examples.n_words) - examples.n_words, examples.n_words, strict=True
    ):
        assert find_tree_error(parses.heads[begin : begin + n].tolist()) is None


def test_words_that_are_cut_are_counted(tiny_encoder: Encoder, trees: list[ParsedSentence]) -> None:
    few = encode(tiny_encoder, trees, max_words=7)
    assert few.n_words.max() == 7
    assert few.n_cut == sum(max(0, len(tree.words) - 7) for tree in trees)
    heads = [head if head <= 7 else NO_LABEL for tree in trees for head in tree.heads[:7]]
    assert few.heads.tolist() == heads
    once = encode(tiny_encoder, trees, longest=24, one_window=True)
    assert (once.n_windows == 1).all()
    assert once.n_cut == sum(len(tree.words) for tree in trees) - once.n_words.sum() > 0


def test_words_without_subwords_have_heads(tiny_encoder: Encoder) -> None:
    bare = ParsedSentence(("dogs", "\u200d", "bark"), ("X",) * 3, (3, 3, 0), ("a", "b", "root"), "")
    examples = encode(tiny_encoder, [bare])
    assert examples.n_without_subword == 1
    batch = examples.collate(np.array([0]))
    assert batch.tokens.ids[batch.positions[1]] == tiny_encoder.tokenizer.unk_token_id
    parses = make_parser(tiny_encoder).parse(examples, SETTINGS)
    assert find_tree_error(parses.heads.tolist()) is None


def test_treebanks_are_found_by_name(tmp_path: Path) -> None:
    for folder in (DATA, UD):
        files = find_files(folder)
        assert (sorted(files.train), sorted(files.dev)) == (["en"], ["en"])
        assert sorted(files.test) == ["de", "en", "fr", "zh"]
    assert list_languages(DATA, SETTINGS) == ["en", "de", "fr", "zh"]
    nested = tmp_path / "UD_English-EWT"
    nested.mkdir()
    for part in ("train", "test"):
        shutil.copy(UD / f"en_ewt-ud-{part}.conllu", nested)
    assert list_languages(tmp_path, SETTINGS) == ["en"]
    shutil.copytree(nested, tmp_path / "data" / "xtreme" / "ud" / nested.name)
    assert list_languages(tmp_path / "data", SETTINGS) == ["en"]
    shutil.copy(UD / "en_ewt-ud-test.conllu", tmp_path / "en_gum-ud-test.conllu")
    with pytest.raises(InputError, match="is a treebank of 'en' too"):
        find_files(tmp_path)


def test_missing_treebanks_are_errors(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        find_files(tmp_path / "none")
    with pytest.raises(InputError, match="no treebanks for training and testing"):
        find_files(tmp_path)
    with pytest.raises(InputError, match=r"no test for 'sv' \(choose from: en de fr zh\)"):
        measure(tiny_encoder, UD, languages=["sv"], settings=SETTINGS, seed=0)
    with pytest.raises(InputError, match="source language 'de'"):
        list_languages(UD, replace(SETTINGS, source="de"))


def test_scores_are_complete_and_reproducible(tiny_encoder: Encoder) -> None:
    settings = replace(SETTINGS, train_examples=12, test_examples=6, select="best", epochs=2)
    reported: list[tuple[int, int]] = []

    def measure_languages(seed: int, on_progress: object = None) -> dict[str, object]:
        outcomes = measure(
            copy_of(tiny_encoder),
            UD,
            languages=["zh", "en"],
            settings=settings,
            seed=seed,
            on_progress=lambda done, total: reported.append((done, total)),
        )
        return {outcome.language: outcome for outcome in outcomes}

    found = measure_languages(0)
    assert list(found) == ["en", "zh"]
    for outcome in found.values():
        assert list(outcome.metrics) == ["las", "uas"]
        assert outcome.items.score == pytest.approx(outcome.metrics["las"], abs=1e-6)
        assert outcome.n_items == len(outcome.items.numerators) == 6
        assert outcome.counts["train_sentences"] == 12
        scored = outcome.counts["words"] - outcome.counts["words_ignored"]
        assert outcome.items.denominators.sum() == scored
    assert reported[-1][0] == reported[-1][1]
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    again = measure_languages(0)
    assert all(again[name].metrics == found[name].metrics for name in found)
    np.testing.assert_array_equal(again["zh"].items.numerators, found["zh"].items.numerators)


def test_parser_memorizes_its_training_trees(tiny_encoder: Encoder, tmp_path: Path) -> None:
    for part in ("train", "test"):
        shutil.copy(UD / "en_ewt-ud-test.conllu", tmp_path / f"en_ewt-ud-{part}.conllu")
    settings = TaskSettings(
        epochs=30, batch_tokens=256, learning_rate=1e-3, head_learning_rate=3e-3
    )
    (outcome,) = measure(copy_of(tiny_encoder), tmp_path, settings=settings, seed=0)
    assert outcome.metrics["uas"] > 90
    assert outcome.metrics["las"] > 85


def sentence(tags: str, heads: list[int], relations: str) -> ParsedSentence:
    names = tuple(relations.split())
    return ParsedSentence(names, tuple(tags.split()), tuple(heads), names, "")


def test_scores_by_hand() -> None:
    gold = [
        sentence("DET NOUN VERB PUNCT", [2, 3, 0, 3], "det nsubj root punct"),
        sentence("NOUN SYM NUM", [0, 1, 2], "root dep nummod"),
    ]
    heads = [[2, 3, 0, 1], [2, 0, 2]]
    relations = [["det", "obj", "root", "punct"], ["root", "dep", "nummod"]]
    found = score_attachments(gold, heads, relations)
    # First sentence: three scored words with correct heads, one with a wrong relation; the full
    # stop is ignored. Second sentence: one of two scored words is correct; SYM is ignored.
    assert found.n_words.tolist() == [3, 2]
    assert found.n_heads.tolist() == [3, 1]
    assert found.n_relations.tolist() == [2, 1]
    assert found.uas == pytest.approx(100 * 4 / 5)
    assert found.las == pytest.approx(100 * 3 / 5)
    assert found.items.score == pytest.approx(found.las)
    # With no ignored tags: 3 + 1 of 7 heads, because those of the full stop and SYM are wrong.
    everything = score_attachments(gold, heads, relations, ignored=())
    assert (everything.uas, everything.las) == (pytest.approx(400 / 7), pytest.approx(300 / 7))


def test_subtypes_count_only_on_request() -> None:
    gold = [sentence("VERB NOUN", [0, 1], "root nsubj:pass")]
    relations = [["root", "nsubj"]]
    assert score_attachments(gold, [[0, 1]], relations).las == 100
    assert score_attachments(gold, [[0, 1]], relations, subtypes=True).las == 50


def test_relations_of_version_1() -> None:
    assert normalize_relation("dobj") == "obj"
    assert normalize_relation("auxpass", subtypes=True) == "aux:pass"
    assert normalize_relation("neg") == "neg"  # version 2 has several relations for it


def test_words_without_prediction_are_not_scored() -> None:
    gold = [sentence("VERB NOUN NOUN", [0, 3, 1], "root nmod obj")]
    found = score_attachments(gold, [[0, 1]], [["root", "nmod"]])
    assert (found.n_words.tolist(), found.n_relations.tolist()) == ([2], [1])


@pytest.mark.parametrize("name", ["fr_gsd-ud-test.conllu", "zh_gsd-ud-test.conllu"])
def test_definition_of_the_shared_task(name: str) -> None:
    """CoNLL 2018: F1 of aligned words with equal heads, relations cut at the colon.

    With gold words all words are aligned, so precision, recall and F1 are equal.
    """
    gold = read_trees(UD / name)
    generator = np.random.default_rng(5)
    heads, relations = [], []
    for tree in gold:
        noise = generator.random((2, len(tree.words))) < 0.3
        heads.append([0 if n else head for n, head in zip(noise[0], tree.heads, strict=True)])
        relations.append(["dep" if n else r for n, r in zip(noise[1], tree.deprels, strict=True)])
    n_gold = n_system = n_heads = n_both = 0
    for tree, above, names in zip(gold, heads, relations, strict=True):
        n_gold, n_system = n_gold + len(tree.heads), n_system + len(above)
        for word in range(len(above)):
            same_head = tree.heads[word] == above[word]
            same_name = tree.deprels[word].split(":")[0] == names[word].split(":")[0]
            n_heads += same_head
            n_both += same_head and same_name
    found = score_attachments(gold, heads, relations, ignored=())
    assert found.uas == pytest.approx(200 * n_heads / (n_gold + n_system))
    assert found.las == pytest.approx(200 * n_both / (n_gold + n_system))
    assert 30 < found.las < found.uas < 90


def test_gold_trees_have_full_scores() -> None:
    gold = read_trees(UD / "en_ewt-ud-test.conllu")
    scores = score_attachments(gold, [s.heads for s in gold], [s.deprels for s in gold])
    assert (scores.las, scores.uas) == (100, 100)
    assert scores.n_words.sum() < sum(len(s.words) for s in gold)
