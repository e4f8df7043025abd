"""Initial weights: the distance from them, and the states that they give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch import distributed, nn
from torch.func import functional_call

from calque.errors import InputError
from calque.objectives.regularization import PretrainedWeights
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.types import TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

    from calque.models.encoder import Encoder

Where = Literal["device", "host"]
PLACES: list[Where] = ["device", "host"]
SENTENCES = Ragged.of([[0, 10, 11, 12, 2], [0, 20, 21, 2], [0, 30, 2]])


@pytest.fixture
def encoder(tiny_encoder: Encoder) -> Encoder:
    """A copy that may be changed."""
    return copy.deepcopy(tiny_encoder)


@pytest.fixture
def batch() -> TokenBatch:
    return pack(SENTENCES, pad_id=1)


def disturb(encoder: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Change every weight and return the changes."""
    generator = torch.Generator().manual_seed(seed)
    moves = {}
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            before = weight.clone()
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            moves[name] = weight - before
    return moves


@pytest.mark.parametrize("where", PLACES)
def test_distance_is_the_sum_of_squares(encoder: Encoder, where: Where) -> None:
    held = PretrainedWeights.of(encoder, where)
    moves = disturb(encoder)
    by_hand = sum(float(move.double().square().sum()) for move in moves.values())
    distance = held.distance(encoder)
    assert distance.item() == pytest.approx(by_hand, rel=1e-5)
    distance.backward()
    for name, weight in encoder.named_parameters():
        torch.testing.assert_close(weight.grad, 2 * moves[name])


@pytest.mark.parametrize("where", PLACES)
def test_at_the_start_the_gradient_is_zero_and_not_nan(encoder: Encoder, where: Where) -> None:
    held = PretrainedWeights.of(encoder, where)
    distance = held.distance(encoder)
    assert distance.item() == 0
    distance.backward()
    assert all((weight.grad == 0).all() for weight in encoder.parameters())


@pytest.mark.parametrize("where", PLACES)
def test_the_plain_norm_is_the_root_in_value_and_gradient(encoder: Encoder, where: Where) -> None:
    held = PretrainedWeights.of(encoder, where)
    held.distance(encoder, "plain").backward()
    assert all((weight.grad == 0).all() for weight in encoder.parameters())
    moves = disturb(encoder)
    squared = 0.0
    for move in moves.values():  # as in the authors' code: the root of a sum over all weights
        for number in move.double().flatten().tolist():
            squared += number * number
    encoder.zero_grad()
    distance = held.distance(encoder, "plain")
    assert distance.item() == pytest.approx(squared**0.5, rel=1e-5)
    distance.backward()
    for name, weight in encoder.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, moves[name] / squared**0.5)


class Measure(nn.Module):
    """A distance as a function of weights."""

    def __init__(self, inner: nn.Module, held: PretrainedWeights) -> None:
        super().__init__()
        self.inner, self.held = inner, held

    def forward(self) -> Tensor:
        inner: Any = self.inner
        return self.held.distance(inner)


def test_gradients_are_correct() -> None:
    generator = torch.Generator().manual_seed(3)
    inner: Any = nn.Linear(3, 2).double()
    measure = Measure(inner, PretrainedWeights.of(inner, "host"))
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3), (2,))
    ]

    def distance(weight: Tensor, bias: Tensor) -> Tensor:
        found: Tensor = functional_call(measure, {"inner.weight": weight, "inner.bias": bias}, ())
        return found

    assert distance(*weights).dtype == torch.float64
    assert torch.autograd.gradcheck(distance, weights)
    assert torch.autograd.gradgradcheck(distance, weights)


def test_half_precision_is_summed_in_single() -> None:
    """In bfloat16 the sum of 4,096 ones would stop at 256."""
    inner: Any = nn.Linear(64, 64, bias=False).bfloat16()
    nn.init.zeros_(inner.weight)
    held = PretrainedWeights.of(inner, "device")
    nn.init.ones_(inner.weight)
    distance = held.distance(inner)
    assert (distance.dtype, distance.item()) == (torch.float32, 4096)
    distance.backward()
    assert inner.weight.grad.dtype == torch.bfloat16
    assert (inner.weight.grad == 2).all()


@pytest.mark.parametrize("where", PLACES)
def test_shared_weights_are_copied_and_counted_once(encoder: Encoder, where: Where) -> None:
    decoder: Any = encoder.model.get_output_embeddings()
    embeddings: Any = encoder.model.get_input_embeddings()
    assert decoder.weight is embeddings.weight
    held = PretrainedWeights.of(encoder, where)
    n_weights = sum(weight.numel() for weight in encoder.parameters())
    assert sum(weight.numel() for weight in held._weights.values()) == n_weights
    with torch.no_grad():
        embeddings.weight[7, 5] += 3
    assert held.distance(encoder).item() == pytest.approx(9)


