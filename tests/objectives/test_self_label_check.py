"""The check of self-labels: an aligned model passes, random weights do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.objectives.denoising_alignment import DenoisingAlignment, DenoisingAlignmentSettings
from calque.objectives.self_label_check import (
    link_clarity,
    pair_with_others,
    self_label_accuracy,
)
from calque.objectives.self_labels import LabelRules, mass_on_links
from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences

DemoRows = list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def mini() -> Encoder:
    return Encoder.load()


@pytest.fixture(scope="module")
def untrained(mini: Encoder) -> Encoder:
    """The same shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(build_model(mini.model.config), mini.tokenizer)


def read_sides(encoder: Encoder, rows: DemoRows) -> tuple[Ragged, ...]:
    return tuple(
        Ragged.of(encode_sentences(encoder.tokenizer, [row[k] for row in rows])) for k in (1, 2)
    )


@pytest.mark.parametrize(
    ("positions", "similarity", "step"), [("continue", "dot", 1), ("reset", "cosine", 2)]
)
def test_random_weights_give_a_warning_and_the_embedded_model_does_not(
    positions: Any,
    similarity: Any,
    step: int,
    mini: Encoder,
    untrained: Encoder,
    demo_rows: DemoRows,
) -> None:
    settings = DenoisingAlignmentSettings(positions=positions, similarity=similarity)
    objective, special_tokens = DenoisingAlignment(settings), SpecialTokens.of(mini.tokenizer)
    sides = read_sides(mini, demo_rows[::step])
    assert objective.find_problem(mini, special_tokens, iter([sides])) is None
    problem = objective.find_problem(untrained.train(), special_tokens, iter([sides]))
    assert problem is not None
    assert "no better than a diagonal" in problem
    assert f"of {200 // step} pairs" in problem
    assert "model.start" in problem
    assert untrained.training


def test_labels_that_are_not_learned_are_not_checked(
    mini: Encoder, untrained: Encoder, demo_rows: DemoRows
) -> None:
    sides, special_tokens = read_sides(mini, demo_rows[::5]), SpecialTokens.of(mini.tokenizer)
    for weight, is_checked in ((0.1, True), (0.0, False)):
        objective = DenoisingAlignment(DenoisingAlignmentSettings(pointer_weight=weight))
        problem = objective.find_problem(untrained, special_tokens, iter([sides]))
        assert (problem is not None) == is_checked


def test_translations_are_distinguished_from_mismatched_pairs(
    mini: Encoder, untrained: Encoder, demo_rows: DemoRows
) -> None:
    sides, special_tokens = read_sides(mini, demo_rows[::2]), SpecialTokens.of(mini.tokenizer)
    rules = LabelRules("cosine", 10.0)
    with torch.no_grad():
        trained, random = (
            self_label_accuracy(encoder.eval(), *sides, special_tokens, 7, rules, reset=True)
            for encoder in (mini, untrained)
        )
    assert trained is not None and random is not None
    assert trained[1] == random[1] == 100
    assert 0.8 < trained[0] <= 1
    assert 0.4 < random[0] < 0.6


def test_random_weights_also_link_along_the_diagonal(
    untrained: Encoder, demo_rows: DemoRows
) -> None:
    """About half of the links of random weights are on the diagonal: no sign of quality."""
    objective = DenoisingAlignment(DenoisingAlignmentSettings(positions="reset"))
    objective.add_weights(untrained.hidden_size, torch.Generator().manual_seed(0))
    collate = objective.build_collator(SpecialTokens.of(untrained.tokenizer), None)
    batch = collate(read_sides(untrained, demo_rows[::5]), torch.Generator().manual_seed(0))
    with torch.no_grad():
        metrics = objective(untrained, batch).metrics
    assert metrics["diagonal"] > 0.4
    assert metrics["labelled"] > 0.8


def test_link_clarity_equals_that_of_pairs_by_the_tokenizer(
    mini: Encoder, demo_rows: DemoRows
) -> None:
    """Special tokens and positions are as in training: `<s> a </s></s> b </s>`."""
    rows, special_tokens, rules = (
        demo_rows[:3],
        SpecialTokens.of(mini.tokenizer),
        LabelRules("cosine", 10.0),
    )
    model: Any = mini.model
    with torch.no_grad():
        found = link_clarity(mini, *read_sides(mini, rows), special_tokens, 7, rules, reset=False)
        for value, (_, english, sentence) in zip(found, rows, strict=True):
            encoded = mini.tokenizer(english, sentence, return_tensors="pt")
            ids = encoded["input_ids"][0].tolist()
            states = model(**encoded, output_hidden_states=True).hidden_states[7][0]
            cut = ids.index(2)
            left, right = range(1, cut), range(cut + 2, len(ids) - 1)
            cells = torch.tensor([[[ids[i] != ids[j] for j in right] for i in left]])
            cosines = torch.cosine_similarity(
                states[list(left)][:, None], states[list(right)][None], dim=-1
            )
            expected = mass_on_links(cosines[None], cells, rules)
            assert value.item() == pytest.approx(expected.item(), abs=1e-4)


def test_too_few_pairs_give_no_result(untrained: Encoder, demo_rows: DemoRows) -> None:
    objective, special_tokens = (
        DenoisingAlignment(DenoisingAlignmentSettings()),
        SpecialTokens.of(untrained.tokenizer),
    )
    sides = read_sides(untrained, demo_rows[:15])
    assert objective.find_problem(untrained, special_tokens, iter([sides])) is None


def test_pairs_too_long_with_another_sentence_are_excluded(
    mini: Encoder, demo_rows: DemoRows
) -> None:
    """4 + 120 tokens and 4 special tokens fill 128; no other sentence fits with the 120."""
    src, tgt = read_sides(mini, demo_rows[:20])
    long = Ragged.of([*np.split(tgt.ids, np.cumsum(tgt.lengths)[:-1]), np.full(120, 9)])
    short = Ragged.of([*np.split(src.ids, np.cumsum(src.lengths)[:-1]), np.full(4, 9)])
    found = self_label_accuracy(
        mini, short, long, SpecialTokens.of(mini.tokenizer), 7, LabelRules(), reset=False
    )
    assert found is not None
    assert found[1] == 20


@given(st.lists(st.integers(1, 60), min_size=2, max_size=30))
def test_partners_are_other_sentences_of_similar_length(lengths: list[int]) -> None:
    partners = pair_with_others(np.array(lengths))
    assert sorted(partners) == list(range(len(lengths)))
    assert (partners != np.arange(len(lengths))).all()
    steps = np.array(lengths)[partners] - lengths
    assert (steps < 0).sum() <= 1  # only the longest gets a shorter one
