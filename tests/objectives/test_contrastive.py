"""Contrastive objectives against direct computations; batches of sentence pairs."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from calque.errors import InputError
from calque.models.heads import FeatureExtractor
from calque.models.pooling import pool_sentences
from calque.models.seq2seq import DecoderPlan, build_seq2seq, random_weights
from calque.objectives.base import ObjectiveSettings
from calque.objectives.contrastive import (
    Contrastive,
    NegativeQueue,
    PairFeatures,
    SentenceContrastive,
    SentenceContrastiveSettings,
    SentencePairBatch,
    SentencePairCollator,
    WordContrastive,
    WordContrastiveSettings,
    contrastive_loss,
    info_nce,
)
from calque.tokens.layout import pack_separately
from calque.tokens.ragged import BatchShape, Ragged, hash_sequences
from calque.tokens.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from calque.models.encoder import Encoder

Negatives = Literal["weak", "strong"]
BOTH: list[Negatives] = ["weak", "strong"]
Pair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]

# Words as lists of subwords, and links with weights of 255. A source word of the first pair has
# two links; the second has no links; the fourth has the third's source sentence.
PAIRS: list[Pair] = [
    ([[10, 11], [12], [13]], [[20], [21, 22, 23], [24]], [(0, 1, 255), (1, 0, 128), (1, 2, 64)]),
    ([[14]], [[26], [27]], []),
    ([[15], [16, 17]], [[28], [29, 30]], [(1, 1, 255), (0, 0, 51)]),
    ([[15], [16, 17]], [[31, 32]], [(0, 0, 255)]),
    ([[18], [19]], [[33], [34], [35]], [(0, 2, 255), (1, 0, 255)]),
]
SHAPE = BatchShape(tokens=96, row=16, sequences=16, budget=96)


# The mathematics


def equation_7(src: Tensor, tgt: Tensor, temperature: float) -> float:
    """The paper's weak loss, with the minus sign that is missing in print."""
    n = len(src)

    def sim(a: Tensor, b: Tensor) -> float:
        return math.exp(F.cosine_similarity(a, b, dim=0).item() / temperature)

    total = 0.0
    for i in range(n):
        total += math.log(sim(src[i], tgt[i]) / sum(sim(src[i], tgt[j]) for j in range(n)))
        total += math.log(sim(src[i], tgt[i]) / sum(sim(src[j], tgt[i]) for j in range(n)))
    return -total / (2 * n)


def equation_8(src: Tensor, tgt: Tensor, temperature: float) -> float:
    """The paper's strong loss, computed naively."""
    n, states = len(src), [*src, *tgt]

    def sim(a: Tensor, b: Tensor) -> float:
        return math.exp(F.cosine_similarity(a, b, dim=0).item() / temperature)

    total = 0.0
    for k, state in enumerate(states):
        aligned = states[(k + n) % (2 * n)]
        others = sum(sim(state, other) for m, other in enumerate(states) if m != k)
        total += math.log(sim(state, aligned) / others)
    return -total / (2 * n)


EQUATIONS = {"weak": equation_7, "strong": equation_8}


@dataclass
class Slow:
    """Pairs of states in lists; keys may be anything."""

    src: list[Tensor]
    tgt: list[Tensor]
    src_keys: list[Any]
    tgt_keys: list[Any]
    weights: list[float]

    def __add__(self, other: Slow) -> Slow:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Slow(*(mine + yours for mine, yours in both))

    def first(self, n: int) -> Slow:
        return Slow(*(column[:n] for column in vars(self).values()))


def slow_loss(mine: Slow, others: Slow, temperature: float, negatives: str) -> float:
    """The weighted mean over own pairs; pairs that share a key are not negatives."""

    def sim(a: Tensor, b: Tensor) -> float:
        return math.exp(F.cosine_similarity(a, b, dim=0).item() / temperature)

    rows, total = mine + others, 0.0
    for i, weight in enumerate(mine.weights):
        strangers = [
            j
            for j in range(len(rows.src))
            if rows.weights[j] > 0
            and rows.src_keys[j] != rows.src_keys[i]
            and rows.tgt_keys[j] != rows.tgt_keys[i]
        ]
        for anchors, near, far in ((rows.src, rows.tgt, rows.src), (rows.tgt, rows.src, rows.tgt)):
            positive = sim(anchors[i], near[i])
            rivals = sum(sim(anchors[i], near[j]) for j in strangers)
            if negatives == "strong":
                rivals += sum(sim(anchors[i], far[j]) for j in strangers)
            total -= weight * math.log(positive / (positive + rivals)) / 2
    return total / sum(mine.weights)


NOBODY = Slow([], [], [], [], [])


def make_rows(src: Tensor, tgt: Tensor, **changes: Tensor) -> PairFeatures:
    numbers = torch.arange(len(src))
    rows = PairFeatures(
        F.normalize(src, dim=1), F.normalize(tgt, dim=1), numbers, numbers + 1000, numbers >= 0
    )
    return rows._replace(**changes)


def mean_loss(
    rows: PairFeatures,
    negatives: Negatives,
    temperature: float = 0.1,
    weights: Tensor | None = None,
) -> Tensor:
    weights = rows.src.new_ones(len(rows.src)) if weights is None else weights
    total, _ = info_nce(rows, rows, 0, weights, temperature, negatives)
    return total / weights.sum()


