"""The watch stops at the first number that is not finite; signals become a wish to stop."""

from __future__ import annotations

import signal

import pytest
import torch
from accelerate import Accelerator

from calque.training.step import Diverged, StopRequest, Watch

GOOD = torch.tensor(1.5)


@pytest.fixture
def watch() -> Watch:
    return Watch(Accelerator(cpu=True))


def test_finite_numbers_pass(watch: Watch) -> None:
    watch.check()
    watch.note(1, {"masked_lm": GOOD, "masked_lm/figure": GOOD}, {"masked_lm": 0})
    watch.note(1, {"the gradient": GOOD}, {})
    watch.check()
    watch.check()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_bad_number_is_named(watch: Watch, value: float) -> None:
    bad = torch.tensor(value)
    batches = {"masked_lm": 16, "translation_lm": 17}
    watch.note(8, {"masked_lm": GOOD, "translation_lm": GOOD}, batches)
    watch.note(9, {"masked_lm": GOOD, "translation_lm": bad}, batches)
    watch.note(9, {"the gradient": bad}, {})
    with pytest.raises(
        Diverged, match=r"^translation_lm is not finite at step 9, batch 17 of its stream \(lower"
    ):
        watch.check()
    watch.check()


def test_a_figure_belongs_to_the_stream_of_its_objective(watch: Watch) -> None:
    watch.note(2, {"mlm": GOOD, "mlm/accuracy": torch.tensor(torch.nan)}, {"mlm": 5})
    with pytest.raises(Diverged, match=r"^mlm/accuracy is not finite at step 2, batch 5"):
        watch.check()


def test_a_gradient_has_no_batch(watch: Watch) -> None:
    watch.note(2, {"mlm": GOOD.bfloat16()}, {"mlm": 5})
    watch.note(2, {"the gradient": torch.tensor(torch.inf)}, {})
    with pytest.raises(Diverged, match=r"^the gradient is not finite at step 2 \("):
        watch.check()


def test_tokens_are_taken_once(watch: Watch) -> None:
    watch.n_tokens += 7
    assert (watch.take_tokens(), watch.take_tokens()) == (7, 0)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_wish_while_listening(kind: signal.Signals) -> None:
    before = signal.getsignal(kind)
    stop = StopRequest()
    with stop.listening():
        made = [stop.made]
        for _ in range(2):
            signal.raise_signal(kind)
            made.append(stop.made)
    assert made == [False, True, True]
    assert signal.getsignal(kind) is before
