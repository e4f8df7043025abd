"""Words and their static vectors: batches, both losses against references, complete runs."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from calque.algorithms.cca import RIDGE, canonical_correlations
from calque.errors import InputError
from calque.objectives.static_target import (
    StaticTarget,
    StaticTargetSettings,
    WordVectorBatch,
    WordVectorCollator,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens
from calque.training.loop import train
from calque.training.recipe import Recipe
from calque.training.recipe_io import load_recipe, parse_recipe
from calque.training.telemetry import read_metrics
from calque.types import LossTerms

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder

FIRST, LAST, PAD = 0, 2, 1
MARKS = SpecialTokens(FIRST, LAST, 1, PAD, 3, (FIRST, PAD, LAST, 3), 100)
WORDS = [[10, 11, 12], [13], [14, 15], [16], [17, 18, 19, 20], [21], [22, 23], [24], [25, 26]]
# Rows of 16 tokens: words lie in an order of their own, and three more would fit.
SHAPE = BatchShape(tokens=64, row=16, sequences=12, budget=64)
HIDDEN = 64


def make_vectors(n_words: int = len(WORDS), width: int = HIDDEN) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=(n_words, width)).astype(np.float32)


def collate(
    words: list[list[int]] = WORDS,
    vectors: np.ndarray[Any, Any] | None = None,
    shape: BatchShape | None = None,
    *,
    unit: bool = True,
    special_tokens: SpecialTokens = MARKS,
) -> WordVectorBatch:
    vectors = make_vectors(len(words)) if vectors is None else vectors
    lengths = np.full(len(words), vectors.shape[1])
    arrays: Any = (Ragged.of(words), Ragged(vectors.ravel(), lengths))
    return WordVectorCollator(special_tokens, shape, unit)(arrays, torch.Generator())


def make_objective(**changes: Any) -> StaticTarget:
    return StaticTarget(StaticTargetSettings(**changes))


def compute(objective: StaticTarget, encoder: Encoder, batch: WordVectorBatch) -> LossTerms:
    terms = objective(encoder, objective.prepare(encoder, batch))
    assert isinstance(terms, LossTerms)
    return terms


def pool_by_hugging_face(encoder: Encoder, layer: int) -> Tensor:
    """Every word in a call of its own: `<s> pieces </s>`, then the mean of the pieces' states."""
    pooled = []
    for word in WORDS:
        ids = torch.tensor([[FIRST, *word, LAST]])
        states = encoder.model(input_ids=ids, output_hidden_states=True).hidden_states[layer]
        pooled.append(states[0, 1:-1].mean(dim=0))
    return torch.stack(pooled)


# Batches


@pytest.mark.parametrize("shape", [None, SHAPE])
def test_words_of_tokens(shape: BatchShape | None) -> None:
    batch = collate(shape=shape)
    found: dict[int, list[int]] = {}
    for token, word in zip(batch.tokens.ids.tolist(), batch.words.tolist(), strict=True):
        found.setdefault(word, []).append(token)
    assert [found[k] for k in range(len(WORDS))] == WORDS
    assert set(found.pop(-1)) == ({FIRST, LAST} if shape is None else {FIRST, LAST, PAD})
    assert len(found) == len(WORDS)
    assert batch.weights.tolist() == [1.0] * 9 + [0.0] * (0 if shape is None else 3)
    assert batch.vectors.shape == (len(batch.weights), HIDDEN)
    assert batch.vectors[len(WORDS) :].eq(0).all()


def test_vectors_are_unchanged_or_of_unit_length() -> None:
    vectors = make_vectors()
    vectors[4] = 0
    assert collate(vectors=vectors, unit=False).vectors.numpy().tolist() == vectors.tolist()
    found = collate(vectors=vectors).vectors
    lengths = [0.0 if k == 4 else 1.0 for k in range(len(WORDS))]
    assert found.norm(dim=1).tolist() == pytest.approx(lengths, abs=1e-6)
    assert F.cosine_similarity(found[0], torch.from_numpy(vectors[0]), dim=0).item() > 1 - 1e-6


# The losses