def draw(n: int, width: int = 5, seed: int = 0, dtype: Any = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    src, tgt = torch.randn(2, n, width, generator=generator, dtype=dtype)
    return src, tgt


E_ = math.e
# Three words a side: s = e₁, e₂, e₃ and t = e₁, e₂, e₂, at temperature 1. By hand, s before t:
BY_HAND = {
    "weak": [
        math.log(E_ + 2) - 1,
        math.log(1 + 2 * E_) - 1,
        math.log(3),
        math.log(E_ + 2) - 1,
        math.log(E_ + 2) - 1,
        math.log(E_ + 2),
    ],
    "strong": [  # two more with 0 for each s, one with 0 and one with 1 or two with 0 for each t
        math.log(E_ + 4) - 1,
        math.log(3 + 2 * E_) - 1,
        math.log(5),
        math.log(E_ + 4) - 1,
        math.log(2 * E_ + 3) - 1,
        math.log(2 * E_ + 3),
    ],
}


@pytest.mark.parametrize("negatives", BOTH)
def test_three_words_by_hand(negatives: Negatives) -> None:
    src = torch.eye(3)
    rows = make_rows(src, src[[0, 1, 1]])
    total, n_won = info_nce(rows, rows, 0, torch.ones(3), 1.0, negatives)
    assert total.item() == pytest.approx(sum(BY_HAND[negatives]) / 2)
    # s₁ and t₁ win; s₂ ties with t₃, s₃ with everyone; t₂ wins unless t₃ is asked too; t₃ loses.
    assert n_won.item() == (1.5 if negatives == "weak" else 1.0)
    weights = torch.tensor([0.0, 0.5, 2.0])
    total, n_won = info_nce(rows, rows, 0, weights, 1.0, negatives)
    by_pair = [
        (s + t) / 2 for s, t in zip(BY_HAND[negatives][:3], BY_HAND[negatives][3:], strict=True)
    ]
    assert total.item() == pytest.approx(0.5 * by_pair[1] + 2 * by_pair[2])
    assert n_won.item() == (0.25 if negatives == "weak" else 0.0)


@pytest.mark.parametrize("negatives", BOTH)
@settings(max_examples=25)
@given(n=st.integers(1, 7), seed=st.integers(0, 1 << 32), temperature=st.floats(0.05, 2.0))
def test_losses_are_those_of_the_paper(
    n: int, seed: int, temperature: float, negatives: Negatives
) -> None:
    src, tgt = draw(n, seed=seed)
    found = mean_loss(make_rows(src, tgt), negatives, temperature)
    assert found.item() == pytest.approx(EQUATIONS[negatives](src, tgt, temperature), abs=1e-9)


@pytest.mark.parametrize("negatives", BOTH)
@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 32))
def test_keys_weights_and_padding_equal_a_loop(seed: int, negatives: Negatives) -> None:
    generator = torch.Generator().manual_seed(seed)
    src, tgt = draw(8, seed=seed)
    keys = torch.randint(5, (2, 8), generator=generator)
    weights = torch.rand(8, generator=generator, dtype=torch.float64)
    weights = weights * (torch.rand(8, generator=generator) < 0.7)
    weights[0] = 1.0
    rows = make_rows(src, tgt, src_keys=keys[0], tgt_keys=keys[1], real=weights > 0)
    found = mean_loss(rows, negatives, 0.3, weights)
    slow = Slow(list(src), list(tgt), *keys.tolist(), weights.tolist())
    assert found.item() == pytest.approx(slow_loss(slow, NOBODY, 0.3, negatives))


@settings(max_examples=25)
@given(n=st.integers(1, 12), seed=st.integers(0, 1 << 32), temperature=st.floats(0.02, 2.0))
def test_weak_is_the_cross_entropy_of_both_directions(
    n: int, seed: int, temperature: float
) -> None:
    rows = make_rows(*draw(n, seed=seed))
    similarity, labels = rows.src @ rows.tgt.T / temperature, torch.arange(n)
    expected = (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2
    torch.testing.assert_close(mean_loss(rows, "weak", temperature), expected)


def test_the_positive_is_always_a_candidate() -> None:
    """Without allowed negatives the loss is 0, never NaN or negative."""
    similarity = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    positives = torch.tensor([5, 0, 3, 3])
    losses = contrastive_loss(similarity, positives, torch.zeros(4, 6, dtype=torch.bool))
    assert losses.tolist() == [0, 0, 0, 0]
    losses.sum().backward()
    assert similarity.grad is not None
    assert similarity.grad.eq(0).all()
    alone = torch.zeros(4, 6, dtype=torch.bool)
    alone[0, 2] = True
    losses = contrastive_loss(similarity, positives, alone).detach()
    assert losses[0].item() == pytest.approx(
        math.log1p(math.exp(similarity[0, 2].item() - similarity[0, 5].item()))
    )
    everyone = contrastive_loss(similarity, positives, torch.ones(4, 6, dtype=torch.bool))
    torch.testing.assert_close(everyone, F.cross_entropy(similarity, positives, reduction="none"))


def test_large_similarities_do_not_overflow() -> None:
    losses = contrastive_loss(
        torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), torch.tensor([0, 0]), torch.ones(2, 2).bool()
    )
    assert losses.tolist() == [0.0, 2e4]


