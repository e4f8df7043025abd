"""How a task is learnt: all choices in one record, every one of them part of a result's hash.

What a task read and tokenized for one seed, kept for the next one in the same process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from weakref import WeakKeyDictionary

from calque.errors import InputError

# Learn in one language and test in all; learn in all languages there are training files of; learn
# in every language for itself; or as the first, but from the frozen encoder's layers.
Setting: TypeAlias = Literal["zero-shot", "translate-train-all", "supervised", "features"]
SETTINGS: tuple[str, ...] = get_args(Setting)


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Choices of fine-tuning. The defaults suit a small encoder; large ones want a lower rate."""

    setting: Setting = "zero-shot"
    source: str = "en"
    epochs: int = 3
    # Of the encoder, and of what is put on top of it. With a higher rate the encoder forgets the
    # other languages over many updates, while the source's scores stay (docs/tasks.md).
    learning_rate: float = 5e-5
    head_learning_rate: float = 1e-3
    # Real tokens an update sees at most, special ones included.
    batch_tokens: int = 1024
    # Tokens a sequence has at most; by default what the encoder's positions allow, up to 256.
    max_length: int | None = None
    # Of the updates, the share during which the learning rates rise; they fall linearly after.
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    # Dropout before the head, and inside the encoder (None: as the model was made).
    dropout: float = 0.1
    body_dropout: float | None = None
    # Of taggers: each word for itself, or the best whole sequence.
    head: Literal["linear", "crf"] = "linear"
    # Which epoch's weights are tested: the last, or the best on held-out text of the source.
    select: Literal["last", "best"] = "last"
    # Examples to use at most, spread evenly over a file.
    train_examples: int | None = None
    test_examples: int | None = None
    # With frozen features: Transformer layers trained on top of the mixture of layers.
    extra_layers: int = 4
    # Of words that windows over a long sentence have in common, as a share of a window.
    overlap: float = 0.25
    # Of parsing: words of a sentence that are read and scored (None: all of them), and whether
    # acl:relcl differs from acl.
    max_words: int | None = 128
    subtypes: bool = False
    # Of questions: tokens from the start of one window on the text to that of the next (half a
    # window at most), and the most tokens an answer has.
    stride: int = 128
    max_answer: int = 30
    # Half precision on CUDA (bfloat16, or "fp32"); a CPU always has single precision.
    precision: Literal["bf16", "fp32"] = "bf16"
    # For tasks that read one layer and train nothing; None: the model's own choice.
    layer: int | None = None
    # Of VECO: predict from H alone, or from H and S beside each other, S reading a translation.
    plug: Literal["out", "in"] = "out"
    # On CUDA, record the whole update once and replay it, which spares small models the launches;
    # where it cannot be recorded, and on a CPU, nothing changes.
    graphs: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        _check(self.setting in SETTINGS, "setting", self.setting, f"choose from {SETTINGS}")
        above_zero = ("epochs", "batch_tokens", "learning_rate", "head_learning_rate")
        for name in (*above_zero, "stride", "max_answer"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "give more than 0")
        for name in ("max_length", "max_words", "train_examples", "test_examples"):
            value = getattr(self, name)
            _check(value is None or value > 0, name, value, "give more than 0")
        for name in ("warmup", "dropout", "body_dropout", "overlap"):
            value = getattr(self, name)
            _check(value is None or 0 <= value < 1, name, value, "give a share below 1")
        for name in ("weight_decay", "extra_layers"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "give 0 or more")
        for name in ("learning_rate", "head_learning_rate", "weight_decay"):
            value = getattr(self, name)
            _check(math.isfinite(value), name, value, "give a finite number")
        _check(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "give more than 0")
        _check(self.head in ("linear", "crf"), "head", self.head, "choose linear or crf")
        _check(self.select in ("last", "best"), "select", self.select, "choose last or best")
        _check(self.plug in ("out", "in"), "plug", self.plug, "choose out or in")
        is_taught = self.plug == "out" or not self.freezes
        _check(is_taught, "plug", self.plug, "a frozen encoder has none: choose another setting")
        _check(self.precision in ("bf16", "fp32"), "precision", self.precision, "bf16 or fp32")

    @property
    def freezes(self) -> bool:
        """Whether the encoder stays as it is."""
        return self.setting == "features"

    @property
    def values(self) -> dict[str, Any]:
        """Give what distinguishes these choices; plugging out does not, being what all can do."""
        found = asdict(self)
        if self.plug == "out":
            del found["plug"]
        return found

    def hash(self) -> str:
        """Name these choices by 12 hexadecimal digits, the same on every machine."""
        text = json.dumps(self.values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check(is_good: bool, name: str, value: object, fix: str) -> None:
    if not is_good:
        raise InputError(f"{name}={value!r}", fix=fix)


T = TypeVar("T")

N_KEPT = 4  # of a tokenizer: the tasks that a worker goes to and fro between are few
_KEPT: WeakKeyDictionary[object, dict[Hashable, object]] = WeakKeyDictionary()


def remember(tokenizer: object, key: Hashable, make: Callable[[], T]) -> T:
    """Give what was made before for the same tokenizer and key, or make it.

    What is given is shared, so nobody may change it. The key must name all that it was made
    from: the task, the files, the settings that matter. It is dropped with the tokenizer, or when
    others have been asked for since.

    >>> class Tokenizer: pass
    >>> tokenizer = Tokenizer()
    >>> remember(tokenizer, "pos", lambda: [1]) is remember(tokenizer, "pos", lambda: [2])
    True
    """
    kept = _KEPT.setdefault(tokenizer, {})
    value = kept.pop(key) if key in kept else make()
    while len(kept) >= N_KEPT:
        kept.pop(next(iter(kept)))
    kept[key] = value
    return value  # type: ignore[return-value]