@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize("layer", [None, 2, -2])
def test_mse_equals_that_of_torch_on_single_words(
    tiny_encoder: Encoder, shape: BatchShape | None, layer: int | None
) -> None:
    objective = make_objective(loss="mse", layer=layer, unit=False)
    with torch.no_grad():
        pooled = pool_by_hugging_face(tiny_encoder, 4 if layer is None else layer)
        terms = compute(objective, tiny_encoder, collate(shape=shape, unit=False))
    expected = F.mse_loss(pooled, torch.from_numpy(make_vectors()))
    torch.testing.assert_close(terms.loss, expected, rtol=1e-5, atol=1e-6)
    assert terms.metrics == {}


@pytest.mark.parametrize("shape", [None, SHAPE])
@pytest.mark.parametrize("components", [None, 3])
@pytest.mark.parametrize("unit", ["one", "variance"])
def test_dcca_correlates_single_words(
    tiny_encoder: Encoder, shape: BatchShape | None, components: int | None, unit: str
) -> None:
    """Vectors of 5 dimensions, states of 64."""
    vectors = make_vectors(width=5)
    objective = make_objective(components=components, ridge=0.1, ridge_unit=unit)
    with torch.no_grad():
        pooled = pool_by_hugging_face(tiny_encoder, 4)
        terms = compute(objective, tiny_encoder, collate(vectors=vectors, shape=shape))
    relative = unit == "variance"
    targets = F.normalize(torch.from_numpy(vectors), dim=1)
    expected = canonical_correlations(pooled, targets, ridges=(0.1, 0.1), relative=relative)
    assert terms.loss.item() == pytest.approx(-expected[:components].sum().item(), rel=1e-4)
    correlation = terms.metrics["correlation"].item()
    assert correlation == pytest.approx(expected[:components].mean().item(), rel=1e-4)
    assert make_objective().settings.ridge == RIDGE


def covariance(x: Tensor, y: Tensor) -> np.ndarray[Any, Any]:
    """Return Σ (x − x̄)(y − ȳ)ᵀ / (n − 1) with loops."""
    n_rows, x, y = len(x), x.double(), y.double()
    found = np.zeros((x.shape[1], y.shape[1]))
    means = [[float(column.sum()) / n_rows for column in view.T] for view in (x, y)]
    for row in range(n_rows):
        a = [float(value) - mean for value, mean in zip(x[row], means[0], strict=True)]
        b = [float(value) - mean for value, mean in zip(y[row], means[1], strict=True)]
        found += np.outer(a, b) / (n_rows - 1)
    return found


def inverse_root(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values, vectors = np.linalg.eigh(matrix)
    return np.array((vectors / np.sqrt(values)) @ vectors.T)


def test_dcca_of_the_paper_is_documented_in_the_recipe(tiny_encoder: Encoder) -> None:
    """All correlations with a ridge of 10⁻³, by the settings in the comment of x2s-dcca.yaml."""
    text = (Path(__file__).parents[2] / "recipes" / "x2s-dcca.yaml").read_text("utf-8")
    changes = re.findall(r"--set (objectives\.1\.\S+)", text)
    assert len(changes) == 3
    settings = load_recipe("x2s-dcca", changes).objectives[1]
    vectors = make_vectors(width=5)
    with torch.no_grad():
        pooled = pool_by_hugging_face(tiny_encoder, 4)
        terms = compute(StaticTarget(settings), tiny_encoder, collate(vectors=vectors))
    targets = F.normalize(torch.from_numpy(vectors), dim=1)
    own, other = (
        covariance(view, view) + 1e-3 * np.eye(view.shape[1]) for view in (pooled, targets)
    )
    table = inverse_root(own) @ covariance(pooled, targets) @ inverse_root(other)
    expected = -np.linalg.svd(table, compute_uv=False).sum()
    assert terms.loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["mse", "dcca"])