@pytest.mark.parametrize("negatives", BOTH)
def test_pairs_that_share_a_side_are_not_negatives_of_each_other(negatives: Negatives) -> None:
    src, tgt = draw(6)
    rows = make_rows(src, tgt)
    rows = rows._replace(
        src_keys=torch.tensor([7, 7, 1, 2, 3, 4]), tgt_keys=torch.tensor([0, 1, 2, 3, 9, 9])
    )
    for tensor in (rows.src, rows.tgt):
        tensor.requires_grad_()
    ones = torch.zeros(6, dtype=torch.float64)
    ones[0] = 1
    total, _ = info_nce(rows, rows, 0, ones, 0.1, negatives)
    gradients = torch.autograd.grad(total, [rows.src, rows.tgt])
    for gradient in gradients:  # of the loss of pair 0, which shares its source with pair 1
        touched = gradient.ne(0).any(dim=1).tolist()
        assert touched == [True, False, True, True, True, True]
    last = torch.zeros(6, dtype=torch.float64)
    last[5] = 1  # shares its target with pair 4
    total, _ = info_nce(rows, rows, 0, last, 0.1, negatives)
    for gradient in torch.autograd.grad(total, [rows.src, rows.tgt]):
        assert gradient.ne(0).any(dim=1).tolist() == [True, True, True, True, False, True]


@pytest.mark.parametrize("negatives", BOTH)
def test_gradients_through_the_features_are_right(negatives: Negatives) -> None:
    extractor = FeatureExtractor(5, 4, torch.Generator().manual_seed(2)).double()
    weights = torch.tensor([1.0, 0.3, 0.0, 2.0, 1.0], dtype=torch.float64)
    keys = torch.tensor([0, 1, 2, 0, 4])

    def loss(src: Tensor, tgt: Tensor, hidden: Tensor, output: Tensor) -> Tensor:
        sides = (
            torch.func.functional_call(
                extractor, {"hidden.weight": hidden, "output.weight": output}, (side,)
            )
            for side in (src, tgt)
        )
        return mean_loss(
            make_rows(*sides, src_keys=keys, real=weights > 0), negatives, 0.5, weights
        )

    parameters = [weight.detach().clone() for weight in extractor.parameters()]
    inputs = [tensor.requires_grad_() for tensor in (*draw(5, seed=3), *parameters)]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("negatives", BOTH)
def test_padding_rows_change_nothing(negatives: Negatives) -> None:
    """Zeros or copies of real rows, at any position, do not affect loss and gradient."""
    src, tgt = (side.requires_grad_() for side in draw(5))
    expected = mean_loss(make_rows(src, tgt), negatives)
    wanted = torch.autograd.grad(expected, [src, tgt])
    place = torch.tensor([0, 1, 2, 3, 4, 0, 0, 0])
    weights = torch.tensor([1.0] * 5 + [0.0] * 3, dtype=torch.float64)
    for zero in (False, True):
        keep = 1 - zero * (weights == 0).double()[:, None]
        keys = torch.cat([torch.arange(5), torch.zeros(3, dtype=torch.int64)])
        rows = make_rows(
            src[place] * keep,
            tgt[place] * keep,
            src_keys=keys,
            tgt_keys=keys,
            real=weights > 0,
        )
        found = mean_loss(rows, negatives, weights=weights)
        torch.testing.assert_close(found, expected)
        for one, other in zip(torch.autograd.grad(found, [src, tgt]), wanted, strict=True):
            torch.testing.assert_close(one, other)


# Objectives on an encoder


