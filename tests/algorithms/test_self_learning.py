"""Self-learning: matches by the dense formula, dropped scores, seeds, and recovered maps."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms import self_learning
from calque.algorithms.nearest import csls_scores, normalize_rows
from calque.algorithms.procrustes import IndexPairs, normalize_space, solve_rotation
from calque.algorithms.self_learning import (
    LearningRound,
    Matcher,
    Matches,
    SelfLearningSettings,
    SimilarityTable,
    refine_map,
    self_learn,
    unsupervised_seed,
)
from calque.errors import InputError

seeds = st.integers(0, 1000)
FEW = SelfLearningSettings(patience=5, n_neighbors=5)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(hidden: int, seed: int = 0) -> Tensor:
    q, _ = torch.linalg.qr(draw(hidden, hidden, seed=seed))
    return q


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_pair(n_words: int = 600, hidden: int = 30, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Two languages with a structure like that of words: topics of many sizes, some directions

    stronger than others; the first turned, with noise, its words in another order: word i of it
    means word `meaning(n)[i]`.
    """
    strengths = torch.arange(1, hidden + 1) ** -0.5
    sizes = torch.arange(1, 41) ** -0.7
    topics = torch.multinomial(sizes, n_words, replacement=True, generator=generator(5))
    tgt = (draw(40, hidden, seed=1)[topics] + 0.7 * draw(n_words, hidden, seed=2)) * strengths
    src = tgt @ rotation(hidden, 3) + noise * draw(n_words, hidden, seed=4) * strengths.mean()
    return normalize_space(src[meaning(n_words)])[0], normalize_space(tgt)[0]


def meaning(n_words: int) -> Tensor:
    return torch.randperm(n_words, generator=generator(6))


def precision(src: Tensor, tgt: Tensor, W: Tensor) -> float:
    found = ((src @ W.to(src)) @ tgt.T).argmax(dim=1)
    return float((found == meaning(len(src))).float().mean())


def seed_pairs(n_pairs: int, n_words: int = 600) -> IndexPairs:
    return IndexPairs(torch.arange(n_pairs), meaning(n_words)[:n_pairs])


# Matching.


@given(st.integers(2, 40), st.integers(2, 40), seeds)
def test_matches_by_the_dense_formula(n_src: int, n_tgt: int, seed: int) -> None:
    src = normalize_rows(draw(n_src, 6, seed=seed))
    tgt = normalize_rows(draw(n_tgt, 6, seed=seed + 1))
    W = rotation(6, seed + 2)
    found = Matcher(src, tgt, SelfLearningSettings(n_neighbors=2)).match(W)
    similar = src @ W @ tgt.T
    scores = csls_scores(similar, 2)
    own = torch.arange(n_src), torch.arange(n_tgt)
    torch.testing.assert_close(scores[own[0], found.forward], scores.amax(dim=1))
    torch.testing.assert_close(scores[found.backward, own[1]], scores.amax(dim=0))
    expected = float(similar.amax(dim=1).mean() + similar.amax(dim=0).mean()) / 2
    assert found.objective == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_union_and_mutual_pairs(n_src: int, n_tgt: int, data: st.DataObject) -> None:
    def choose(n_words: int, n_others: int) -> list[int]:
        words = st.lists(st.integers(-1, n_others - 1), min_size=n_words, max_size=n_words)
        return data.draw(words)

    forward, backward = choose(n_src, n_tgt), choose(n_tgt, n_src)
    there = [(i, j) for i, j in enumerate(forward) if j >= 0]
    back = [(i, j) for j, i in enumerate(backward) if i >= 0]
    matches = Matches(torch.tensor(forward), torch.tensor(backward), 0.0)
    union, mutual = (
        sorted(zip(pairs.src.tolist(), pairs.tgt.tolist(), strict=True))
        for pairs in (matches.union(), matches.mutual())
    )
    assert union == sorted(there + back)
    assert mutual == sorted(set(there) & set(back))
    turned = Matches(matches.backward, matches.forward, 0.0).mutual()
    assert sorted(zip(turned.tgt.tolist(), turned.src.tolist(), strict=True)) == mutual


