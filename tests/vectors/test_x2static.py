"""X2Static and pooling compared with slow loops and torch's SparseAdam."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.vectors.reference import compute_states
from torch.utils._python_dispatch import TorchDispatchMode

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.vectors import x2static
from calque.vectors.corpus import (
    VocabularyLimits,
    WordCorpus,
    number_corpus,
)
from calque.vectors.extract import create_learner, learn
from calque.vectors.occurrences import find_occurrences, plan_block
from calque.vectors.x2static import (
    WordTable,
    X2StaticLearner,
    X2StaticSettings,
    keep_probabilities,
    negative_sampling,
    negative_sampling_loss,
    negative_sampling_signs,
)

CPU = torch.device("cpu")


# The loss.


def test_loss_and_gradient_by_hand() -> None:
    """Two targets with two negatives each, in a table of three words."""
    table = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    contexts = torch.tensor([[1.0, 1.0], [0.5, -1.0]])
    words = torch.tensor([[0, 1, 2], [1, 0, 2]])
    scores = (table[words] * contexts[:, None]).sum(-1)
    assert scores.tolist() == [[1.0, 2.0, 0.0], [-2.0, 0.5, -1.5]]
    exponents, gradient = negative_sampling(scores, negative_sampling_signs(3, CPU))

    def log1pexp(x: float) -> float:
        return math.log(1 + math.exp(x))

    first = log1pexp(-1) + log1pexp(2) + log1pexp(0)
    second = log1pexp(2) + log1pexp(0.5) + log1pexp(-1.5)
    assert negative_sampling_loss(exponents).item() == pytest.approx(first + second, rel=1e-6)
    # d/ds log(1 + e^−s) = −1/(1 + e^s); d/ds log(1 + e^s) = 1/(1 + e^−s).
    assert gradient[0].tolist() == pytest.approx([-0.2689414 / 2, 0.8807971 / 2, 0.25], rel=1e-5)
    assert gradient[1].tolist() == pytest.approx(
        [-0.8807971 / 2, 0.6224593 / 2, 0.1824255 / 2], rel=1e-5
    )


def test_clamped_scores_have_no_gradient() -> None:
    scores = torch.tensor([[-50.0, 50.0, 20.0]])
    exponents, gradient = negative_sampling(scores, negative_sampling_signs(3, CPU))
    assert negative_sampling_loss(exponents).item() == pytest.approx(60, abs=1e-6)
    assert gradient.tolist() == [[0.0, 0.0, pytest.approx(1.0)]]


@settings(max_examples=20)
@given(
    st.lists(
        st.lists(
            st.floats(-25, 25).filter(lambda x: abs(abs(x) - 20) > 1e-3), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=4,
    )
)
def test_gradient_of_the_loss(rows: list[list[float]]) -> None:
    scores = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    signs = negative_sampling_signs(3, CPU).double()

    def mean_loss(scores: torch.Tensor) -> torch.Tensor:
        return negative_sampling_loss(negative_sampling(scores, signs)[0]) / len(scores)

    (expected,) = torch.autograd.grad(mean_loss(scores), scores)
    torch.testing.assert_close(negative_sampling(scores, signs)[1], expected)
    assert torch.autograd.gradcheck(mean_loss, [scores])


# The table.


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 12))
def test_steps_of_sparse_adam(seed: int, n_words: int) -> None:
    """The tables are so small that words repeat in every step."""
    table = WordTable.create(n_words, 6, seed, CPU)
    module = torch.nn.Embedding(n_words, 6, sparse=True)
    module.weight.data.copy_(table.vectors)
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(seed)
    for n_targets in ([5], [1, 4], [2, 2, 1]):
        contexts = 10 * torch.randn(5, 6, generator=random)
        words = torch.randint(0, n_words, (5, 4), generator=random)
        loss, expected = table.take_steps(contexts, words, n_targets, 1e-2), 0.0
        for context, step in zip(contexts.split(n_targets), words.split(n_targets), strict=True):
            scores = (module(step) * context[:, None]).sum(-1).clamp(-20, 20)
            # As in the release: the mean loss of the targets, and of each column of negatives.
            parts = [torch.log(1 + torch.exp(-scores[:, 0])).mean()]
            parts += [torch.log(1 + torch.exp(scores[:, k])).mean() for k in (1, 2, 3)]
            optimizer.zero_grad()
            torch.stack(parts).sum().backward()
            optimizer.step()
            expected += len(step) * sum(part.item() for part in parts)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(table.vectors, module.weight.detach(), atol=2e-6, rtol=0)


class Operators(TorchDispatchMode):
    """Counts the operators of torch that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def test_steps_are_few_operators_without_synchronization(
    tiny_encoder: Encoder, corpus: WordCorpus
) -> None:
    """A GPU would be idle while operators are launched, or while the CPU waits for a result."""

    def count(batch_sentences: int) -> Counter[str]:
        settings = X2StaticSettings(subsample=1, batch_sentences=batch_sentences, n_epochs=1)
        learner = create_learner(corpus, tiny_encoder, settings)
        found = find_occurrences(corpus, np.arange(len(corpus)), learner.choose(0))
        block = plan_block(tiny_encoder, corpus, found, learner.view)
        vectors = torch.randn(len(block.rows), tiny_encoder.hidden_size)
        with Operators() as operators:
            learner.update(0, block, vectors)
        return operators.counts

    one, three = count(len(corpus)), count(len(corpus) // 3)
    assert three.total() - one.total() <= 2 * 21
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"}
    assert not waiting & set(three)
    assert "_to_copy" not in three  # the block is on the device already


def test_initial_vectors() -> None:
    table = WordTable.create(500, 40, 1, CPU)
    assert table.vectors.abs().max() <= 1 / 40
    assert table.vectors.std().item() == pytest.approx(2 / 40 / math.sqrt(12), rel=0.02)
    assert table.vectors.equal(WordTable.create(500, 40, 1, CPU).vectors)
    assert not table.vectors.equal(WordTable.create(500, 40, 2, CPU).vectors)


# Learning.


def test_a_single_word_has_no_context(tiny_encoder: Encoder, tmp_path: Path) -> None:
    limits = VocabularyLimits(min_count=1)
    corpus = number_corpus(
        tiny_encoder.tokenizer, [["cat"]], tmp_path, max_subwords=9, limits=limits
    )
    for context, n_targets in (("others", 0), ("all", 1)):
        settings = X2StaticSettings(context=context, subsample=1, n_epochs=1)
        learner = create_learner(corpus, tiny_encoder, settings)
        assert isinstance(learner, X2StaticLearner)
        learn(tiny_encoder, corpus, learner, 2)
        assert learner.totals[0] == n_targets
        assert learner.vectors().isfinite().all()


def test_layers_above_the_requested_one_do_not_run(
    tiny_encoder: Encoder, corpus: WordCorpus
) -> None:
    ran: list[int] = []
    layers = tiny_encoder.family.get_layers(tiny_encoder.model)
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(layers, start=1)
    ]
    learn(tiny_encoder, corpus, create_learner(corpus, tiny_encoder, None), 2)
    for hook in hooks:
        hook.remove()
    assert set(ran) == {1, 2}


