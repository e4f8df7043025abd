"""Attachment scores by hand, and compared with the definition of the CoNLL 2018 shared task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calque.evaluation.tasks.parsing import normalize_relation, score_attachments
from calque.io.conllu import ParsedSentence, read_trees

UD = Path(__file__).parents[1] / "data" / "ud"


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