@given(st.integers(2, 30), st.integers(2, 30), st.floats(0.05, 1.0), seeds)
def test_dropped_scores_leave_the_next_best(n_src: int, n_tgt: int, keep: float, seed: int) -> None:
    """Of every word, the match is that of the rank that was drawn, in the order of all scores."""
    src = normalize_rows(draw(n_src, 6, seed=seed).double())
    tgt = normalize_rows(draw(n_tgt, 6, seed=seed + 1).double())
    matcher = Matcher(src, tgt, SelfLearningSettings(n_neighbors=2))
    found = matcher.match(torch.eye(6), keep, generator(seed))
    scores = csls_scores(src @ tgt.T, 2)
    source = generator(seed)  # drawn for the source words first, then for the others
    for way, all_scores in ((found.forward, scores), (found.backward, scores.T)):
        order = all_scores.argsort(dim=1, descending=True)
        drawn, owners = matcher._draw(len(way), keep, source)
        for rank, own in zip(drawn.tolist(), owners.tolist(), strict=True):
            expected = int(order[own, rank - 1]) if rank <= order.shape[1] else -1
            assert int(way[own]) == expected


def test_pairs_of_both_directions() -> None:
    matches = Matches(torch.tensor([1, 0, -1]), torch.tensor([1, -1]), 0.0)
    union = matches.union()
    assert list(zip(union.src.tolist(), union.tgt.tolist(), strict=True)) == [
        (0, 1),
        (1, 0),
        (1, 0),
    ]
    mutual = matches.mutual()
    assert (mutual.src.tolist(), mutual.tgt.tolist()) == ([1], [0])


# Dropped scores.


def draw_matches(similar: Tensor, keep: float, n_times: int) -> Tensor:
    """The rank, from 1, of the first source's match by CSLS: often, with scores dropped."""
    n_tgt = similar.shape[1]
    # Rows whose products are the given similarities: tgt is the identity.
    matcher = Matcher(similar, torch.eye(n_tgt), SelfLearningSettings(n_neighbors=1))
    order = csls_scores(similar, 1)[0].argsort(descending=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, n_tgt + 1)
    source, found = generator(1), []
    for _ in range(n_times):
        match = int(matcher.match(torch.eye(n_tgt), keep, source).forward[0])
        found.append(0 if match < 0 else int(ranks[match]))
    return torch.tensor(found)


def dense_drop(scores: Tensor, keep: float, dropped: float, source: torch.Generator) -> int:
    """The rank of the best score after others were set to `dropped`, one number for each."""
    kept = torch.rand(len(scores), generator=source) < keep
    best = int(torch.where(kept, scores, dropped).argmax())
    return 1 + int((scores > scores[best]).sum())


def test_a_dropped_score_never_wins() -> None:
    """All scores are negative, as with CSLS they often are: what is dropped is −∞, not 0.

    Set to 0, as VecMap does, a dropped score would win over all kept ones and the match would be
    any word. The best kept one has a geometrically distributed rank instead.
    """
    n_tgt, keep, n_times = 12, 0.5, 4000
    similar = torch.full((2, n_tgt), -0.9)
    similar[0] = -torch.linspace(0.05, 0.6, n_tgt)
    assert bool((csls_scores(similar, 1)[0] <= 0).all())
    ranks = draw_matches(similar, keep, n_times)
    expected = [keep * (1 - keep) ** (rank - 1) for rank in range(1, 6)]

    def differ(found: Tensor) -> float:
        counts = [int((found == rank).sum()) for rank in range(1, 6)]
        rest = len(found) - sum(counts)
        shares = [*expected, 1 - sum(expected)]
        return float(scipy.stats.chisquare([*counts, rest], [n_times * s for s in shares]).pvalue)

    assert differ(ranks) > 0.001
    scores, source = csls_scores(similar, 1)[0], generator(2)
    dense = [dense_drop(scores, keep, -math.inf, source) for _ in range(n_times)]
    trap = [dense_drop(scores, keep, 0.0, source) for _ in range(n_times)]
    assert differ(torch.tensor(dense)) > 0.001  # the rank is what dropping to −∞ gives
    assert differ(torch.tensor(trap)) < 1e-9  # and this is what the test would catch