def test_only_the_encoder_learns_up_to_the_layer(tiny_encoder: Encoder, loss: str) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective = make_objective(loss=loss, layer=2)
    assert not list(objective.parameters())
    batch = collate(shape=SHAPE)
    compute(objective, encoder, batch).loss.backward()
    touched = {name for name, p in encoder.named_parameters() if p.grad is not None}
    assert any("encoder.layer.1." in name for name in touched)
    touched -= {"model.lm_head.decoder.weight"}  # the embeddings by another name
    assert not [name for name in touched if "layer.2." in name or "lm_head" in name]
    embeddings: Any = encoder.model.get_input_embeddings()
    rows = embeddings.weight.grad.ne(0).any(dim=1).nonzero().flatten().tolist()
    assert rows == [FIRST, LAST, *range(10, 27)]  # padding has none
    assert not batch.vectors.requires_grad


@pytest.mark.parametrize("loss", ["mse", "dcca"])
def test_a_filled_shape_changes_nothing(tiny_encoder: Encoder, loss: str) -> None:
    gradients = []
    for shape in (None, SHAPE):
        encoder = copy.deepcopy(tiny_encoder).double()
        compute(make_objective(loss=loss), encoder, collate(shape=shape)).loss.backward()
        gradients.append([p.grad for p in encoder.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ridge_unit", ["one", "variance"])
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([[10, 11]] * 6, id="one word"),
        pytest.param([[10], [11]] * 3, id="two words"),
        pytest.param([[10]], id="alone"),
        pytest.param(WORDS[:2], id="two"),
    ],
)
def test_degenerate_batches_give_finite_losses(
    tiny_encoder: Encoder, words: list[list[int]], ridge_unit: str
) -> None:
    """Fewer words than dimensions, repeated ones, and vectors that are zero or equal."""
    n_words = len(words)
    for vectors in (make_vectors(n_words), np.zeros((n_words, 7)), np.ones((n_words, HIDDEN))):
        encoder = copy.deepcopy(tiny_encoder)
        batch = collate(words, vectors.astype(np.float32), SHAPE)
        terms = compute(make_objective(ridge_unit=ridge_unit), encoder, batch)
        terms.loss.backward()
        assert terms.loss.isfinite()
        assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


