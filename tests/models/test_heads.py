from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from calque.models.heads import NO_LABEL, SentenceClassifier, mean_cross_entropy


def test_mean_over_labelled_rows() -> None:
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, NO_LABEL, 2, NO_LABEL, 1])
    expected = F.cross_entropy(scores[[0, 2, 4]], labels[[0, 2, 4]])
    assert float(mean_cross_entropy(scores, labels)) == pytest.approx(float(expected))


def test_no_label_at_all_is_no_loss() -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    loss = mean_cross_entropy(scores, torch.full((2,), NO_LABEL))
    loss.backward()
    assert loss.item() == 0 and scores.grad is not None and not scores.grad.any()


def test_half_precision_scores_have_a_single_precision_loss() -> None:
    scores = torch.randn(4, 3).bfloat16()
    assert mean_cross_entropy(scores, torch.zeros(4, dtype=torch.long)).dtype == torch.float32


def test_the_generator_decides_the_weights() -> None:
    one, same, other = (
        SentenceClassifier(8, 2, 0.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one.dense.weight, same.dense.weight)
    assert not torch.equal(one.dense.weight, other.dense.weight)