def test_no_match_if_all_scores_are_dropped() -> None:
    similar = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    ranks = draw_matches(similar, 0.5, 2000)
    assert float((ranks == 0).float().mean()) == pytest.approx(0.25, abs=0.03)


def test_dropping_keeps_the_hubness_and_the_objective() -> None:
    src, tgt = make_pair(100)
    matcher, W = Matcher(src, tgt, FEW), torch.eye(30)
    whole, dropped = matcher.match(W), matcher.match(W, 0.1, generator())
    assert dropped.objective == pytest.approx(whole.objective, abs=1e-6)
    assert float((whole.forward == dropped.forward).float().mean()) < 0.3


# Starts.


def test_the_root_agrees_with_scipy() -> None:
    matrix = draw(5, 8).double()  # of full rank: sqrtm is not exact otherwise
    expected = scipy.linalg.sqrtm((matrix @ matrix.T).numpy()).real
    np.testing.assert_allclose(self_learning._similarity_root(matrix).numpy(), expected, atol=1e-8)


def test_the_root_of_many_words() -> None:
    matrix = draw(30, 5).double()
    root = self_learning._similarity_root(matrix)
    torch.testing.assert_close(root @ root, matrix @ matrix.T)
    assert float(torch.linalg.eigvalsh(root).min()) > -1e-9


def test_the_unsupervised_seed_finds_words_of_a_rotated_space() -> None:
    src, tgt = make_pair(noise=0.0)
    pairs = unsupervised_seed(src, tgt, SelfLearningSettings())
    right = meaning(600)[pairs.src] == pairs.tgt
    assert float(right.float().mean()) > 0.95


@given(st.integers(5, 40), st.integers(1, 8), seeds)
def test_the_unsupervised_seed_does_not_depend_on_the_bases(
    n_words: int, hidden: int, seed: int
) -> None:
    src, tgt = (normalize_space(draw(n_words, hidden, seed=seed + n).double())[0] for n in (0, 1))
    turned = src @ rotation(hidden, seed + 2).double()
    one, other = (unsupervised_seed(side, tgt, SelfLearningSettings()) for side in (src, turned))
    assert torch.equal(one.src, other.src)
    assert torch.equal(one.tgt, other.tgt)


@given(st.integers(1, 20), st.integers(1, 8), seeds)
def test_a_root_squared_is_the_product(n_words: int, hidden: int, seed: int) -> None:
    matrix = draw(n_words, hidden, seed=seed).double()
    root = self_learning._similarity_root(matrix)
    torch.testing.assert_close(root @ root, matrix @ matrix.T, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(root, root.T)
    assert float(torch.linalg.eigvalsh(root).min()) > -1e-7


def test_the_unsupervised_seed_uses_the_most_frequent_words() -> None:
    src, tgt = make_pair()
    pairs = unsupervised_seed(src, tgt[:300], SelfLearningSettings(n_start_words=200))
    assert len(pairs) == 400
    assert int(pairs.src.max()) < 200
    assert int(pairs.tgt.max()) < 200


# The loop.


@pytest.mark.parametrize("noise", [0.3, 0.7])
def test_few_pairs_are_enough(noise: float) -> None:
    src, tgt = make_pair(noise=noise)
    start = seed_pairs(15)
    learned = self_learn(src, tgt, start, FEW, generator())
    assert precision(src, tgt, solve_rotation(src, tgt, start)) < 0.65
    assert precision(src, tgt, learned.map) > 0.97


def test_no_pairs_are_needed_for_a_structured_space() -> None:
    src, tgt = make_pair(noise=0.7)
    start = unsupervised_seed(src, tgt, FEW)
    first = float((meaning(600)[start.src] == start.tgt).float().mean())
    learned = self_learn(src, tgt, start, FEW, generator())
    assert 0.01 < first < 0.5
    assert precision(src, tgt, learned.map) > 0.97
    torch.testing.assert_close(
        learned.map.mT @ learned.map, torch.eye(30, dtype=torch.float64), atol=1e-9, rtol=0
    )


def test_the_share_of_kept_scores_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_learning, "fast_dtype", lambda tensor: tensor.dtype)
    src, tgt = make_pair(200)
    seen: list[LearningRound] = []
    learned = self_learn(src, tgt, seed_pairs(40, 200), FEW, generator(), seen.append)
    assert seen == learned.rounds
    keeps = list(dict.fromkeys(entry.keep for entry in seen))
    assert keeps == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0])
    assert [entry.number for entry in seen] == list(range(1, len(seen) + 1))
    # Not before `patience` rounds without improvement, and not later.
    best, improved, expected = -math.inf, 0, 0.1
    for entry in seen:
        if entry.number - improved > FEW.patience:
            expected, improved = min(1.0, 2 * expected), entry.number
        assert entry.keep == expected
        if entry.objective - best >= FEW.threshold:
            best, improved = entry.objective, entry.number
    assert len(seen) - improved == FEW.patience


