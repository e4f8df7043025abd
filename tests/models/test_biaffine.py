"""The biaffine scores, against torch's own bilinear layer and sums as the paper writes them."""

from __future__ import annotations

import torch
from torch import nn

from calque.models.biaffine import IMPOSSIBLE, BiaffineHead
from calque.models.heads import NO_LABEL, mean_cross_entropy

# Two sentences, of 3 and 2 words, in the rows 0 to 4; row 5 is the root.
CELLS = torch.tensor([0, 1, 2, 3, 4])
IS_WORD = torch.tensor([[True, True, True], [True, True, False]])


def make_head() -> BiaffineHead:
    generator = torch.Generator().manual_seed(3)
    head = BiaffineHead(6, 3, generator, arc_size=5, relation_size=4).double().eval()
    with torch.no_grad():  # they begin at zero, which would hide everything
        for parameter in (head.arc, head.arc_bias, head.relation):
            parameter.normal_(generator=generator)
    return head


def draw_states() -> torch.Tensor:
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def test_arcs_as_written_in_the_paper() -> None:
    head = make_head()
    views = head.view(draw_states())
    scores = head.score_arcs(views, CELLS, IS_WORD)
    assert scores.shape == (2, 3, 4)
    for sentence, (first, heads) in enumerate([(0, [5, 0, 1, 2]), (3, [5, 3, 4])]):
        for word in range(len(heads) - 1):
            for place, row in enumerate(heads):
                d, h = views.arc_words[first + word], views.arc_heads[row]
                expected = d @ head.arc @ h + head.arc_bias @ h
                torch.testing.assert_close(scores[sentence, word, place], expected)
    assert (scores[1, :, 3] == IMPOSSIBLE).all()


def test_relations_as_torchs_bilinear_layer() -> None:
    head = make_head()
    views = head.view(draw_states())
    heads = torch.tensor([1, 5, 4, 0, 2])
    bilinear = nn.Bilinear(5, 5, 3, bias=False).double()
    with torch.no_grad():
        bilinear.weight.copy_(head.relation.permute(1, 0, 2))
    ones = torch.ones(5, 1, dtype=torch.float64)
    words = torch.cat([views.relation_words[:5], ones], dim=1)
    above = torch.cat([views.relation_heads[heads], ones], dim=1)
    torch.testing.assert_close(head.score_relations(views, heads), bilinear(words, above))


def test_the_root_is_a_head_like_any_other() -> None:
    head = make_head()
    states = draw_states()
    with torch.no_grad():
        head.root.copy_(states[1])
    scores = head.score_arcs(head.view(states), CELLS, IS_WORD)
    torch.testing.assert_close(scores[0, :, 0], scores[0, :, 2])
    assert not torch.allclose(scores[0, :, 0], scores[0, :, 1])


def test_scores_are_single_where_products_are_half() -> None:
    head = make_head().float()
    with torch.autocast("cpu", torch.bfloat16):
        views = head.view(draw_states().float())
        assert views.arc_words.dtype == torch.bfloat16
        assert head.score_arcs(views, CELLS, IS_WORD).dtype == torch.float32


def test_gradients() -> None:
    head = make_head()
    heads = torch.tensor([[2, 0, 1], [0, 1, NO_LABEL]])
    rows, relations = torch.tensor([1, 5, 0, 5, 3]), torch.tensor([0, 1, 2, 1, NO_LABEL])
    names = [name for name, _ in head.named_parameters()]

    def loss(states: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, weights, strict=True))

        def both(states: torch.Tensor) -> torch.Tensor:
            views = head.view(states)
            arcs = head.score_arcs(views, CELLS, IS_WORD).flatten(0, 1)
            kinds = head.score_relations(views, rows)
            return mean_cross_entropy(arcs, heads.flatten()) + mean_cross_entropy(kinds, relations)

        head.forward = both  # type: ignore[method-assign]
        found: torch.Tensor = torch.func.functional_call(head, given, (states,))
        return found

    states = draw_states().requires_grad_()
    assert torch.autograd.gradcheck(loss, (states, *head.parameters()))