def arrays_of(pairs: list[Pair]) -> tuple[Ragged, ...]:
    """The arrays of a linked corpus; sentences need only the first two."""
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = [[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs]
    return (*sides, *words, Ragged.of(links))


def make_objective(kind: str, hidden: int = 64, **changes: Any) -> Contrastive:
    objective: Contrastive = (
        WordContrastive(WordContrastiveSettings(**{"parameter_weight": 0.0} | changes))
        if kind == "word"
        else SentenceContrastive(SentenceContrastiveSettings(**changes))
    )
    objective.add_weights(hidden, torch.Generator().manual_seed(5))
    return objective


def collate(
    objective: Contrastive,
    encoder: Encoder,
    pairs: list[Pair] = PAIRS,
    shape: BatchShape | None = None,
) -> Any:
    build = objective.build_collator(SpecialTokens.of(encoder.tokenizer), shape)
    return build(arrays_of(pairs), torch.Generator())


def find_states(encoder: Encoder, pair: Pair, side: int, layer: int) -> Tensor:
    """The states of one sentence that is encoded alone, without special tokens."""
    from calque.tokens.ragged import add_special_tokens, pack

    special_tokens = SpecialTokens.of(encoder.tokenizer)
    alone = add_special_tokens(
        Ragged.of([list(chain(*pair[side]))]), special_tokens.cls_id, special_tokens.sep_id
    )
    (states,) = encoder(pack(alone, pad_id=special_tokens.pad_id), [layer])
    result: Tensor = states[1:-1]
    return result


def read_slowly(
    objective: Contrastive, encoder: Encoder, pairs: list[Pair], batch: int = 0
) -> Slow:
    """The compared states, computed sentence by sentence; `batch` makes positions distinct."""
    settings = objective.settings
    layer = encoder.n_layers if settings.layer is None else settings.layer
    found = Slow([], [], [], [], [])
    columns = ((found.src, found.src_keys), (found.tgt, found.tgt_keys))
    for number, pair in enumerate(pairs):
        for side, (states, keys) in enumerate(columns):
            mine = find_states(encoder, pair, side, layer)
            if isinstance(objective, SentenceContrastive):
                states.append(extract(objective, mine.mean(dim=0)))
                keys.append(list(chain(*pair[side])))
                continue
            for link in pair[2]:
                word = pair[side][link[side]]
                start = len(list(chain(*pair[side][: link[side]])))
                stop = start + (1 if settings.words == "first" else len(word))
                states.append(extract(objective, mine[start:stop].mean(dim=0)))
                keys.append(word if settings.spare == "text" else (batch, number, link[side]))
        one = isinstance(objective, SentenceContrastive)
        found.weights.extend([1.0] if one else [level / 255 for _, _, level in pair[2]])
    return found


def extract(objective: Contrastive, state: Tensor) -> Tensor:
    if objective.extractor is None:
        return state
    hidden = (objective.extractor.hidden.weight @ state).clamp(min=0)
    return objective.extractor.output.weight @ hidden


CASES: list[tuple[str, dict[str, Any]]] = [
    ("word", {}),
    ("word", {"words": "mean", "features": None, "layer": 2, "temperature": 0.3}),
    ("word", {"spare": "text", "features": 16}),
    ("sentence", {}),
    ("sentence", {"features": 16, "layer": 1, "temperature": 0.2}),
]


@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize("negatives", BOTH)
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_losses_equal_those_of_sentences_encoded_alone(
    kind: str,
    changes: dict[str, Any],
    negatives: Negatives,
    shape: BatchShape | None,
    tiny_encoder: Encoder,
) -> None:
    objective = make_objective(kind, negatives=negatives, **changes)
    with torch.no_grad():
        terms = objective(tiny_encoder, collate(objective, tiny_encoder, shape=shape))
        slow = read_slowly(objective, tiny_encoder, PAIRS)
    expected = slow_loss(slow, NOBODY, objective.settings.temperature, negatives)
    assert terms.metrics.keys() == {"contrast", "accuracy"}
    assert (
        terms.loss.item() == terms.metrics["contrast"].item() == pytest.approx(expected, rel=2e-4)
    )
    assert 0 <= terms.metrics["accuracy"].item() <= 1


@pytest.mark.parametrize("negatives", BOTH)
@pytest.mark.parametrize("kind", ["word", "sentence"])
def test_the_padding_of_a_shape_gets_no_gradient(
    kind: str, negatives: Negatives, tiny_encoder: Encoder
) -> None:
    encoder = copy.deepcopy(tiny_encoder).double()
    objective = make_objective(kind, negatives=negatives, features=16).double()
    everything = {**dict(encoder.named_parameters()), **dict(objective.named_parameters())}
    gradients = []
    for shape in (None, SHAPE):
        terms = objective(encoder, collate(objective, encoder, shape=shape))
        found = torch.autograd.grad(terms.loss, list(everything.values()), allow_unused=True)
        gradients.append(dict(zip(everything, found, strict=True)))
    used = [name for name, gradient in gradients[0].items() if gradient is not None]
    assert "model.lm_head.decoder.weight" in used  # the embeddings, which are also the output
    assert {f"model.lm_head.{name}" for name in ("bias", "dense.weight")}.isdisjoint(used)
    for name in used:
        torch.testing.assert_close(gradients[0][name], gradients[1][name])


@pytest.mark.parametrize("kind", ["word", "sentence"])
def test_without_an_extractor_lengths_do_not_matter(kind: str, tiny_encoder: Encoder) -> None:
    """The last layer norm's weight scales all states."""
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective(kind, features=None)
    batch = collate(objective, encoder)
    with torch.no_grad():
        before = objective(encoder, batch)
        norm: Any = encoder.model.roberta.encoder.layer[-1].output.LayerNorm  # type: ignore[union-attr,index]
        norm.weight.mul_(37.0)
        norm.bias.mul_(37.0)
        after = objective(encoder, batch)
    assert after.loss.item() == pytest.approx(before.loss.item(), rel=1e-4)


def test_weights_of_links_are_relative(tiny_encoder: Encoder) -> None:
    objective = make_objective("word")
    batch = collate(objective, tiny_encoder)
    with torch.no_grad():
        one = objective(tiny_encoder, batch)
        other = objective(tiny_encoder, replace(batch, weights=3 * batch.weights))
    assert other.loss.item() == pytest.approx(one.loss.item(), rel=1e-5)


@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize("queue", [0, 4])
def test_a_batch_without_links_has_no_loss_and_no_nan(
    queue: int, shape: BatchShape | None, tiny_encoder: Encoder
) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective("word", queue=queue)
    terms = objective(encoder, collate(objective, encoder, [PAIRS[1]], shape))
    assert terms.loss.item() == terms.metrics["accuracy"].item() == 0
    terms.loss.backward()
    gradients = [p.grad for p in encoder.parameters() if p.grad is not None]
    assert all(gradient.eq(0).all() for gradient in gradients)
    assert objective.queue is None or not objective.queue.real.any()


def test_no_links_in_many_processes_is_not_nan(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 processes, 64 divided by the smallest float would be infinite."""
    monkeypatch.setattr("calque.objectives.contrastive.n_processes", lambda: 64)
    objective = make_objective("word")
    with torch.no_grad():
        loss = objective(tiny_encoder, collate(objective, tiny_encoder, [PAIRS[1]], SHAPE)).loss
    assert loss.item() == 0


def test_an_impossible_layer_is_an_error_at_the_start(tiny_encoder: Encoder) -> None:
    objective = make_objective("sentence", layer=9)
    with pytest.raises(InputError, match="layer 9 does not exist"):
        objective.start(tiny_encoder, ["en-de"])


@pytest.mark.parametrize(("norm", "power"), [("squared", 1.0), ("plain", 0.5)])
def test_the_distance_to_the_pretrained_weights_is_added(
    tiny_encoder: Encoder, norm: str, power: float
) -> None:
    """Eq. 5 at θ = θ_pretrained + 0.01 everywhere, by the number of weights."""
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective("sentence", parameter_weight=2.0, parameter_norm=norm)
    batch = collate(objective, encoder)
    objective.start(encoder, ["en-de"])
    with torch.no_grad():
        terms = objective(encoder, batch)
        assert terms.metrics["parameters"].item() == 0
        for parameter in encoder.parameters():
            parameter.add_(0.01)
        terms = objective(encoder, batch)
    n_weights = sum(parameter.numel() for parameter in encoder.parameters())
    expected_distance = (1e-4 * n_weights) ** power
    assert terms.metrics["parameters"].item() == pytest.approx(expected_distance, rel=1e-3)
    expected = terms.metrics["contrast"] + 2 * terms.metrics["parameters"]
    torch.testing.assert_close(terms.loss, expected)
    assert not [name for name in objective.state_dict() if "pretrained" in name]


@pytest.mark.parametrize(("layer", "expected"), [(None, 4), (1, 1), (-2, 3)])
def test_the_trained_layer_becomes_the_retrieval_layer(
    layer: int | None, expected: int, tiny_encoder: Encoder
) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    encoder.model.config.calque = {"other": 7, "retrieval_layer": 0}
    make_objective("word", layer=layer).start(encoder, ["en-de"])
    assert encoder.retrieval_layer == 0  # words say nothing of it
    make_objective("sentence", layer=layer).start(encoder, ["en-de"])
    assert encoder.settings == {"other": 7, "retrieval_layer": expected}


def test_the_languages_of_a_decoder_are_kept(tiny_encoder: Encoder) -> None:
    plan = DecoderPlan(languages=("de", "en"))
    model = build_seq2seq(plan, random_weights(tiny_encoder.config), tiny_encoder.tokenizer)
    model.add_directions([("en", "de")])
    make_objective("sentence", layer=2).start(model, ["en-de"])
    assert model.retrieval_layer == 2
    assert (list(model.start_tokens), model.directions) == (["de", "en"], [("en", "de")])


@pytest.mark.parametrize("kind", ["word", "sentence"])
def test_training_brings_translations_together(kind: str, tiny_encoder: Encoder) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective(kind, features=16)
    batch = collate(objective, encoder, PAIRS[:3] + PAIRS[4:])
    parameters = [*encoder.parameters(), *objective.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    history = []
    for _ in range(25):
        terms = objective(encoder, batch)
        history.append(terms.loss.item())
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
    assert history[-1] < history[0] - 0.5
    assert terms.metrics["accuracy"].item() > 0.9


# The queue of negatives


def rows_of(*numbers: int, real: list[bool] | None = None) -> PairFeatures:
    """Pairs that are identified by their numbers."""
    values = torch.tensor(numbers)
    states = values[:, None].float().expand(-1, 3)
    real_ones = torch.tensor(real or [True] * len(numbers))
    return PairFeatures(states, -states, values, values + 100, real_ones)


def read_queue(queue: NegativeQueue) -> list[int]:
    rows = queue.pairs()
    numbers = rows.src_keys[rows.real].tolist()
    assert rows.tgt_keys[rows.real].tolist() == [number + 100 for number in numbers]
    assert rows.src[rows.real].tolist() == [[float(number)] * 3 for number in numbers]
    assert rows.tgt[rows.real].tolist() == [[-float(number)] * 3 for number in numbers]
    return [int(number) for number in numbers]


def test_the_newest_rows_come_first_and_the_oldest_are_dropped() -> None:
    queue = NegativeQueue(5, 3)
    assert read_queue(queue) == []
    queue.push(rows_of(1, 2))
    assert read_queue(queue) == [1, 2]
    queue.push(rows_of(3, 4, 5, real=[True, False, True]))
    assert read_queue(queue) == [3, 5, 1, 2]
    queue.push(rows_of(6, 7))
    assert read_queue(queue) == [6, 7, 3, 5, 1]
    queue.push(rows_of(8, real=[False]))
    assert read_queue(queue) == [6, 7, 3, 5, 1]
    queue.push(rows_of(*range(10, 18)))
    assert read_queue(queue) == [10, 11, 12, 13, 14]


def test_rows_are_copies_and_have_no_gradient() -> None:
    queue = NegativeQueue(3, 3)
    queue.push(rows_of(1))
    before = queue.pairs()
    states = torch.full((2, 3), 2.0, requires_grad=True)
    queue.push(rows_of(2, 2)._replace(src=states * 1, tgt=-states))
    assert before.src_keys.tolist() == [1, 0, 0]
    assert not any(tensor.requires_grad for tensor in queue.pairs())
    assert not list(queue.parameters())
    assert queue.state_dict().keys() == set(PairFeatures._fields)


@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize("negatives", BOTH)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("word", {}), ("word", {"spare": "text"}), ("sentence", {"features": 16}), ("sentence", {})],
)
def test_the_loss_with_a_queue_equals_that_with_its_rows_in_the_batch(
    kind: str,
    changes: dict[str, Any],
    negatives: Negatives,
    shape: BatchShape | None,
    tiny_encoder: Encoder,
) -> None:
    """Sentences that batches share are excluded by text, but not by position."""
    objective = make_objective(kind, negatives=negatives, queue=5, **changes)
    batches = [PAIRS[:1] + PAIRS[4:], PAIRS[2:4], PAIRS]
    with torch.no_grad():
        for pairs in batches:
            found = objective(tiny_encoder, collate(objective, tiny_encoder, pairs, shape)).loss
        old, new, mine = (
            read_slowly(objective, tiny_encoder, pairs, number)
            for number, pairs in enumerate(batches)
        )
    waiting = (new + old).first(5)
    expected = slow_loss(mine, waiting, objective.settings.temperature, negatives)
    assert found.item() == pytest.approx(expected, rel=2e-4)
    assert found.item() > slow_loss(mine, NOBODY, objective.settings.temperature, negatives)


@pytest.mark.parametrize("kind", ["word", "sentence"])
def test_the_queue_gets_no_gradient_but_affects_others(kind: str, tiny_encoder: Encoder) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective(kind, queue=6, features=16)
    batch = collate(objective, encoder, shape=SHAPE)
    gradients = []
    for _ in range(2):
        objective.zero_grad()
        objective(encoder, batch).loss.backward()
        assert objective.extractor is not None
        gradients.append(objective.extractor.output.weight.grad)
    assert not torch.equal(*gradients)
    assert objective.queue is not None
    assert not any(buffer.requires_grad for buffer in objective.queue.buffers())


def test_validation_uses_the_queue_without_changing_it(tiny_encoder: Encoder) -> None:
    objective = make_objective("sentence", queue=6)
    assert objective.queue is not None
    with torch.no_grad():
        objective(tiny_encoder, collate(objective, tiny_encoder, PAIRS[:2]))
        before = objective.queue.pairs()
        objective.eval()
        batch = collate(objective, tiny_encoder, PAIRS[2:])
        first, again = (objective(tiny_encoder, batch).loss for _ in range(2))
        plain = make_objective("sentence").eval()(tiny_encoder, batch).loss
    assert all(torch.equal(*pair) for pair in zip(before, objective.queue.pairs(), strict=True))
    assert first.item() == again.item() > plain.item()


def test_an_objective_without_a_queue_or_features_has_no_weights() -> None:
    assert not make_objective("sentence").state_dict()
    assert make_objective("sentence", queue=3).state_dict()["queue.src"].shape == (3, 64)
    both = make_objective("word", queue=3, features=8)
    assert both.state_dict()["queue.src"].shape == (3, 8)
    assert {name for name, _ in both.named_parameters()} == {
        "extractor.hidden.weight",
        "extractor.output.weight",
    }


# A teacher


@pytest.fixture
def student(tiny_encoder: Encoder) -> Encoder:
    """A copy of the encoder with other weights."""
    changed = copy.deepcopy(tiny_encoder)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=noise)
    return changed


def test_both_sides_are_compared_with_the_teachers_sources(
    student: Encoder, tiny_encoder: Encoder, tiny_folder: Path
) -> None:
    objective = make_objective("sentence", teacher=str(tiny_folder), queue=8, layer=2)
    objective.start(student, ["en", "de"])
    pairs = [PAIRS[0], PAIRS[1], PAIRS[4]]
    with torch.no_grad():
        for _ in range(2):  # the second time, the queue has the first batch
            batch = objective.prepare(student, collate(objective, student, pairs))
            loss = objective(student, batch).loss.item()
    means = [
        torch.stack([find_states(encoder, pair, side, 2).mean(dim=0) for pair in pairs])
        for encoder, side in ((student, 0), (student, 1), (tiny_encoder, 0))
    ]
    src, tgt, taught = (F.normalize(side, dim=1) for side in means)
    expected = []
    for side in (src, tgt):
        # The queue has the same sentences: each other one is a negative twice, the own one never.
        similarity = side @ taught.T / 0.05
        others = similarity.masked_fill(torch.eye(3, dtype=torch.bool), -torch.inf)
        both = torch.cat([similarity, others], dim=1)
        expected.append(F.cross_entropy(both, torch.arange(3)).item())
    assert loss == pytest.approx(sum(expected) / 2, abs=1e-4)
    assert objective.queue is not None
    torch.testing.assert_close(objective.queue.src[:3], taught, atol=1e-5, rtol=0)
    torch.testing.assert_close(objective.queue.tgt[:3], taught, atol=1e-5, rtol=0)


def test_the_teacher_gets_no_gradient_and_is_no_weight(student: Encoder, tiny_folder: Path) -> None:
    objective = make_objective("sentence", teacher=str(tiny_folder))
    objective.start(student, ["en", "de"])
    batch = objective.prepare(student, collate(objective, student))
    assert batch.targets is not None
    assert not batch.targets.requires_grad
    assert list(objective.parameters()) == []


def test_a_teacher_must_fit(student: Encoder, tiny_folder: Path) -> None:
    with pytest.raises(InputError, match="without `features`"):
        make_objective("sentence", teacher=str(tiny_folder), features=8).start(student, ["en"])
    with pytest.raises(InputError, match="has another vocabulary than this model"):
        make_objective("sentence", teacher="calque-mini").start(student, ["en"])


# Compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
@pytest.mark.parametrize(("kind", "queue"), [("word", 6), ("sentence", 0)])
def test_one_graph_serves_all_batches(kind: str, queue: int, compilable_encoder: Encoder) -> None:
    torch._dynamo.reset()
    encoder = compilable_encoder
    changes = {"queue": queue, "features": 16, "parameter_weight": 0.5, "negatives": "strong"}
    objective, plain = (make_objective(kind, **changes) for _ in range(2))
    for one in (objective, plain):
        one.start(encoder, ["en-de"])
    objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pairs in (PAIRS, PAIRS[:2], PAIRS[2:]):
            batch = collate(objective, encoder, pairs, SHAPE)
            losses = [one(encoder, batch).loss for one in (objective, plain)]
            torch.testing.assert_close(*losses)
            weight: Any = encoder.model.get_input_embeddings().weight
            torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in losses))
    if queue:
        assert objective.queue is not None
        assert plain.queue is not None
        for one, other in zip(objective.queue.pairs(), plain.queue.pairs(), strict=True):
            torch.testing.assert_close(one, other)
        assert objective.queue.real.all()


# Settings


def test_the_papers_settings_are_the_defaults_for_words() -> None:
    words = WordContrastiveSettings()
    assert (words.temperature, words.features, words.parameter_weight) == (0.1, 128, 1.0)
    assert (words.words, words.negatives, words.layer, words.queue) == ("first", "weak", None, 0)
    sentences = SentenceContrastiveSettings()
    assert (sentences.features, sentences.parameter_weight) == (None, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0.0}, {"features": 0}, {"queue": -1}, {"negatives": "all"}, {"words": 2}],
)
def test_invalid_settings_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WordContrastiveSettings.model_validate(wrong)


def test_new_keys_with_default_values_are_not_written() -> None:
    """A recipe older than `batch_examples` and `text` keeps its fingerprint."""
    old = ObjectiveSettings(kind="any", weight=2.0).model_dump()
    assert old == {"kind": "any", "weight": 2.0, "batch_tokens": 16_384}
    new = ObjectiveSettings(kind="any", batch_examples=5, text="raw").model_dump()
    usual = {"kind": "any", "weight": 1.0, "batch_tokens": 16_384}
    assert new == usual | {"batch_examples": 5, "text": "raw"}
    assert ObjectiveSettings.model_validate(new).model_dump() == new


Pairs = list[tuple[list[int], list[int]]]

FIRST, LAST, PAD = 0, 2, 1
MARKS = SpecialTokens(FIRST, LAST, 1, PAD, 3, (FIRST, PAD, LAST, 3), 100)
# The third pair has the first one's source, the fourth the second one's target.
SENTENCE_PAIRS: Pairs = [
    ([10, 11, 12], [20]),
    ([13], [21, 22]),
    ([10, 11, 12], [23, 24, 25, 26, 27]),
    ([14, 15], [21, 22]),
]
# Rows of 8 tokens: sources and targets lie in an order of their own.
SENTENCE_SHAPE = BatchShape(tokens=56, row=8, sequences=12, budget=56)
SENTENCE = st.lists(st.integers(4, 99), min_size=1, max_size=6)


def collate_sentences(pairs: Pairs, shape: BatchShape | None) -> SentencePairBatch:
    sides = tuple(Ragged.of([pair[side] for pair in pairs]) for side in (0, 1))
    return SentencePairCollator(MARKS, shape)(sides, torch.Generator())


def pool_slowly(batch: SentencePairBatch, states: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Find every sentence among the sequences by its ids, and average its states."""
    found: dict[tuple[int, ...], Tensor] = {}
    ids, offsets = batch.tokens.ids.tolist(), batch.tokens.offsets.tolist()
    for start, stop in pairwise(offsets):
        if stop > start and ids[start] == FIRST:
            found[tuple(ids[start + 1 : stop - 1])] = states[start + 1 : stop - 1].mean(dim=0)
    src, tgt = ([found[tuple(pair[side])] for pair in pairs] for side in (0, 1))
    return torch.stack(src), torch.stack(tgt)


def states_by_id(batch: SentencePairBatch) -> Tensor:
    """States that only depend on the token and its position, as those of equal sentences are."""
    table = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    return table[batch.tokens.ids] + batch.tokens.positions[:, None]


@pytest.mark.parametrize("shape", [None, SENTENCE_SHAPE])
def test_sentences_are_the_means_of_their_tokens(shape: BatchShape | None) -> None:
    batch = collate_sentences(SENTENCE_PAIRS, shape)
    states = states_by_id(batch)
    for found, expected in zip(
        batch.pool(states), pool_slowly(batch, states, SENTENCE_PAIRS), strict=True
    ):
        torch.testing.assert_close(found[: len(SENTENCE_PAIRS)], expected)
        assert found[len(SENTENCE_PAIRS) :].eq(0).all()


@given(st.lists(st.tuples(SENTENCE, SENTENCE), min_size=1, max_size=6), st.booleans())
def test_random_sentences_are_pooled_as_in_a_loop(pairs: Pairs, with_rows: bool) -> None:
    batch = collate_sentences(pairs, SENTENCE_SHAPE if with_rows else None)
    states = states_by_id(batch)
    for found, expected in zip(batch.pool(states), pool_slowly(batch, states, pairs), strict=True):
        torch.testing.assert_close(found[: len(pairs)], expected)


def test_pooling_is_that_of_the_finished_model() -> None:
    """Without a shape the sequences are the sources and then the targets."""
    batch = collate_sentences(SENTENCE_PAIRS, None)
    states = torch.randn(len(batch.tokens.ids), 6)
    keep = ~torch.isin(batch.tokens.ids, torch.tensor([FIRST, LAST]))
    expected = pool_sentences(states, batch.tokens.offsets, keep)
    torch.testing.assert_close(torch.cat(batch.pool(states)), expected)


def test_half_precision_is_pooled_in_single() -> None:
    batch = collate_sentences([(list(range(4, 100)) * 4, [5])], None)
    states = torch.full((len(batch.tokens.ids), 2), 1.01, dtype=torch.bfloat16)
    src, tgt = batch.pool(states)
    assert src.dtype == torch.float32
    assert src.tolist() == tgt.tolist() == [[states[0, 0].item()] * 2]
    assert batch.pool(states.double())[0].dtype == torch.float64


def test_special_tokens_and_other_sentences_get_no_gradient() -> None:
    batch = collate_sentences(SENTENCE_PAIRS, SENTENCE_SHAPE)
    states = torch.randn(len(batch.tokens.ids), 3, requires_grad=True)
    src, _ = batch.pool(states)
    (gradient,) = torch.autograd.grad(src[2].sum(), states)
    touched = gradient.ne(0).any(dim=1)
    assert sorted(batch.tokens.ids[touched].tolist()) == [10, 11, 12]
    assert gradient[touched].unique().tolist() == pytest.approx([1 / 3])


def owners_of(batch: SentencePairBatch) -> dict[int, list[int]]:
    """List the tokens that each sentence owns, in order."""
    found: dict[int, list[int]] = {}
    for token, owner in zip(batch.tokens.ids.tolist(), batch.owners.tolist(), strict=True):
        found.setdefault(owner, []).append(token)
    return found


def test_owners_without_a_shape() -> None:
    found = owners_of(collate_sentences(SENTENCE_PAIRS, None))
    expected = [pair[side] for side in (0, 1) for pair in SENTENCE_PAIRS]
    assert [found[k] for k in range(8)] == expected
    assert sorted(found[8]) == [FIRST] * 8 + [LAST] * 8


def test_owners_with_a_shape() -> None:
    """With room for six pairs, targets start at 6; 12 means that no sentence owns a token."""
    batch = collate_sentences(SENTENCE_PAIRS, SENTENCE_SHAPE)
    found = owners_of(batch)
    assert found.keys() == {0, 1, 2, 3, 6, 7, 8, 9, 12}
    assert [found[k] for k in range(4)] == [pair[0] for pair in SENTENCE_PAIRS]
    assert [found[k + 6] for k in range(4)] == [pair[1] for pair in SENTENCE_PAIRS]
    n_padding = 56 - batch.tokens.n_real
    assert sorted(found[12]) == [FIRST] * 8 + [PAD] * n_padding + [LAST] * 8
    assert batch.weights.tolist() == [1, 1, 1, 1, 0, 0]


def test_batches_of_a_shape_have_one_shape() -> None:
    def sizes(batch: SentencePairBatch) -> list[int]:
        tokens = [batch.tokens.ids, batch.tokens.positions, batch.tokens.offsets]
        rest = [batch.owners, batch.weights, batch.src_keys, batch.tgt_keys]
        return [len(array) for array in tokens + rest]

    batches = [
        collate_sentences(pairs, SENTENCE_SHAPE)
        for pairs in (SENTENCE_PAIRS, SENTENCE_PAIRS[:1], SENTENCE_PAIRS[1:] * 2)
    ]
    assert sizes(batches[0]) == sizes(batches[1]) == sizes(batches[2])
    assert [int(batch.weights.sum()) for batch in batches] == [4, 1, 6]
    more = collate_sentences(
        SENTENCE_PAIRS * 2, SENTENCE_SHAPE
    )  # than the shape has room for: nothing is lost
    assert more.weights.tolist() == [1] * 8


def test_equal_sentences_have_equal_keys() -> None:
    for shape in (None, SENTENCE_SHAPE):
        batch = collate_sentences(SENTENCE_PAIRS, shape)
        src, tgt = batch.src_keys.tolist()[:4], batch.tgt_keys.tolist()[:4]
        assert src[0] == src[2]
        assert tgt[1] == tgt[3]
        assert len(set(src)) == len(set(tgt)) == 3


@given(st.lists(st.lists(st.integers(0, 2**31), min_size=1, max_size=5), max_size=8))
def test_equal_sequences_have_equal_hashes(sequences: list[list[int]]) -> None:
    ragged = Ragged.of([*sequences, *sequences[::-1]])
    found = hash_sequences(ragged.ids, ragged.lengths).tolist()
    n = len(sequences)
    assert found[:n] == found[n:][::-1]
    assert len(set(found)) == len({tuple(sequence) for sequence in sequences})


def test_similar_sequences_have_different_hashes() -> None:
    """All orders and lengths of few tokens, and long sentences that differ in one position."""
    sequences = [list(s) for n in range(1, 8) for s in product((0, 1, 2), repeat=n)]
    base = list(range(120))
    sequences += [[*base[:k], 7_000, *base[k + 1 :]] for k in range(120)]
    sequences += [base[:k] + base[k + 1 :] + [base[k]] for k in range(119)]
    ragged = Ragged.of(sequences)
    found = hash_sequences(ragged.ids, ragged.lengths).tolist()
    assert len(set(found)) == len(sequences)


def test_special_tokens_can_belong_to_their_side() -> None:
    src, tgt = (Ragged.of([pair[side] for pair in SENTENCE_PAIRS]) for side in (0, 1))
    for shape in (None, SENTENCE_SHAPE):
        tokens, owners = pack_separately((src, tgt), MARKS, shape)
        found: dict[int, list[int]] = {}
        for token, owner in zip(tokens.ids.tolist(), owners.tolist(), strict=True):
            found.setdefault(owner, []).append(token)
        for k, pair in enumerate(SENTENCE_PAIRS):
            assert found[k] == [FIRST, *pair[0], LAST]
            assert found[k + 4] == [FIRST, *pair[1], LAST]
        assert set(found.get(8, [])) <= {PAD}
        assert (8 in found) == (shape is not None)


def test_all_tensors_of_a_batch_are_moved() -> None:
    batch = collate_sentences(SENTENCE_PAIRS, SENTENCE_SHAPE)
    moved = batch.to("cpu")
    assert type(moved) is SentencePairBatch
    assert moved.tokens.ids.equal(batch.tokens.ids)
    assert moved.tokens.row == 8
    assert moved.owners.equal(batch.owners)
    there = batch.to("meta")
    arrays = [there.tokens.ids, there.tokens.positions, there.tokens.offsets, there.owners]
    arrays += [there.weights, there.src_keys, there.tgt_keys]
    assert all(array.is_meta for array in arrays)
