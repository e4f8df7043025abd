"""L2 alignment: losses by hand and against torch, regularizers, and complete runs."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F

from calque.errors import InputError
from calque.objectives import build_objective
from calque.objectives.contrastive import WordContrastiveSettings
from calque.objectives.linear_map import LinearMapSettings
from calque.objectives.linked_words import LinkedWordsSettings
from calque.objectives.regression import L2Settings, Regression, l2_loss
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens
from calque.training.loop import train
from calque.training.recipe import Recipe
from calque.training.recipe_io import parse_recipe
from calque.training.telemetry import read_metrics
from calque.types import LossTerms

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder

Pair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]
# Words as lists of subwords, and links with weights of 255; the second pair has none.
PAIRS: list[Pair] = [
    ([[10, 11], [12], [13]], [[20], [21, 22, 23], [24]], [(0, 1, 255), (1, 0, 51)]),
    ([[14]], [[26], [27]], []),
    ([[15], [16, 17]], [[28], [29, 30]], [(1, 1, 255), (0, 0, 255)]),
]
ROOMY = BatchShape(tokens=64, row=16, sequences=8, budget=64)


def collate(
    encoder: Encoder, pairs: list[Pair] = PAIRS, shape: BatchShape | None = None, **changes: Any
) -> Any:
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = Ragged.of([[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs])
    build = make_objective(**changes).build_collator(SpecialTokens.of(encoder.tokenizer), shape)
    return build((*sides, *words, links), torch.Generator())


def make_objective(**changes: Any) -> Regression:
    return Regression(L2Settings(**changes))


def compute(objective: Regression, encoder: Encoder, batch: Any) -> LossTerms:
    """Compute the loss as a training step does."""
    terms = objective(encoder, objective.prepare(encoder, batch))
    assert isinstance(terms, LossTerms)
    return terms


def disturb(encoder: Encoder, size: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator))


# The tensor function


def test_three_words_by_hand() -> None:
    src = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, -1.0]])
    tgt = torch.tensor([[0.0, 0.0], [0.0, 3.0], [3.0, 1.0]])
    # Squared lengths 5, 9 and 4.
    assert l2_loss(src, tgt, torch.ones(3)).item() == 6
    assert l2_loss(src, tgt, torch.tensor([1.0, 0.0, 0.5])).item() == pytest.approx(7 / 1.5)
    assert l2_loss(src, tgt, torch.ones(3), torch.tensor(9.0)).item() == 2
    # Below one link in all, it is a mean still.
    assert l2_loss(src, tgt, torch.tensor([0.0, 0.1, 0.0])).item() == pytest.approx(9)


def test_without_links_the_loss_is_zero_and_not_nan() -> None:
    for n_rows in (0, 3):
        src = torch.randn(n_rows, 4, requires_grad=True)
        loss = l2_loss(src, torch.randn(n_rows, 4), torch.zeros(n_rows))
        (gradient,) = torch.autograd.grad(loss, src)
        assert loss.item() == 0
        assert (gradient == 0).all()


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 9))
def test_it_is_the_mean_squared_error_times_the_width(seed: int, n_rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    src, tgt = torch.randn(2, n_rows, width, generator=generator)
    weights = 0.1 + torch.rand((), generator=generator).expand(n_rows)
    torch.testing.assert_close(l2_loss(src, tgt, weights), width * F.mse_loss(src, tgt))


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_gradients_are_correct(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    src, tgt = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    weights = weights * (torch.rand(5, generator=generator) < 0.6)
    sides = (src.requires_grad_(), tgt.requires_grad_())
    assert torch.autograd.gradcheck(lambda s, t: l2_loss(s, t, weights), sides)
    total = torch.tensor(3.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s, t: l2_loss(s, t, weights, total), sides)


# The objective


def by_loop(states: Tensor, ids: list[int], words: str) -> float:
    """Σ w‖s − t‖² / Σ w, link by link; all ids are different."""
    place = {token: k for k, token in enumerate(ids)}
    total = weight = 0.0
    for src_words, tgt_words, links in PAIRS:
        for i, j, level in links:
            s, t = (
                states[[place[token] for token in word]] for word in (src_words[i], tgt_words[j])
            )
            far = s[0] - t[0] if words == "first" else s.mean(0) - t.mean(0)
            total += level / 255 * float(far.square().sum())
            weight += level / 255
    return total / weight


@pytest.mark.parametrize("shape", [None, ROOMY])
@pytest.mark.parametrize(("words", "layer"), [("first", None), ("mean", 2), ("first", -2)])
def test_the_loss_equals_a_loop_over_links(
    tiny_encoder: Encoder, shape: BatchShape | None, words: str, layer: int | None
) -> None:
    changes = {"words": words, "layer": layer, "parameter_weight": 0.0}
    batch = collate(tiny_encoder, shape=shape, **changes)
    with torch.no_grad():
        terms = compute(make_objective(**changes), tiny_encoder, batch)
        (states,) = tiny_encoder(batch.tokens, [4 if layer is None else layer])
    assert terms.metrics.keys() == {"l2"}
    assert terms.loss.item() == terms.metrics["l2"].item()
    expected = by_loop(states, batch.tokens.ids.tolist(), words)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [None, ROOMY])
@pytest.mark.parametrize(
    ("reference", "norm"), [("device", "squared"), ("host", "squared"), ("device", "plain")]
)
def test_the_terms_add_up(
    tiny_encoder: Encoder, shape: BatchShape | None, reference: str, norm: str
) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    changes = {"parameter_weight": 0.5, "hidden_weight": 0.25, "reference": reference, "layer": 3}
    changes["parameter_norm"] = norm
    objective = make_objective(**changes)
    objective.start(encoder, ["en-de"])
    batch = collate(encoder, shape=shape, **changes)
    with torch.no_grad():
        at_start = compute(objective, encoder, batch)
        (before,) = encoder(batch.tokens, [3])
        assert at_start.metrics["parameters"].item() == at_start.metrics["hidden"].item() == 0
        torch.testing.assert_close(at_start.loss, at_start.metrics["l2"])
        disturb(encoder)
        terms = compute(objective, encoder, batch)
        (after,) = encoder(batch.tokens, [3])
    metrics = {name: value.item() for name, value in terms.metrics.items()}
    assert metrics.keys() == {"l2", "hidden", "parameters"}
    total = metrics["l2"] + 0.25 * metrics["hidden"] + 0.5 * metrics["parameters"]
    assert terms.loss.item() == pytest.approx(total)
    # All tokens of the sources, with their marks: 10 to 17, and two marks for each of 3 sentences.
    starts = batch.tokens.offsets.tolist()
    rows = []
    for start, stop in pairwise(starts):
        if stop > start and 10 <= int(batch.tokens.ids[start + 1]) < 20:
            rows += [float((after[k] - before[k]).square().sum()) for k in range(start, stop)]
    assert len(rows) == 8 + 6
    assert metrics["hidden"] == pytest.approx(sum(rows) / len(rows), rel=1e-5)
    moved = zip(encoder.parameters(), tiny_encoder.parameters(), strict=True)
    with torch.no_grad():
        by_hand = sum(float((now - then).double().square().sum()) for now, then in moved)
    by_hand = by_hand if norm == "squared" else by_hand**0.5
    assert metrics["parameters"] == pytest.approx(by_hand, rel=1e-5)


def test_in_the_first_step_only_words_have_a_gradient(tiny_encoder: Encoder) -> None:
    """At the start both regularizers have zero gradient, and nothing is NaN."""
    gradients = []
    for weight in (0.0, 1.0):
        encoder = copy.deepcopy(tiny_encoder)
        objective = make_objective(parameter_weight=weight, hidden_weight=weight)
        objective.start(encoder, ["en-de"])
        compute(objective, encoder, collate(encoder)).loss.backward()
        found = {n: p.grad for n, p in encoder.named_parameters() if p.grad is not None}
        gradients.append({name: gradient for name, gradient in found.items() if gradient.any()})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("layer.3" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize("shape", [None, ROOMY])
def test_without_links_only_the_regularizers_remain(
    tiny_encoder: Encoder, shape: BatchShape | None
) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective(hidden_weight=1.0)
    objective.start(encoder, ["en-de"])
    disturb(encoder)
    terms = compute(objective, encoder, collate(encoder, [PAIRS[1]], shape))
    assert terms.metrics["l2"].item() == 0
    assert terms.metrics["hidden"].item() > 0
    terms.loss.backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("kind", ["l2", "word_contrastive", "linked_words", "linear_map"])
def test_missing_links_are_reported(tiny_encoder: Encoder, kind: str) -> None:
    settings: Any = {"l2": L2Settings, "word_contrastive": WordContrastiveSettings}
    settings |= {"linked_words": LinkedWordsSettings, "linear_map": LinearMapSettings}
    objective, special_tokens = (
        build_objective(settings[kind]()),
        SpecialTokens.of(tiny_encoder.tokenizer),
    )
    sides = (*(Ragged.of([[5]]) for _ in range(2)), *(Ragged.of([[1]]) for _ in range(2)))
    linked, unlinked = (*sides, Ragged.of([[255]])), (*sides, Ragged.of([[]]))
    problem = objective.find_problem(tiny_encoder, special_tokens, repeat(unlinked))
    assert problem is not None
    assert problem.startswith("the first pairs have no links")
    later = chain([unlinked] * 5, repeat(linked))
    assert objective.find_problem(tiny_encoder, special_tokens, later) is None


def test_weights_are_copied_only_if_needed(tiny_encoder: Encoder) -> None:
    for changes, is_held in (
        ({}, True),
        ({"parameter_weight": 0.0}, False),
        ({"parameter_weight": 0.0, "hidden_weight": 1.0}, True),
    ):
        objective = make_objective(**changes)
        objective.start(tiny_encoder, ["en-de"])
        assert (objective.pretrained is not None) == is_held
        # They are no part of checkpoints, nor do they follow the objective to a device.
        assert not objective.state_dict()
    with pytest.raises(InputError, match="layer 5 does not exist"):
        make_objective(layer=5).start(tiny_encoder, ["en-de"])


def test_dropout_applies_to_words_but_not_to_initial_states(tiny_encoder: Encoder) -> None:
    encoder = copy.deepcopy(tiny_encoder).train()
    objective = make_objective(hidden_weight=1.0)
    objective.start(encoder, ["en-de"])
    batch = collate(encoder)
    prepared = [objective.prepare(encoder, batch).initial_states for _ in range(2)]
    assert prepared[0] is not None
    assert prepared[1] is not None
    assert prepared[0].equal(prepared[1])
    with torch.no_grad():
        losses = {compute(objective, encoder, batch).loss.item() for _ in range(2)}
        assert len(losses) == 2
        encoder.eval()
        losses = {compute(objective, encoder, batch).loss.item() for _ in range(2)}
        assert len(losses) == 1


def test_training_brings_linked_words_together(tiny_encoder: Encoder) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective, batch = make_objective(parameter_weight=0.01), collate(encoder)
    objective.start(encoder, ["en-de"])
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3, weight_decay=0.0)
    history = []
    for _ in range(15):
        terms = compute(objective, encoder, batch)
        history.append({name: value.item() for name, value in terms.metrics.items()})
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
    assert history[-1]["l2"] < history[0]["l2"] / 4
    assert history[0]["parameters"] == 0 < history[-1]["parameters"]


def test_a_higher_weight_keeps_parameters_closer(tiny_encoder: Encoder) -> None:
    distances = []
    for weight in (0.01, 10.0):
        encoder = copy.deepcopy(tiny_encoder)
        objective, batch = make_objective(parameter_weight=weight), collate(encoder)
        objective.start(encoder, ["en-de"])
        optimizer = torch.optim.SGD(encoder.parameters(), lr=2e-3)
        for _ in range(10):
            terms = compute(objective, encoder, batch)
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
        distances.append(terms.metrics["parameters"].item())
    assert 0 < distances[1] < distances[0]


@pytest.mark.slow
def test_one_graph_serves_all_batches(compilable_encoder: Encoder) -> None:
    torch._dynamo.reset()
    encoder = compilable_encoder
    objective = make_objective(hidden_weight=0.5)
    objective.start(encoder, ["en-de"])
    objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pairs in (PAIRS, PAIRS[:2], PAIRS[1:]):
            batch = objective.prepare(encoder, collate(encoder, pairs, ROOMY))
            compiled = objective(encoder, batch).loss
            torch.testing.assert_close(compiled, objective.forward(encoder, batch).loss)
            compiled.backward()
            disturb(encoder, 0.01)


def test_invalid_settings_are_errors() -> None:
    for wrong in ({"parameter_weight": -1.0}, {"words": "last"}, {"reference": "disk"}, {"l": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            L2Settings.model_validate(wrong)
    special_tokens = SpecialTokens(0, 2, 1, 1, 3, (0, 1, 2, 3), 50)
    assert make_objective().count_special_tokens(special_tokens) == 4


# Whole runs


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def linked_text(
    tiny_tokenizer: PreTrainedTokenizerFast,
    demo_rows: list[tuple[str, str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two languages of the demo; words at equal positions are linked."""
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("text")
    sources = []
    for language in ("de", "fr"):
        rows = [(src, tgt) for code, src, tgt in demo_rows if code == language]
        text, links = files / f"en-{language}.text", files / f"en-{language}.links"
        text.write_text("".join(f"{src} ||| {tgt}\n" for src, tgt in rows), encoding="utf-8")
        n_shared = [min(len(src.split()), len(tgt.split())) for src, tgt in rows]
        lines = [" ".join(f"{k}-{k}" for k in range(n)) for n in n_shared]
        links.write_text("".join(f"{line}\n" for line in lines))
        sources.append(TextSource((text,), ("en", language), links=links))
    prepare_corpora(sources, tiny_tokenizer, folder, rules=CleaningRules())
    return folder