def test_the_last_rounds_are_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """After rounds in low precision, the result is one that exact rounds would keep."""
    asked: list[bool] = []

    class Spy(Matcher):
        def match(  # type: ignore[override]
            self, *args: object, low_precision: bool = False
        ) -> Matches:
            asked.append(low_precision)
            return super().match(*args, low_precision=low_precision)  # type: ignore[arg-type]

    monkeypatch.setattr(self_learning, "fast_dtype", lambda tensor: torch.bfloat16)
    monkeypatch.setattr(self_learning, "Matcher", Spy)
    src, tgt = make_pair(noise=0.7)
    learned = self_learn(src, tgt, seed_pairs(15), FEW, generator())
    n_exact = asked.count(False)
    assert asked == [True] * (len(asked) - n_exact) + [False] * n_exact
    assert n_exact >= 2
    assert learned.rounds[-1].objective <= learned.rounds[-2].objective + FEW.threshold
    assert precision(src, tgt, learned.map) > 0.97


def test_low_precision_changes_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_learning, "fast_dtype", lambda tensor: torch.bfloat16)
    src, tgt = make_pair(noise=0.7)
    matcher, W = Matcher(src, tgt, FEW), solve_rotation(src, tgt, seed_pairs(600))
    exact, rough = matcher.match(W), matcher.match(W, low_precision=True)
    assert rough.objective == pytest.approx(exact.objective, abs=1e-3)
    assert float((rough.forward == exact.forward).float().mean()) > 0.97


def test_the_last_dictionary_uses_all_scores() -> None:
    src, tgt = make_pair(200)
    learned = self_learn(src, tgt, seed_pairs(40, 200), FEW, generator())
    assert len(learned.pairs) == 400
    assert learned.rounds[-1].keep == 1.0
    torch.testing.assert_close(learned.map, solve_rotation(src, tgt, learned.pairs))


def test_the_random_seed_decides() -> None:
    src, tgt = make_pair(200)
    runs = [self_learn(src, tgt, seed_pairs(20, 200), FEW, generator(seed)) for seed in (1, 1, 2)]
    assert runs[0].rounds == runs[1].rounds
    assert torch.equal(runs[0].map, runs[1].map)
    assert runs[0].rounds != runs[2].rounds


def test_rounds_are_limited() -> None:
    src, tgt = make_pair(100)
    settings = SelfLearningSettings(max_rounds=3, n_neighbors=5)
    assert len(self_learn(src, tgt, seed_pairs(20, 100), settings, generator()).rounds) == 3


def test_only_frequent_words_are_matched() -> None:
    src, tgt = make_pair(200)
    settings = SelfLearningSettings(patience=3, n_words=50, n_neighbors=5)
    learned = self_learn(src, tgt, seed_pairs(40, 200), settings, generator())
    assert len(learned.pairs) == 100
    assert int(torch.cat([learned.pairs.src, learned.pairs.tgt]).max()) < 50


def test_no_words() -> None:
    with pytest.raises(InputError, match="has no vectors"):
        Matcher(draw(0, 3), draw(5, 3), FEW)