@pytest.mark.parametrize("where", PLACES)
def test_frozen_weights_are_left_out(encoder: Encoder, batch: TokenBatch, where: Where) -> None:
    expected = encoder(batch, [4])
    frozen = {name for name, _ in encoder.named_parameters() if "embeddings" in name}
    for name, weight in encoder.named_parameters():
        weight.requires_grad_(name not in frozen)
    held = PretrainedWeights.of(encoder, where)
    assert held._weights.keys() == dict(encoder.named_parameters()).keys() - frozen
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            weight.add_(0 if name in frozen else 0.5)
    n_trained = sum(w.numel() for w in encoder.parameters() if w.requires_grad)
    assert held.distance(encoder).item() == pytest.approx(0.25 * n_trained, rel=1e-5)
    assert held.encode(encoder, batch, [4])[0].equal(expected[0])
    for weight in encoder.parameters():
        weight.requires_grad_(False)
    assert held.distance(encoder).item() == 0


@pytest.mark.parametrize("use_fused_layers", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_states_equal_the_initial_ones_bit_for_bit(
    encoder: Encoder, where: Where, use_fused_layers: bool
) -> None:
    encoder.use_fused_layers = use_fused_layers
    batch = pack(SENTENCES, pad_id=1, shape=BatchShape(32, 16, 4, 32))
    with torch.no_grad():
        expected = encoder(batch, [4, 0, 2])
    held = PretrainedWeights.of(encoder, where)
    moves = disturb(encoder)
    encoder.train()  # with its dropout of 0.1
    now = {name: weight.clone() for name, weight in encoder.named_parameters()}
    for _ in range(2):
        found = held.encode(encoder, batch, [4, 0, 2])
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))
        assert not any(states.requires_grad for states in found)
    # The encoder is left as it was: its mode, its weights, and their way to a gradient.
    assert all(module.training for module in encoder.modules())
    assert all(weight.equal(now[name]) for name, weight in encoder.named_parameters())
    encoder(batch, [4])[0].sum().backward()
    first: Any = encoder.model.get_input_embeddings()
    assert first.weight.grad is not None
    assert not expected[0].allclose(encoder.eval()(batch, [4])[0])
    assert moves


def test_a_pass_without_gradients_does_not_fill_the_autocast_cache(
    encoder: Encoder, batch: TokenBatch
) -> None:
    """Autocast caches cast weights; those cast without gradients must not be reused."""
    held = PretrainedWeights.of(encoder, "device")
    with torch.autocast("cpu", torch.bfloat16):
        (before,) = held.encode(encoder, batch, [4])
        (states,) = encoder(batch, [4])
    assert before.dtype == states.dtype
    (states - before)[:, :7].sum().backward()
    layer: Any = encoder.family.get_layers(encoder.model)[0]
    assert (layer.intermediate.dense.weight.grad != 0).any()


def test_stored_weights_are_copies(encoder: Encoder) -> None:
    for where in PLACES:
        held = PretrainedWeights.of(encoder, where)
        places = {weight.data_ptr() for weight in encoder.parameters()}
        assert not places & {weight.data_ptr() for weight in held._weights.values()}
        assert not any(weight.requires_grad for weight in held._weights.values())


@pytest.fixture
def one_process() -> Iterator[None]:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_sharded_weights_are_an_error(encoder: Encoder, batch: TokenBatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    held = PretrainedWeights.of(encoder, "device")
    mesh = init_device_mesh("cpu", (1,))
    # As in training: layers are shards until they are called, the rest is whole by then.
    for layer in encoder.family.get_layers(encoder.model):
        fully_shard(layer, mesh=mesh)
    for act in (lambda: held.distance(encoder), lambda: held.encode(encoder, batch, [4])):
        with pytest.raises(InputError, match=r"\(set engine\.distributed=ddp\)"):
            act()


@pytest.mark.slow
# torch looks at what comes out of a break in its graphs, and hides this warning where it may.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("where", PLACES)
def test_one_graph_serves_all_steps(compilable_encoder: Encoder, where: Where) -> None:
    torch._dynamo.reset()
    encoder = compilable_encoder
    batch = pack(SENTENCES, pad_id=1, shape=BatchShape(32, 16, 4, 32))
    with torch.no_grad():
        (expected,) = encoder(batch, [1])
    held = PretrainedWeights.of(encoder, where)
    options: dict[str, Any] = {"dynamic": False, "backend": "aot_eager"}
    held.compile(**options, fullgraph=True)
    # What the host holds is fetched piece by piece, outside the graph.
    measure = torch.compile(held.distance, **options, fullgraph=where == "device")
    encoder.train()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            torch.testing.assert_close(held.encode(encoder, batch, [1])[0], expected)
            torch.testing.assert_close(measure(encoder), held.distance(encoder))
            measure(encoder).backward()
            disturb(encoder, seed)