def make_recipe(**objective: Any) -> Recipe:
    model = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "positions": 64}
    content = {
        "name": "tiny",
        "model": model | {"dropout": 0.1},
        "data": {"max_length": 64, "validation_examples": 3},
        "objectives": [{"kind": "l2", "batch_tokens": 512, "hidden_weight": 0.1} | objective],
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.0},
        "schedule": {"steps": 6, "warmup": 2},
        "checkpoints": {"every": 3, "validate_every": 3, "validation_batches": 2},
        "telemetry": {"every": 1},
    }
    return parse_recipe(content, "the tiny recipe")


def read_rows(run: Path) -> list[dict[str, Any]]:
    passing = {"seconds", "tokens_per_second"}
    rows = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in passing} for row in rows]


@pytest.fixture(scope="module")
def run(linked_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    train(make_recipe(), output=folder, prepared=linked_text)
    return folder


def test_a_run_logs_its_metrics_and_the_loss_falls(run: Path) -> None:
    rows = read_rows(run)
    training = [row for row in rows if row["kind"] == "train"]
    for row in rows:
        parts = {name: row[f"loss/l2/{name}"] for name in ("l2", "hidden", "parameters")}
        total = parts["l2"] + 0.1 * parts["hidden"] + parts["parameters"]
        assert row["loss/l2"] == pytest.approx(total, rel=1e-5)
    assert training[0]["loss/l2/parameters"] == 0
    # In training, dropout alone tells the states from those of before.
    assert training[0]["loss/l2/hidden"] > 0
    assert training[-1]["loss/l2"] < training[0]["loss/l2"] - 0.5
    assert len(rows) - len(training) == 2
    names = load_file(run / "step-00000006" / "training_state.safetensors")
    assert not [name for name in names if "pretrained" in name or name.startswith("objectives")]


def test_a_resumed_run_regularizes_toward_the_initial_weights(
    run: Path, linked_text: Path, tmp_path: Path
) -> None:
    """Bit for bit: the reference is the initial model, not the checkpoint."""
    again = tmp_path / "again"
    shutil.copytree(run, again)
    shutil.rmtree(again / "step-00000006")
    shutil.rmtree(again / "model")
    train(make_recipe(), output=again, prepared=linked_text, resume=True)
    assert read_rows(again) == read_rows(run)
    for name in ("step-00000006", "model"):
        for file in sorted((run / name).glob("*.safetensors")):
            one, other = load_file(file), load_file(again / name / file.name)
            assert one.keys() == other.keys()
            assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_reference_weights_can_be_in_host_memory(
    run: Path, linked_text: Path, tmp_path: Path
) -> None:
    train(make_recipe(reference="host"), output=tmp_path, prepared=linked_text)
    for one, other in zip(read_rows(run), read_rows(tmp_path), strict=True):
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=1e-4)