def test_keep_probabilities_by_hand() -> None:
    # f = 0.8 and 0.2: √(0.1/0.8) + 0.1/0.8 and √(0.1/0.2) + 0.1/0.2, at most 1.
    assert keep_probabilities(np.array([80, 20]), 0.1) == pytest.approx([0.47855339, 1])


def test_negatives_follow_the_root_of_the_count(tiny_encoder: Encoder, tmp_path: Path) -> None:
    text = [["a"] * 64 + ["b"] * 16 + ["c"] * 4]
    corpus = number_corpus(
        tiny_encoder.tokenizer,
        text,
        tmp_path,
        max_subwords=126,
        limits=VocabularyLimits(min_count=1),
    )
    learner = X2StaticLearner(corpus, 4, X2StaticSettings(), CPU)
    drawn = learner._draw_negatives(0, 5000)
    assert drawn.shape == (5000, 10)
    shares = torch.bincount(drawn.flatten(), minlength=3) / drawn.numel()
    # √64 : √16 : √4 = 8 : 4 : 2; three standard deviations of a share are 0.007 at most.
    np.testing.assert_allclose(shares, [8 / 14, 4 / 14, 2 / 14], atol=0.007)
    assert not drawn.equal(learner._draw_negatives(1, 5000))


@pytest.mark.parametrize("context", ["others", "all"])
def test_one_epoch_of_a_slow_loop(
    tiny_encoder: Encoder,
    corpus: WordCorpus,
    sentences: list[list[str]],
    context: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop has the same random numbers, and torch's optimizer."""
    monkeypatch.setattr(x2static, "BLOCK_SENTENCES", 12)
    settings = X2StaticSettings(context, 3, 0.02, 0.01, batch_sentences=4, n_epochs=1, seed=5)
    learner = create_learner(corpus, tiny_encoder, settings)
    assert isinstance(learner, X2StaticLearner)
    module = torch.nn.Embedding(len(corpus.words), tiny_encoder.hidden_size, sparse=True)
    module.weight.data.copy_(learner.vectors())
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.01)
    order, n_targets = learner.order(0), 0
    for block in range(-(-len(order) // 12)):
        index = order[block * 12 : block * 12 + 12]
        found = find_occurrences(corpus, index, learner.choose(block))
        negatives = iter(learner._draw_negatives(block, len(found.rows)))
        targets = iter(zip(found.rows.tolist(), found.starts.tolist(), strict=True))
        for first in range(0, len(index), 4):
            losses = []
            for number, n_found in zip(
                index[first : first + 4], found.n_found[first : first + 4], strict=True
            ):
                states, spans = compute_states(tiny_encoder, sentences[number], 2)
                for row, start in itertools.islice(targets, int(n_found)):
                    word = sentences[number][[span[0] - 1 for span in spans].index(start)]
                    assert word == corpus.words[row]
                    own = next(span for span in spans if span[0] - 1 == start)
                    tokens = range(len(states))
                    if context == "others":
                        tokens = [k for k in tokens[1:-1] if k not in own]
                    mean = states[list(tokens)].mean(0)
                    scores = [(1, mean @ module(torch.tensor(row)))]
                    scores += [(-1, mean @ module(negative)) for negative in next(negatives)]
                    losses.append(sum(torch.log(1 + torch.exp(-y * s)) for y, s in scores))
            if losses:
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
                n_targets += len(losses)
    learn(tiny_encoder, corpus, learner, 2)
    assert learner.totals[0] == n_targets > 20
    torch.testing.assert_close(learner.vectors(), module.weight.detach(), atol=2e-5, rtol=0)


def test_frequent_words_are_subsampled(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    learner = X2StaticLearner(corpus, 4, X2StaticSettings(subsample=1e-3), CPU)
    index = np.arange(len(corpus))
    counts = np.zeros(len(corpus.words))
    for block in range(200):
        found = find_occurrences(corpus, index, learner.choose(block))
        counts += np.bincount(found.rows, minlength=len(counts))
    kept = keep_probabilities(corpus.counts, 1e-3)
    np.testing.assert_allclose(counts / 200, kept * corpus.counts, rtol=0.25)


@pytest.mark.parametrize("layer", [0, 3])
def test_pooling_of_a_loop(
    tiny_encoder: Encoder, corpus: WordCorpus, sentences: list[list[str]], layer: int
) -> None:
    learner = create_learner(corpus, tiny_encoder, None)
    learn(tiny_encoder, corpus, learner, layer)
    seen: dict[str, list[torch.Tensor]] = {word: [] for word in corpus.words}
    for words in sentences:
        states, spans = compute_states(tiny_encoder, words, layer)
        for word, span in zip(words, spans, strict=True):
            if word in seen:
                seen[word].append(states[span].mean(0))
    expected = torch.stack([torch.stack(found).mean(0) for found in seen.values()])
    torch.testing.assert_close(learner.vectors(), expected, atol=1e-5, rtol=1e-4)


def test_same_seed_same_vectors(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    def learn_with(seed: int) -> torch.Tensor:
        settings = X2StaticSettings(subsample=0.01, n_epochs=2, seed=seed)
        learner = create_learner(corpus, tiny_encoder, settings)
        learn(tiny_encoder, corpus, learner, 2)
        return learner.vectors()

    assert learn_with(1).equal(learn_with(1))
    assert not torch.allclose(learn_with(1), learn_with(2))


def test_the_loss_decreases(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    """The loss starts at 11 log 2 and decreases."""
    settings = X2StaticSettings(subsample=1, n_epochs=1, learning_rate=1e-6)
    learner = create_learner(corpus, tiny_encoder, settings)
    assert isinstance(learner, X2StaticLearner)
    learn(tiny_encoder, corpus, learner, 2)
    assert (learner.totals[1] / learner.totals[0]).item() == pytest.approx(
        11 * math.log(2), rel=0.02
    )
    settings = X2StaticSettings(subsample=1, n_epochs=30, learning_rate=1e-2, batch_sentences=8)
    learner = create_learner(corpus, tiny_encoder, settings)
    assert isinstance(learner, X2StaticLearner)
    learn(tiny_encoder, corpus, learner, 2)
    assert (learner.totals[1] / learner.totals[0]).item() < 5


@pytest.mark.parametrize(
    "settings",
    [
        {"n_epochs": 0},
        {"subsample": 0},
        {"n_negatives": 0},
        {"learning_rate": -1},
        {"context": "x"},
    ],
)
def test_invalid_settings(
    tiny_encoder: Encoder, corpus: WordCorpus, settings: dict[str, object]
) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        create_learner(corpus, tiny_encoder, X2StaticSettings(**settings))


@pytest.mark.gpu
def test_same_vectors_on_a_gpu(tiny_folder: Path, corpus: WordCorpus) -> None:
    """Pooling has no random numbers, which depend on the device."""
    encoder = Encoder.load(tiny_folder, device="cuda")
    expected = create_learner(corpus, Encoder.load(tiny_folder), None)
    learn(Encoder.load(tiny_folder), corpus, expected, 2)
    learner = create_learner(corpus, encoder, None)
    learn(encoder, corpus, learner, 2)
    torch.testing.assert_close(learner.vectors().cpu(), expected.vectors(), atol=1e-4, rtol=1e-3)
    tables = [WordTable.create(20, 8, 1, torch.device(name)) for name in ("cpu", "cuda")]
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        contexts = torch.randn(30, 8, generator=random)
        words = torch.randint(0, 20, (30, 4), generator=random)
        for table in tables:
            device = table.vectors.device
            table.take_steps(contexts.to(device), words.to(device), [10, 20], 1e-2)
    torch.testing.assert_close(tables[1].vectors.cpu(), tables[0].vectors, atol=1e-5, rtol=0)
