"""The warm-start check: an aligned model passes, random weights do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.objectives.base import Marks
from calque.objectives.denoising_alignment import (
    DenoisingAlignment,
    DenoisingAlignmentSettings,
    measure_clarity,
    pair_with_others,
    tell_translations,
)
from calque.objectives.self_labels import LabelRules, share_on_links
from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import encode_sentences

Rows = list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def mini() -> Encoder:
    return Encoder.load()


@pytest.fixture(scope="module")
def untrained(mini: Encoder) -> Encoder:
    """The same shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(build_model(mini.model.config), mini.tokenizer)


def read_sides(encoder: Encoder, rows: Rows) -> tuple[Ragged, ...]:
    return tuple(
        Ragged.of(encode_sentences(encoder.tokenizer, [row[k] for row in rows])) for k in (1, 2)
    )


@pytest.mark.parametrize(
    ("positions", "similarity", "step"), [("continue", "dot", 1), ("reset", "cosine", 2)]
)
def test_random_weights_are_warned_of_and_the_embedded_model_is_not(
    positions: Any, similarity: Any, step: int, mini: Encoder, untrained: Encoder, demo_rows: Rows
) -> None:
    settings = DenoisingAlignmentSettings(positions=positions, similarity=similarity)
    objective, marks = DenoisingAlignment(settings), Marks.of(mini.tokenizer)
    sides = read_sides(mini, demo_rows[::step])
    assert objective.find_fault(mini, marks, iter([sides])) is None
    fault = objective.find_fault(untrained.train(), marks, iter([sides]))
    assert fault is not None
    assert "no better than a diagonal" in fault
    assert f"of {200 // step} pairs" in fault
    assert "model.start" in fault
    assert untrained.training


def test_translations_are_told_far_better_than_by_chance(
    mini: Encoder, untrained: Encoder, demo_rows: Rows
) -> None:
    sides, marks = read_sides(mini, demo_rows[::2]), Marks.of(mini.tokenizer)
    rules = LabelRules("cosine", 10.0)
    with torch.no_grad():
        trained, random = (
            tell_translations(encoder.eval(), *sides, marks, 7, rules, reset=True)
            for encoder in (mini, untrained)
        )
    assert trained is not None and random is not None
    assert trained[1] == random[1] == 100
    assert 0.8 < trained[0] <= 1
    assert 0.4 < random[0] < 0.6


def test_the_diagonal_itself_tells_nothing(untrained: Encoder, demo_rows: Rows) -> None:
    """Half of the links of random weights lie on the diagonal: that is no sign of quality."""
    objective = DenoisingAlignment(DenoisingAlignmentSettings(positions="reset"))
    objective.add_weights(untrained.hidden_size, torch.Generator().manual_seed(0))
    collate = objective.make_collate(Marks.of(untrained.tokenizer), None)
    batch = collate(read_sides(untrained, demo_rows[::2]), torch.Generator().manual_seed(0))
    with torch.no_grad():
        figures = objective(untrained, batch).figures
    assert figures["diagonal"] > 0.4
    assert figures["labelled"] > 0.8


def test_clarity_is_that_of_the_tokenizers_own_pairs(mini: Encoder, demo_rows: Rows) -> None:
    """Marks and positions as in training: `<s> a </s></s> b </s>`, in one sequence."""
    rows, marks, rules = demo_rows[:3], Marks.of(mini.tokenizer), LabelRules("cosine", 10.0)
    model: Any = mini.model
    with torch.no_grad():
        found = measure_clarity(mini, *read_sides(mini, rows), marks, 7, rules, reset=False)
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
            expected = share_on_links(cosines[None], cells, rules)
            assert value.item() == pytest.approx(expected.item(), abs=1e-4)


def test_too_few_pairs_allow_no_verdict(untrained: Encoder, demo_rows: Rows) -> None:
    objective, marks = (
        DenoisingAlignment(DenoisingAlignmentSettings()),
        Marks.of(untrained.tokenizer),
    )
    sides = read_sides(untrained, demo_rows[:15])
    assert objective.find_fault(untrained, marks, iter([sides])) is None


def test_pairs_that_would_be_too_long_with_another_sentence_are_left_out(
    mini: Encoder, demo_rows: Rows
) -> None:
    """4 + 120 tokens and 4 marks fill the window of 128; who gets the 120 as a partner bursts."""
    src, tgt = read_sides(mini, demo_rows[:40])
    long = Ragged.of([*np.split(tgt.ids, np.cumsum(tgt.lengths)[:-1]), np.full(120, 9)])
    short = Ragged.of([*np.split(src.ids, np.cumsum(src.lengths)[:-1]), np.full(4, 9)])
    found = tell_translations(
        mini, short, long, Marks.of(mini.tokenizer), 7, LabelRules(), reset=False
    )
    assert found is not None
    assert found[1] == 40


@given(st.lists(st.integers(1, 60), min_size=2, max_size=30))
def test_partners_are_others_of_like_length(lengths: list[int]) -> None:
    partners = pair_with_others(np.array(lengths))
    assert sorted(partners) == list(range(len(lengths)))
    assert (partners != np.arange(len(lengths))).all()
    steps = np.array(lengths)[partners] - lengths
    assert (steps < 0).sum() <= 1  # only the longest gets a shorter one
