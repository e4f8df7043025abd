"""The neural word aligner against plain transformers, in windows and batches, and by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import calque
from calque.algorithms.calibration import Calibration
from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.tokens.words import WordEncoder
from calque.word_alignment.neural import AlignSettings, Method, WordAligner, link_words
from calque.word_alignment.pair_windows import PairLayout, build_pair_batch, split_pairs

Row = tuple[str, str, str]
Pair = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def pairs(demo_rows: list[Row]) -> list[Pair]:
    return [(row[2].split(), row[1].split()) for row in demo_rows[::6]]


def align_plainly(folder: Path, pair: Pair, layer: int, joint: bool) -> list[tuple[int, int]]:
    """Mutual argmax of cosines of mean-pooled words from `AutoModel`, without code of Calque."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def pool(states: torch.Tensor, owners: list[int | None], n_words: int) -> torch.Tensor:
        rows = [
            states[[k for k, owner in enumerate(owners) if owner == word]].mean(0)
            for word in range(n_words)
        ]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)

    with torch.no_grad():
        if joint:
            inputs = tokenizer(*pair, is_split_into_words=True, return_tensors="pt")
            states = model(**inputs, output_hidden_states=True).hidden_states[layer][0]
            owners, sides = inputs.word_ids(), inputs.sequence_ids()
            src, tgt = (
                pool(
                    states,
                    [w if s == side else None for w, s in zip(owners, sides, strict=True)],
                    len(pair[side]),
                )
                for side in (0, 1)
            )
        else:
            src, tgt = (
                pool(
                    model(**inputs, output_hidden_states=True).hidden_states[layer][0],
                    inputs.word_ids(),
                    len(words),
                )
                for words in pair
                for inputs in [tokenizer(words, is_split_into_words=True, return_tensors="pt")]
            )
    cosines = src @ tgt.T
    best_tgt, best_src = cosines.argmax(1), cosines.argmax(0)
    return [(i, int(j)) for i, j in enumerate(best_tgt) if best_src[j] == i]


@pytest.mark.parametrize("encode", ["joint", "separate"])
@pytest.mark.parametrize("layer", [0, 3])
def test_matches_plain_transformers(
    tiny_folder: Path, pairs: list[Pair], encode: str, layer: int
) -> None:
    aligner = WordAligner(
        Encoder.load(tiny_folder),
        method="argmax",
        layer=layer,
        encode=encode,  # type: ignore[arg-type]
        spelling=0.0,
    )
    some = pairs[:12]
    plain = [align_plainly(tiny_folder, pair, layer, encode == "joint") for pair in some]
    assert aligner.align(some) == plain