def test_training_raises_the_correlation(tiny_encoder: Encoder) -> None:
    """Vectors of 3 dimensions, and 9 words: with a firm ridge, correlation has to be learned."""
    encoder, vectors = copy.deepcopy(tiny_encoder), make_vectors(width=3)
    objective, batch = make_objective(ridge=5.0, ridge_unit="variance"), collate(vectors=vectors)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
    losses = []
    for _ in range(12):
        loss = compute(objective, encoder, batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1


# Vectors laid where states lie


def fit(encoder: Encoder, **changes: Any) -> StaticTarget:
    objective = make_objective(loss="mse", fit=True, **changes)
    vectors: Any = Ragged(make_vectors(width=32).ravel(), np.full(len(WORDS), 32))
    examples = iter([(Ragged.of(WORDS), vectors)] * 9999)
    objective.fit(encoder, MARKS, examples)
    return objective


def test_fitted_vectors_have_the_mean_and_spread_of_the_states(tiny_encoder: Encoder) -> None:
    """32 dimensions in 64: shape is kept, and mean and spread are those of the states."""
    encoder = copy.deepcopy(tiny_encoder).train()
    objective = fit(encoder, layer=3)
    assert encoder.training
    assert objective.fitted is not None
    batch = collate(vectors=make_vectors(width=32))
    with torch.no_grad():
        pooled = pool_by_hugging_face(tiny_encoder, 3)
        laid = objective.fitted.apply(batch.vectors)
        loss = compute(objective, tiny_encoder, batch).loss
    torch.testing.assert_close(laid.mean(0), pooled.mean(0), rtol=1e-4, atol=1e-4)
    assert laid.var(0).sum().item() == pytest.approx(pooled.var(0).sum().item(), rel=1e-4)
    distances = [torch.cdist(rows, rows).flatten() for rows in (laid, batch.vectors)]
    ratios = (distances[0] / distances[1])[distances[1] > 0]
    assert ratios.min().item() == pytest.approx(ratios.max().item(), rel=1e-3)
    torch.testing.assert_close(loss, F.mse_loss(pooled, laid), rtol=1e-4, atol=1e-5)
    assert not objective.state_dict()


def test_without_fit_vectors_are_unchanged(tiny_encoder: Encoder) -> None:
    objective = make_objective(loss="mse")
    objective.fit(tiny_encoder, MARKS, iter([]))
    assert objective.fitted is None


# What is refused before a run


def look(encoder: Encoder, n_words: int, width: int, **changes: Any) -> str | None:
    numbers: Any = Ragged(np.zeros(n_words * width), np.full(n_words, width))
    examples = iter([(Ragged.of([[10]] * n_words), numbers)])
    return make_objective(**changes).find_problem(encoder, MARKS, examples)


def test_vectors_of_a_wrong_size_are_errors(tiny_encoder: Encoder) -> None:
    assert look(tiny_encoder, 9, 64, loss="mse") is None
    with pytest.raises(InputError, match="vectors have 300 dimensions, but the encoder 64"):
        look(tiny_encoder, 9, 300, loss="mse")
    assert look(tiny_encoder, 9, 300, loss="mse", fit=True) is None
    with pytest.raises(InputError, match="components=31, but there are only 30"):
        look(tiny_encoder, 9, 30, components=31)
    with pytest.raises(InputError, match="layer 5 does not exist"):
        make_objective(layer=5).start(tiny_encoder, ["de"])


def test_too_few_words_are_reported(tiny_encoder: Encoder) -> None:
    assert look(tiny_encoder, 65 + 30, 30) is None
    fault = look(tiny_encoder, 64 + 30, 30)
    assert fault is not None
    assert "batches of 94 words are too small for 64 + 30 dimensions" in fault
    assert "1 correlations are 1 for any vectors" in fault
    # Two spaces of 9 dimensions in one of 9.
    assert "9 correlations" in (look(tiny_encoder, 10, 30) or "")


@pytest.mark.parametrize(("n_words", "width"), [(80, 30), (20, 12), (70, 70)])
def test_as_many_correlations_are_1_as_reported(
    tiny_encoder: Encoder, n_words: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    src, tgt = (
        torch.randn(n_words, d, generator=generator, dtype=torch.float64) for d in (HIDDEN, width)
    )
    found = canonical_correlations(src, tgt, ridges=(0.0, 0.0))
    n_sure = int((found > 1 - 1e-6).sum())
    assert f"{n_sure} correlations" in (look(tiny_encoder, n_words, width) or "")


def test_invalid_settings_are_errors() -> None:
    for wrong in (
        {"loss": "l2"},
        {"components": 0},
        {"ridge": -1.0},
        {"ridge_unit": "two"},
        {"fit": True, "loss": "dcca"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            StaticTargetSettings.model_validate(wrong)
    assert make_objective().count_special_tokens(MARKS) == 2


# Whole runs


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are slower on several threads."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def text_with_vectors(
    tiny_tokenizer: PreTrainedTokenizerFast,
    demo_rows: list[tuple[str, str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two languages of the demo, and vectors of their words."""
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("text")
    sources = []
    for language in ("de", "fr"):
        lines = [text for code, _, text in demo_rows if code == language]
        text, vectors = files / f"{language}.txt", files / f"{language}.vec"
        text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        words = list(dict.fromkeys(word for line in lines for word in line.split()))
        numbers = np.random.default_rng(1).normal(size=(len(words), 32))
        rows = [" ".join([word, *map("{:.4f}".format, row)]) for word, row in
                zip(words, numbers, strict=True)]  # fmt: skip
        vectors.write_text("\n".join([f"{len(words)} 32", *rows, ""]), encoding="utf-8")
        sources += [TextSource((text,), (language,))]
        sources += [TextSource((vectors,), (language,), vectors=True)]
    prepare_corpora(sources, tiny_tokenizer, folder, rules=CleaningRules())
    return folder


def make_recipe(**objective: Any) -> Recipe:
    model = {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "positions": 64}
    static = {"kind": "static_target", "batch_tokens": 1024, "batch_examples": 80}
    content = {
        "name": "tiny",
        "model": model | {"dropout": 0.1},
        "data": {"max_length": 64, "validation_examples": 5},
        "objectives": [{"kind": "masked_lm", "batch_tokens": 512}, static | objective],
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


@pytest.mark.parametrize("settings", [{"loss": "mse"}, {"loss": "mse", "fit": True}, {}])
def test_a_run_learns_and_can_be_resumed(
    text_with_vectors: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Bit for bit, including the metrics of the validation text."""
    run, again = tmp_path / "run", tmp_path / "again"
    train(make_recipe(**settings), output=run, prepared=text_with_vectors)
    rows = read_rows(run)
    training = [row["loss/static_target"] for row in rows if row["kind"] == "train"]
    assert training[-1] < training[0]
    assert len([row for row in rows if row["kind"] != "train"]) == 2
    assert all(np.isfinite(row["loss/static_target"]) for row in rows)
    shutil.copytree(run, again)
    for name in ("step-00000006", "model"):
        shutil.rmtree(again / name)
    train(make_recipe(**settings), output=again, prepared=text_with_vectors, resume=True)
    assert read_rows(again) == rows
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, again))
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_vectors_of_another_size_are_an_error_before_the_run_starts(
    text_with_vectors: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(loss="mse")
    narrow = recipe.model_copy(update={"model": recipe.model.model_copy(update={"hidden": 16})})
    with pytest.raises(InputError, match="vectors have 32 dimensions, but the encoder 16"):
        train(narrow, output=tmp_path, prepared=text_with_vectors)


TWO = """
import json, sys
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from test_static_target import SHAPE, WORDS, collate, make_objective, make_vectors
from calque.models.encoder import Encoder
from calque.training.step import TrainStep

distributed.init_process_group("gloo")
rank = distributed.get_rank()

def compute(part, shape, changes, together):
    encoder = Encoder.load(sys.argv[1]).double().eval()
    objective = make_objective(**changes)
    step = TrainStep(encoder, [objective])
    objective.train()
    step.training = True
    wrapped = step
    if together and shape is not None:
        encoder.use_fused_layers = True
        objective.compile(dynamic=False, backend="aot_eager")
    if together:
        wrapped = DistributedDataParallel(step, find_unused_parameters=True)
    loss, metrics = wrapped([collate(WORDS[part], make_vectors()[part], shape)])
    loss.backward()
    known = [p.grad for p in encoder.parameters() if p.grad is not None]
    step.eval()
    with torch.no_grad():  # the same batch in all processes
        validation_loss, _ = step([collate(WORDS, make_vectors(), shape)])
    gradient = torch.cat([g.flatten() for g in known if g.any()])
    return gradient, torch.stack([*metrics.values(), validation_loss])

parts = [slice(0, 6), slice(6, None)]
cases = [(None, {"loss": "mse"}), (SHAPE, {"loss": "mse"}), (None, {}), (SHAPE, {"components": 4})]
found = [compute(parts[rank], *case, True) for case in cases]
for _, metrics in found:
    distributed.all_reduce(metrics)
distributed.barrier()
distributed.destroy_process_group()
expected = [compute(slice(None), *case, False) for case in cases]
if rank == 0:
    rows = []
    for (gradient, metrics), (right, expected_metrics) in zip(found, expected):
        far = (gradient - right).norm() / right.norm()
        rows.append([far.item(), (metrics / 2).tolist(), expected_metrics.tolist()])
    print(json.dumps(rows))
"""


@pytest.mark.slow
def test_two_processes_compute_what_one_does(
    tiny_folder: Path, tmp_path: Path, fork_server: Any
) -> None:
    """Words are distributed unevenly, and the statistics are those of all of them.

    With a fixed shape the two are compiled; here without the checks of types that tests put around
    functions, which cannot be traced.
    """
    (tmp_path / "two.py").write_text(TWO)
    done = fork_server.run(tmp_path / "two.py", tiny_folder, beside=Path(__file__))
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert len(cases) == 4
    for far, metrics, expected in cases:
        assert far < 1e-6
        assert metrics == pytest.approx(expected, rel=1e-6)