TWO = """
import json, sys
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from test_regression import PAIRS, collate, disturb, make_objective
from calque.models.encoder import Encoder
from calque.training.step import TrainStep

distributed.init_process_group("gloo")
rank = distributed.get_rank()

def compute(pairs, together):
    encoder = Encoder.load(sys.argv[1])
    objective = make_objective(hidden_weight=0.5)
    objective.start(encoder, ["en-de"])
    disturb(encoder)
    step = TrainStep(encoder, [objective]).eval()
    wrapped = DistributedDataParallel(step) if together else step
    loss, metrics = wrapped([collate(encoder, pairs)])
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in encoder.parameters()])
    return gradient, torch.stack(list(metrics.values()))

shares = [PAIRS[:2], PAIRS[2:]]
gradient, metrics = compute(shares[rank], True)
distributed.all_reduce(metrics)
distributed.barrier()
distributed.destroy_process_group()
expected, expected_metrics = compute(PAIRS, False)
if rank == 0:
    far = (gradient - expected).norm() / expected.norm()
    print(json.dumps([far.item(), (metrics / 2).tolist(), expected_metrics.tolist()]))
"""


@pytest.mark.slow
def test_two_processes_compute_what_one_does(
    tiny_folder: Path, tmp_path: Path, fork_server: Any
) -> None:
    """Links and tokens are distributed unevenly, but all have the same weight."""
    (tmp_path / "two.py").write_text(TWO)
    done = fork_server.run(tmp_path / "two.py", tiny_folder, beside=Path(__file__))
    assert done.returncode == 0, done.stderr
    far, metrics, expected_metrics = json.loads(done.stdout.splitlines()[-1])
    assert far < 1e-5
    assert len(expected_metrics) == 4
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)