def test_batches_do_not_matter(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    alone = WordAligner(tiny_encoder, batch_tokens=1).align(pairs)
    assert WordAligner(tiny_encoder).align(pairs) == alone
    assert WordAligner(tiny_encoder).align(pairs[::-1]) == alone[::-1]


def test_layers_in_one_pass(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    aligner = WordAligner(tiny_encoder)
    found = aligner.align_layers(pairs, [0, 2, -1])
    for layer in (0, 2, tiny_encoder.n_layers):
        single = aligner.with_layer(layer).align_block(pairs)
        assert found[layer].links.to_lists() == single.links.to_lists()


def test_identical_sentences_align_along_the_diagonal(tiny_encoder: Encoder) -> None:
    words = ["we", "saw", "two", "small", "red", "houses", "near", "that", "river"]
    for method in ("ot", "itermax", "argmax", "match"):
        aligner = WordAligner(tiny_encoder, method=method, layer=1)  # type: ignore[arg-type]
        assert aligner.align([(words, words)]) == [[(i, i) for i in range(len(words))]], method


def test_empty_sides_have_no_links(tiny_encoder: Encoder) -> None:
    block = WordAligner(tiny_encoder).align_block(
        [([], ["a"]), (["b"], ["b"]), (["c"], []), ([], [])]
    )
    assert block.links.to_lists() == [[], [(0, 0)], [], []]
    assert (block.report.n_pairs, block.report.n_empty, block.report.n_links) == (4, 3, 1)
    assert WordAligner(tiny_encoder).align([]) == []


def test_words_without_subwords_are_never_linked(tiny_encoder: Encoder) -> None:
    nothing = "\u200b"
    assert len(WordEncoder(tiny_encoder.tokenizer).encode([[nothing]]).ids) == 0
    links = WordAligner(tiny_encoder, method="match").align([(["a", nothing, "b"], ["a", "b"])])[0]
    assert links and all(i != 1 for i, _ in links)


@pytest.mark.parametrize("encode", ["joint", "separate"])
def test_long_pairs_are_aligned_in_windows(
    tiny_encoder: Encoder, demo_rows: list[Row], encode: str
) -> None:
    words = " ".join(row[1] for row in demo_rows[:60]).split()
    aligner = WordAligner(tiny_encoder, method="argmax", layer=1, encode=encode)  # type: ignore[arg-type]
    block = aligner.align_block([(["a"], ["a"]), (words, words)])
    short, long = block.links.to_lists()
    assert short == [(0, 0)]
    assert block.report.n_long == 1 and block.report.n_windows > 3
    # A word finds itself, except for repeated words.
    assert len({(i, j) for i, j in long if i == j}) > 0.7 * len(words)
    assert len({i for i, _ in long}) == len(long)  # argmax links one to one: no word twice


def test_a_huge_word_is_counted(tiny_encoder: Encoder) -> None:
    block = WordAligner(tiny_encoder).align_block([(["x" * 20_000, "house"], ["house"])])
    assert block.report.n_cut == 1
    assert block.links.n_pairs == 1


def test_scores_are_probabilities(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    links = WordAligner(tiny_encoder, method="itermax").align_block(pairs).links
    assert len(links.scores) == len(links.pairs) > 0
    assert (links.scores > 0).all() and (links.scores <= 1).all()


def test_settings_come_from_the_model(tiny_encoder: Encoder) -> None:
    assert AlignSettings.of(tiny_encoder).layer == round(2 / 3 * tiny_encoder.n_layers)
    assert AlignSettings.of(tiny_encoder, layer=-1).layer == tiny_encoder.n_layers
    with pytest.raises(InputError, match="method best does not exist"):
        AlignSettings.of(tiny_encoder, method="best")


def test_strings_are_not_word_lists(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="pair 1 is not two lists of words"):
        WordAligner(tiny_encoder).align([(["a"], ["b"]), ("das Haus", "the house")])


def test_the_public_name() -> None:
    assert calque.WordAligner is WordAligner


# Links of given cosines


def sinkhorn_by_hand(kernel: np.ndarray, n_iterations: int) -> np.ndarray:
    """Scale columns, then rows, to uniform masses in plain loops."""
    plan = kernel.copy()
    for _ in range(n_iterations):
        for j in range(plan.shape[1]):
            plan[:, j] *= 1 / plan.shape[1] / plan[:, j].sum()
        for i in range(plan.shape[0]):
            plan[i] *= 1 / plan.shape[0] / plan[i].sum()
    return plan


def mutual_by_hand(scores: np.ndarray) -> set[tuple[int, int]]:
    best = [int(row.argmax()) for row in scores]
    return {(i, j) for i, j in enumerate(best) if int(scores[:, j].argmax()) == i}


def itermax_by_hand(scores: np.ndarray, alpha: float = 0.9) -> set[tuple[int, int]]:
    """Apply SimAlign's two rounds in plain loops to nonnegative scores."""
    links = mutual_by_hand(scores)
    taken_src, taken_tgt = {i for i, _ in links}, {j for _, j in links}
    if min(scores.shape) <= 2 or len(taken_src) == len(scores) or len(taken_tgt) == len(scores[0]):
        return links
    lowered = scores.copy()
    for i, j in np.ndindex(scores.shape):
        n_taken = (i in taken_src) + (j in taken_tgt)
        lowered[i, j] *= (1.0, alpha, 0.0)[n_taken]
    return links | {
        (i, j) for i, j in mutual_by_hand(lowered) if not (i in taken_src and j in taken_tgt)
    }


def link(method: Method, cosines: np.ndarray, **options: Any) -> set[tuple[int, int]]:
    """Link one sentence pair, padded with a row and a column that are not valid."""
    shape = cosines.shape[0] + 1, cosines.shape[1] + 1
    similarity, valid = torch.ones(1, *shape), torch.zeros(1, *shape, dtype=torch.bool)
    similarity[0, :-1, :-1], valid[0, :-1, :-1] = torch.from_numpy(cosines).float(), True
    settings = AlignSettings(method=method, **options)
    links, _ = link_words(similarity, valid, settings)
    return {(i, j) for _, i, j in links.nonzero().tolist()}


def score_by_hand(cosines: np.ndarray) -> np.ndarray:
    kernel = np.exp(20 * cosines)
    return np.sqrt(kernel / kernel.sum(axis=0) * kernel / kernel.sum(axis=1, keepdims=True))


def draw_cosines() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.uniform(-0.2, 0.9, size=generator.integers(3, 8, size=2)) for _ in range(60)]


def test_optimal_transport_is_sinkhorn_then_itermax() -> None:
    """Each of the two steps matters: neither alone gives these links."""
    without_sinkhorn = without_itermax = 0
    for cosines in draw_cosines():
        plan = sinkhorn_by_hand(np.exp(20 * cosines), 2)
        expected = itermax_by_hand(plan)
        assert link("ot", cosines) == expected
        without_sinkhorn += itermax_by_hand(np.exp(20 * cosines)) != expected
        without_itermax += mutual_by_hand(plan) != expected
    assert without_sinkhorn > 10 and without_itermax > 10


def test_optimal_transport_matches_pot() -> None:
    ot = pytest.importorskip("ot")
    for n_iterations, cosines in enumerate(draw_cosines(), start=1):
        masses = [np.full(n, 1 / n) for n in cosines.shape]
        plan = ot.sinkhorn(
            *masses, 1 - cosines, 1 / 20, numItermax=n_iterations, stopThr=0, warn=False
        )
        assert link("ot", cosines, n_iterations=n_iterations) == itermax_by_hand(plan)


def test_other_methods_by_hand() -> None:
    from scipy.optimize import linear_sum_assignment

    for cosines in draw_cosines():
        assert link("argmax", cosines) == mutual_by_hand(cosines)
        assert link("itermax", cosines) == itermax_by_hand((1 + cosines) / 2)
        rows, columns = linear_sum_assignment(cosines, maximize=True)
        assert link("match", cosines) == set(zip(rows.tolist(), columns.tolist(), strict=True))
        scores = score_by_hand(cosines)
        above = {(i, j) for i, j in mutual_by_hand(cosines) if scores[i, j] >= 0.6}
        assert link("argmax", cosines, threshold=0.6) == above
        # σ(2 · log-odds + 1) ≥ 0.6, and from the threshold of the calibration on.
        odds = (scores / (1 - scores)) ** 2 * np.e
        likely = {(i, j) for i, j in np.ndindex(odds.shape) if odds[i, j] >= 1.5}
        calibration = Calibration(slope=2.0, intercept=1.0, threshold=0.9)
        options: dict[str, Any] = {"calibration": calibration}
        assert link("probability", cosines, **options, threshold=0.6) == likely
        likely = {(i, j) for i, j in likely if odds[i, j] >= 9}
        assert link("probability", cosines, **options) == likely
        assert link("argmax", cosines, **options) == mutual_by_hand(cosines)


@pytest.mark.parametrize("first", ["columns", "rows"])
@pytest.mark.parametrize("mu", [1.0, 0.25])
def test_dot_products_have_the_kernel_of_xlm_align(first: Any, mu: float) -> None:
    n_other_order = 0
    for products in draw_cosines():
        products = 20 * products
        plans = {}
        for order in ("columns", "rows"):
            plan = np.maximum(1e-6, products) ** (1 / mu)
            for _ in range(2):
                for axis in (1, 0) if order == "rows" else (0, 1):
                    plan = plan / plan.sum(axis=axis, keepdims=True)
            plans[order] = itermax_by_hand(plan)
        options: dict[str, Any] = {"similarity": "dot", "sharpness": 1 / mu}
        assert link("ot", products, **options, scale_first=first) == plans[first]
        n_other_order += plans["rows"] != plans["columns"]
        positive = np.maximum(1e-6, products)
        assert link("itermax", products, **options) == itermax_by_hand(positive)
        assert link("argmax", products, **options) == mutual_by_hand(positive)
    assert n_other_order > 3
    assert link("argmax", np.array([[-5.0]]), similarity="dot") == {(0, 0)}  # not below a threshold


@pytest.mark.parametrize("sharpness", [0.0, -1.0, float("nan"), float("inf")])
def test_sharpness_is_a_positive_number(tiny_encoder: Encoder, sharpness: float) -> None:
    with pytest.raises(InputError, match="the sharpness is"):
        AlignSettings.of(tiny_encoder, sharpness=sharpness)


def test_the_sharpness_belongs_to_the_similarity(tiny_encoder: Encoder) -> None:
    stored = {"alignment": {"sharpness": 7.0}}
    config = tiny_encoder.config
    with mock.patch.object(config, "calque", stored, create=True):
        assert AlignSettings.of(tiny_encoder).sharpness == 7.0
        assert AlignSettings.of(tiny_encoder, similarity="cosine").sharpness == 7.0
        assert AlignSettings.of(tiny_encoder, similarity="dot").sharpness == 1.0
        assert AlignSettings.of(tiny_encoder, similarity="dot", sharpness=3.0).sharpness == 3.0
    with pytest.raises(InputError, match="the sharpness is 0"):
        AlignSettings.of(tiny_encoder, sharpness=0.0)


def test_a_stored_calibration_is_used_with_the_settings_it_was_fitted_for(
    tiny_encoder: Encoder,
) -> None:
    calibration = {"slope": 0.5, "intercept": 1.0, "threshold": 0.3}
    alignment = {"method": "probability", "layer": 3, "calibration": calibration}
    with mock.patch.object(tiny_encoder.config, "calque", {"alignment": alignment}, create=True):
        stored = AlignSettings.of(tiny_encoder)
        assert stored.calibration == Calibration(**calibration)
        assert (stored.method, stored.min_score) == ("probability", 0.3)
        assert AlignSettings.of(tiny_encoder, layer=-2) == stored
        assert AlignSettings.of(tiny_encoder, threshold=0.0).min_score == 0
        same = AlignSettings.of(tiny_encoder, method="argmax")
        assert (same.calibration, same.min_score) == (stored.calibration, 0)
        others: list[dict[str, Any]] = [
            {"layer": 2},
            {"encode": "joint"},
            {"sharpness": 7.0},
            {"similarity": "dot"},
            {"unit": "subwords"},
            {"spelling": 0.0},  # as in `calque evaluate`
        ]
        for other in others:
            found = AlignSettings.of(tiny_encoder, **other)
            assert (found.method, found.calibration) == ("argmax", None)
            with pytest.raises(InputError, match="not calibrated for these settings"):
                AlignSettings.of(tiny_encoder, method="probability", **other)
    with pytest.raises(InputError, match="not calibrated for these settings"):
        WordAligner(tiny_encoder, method="probability")
    with pytest.raises(InputError, match=r"the threshold is 1\.5"):
        WordAligner(tiny_encoder, threshold=1.5)


def test_the_embedded_model_links_by_probability() -> None:
    settings = AlignSettings.of(Encoder.load("calque-mini"))
    assert settings.method == "probability"
    assert settings.calibration is not None
    assert settings.min_score == settings.calibration.threshold > 0


@pytest.mark.parametrize("encode", ["joint", "separate"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_words_are_linked_if_any_subwords_are(
    tiny_encoder: Encoder, pairs: list[Pair], encode: Any, similarity: Any
) -> None:
    """Every subword is given as a word of its own, and links are then read word by word."""
    aligner = WordAligner(
        tiny_encoder,
        method="ot",
        layer=2,
        encode=encode,
        similarity=similarity,
        unit="subwords",
        sharpness=5.0,
    )
    words = WordEncoder(tiny_encoder.tokenizer)
    layout = PairLayout.of(tiny_encoder, encode, "continue")
    n_several = 0
    for pair, found in zip(pairs, aligner.align(pairs), strict=True):
        windows = split_pairs(words, [pair], layout.limits)
        batch = build_pair_batch(windows, np.array([0]), layout)
        with torch.no_grad():
            (states,) = tiny_encoder(batch.tokens, [2])
        src, tgt = states[batch.src_positions], states[batch.tgt_positions]
        if similarity == "cosine":
            cosines = torch.cosine_similarity(src[:, None], tgt[None], dim=-1).double().numpy()
            plan = np.exp(5 * cosines)
        else:
            plan = np.maximum(1e-6, (src @ tgt.T).double().numpy()) ** 5
        links = itermax_by_hand(sinkhorn_by_hand(plan, 2))
        owners = batch.src_slots.tolist(), batch.tgt_slots.tolist()
        expected = {(owners[0][i], owners[1][j]) for i, j in links}
        n_several += len(expected) < len(links)
        assert set(found) == expected
    assert n_several > 3
    single = aligner.align_each(pairs[:5], [aligner.settings])[0]
    assert (single.links.scores > 0).all() and (single.links.scores <= 1).all()


def test_evidence_is_added_to_the_log_kernel() -> None:
    cosines = torch.tensor([[[0.9, 0.1], [0.8, 0.2]]])
    valid = torch.ones_like(cosines, dtype=torch.bool)
    settings = AlignSettings(method="argmax")
    links, scores = link_words(cosines, valid, settings)
    assert links[0].tolist() == [[True, False], [False, False]]
    logits = 20 * cosines[0].double()
    expected = (logits.softmax(0) * logits.softmax(1)).sqrt()
    torch.testing.assert_close(scores[0].double(), expected, rtol=1e-5, atol=1e-6)
    evidence = torch.tensor([[[0.0, 0.0], [0.0, 15.0]]])
    links, _ = link_words(cosines, valid, settings, evidence)
    assert links[0].tolist() == [[True, False], [False, True]]
