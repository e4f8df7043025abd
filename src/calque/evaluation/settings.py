"""Settings of tasks: every choice in one record, each of them part of a result's `config` hash."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from weakref import WeakKeyDictionary

from calque.errors import InputError

# zero-shot: train in the source language and test in all languages. translate-train-all: train on
# all languages that have training files. supervised: train and test in each language separately.
# directions: train in each language separately and test in all. features: like zero-shot, but with
# a frozen encoder.
Setting: TypeAlias = Literal[
    "zero-shot", "translate-train-all", "supervised", "directions", "features"
]
SETTINGS: tuple[str, ...] = get_args(Setting)

CHOICES = {
    "setting": SETTINGS,
    "head": ("linear", "crf"),
    "select": ("last", "best"),
    "plug": ("out", "in"),
    "precision": ("bf16", "fp32"),
    "similarity": ("cosine", "margin"),
}
# Settings that were added later: they do not count in the hash while they have their default.
OPTIONAL = (
    "plug",
    "layers",
    "center",
    "neutral",
    "batch_examples",
    "pooler",
    "chinese_words",
    "similarity",
)


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How a task is trained and tested. The defaults suit a small encoder."""

    setting: Setting = "zero-shot"
    source: str = "en"
    epochs: int = 3
    # Learning rates of the encoder and of the head. With a higher rate the encoder forgets the
    # other languages over many updates, while scores in the source language stay the same.
    learning_rate: float = 5e-5
    head_learning_rate: float = 1e-3
    # Maximum number of tokens per update, special tokens included, padding not included.
    batch_tokens: int = 1024
    # Examples per update, whatever their length. Default: as many as batch_tokens allows.
    batch_examples: int | None = None
    # Maximum tokens per sequence. Default: what the encoder's positions allow, at most 256.
    max_length: int | None = None
    # Share of the updates with a rising learning rate; afterwards it falls linearly.
    warmup: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    # Dropout before the head, and inside the encoder (None: as configured in the model).
    dropout: float = 0.1
    body_dropout: float | None = None
    # Taggers: classify each word separately, or find the best sequence with a CRF.
    head: Literal["linear", "crf"] = "linear"
    # Classification: a tanh layer before the linear one, as in RoBERTa.
    pooler: bool = True
    # Named entities: join Chinese characters to words, which have the tag of their first character.
    chinese_words: bool = False
    # Test the weights of the last epoch, or of the best one on held-out source text.
    select: Literal["last", "best"] = "last"
    # Maximum number of examples, taken at equal distances from the file.
    train_examples: int | None = None
    test_examples: int | None = None
    # With frozen features: Transformer layers trained on top of the mixture of layers.
    extra_layers: int = 4
    # Overlap of the windows of a long sentence, as a share of a window.
    overlap: float = 0.25
    # Parsing: read the first words of a sentence only (None: all of them), and whether subtypes
    # of relations such as acl:relcl count.
    max_words: int | None = 128
    subtypes: bool = False
    # Question answering: tokens between the starts of two windows (at most half a window), and
    # the maximum length of an answer in tokens.
    stride: int = 128
    max_answer: int = 30
    # Precision of training on CUDA; a CPU always uses fp32.
    precision: Literal["bf16", "fp32"] = "bf16"
    # Tasks without training: the layer of the score. Default: the first of `layers`, otherwise
    # the model's best layer.
    layer: int | None = None
    # VECO: predict from H alone (out), or from H and S, where S reads a translation (in).
    plug: Literal["out", "in"] = "out"
    # On CUDA, record the update as a graph and replay it, which is faster for small models.
    graphs: bool = True
    # Tasks without training: all layers that are measured. Default: every layer.
    layers: tuple[int, ...] | None = None
    # Retrieval: subtract the mean vector of each language, or use the language-neutral space that
    # is stored with the model.
    center: bool = False
    neutral: bool = False
    # Tatoeba: the nearest sentence by cosine, as XTREME has it, or by the margin that mining uses.
    similarity: Literal["cosine", "margin"] = "cosine"

    def __post_init__(self) -> None:
        """Raise an InputError for invalid values."""
        for name, choices in CHOICES.items():
            _check(getattr(self, name) in choices, name, self, f"choose from {', '.join(choices)}")
        for name in ("learning_rate", "head_learning_rate", "weight_decay"):
            _check(math.isfinite(getattr(self, name)), name, self, "use a finite number")
        for name in ("epochs", "batch_tokens", "learning_rate", "head_learning_rate", "stride"):
            _check(getattr(self, name) > 0, name, self, "use a number above 0")
        for name in ("max_answer", "max_grad_norm"):
            _check(getattr(self, name) > 0, name, self, "use a number above 0")
        optional = ("batch_examples", "max_length", "max_words", "train_examples", "test_examples")
        for name in optional:
            value = getattr(self, name)
            _check(value is None or value > 0, name, self, "use a number above 0")
        for name in ("warmup", "dropout", "body_dropout", "overlap"):
            value = getattr(self, name)
            _check(value is None or 0 <= value < 1, name, self, "use a number from 0 to below 1")
        for name in ("weight_decay", "extra_layers"):
            _check(getattr(self, name) >= 0, name, self, "use 0 or a number above it")
        fix = "a frozen encoder has no cross-attention to train: choose another setting"
        _check(self.plug == "out" or not self.is_frozen, "plug", self, fix)
        fix = "a neutral space has its own layer: use neutral alone"
        chosen = self.center or self.layer is not None or self.layers is not None
        _check(not (self.neutral and chosen), "neutral", self, fix)

    @property
    def is_frozen(self) -> bool:
        """Whether the encoder is not trained."""
        return self.setting == "features"

    @property
    def values(self) -> dict[str, Any]:
        """The values that identify these settings."""
        values = asdict(self)
        for field in fields(self):
            if field.name in OPTIONAL and getattr(self, field.name) == field.default:
                del values[field.name]
        return values

    def hash(self) -> str:
        """Return 12 hexadecimal digits that are the same on every machine."""
        text = json.dumps(self.values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


# Wu and Dredze (2020), Section 3 and Appendix A: fine-tuning on English and, for linear maps,
# training on frozen features. Paper: weights are compared on development data after every epoch;
# the authors' code does so four times per epoch of fine-tuning.
_WU_DREDZE = {
    "epochs": 5,
    "learning_rate": 2e-5,
    "head_learning_rate": 2e-5,
    "batch_examples": 32,
    "warmup": 0.1,
    "weight_decay": 0.0,
    "max_length": 128,
    "max_words": 128,
    "pooler": False,
    "chinese_words": True,
    "select": "best",
}
_WU_DREDZE_FROZEN = _WU_DREDZE | {
    "setting": "features",
    "epochs": 20,
    "head_learning_rate": 1e-3,
    "batch_examples": 128,
    "extra_layers": 4,
}
# Settings of published protocols by task: of a trained encoder, and of a frozen one.
PROTOCOLS: dict[str, dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "wu-dredze": {
        "pos": (_WU_DREDZE, _WU_DREDZE_FROZEN),
        "parsing": (_WU_DREDZE, _WU_DREDZE_FROZEN),
        "xnli": (_WU_DREDZE, _WU_DREDZE_FROZEN | {"head_learning_rate": 1e-4}),
        "ner": (_WU_DREDZE, _WU_DREDZE_FROZEN | {"head_learning_rate": 1e-4, "head": "crf"}),
    }
}


def find_protocol(protocol: str | None, task: str, *, frozen: bool) -> Mapping[str, Any]:
    """Return the settings of a published protocol for a fine-tuned task, none without a protocol.

    >>> find_protocol("wu-dredze", "ner", frozen=True)["head"]
    'crf'
    """
    if protocol is None:
        return {}
    if protocol not in PROTOCOLS:
        problem = f"there is no protocol {protocol!r}"
        raise InputError(problem, fix=f"choose from: {', '.join(PROTOCOLS)}")
    tasks = PROTOCOLS[protocol]
    if task not in tasks:
        problem = f"the protocol {protocol} has no settings for {task}"
        raise InputError(problem, fix=f"choose tasks from: {', '.join(tasks)}")
    return tasks[task][frozen]


def build_settings(*choices: Mapping[str, Any]) -> TaskSettings:
    """Return settings with values from several mappings; later ones take precedence.

    >>> build_settings({"epochs": 2}, {"epochs": "5"}).epochs
    5
    """
    values = {name: value for choice in choices for name, value in choice.items()}
    for name, value in values.items():
        is_text = _find_type(name) == "str" or "Literal" in _find_type(name)
        if isinstance(value, str) and name not in CHOICES and not is_text:
            values[name] = parse_setting(name, value)
    return TaskSettings(**values)


def parse_setting(name: str, text: str) -> Any:
    """Convert the text of a value to the type of the setting.

    >>> parse_setting("epochs", "2"), parse_setting("max_length", "none")
    (2, None)
    """
    kind = _find_type(name)
    if "None" in kind and text.lower() in ("none", "null", ""):
        return None
    try:
        if "bool" in kind:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if "tuple" in kind:
            return tuple(int(part) for part in text.split(","))
        if "int" in kind and "float" not in kind:
            return int(text)
        return float(text) if "float" in kind else text
    except (ValueError, KeyError):
        wanted = "true or false" if "bool" in kind else "a number"
        raise InputError(f"the value {text!r} of {name} is invalid", fix=f"use {wanted}") from None


T = TypeVar("T")

N_CACHED = 4  # values per tokenizer: a worker switches between few tasks
_CACHE: WeakKeyDictionary[object, dict[Hashable, object]] = WeakKeyDictionary()


def remember(tokenizer: object, key: Hashable, make: Callable[[], T]) -> T:
    """Return the cached value for a tokenizer and key, or make and cache it.

    This saves reading and tokenizing the same files for every seed. The key must contain all that
    the value depends on: the task, the files and the settings. Callers must not change the value.
    The cache of a tokenizer keeps the values used last and disappears with the tokenizer.

    >>> class Tokenizer: pass
    >>> tokenizer = Tokenizer()
    >>> remember(tokenizer, "pos", lambda: [1]) is remember(tokenizer, "pos", lambda: [2])
    True
    """
    cached = _CACHE.setdefault(tokenizer, {})
    value = cached.pop(key) if key in cached else make()
    while len(cached) >= N_CACHED:
        cached.pop(next(iter(cached)))
    cached[key] = value
    return value  # type: ignore[return-value]


def _find_type(name: str) -> str:
    types = {field.name: str(field.type) for field in fields(TaskSettings)}
    if name not in types:
        known = ", ".join(sorted(types))
        raise InputError(f"there is no setting {name!r}", fix=f"choose from: {known}")
    return types[name]


def _check(is_valid: bool, name: str, settings: TaskSettings, fix: str) -> None:
    if not is_valid:
        raise InputError(f"the setting {name}={getattr(settings, name)!r} is invalid", fix=fix)