# Refinement.


def test_refinement_improves_on_its_start() -> None:
    src, tgt = make_pair(noise=0.7)
    start = seed_pairs(15)
    refined = refine_map(src, tgt, start, FEW)
    before = precision(src, tgt, solve_rotation(src, tgt, start))
    assert before < 0.4
    assert precision(src, tgt, refined.map) > max(0.97, before)
    assert len(refined.rounds) == 6
    objectives = [entry.objective for entry in refined.rounds]
    W = refined.map
    assert Matcher(src, tgt, FEW).match(W).objective == pytest.approx(max(objectives), abs=1e-6)


def test_refinement_keeps_a_start_that_is_better() -> None:
    src, tgt = make_pair(100, noise=0.0)
    refined = refine_map(src, tgt, seed_pairs(100, 100), FEW, n_rounds=2)
    assert precision(src, tgt, refined.map) == 1.0


# The table of similarities, stored or computed block by block.

table_sizes = st.integers(1, 40)


def draw_double(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def _small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_learning, "BLOCK", 7)
        patch.setattr(self_learning, "CPU_BLOCK", 4)
        yield


def make_table(n_src: int, n_tgt: int, stored: bool, seed: int) -> tuple[SimilarityTable, Tensor]:
    src, tgt = draw_double(n_src, 5, seed=seed), draw_double(n_tgt, 5, seed=seed + 1)
    table = SimilarityTable(n_src, n_tgt, src, max_bytes=1 << 20 if stored else 0)
    assert (table.scores is not None) == stored
    table.fill(src, tgt)
    return table, src @ tgt.mT


@pytest.mark.usefixtures("_small_blocks")
@given(table_sizes, table_sizes, st.booleans(), seeds, st.data())
def test_topk_of_rows_and_columns(
    n_src: int, n_tgt: int, stored: bool, seed: int, data: st.DataObject
) -> None:
    table, scores = make_table(n_src, n_tgt, stored, seed)
    k = data.draw(st.integers(1, min(n_src, n_tgt)))
    by_src, by_tgt = table.topk(k)
    for found, expected in ((by_src, scores.numpy()), (by_tgt, scores.numpy().T)):
        np.testing.assert_allclose(found.numpy(), -np.sort(-expected, axis=1)[:, :k], atol=1e-12)


@pytest.mark.usefixtures("_small_blocks")
@given(table_sizes, table_sizes, st.booleans(), seeds, st.data())
def test_ranked_words(n_src: int, n_tgt: int, stored: bool, seed: int, data: st.DataObject) -> None:
    """The n-th of the sorted scores; beyond the last there is none."""
    table, scores = make_table(n_src, n_tgt, stored, seed)
    for way, all_scores, n_words in (
        (table.ranked_targets, scores.numpy(), n_src),
        (table.ranked_sources, scores.numpy().T, n_tgt),
    ):
        n_others = all_scores.shape[1]
        drawn = st.lists(st.integers(1, n_others + 3), min_size=n_words, max_size=n_words)
        ranks = sorted(data.draw(drawn))
        penalties = draw_double(n_others, seed=seed + 2)
        order = np.argsort(-(all_scores - penalties.numpy()), axis=1)
        expected = [
            row[rank - 1] if rank <= n_others else -1
            for row, rank in zip(order, ranks, strict=True)
        ]
        assert way(torch.tensor(ranks), penalties).tolist() == expected


@pytest.mark.usefixtures("_small_blocks")
@given(table_sizes, table_sizes, st.booleans(), seeds)
def test_a_table_can_be_filled_again(n_src: int, n_tgt: int, stored: bool, seed: int) -> None:
    table, _ = make_table(n_src, n_tgt, stored, seed)
    table.ranked_targets(torch.ones(n_src, dtype=torch.int64), torch.zeros(n_tgt).double())
    src, tgt = draw_double(n_src, 5, seed=seed + 3), draw_double(n_tgt, 5, seed=seed + 4)
    table.fill(src, tgt)
    torch.testing.assert_close(table.topk(1)[0][:, 0], (src @ tgt.mT).amax(dim=1))
