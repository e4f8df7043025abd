"""Linear maps by gradient steps: losses by hand, best maps, convergence to the closed form."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from calque.algorithms.procrustes import orthogonalize_step, solve_procrustes
from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.language_maps import load_maps
from calque.objectives.linear_map import (
    LinearMap,
    LinearMapSettings,
    LinkStates,
    PairRoles,
    sum_distances,
    sum_errors,
)
from calque.objectives.linked_words import WordPairBatch
from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import SpecialTokens

# Words of a source, words of a target, links with weights of 255; all of different subwords.
Pair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]
PAIRS: list[Pair] = [
    ([[10, 11], [12]], [[20], [21, 22]], [(0, 1, 255), (1, 0, 51)]),
    ([[13]], [[23], [24]], [(0, 1, 255)]),
    ([[14], [15, 16]], [[25]], [(1, 0, 255)]),
]


def collate(encoder: Encoder, languages: list[int], pairs: list[Pair] = PAIRS) -> WordPairBatch:
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = Ragged.of([[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs])
    arrays = (*sides, *words, links, Ragged.of([[number] for number in languages]))
    build = LinearMap(LinearMapSettings()).build_collator(SpecialTokens.of(encoder.tokenizer), None)
    batch = build(arrays, torch.Generator())
    assert isinstance(batch, WordPairBatch)
    return batch


@pytest.fixture
def frozen(tiny_encoder: Encoder) -> Encoder:
    """A frozen copy in training mode, with dropout."""
    encoder = copy.deepcopy(tiny_encoder).train().requires_grad_(False)
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    return encoder


def start(encoder: Encoder, languages: Sequence[str] = ("en-de",), **changes: Any) -> LinearMap:
    objective = LinearMap(LinearMapSettings(**changes))
    objective.start(encoder, languages)
    return objective


def draw_links(
    maps: Tensor, n_links: int, noise: float = 0.0, seed: int = 0, dtype: Any = torch.float32
) -> LinkStates:
    """Random links of all languages in turn; sources are mapped targets plus noise."""
    generator = torch.Generator().manual_seed(seed)
    n_languages, n_layers, hidden, _ = maps.shape
    languages = torch.arange(n_links) % n_languages
    tgt, error = torch.randn(2, n_layers, n_links, hidden, generator=generator, dtype=dtype)
    src = torch.einsum("nkd,knde->nke", tgt, maps[languages].to(dtype)) + noise * error
    weights = torch.rand(n_links, generator=generator, dtype=dtype) + 0.5
    return LinkStates(src, tgt, weights, languages)


def draw_maps(*shape: int, seed: int = 1) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))
    return q


# The loss.


def test_errors_by_hand() -> None:
    """Two languages, one layer, two dimensions; the second language has one link, of weight ½."""
    src = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [3.0, 3.0]]])
    tgt = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    linked = LinkStates(src, tgt, torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0, 0, 1]))
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    maps = torch.stack([swap, 2 * swap])[:, None]
    # (1, 2) − (0, 1); (0, 0) − (1, 0), twice; half of (3, 3) − (2, 2).
    assert sum_errors(linked, maps).tolist() == [[2 + 2 * 1], [0.5 * 2]]
    assert sum_distances(linked, 2).tolist() == [[4 + 2 * 1], [0.5 * 8]]
    assert linked.total_weights(3).tolist() == [3.0, 0.5, 0.0]


def test_errors_equal_a_loop_over_links() -> None:
    maps = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    linked = draw_links(maps + 0.1, 11, noise=1.0)
    expected = np.zeros((3, 2))
    for k in range(11):
        language, weight = int(linked.languages[k]), float(linked.weights[k])
        for layer in range(2):
            error = linked.src[layer, k] - linked.tgt[layer, k] @ maps[language, layer]
            expected[language, layer] += weight * float(error @ error)
    np.testing.assert_allclose(sum_errors(linked, maps).numpy(), expected, rtol=1e-5)


def test_gradients_are_exact_and_absent_languages_have_none() -> None:
    maps = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    linked = draw_links(torch.ones(2, 2, 3, 3), 5, noise=1.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda W: sum_errors(linked, W), (maps,))
    sum_errors(linked, maps).sum().backward()
    assert maps.grad is not None
    assert maps.grad[:2].abs().min() > 0
    assert not maps.grad[2].any()


def test_a_batch_without_links_has_a_zero_gradient(frozen: Encoder) -> None:
    objective = start(frozen)
    batch = collate(frozen, [0], [([[10]], [[20]], [])])
    loss = objective(frozen, objective.prepare(frozen, batch)).loss
    loss.backward()
    assert loss.item() == 0
    assert objective.maps.grad is not None and not objective.maps.grad.any()


def test_the_loss_is_the_mean_over_links_and_layers(frozen: Encoder) -> None:
    objective = start(frozen, ["en-de", "en-fr"], layers=[1, -1])
    linked = objective.prepare(frozen, collate(frozen, [0, 1, 0]))
    terms = objective(frozen, linked)
    squares = (linked.src - linked.tgt).square().sum(-1)  # the maps begin as identities
    expected = (squares * linked.weights).sum() / (2 * linked.weights.sum())
    torch.testing.assert_close(terms.loss, expected)
    torch.testing.assert_close(terms.metrics["unmapped"], expected)


# What is read.


def test_states_equal_those_of_the_model_in_use(frozen: Encoder, tiny_folder: Path) -> None:
    """All layers, without dropout in training mode; sentences are encoded separately."""
    from transformers import AutoModel

    objective = start(frozen)
    linked = objective.prepare(frozen, collate(frozen, [0, 0, 0]))
    assert frozen.training
    plain = AutoModel.from_pretrained(tiny_folder, dtype=torch.float32).eval()

    def read(words: list[list[int]]) -> dict[int, np.ndarray]:
        ids = torch.tensor([[0, *chain(*words), 2]])
        with torch.no_grad():
            states = torch.stack(plain(ids, output_hidden_states=True).hidden_states)[:, 0]
        return {int(token): states[:, k].numpy() for k, token in enumerate(ids[0])}

    expected_src, expected_tgt = [], []
    for src, tgt, links in PAIRS:
        src_states, tgt_states = read(src), read(tgt)
        expected_src += [src_states[src[i][0]] for i, _, _ in links]
        expected_tgt += [tgt_states[tgt[j][0]] for _, j, _ in links]
    for found, expected in ((linked.src, expected_src), (linked.tgt, expected_tgt)):
        np.testing.assert_allclose(found.numpy(), np.stack(expected, axis=1), atol=1e-5)
    assert linked.weights.tolist() == pytest.approx([1, 0.2, 1, 1])


def test_pairs_in_either_order_map_to_the_pivot(frozen: Encoder) -> None:
    """In de-en German comes first: its links are reversed and share the map of en-de."""
    forward = start(frozen, ["en-de", "en-fr"])
    turned = start(frozen, ["de-en", "en-de", "en-fr"])
    assert turned.roles == PairRoles(("de", "fr"), (0, 0, 1), (True, False, False))
    straight = forward.prepare(frozen, collate(frozen, [0, 0, 1]))
    mixed = turned.prepare(frozen, collate(frozen, [0, 1, 2]))
    assert straight.languages.tolist() == mixed.languages.tolist() == [0, 0, 0, 1]
    # The links of the first pair, two of them, are the other way round.
    torch.testing.assert_close(mixed.src[:, :2], straight.tgt[:, :2])
    torch.testing.assert_close(mixed.tgt[:, :2], straight.src[:, :2])
    torch.testing.assert_close(mixed.src[:, 2:], straight.src[:, 2:])


def test_words_can_be_means_of_subwords(frozen: Encoder) -> None:
    batch = collate(frozen, [0, 0, 0])
    first = start(frozen).prepare(frozen, batch)
    mean = start(frozen, words="mean").prepare(frozen, batch)
    is_single = torch.tensor([False, True, True, False])  # the source of a link has one subword
    same = (first.src == mean.src).all(dim=-1).all(dim=0)
    assert same.tolist() == is_single.tolist()


@pytest.mark.parametrize(
    ("languages", "changes", "message"),
    [
        (
            ["en-de"],
            {"solver": "procrustes"},
            "solver=procrustes cannot be combined with gradient steps",
        ),
        (["de-fr"], {}, "de-fr is not a pair of 'en' and another language"),
        (["en-en"], {}, "en-en is not a pair of 'en'"),
        (["en-de"], {"pivot": "fr"}, "en-de is not a pair of 'fr'"),
        (["en-de"], {"layers": [0, 9]}, "layer 9 does not exist"),
    ],
)
def test_errors_are_reported(
    frozen: Encoder, languages: list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        start(frozen, languages, **changes)


def test_a_trained_encoder_is_an_error(frozen: Encoder) -> None:
    next(frozen.parameters()).requires_grad_(True)
    with pytest.raises(InputError, match=r"needs a frozen encoder \(freeze it: .*encoder"):
        start(frozen)


# Learning.


def choose(linked: LinkStates, rows: Tensor) -> LinkStates:
    columns = linked.weights[rows], linked.languages[rows]
    return LinkStates(linked.src[:, rows], linked.tgt[:, rows], *columns)


def follow(objective: LinearMap, encoder: Encoder, linked: LinkStates, n_steps: int) -> None:
    """Take steps of Adam with a falling rate, each on some of the links."""
    optimizer = torch.optim.Adam([objective.maps], lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, n_steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(n_steps):
        rows = torch.randperm(len(linked.weights), generator=generator)[:256]
        optimizer.zero_grad()
        objective(encoder, choose(linked, rows)).loss.backward()
        optimizer.step()
        objective.after_step()
        schedule.step()


def test_steps_converge_to_the_closed_form(frozen: Encoder) -> None:
    """From batches with noise: nearly the error of Procrustes, nearly its maps, orthogonal."""
    objective = start(frozen, ["en-de", "en-fr"], layers=[0, 2])
    whole = draw_links(draw_maps(2, 2, 64, 64), 3000, noise=0.1)
    follow(objective, frozen, whole, 300)
    maps = objective.maps.detach()
    for language, rows in enumerate(whole.split(2)):
        for layer in range(2):
            src, tgt, weights = whole.src[layer, rows], whole.tgt[layer, rows], whole.weights[rows]
            W = solve_procrustes((tgt.mT @ (weights[:, None] * src)).double()).float()
            before, found, best = (
                float(weights @ (src - tgt @ M).square().sum(dim=1))
                for M in (torch.eye(64), maps[language, layer], W)
            )
            # Nearly orthogonal maps may do a little better than orthogonal ones.
            assert abs(found - best) < 0.01 * (before - best)
            torch.testing.assert_close(maps[language, layer], W, atol=0.1, rtol=0)
    gram = maps @ maps.mT
    torch.testing.assert_close(gram, torch.eye(64).expand_as(gram), atol=0.05, rtol=0)


def test_every_step_is_followed_by_the_orthogonal_step(frozen: Encoder) -> None:
    objective = start(frozen, beta=0.1)
    with torch.no_grad():
        objective.maps += 0.01 * torch.randn_like(objective.maps)
        objective.maps[0, 1] *= 100  # would diverge
    before = objective.maps.detach().clone()
    objective.after_step()
    torch.testing.assert_close(objective.maps.detach(), orthogonalize_step(before, 0.1))
    assert isinstance(objective.maps, torch.nn.Parameter)


# The best by validation.


def validate(objective: LinearMap, encoder: Encoder, maps: Tensor, linked: LinkStates) -> None:
    with torch.no_grad():
        objective.maps.copy_(maps)
        objective.eval()
        halves = [torch.arange(0, 8), torch.arange(8, 20)]
        for rows in halves:
            objective(encoder, choose(linked, rows))
        objective.after_validation()
        objective.train()


def test_the_best_of_every_language_and_layer_is_kept(frozen: Encoder, tmp_path: Path) -> None:
    objective = start(frozen, ["en-de", "en-fr", "en-ja"], layers=[1, 3])
    true = draw_maps(3, 2, 64, 64)
    linked = draw_links(true[:2], 20)  # none of Japanese
    wrong = draw_maps(3, 2, 64, 64, seed=5)
    first, second = wrong.clone(), wrong.clone()
    first[0, 0], second[1, 1], first[0, 1] = true[0, 0], true[1, 1], true[0, 1]
    second[2] = true[2]
    validate(objective, frozen, first, linked)
    validate(objective, frozen, second, linked)
    best = objective.best_maps
    assert torch.equal(best[0], true[0])  # of the first time
    assert torch.equal(best[1, 0], wrong[1, 0])  # the same at both
    assert torch.equal(best[1, 1], true[1, 1])  # of the second time
    assert objective.best_losses[0, 0] < 1e-8
    assert objective.best_losses[1, 1] < 1e-8  # of that time alone
    distances = sum_distances(linked, 3)[:2] / linked.total_weights(3)[:2, None]
    torch.testing.assert_close(objective.unmapped_losses[:2], distances)
    objective.save_files(frozen, tmp_path)
    found = load_maps(tmp_path, 64, 4)
    assert (found.languages, found.layers, found.pivot) == (("de", "fr", "ja"), (1, 3), "en")
    assert torch.equal(found.maps[:2], best[:2])
    assert torch.equal(found.maps[2], second[2])  # not judged: the last
    about = json.loads((tmp_path / "maps.json").read_text())["about"]
    assert (about["solver"], about["words"], about["beta"]) == ("gradient", "first", 0.01)
    assert about["validation"]["de"]["mapped"][0] == pytest.approx(0, abs=1e-6)
    assert about["validation"]["ja"] == {"unmapped": [None, None], "mapped": [None, None]}
    assert all(b < a for a, b in zip(*about["validation"]["de"].values(), strict=True))


def test_training_batches_do_not_count_as_validation(frozen: Encoder) -> None:
    objective = start(frozen, ["en-de", "en-fr"], layers=[1, 3])
    objective(frozen, draw_links(draw_maps(2, 2, 64, 64), 20))
    objective.after_validation()
    assert objective.best_losses.isinf().all()


def test_state_in_a_checkpoint(frozen: Encoder) -> None:
    names = {"maps", "best_maps", "best_losses", "unmapped_losses"}
    objective = start(frozen)
    assert set(objective.state_dict()) == names
    assert [name for name, p in objective.named_parameters() if p.requires_grad] == ["maps"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)
