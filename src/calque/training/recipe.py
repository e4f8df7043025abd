"""The typed recipe: every key of a recipe file, its type, its default and its limits."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.models.seq2seq import DecoderPlan
from calque.models.tag_probe import ProbeMetric
from calque.objectives import AnySettings, ObjectiveSettings

# Stands for a language code in `probe.test`.
LANGUAGE = "{language}"
# Longest name that becomes a part of a path, in bytes.
MAX_NAME = 100
MAX_PARAMETERS = 10**11


class Section(BaseModel):
    """A part of a recipe; unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DecoderSection(Section):
    """`model.decoder`: a decoder with the shape and the weights of the encoder's layers.

    Its cross-attention is copied from `model.start` if that model has one (the folder `veco` of a
    VECO model, or another encoder–decoder), and is random otherwise.
    """

    # Number of layers. Default: as many as the encoder has.
    layers: int | None = Field(None, gt=0)
    # Which of the encoder's layers to copy.
    which: Literal["first", "last"] = "last"
    # "random" ignores a cross-attention in `model.start`.
    cross_attention: Literal["start", "random"] = "start"
    # Weights shared with the encoder: none, the word embeddings, or all but the cross-attention.
    tie: Literal["nothing", "embeddings", "all"] = "embeddings"
    # Target languages; each gets a start token. A single target language needs none.
    languages: list[str] = []

    def plan(self) -> DecoderPlan:
        """Return the settings from which the model is built."""
        languages = tuple(self.languages)
        return DecoderPlan(self.layers, self.which, self.cross_attention, self.tie, languages)


class ModelSection(Section):
    """The encoder: a checkpoint to start from, or the shape of a new one."""

    # A model folder, a hub name or calque-mini. Default: a new encoder with random weights.
    start: str | None = None
    architecture: Literal["xlm-roberta", "roberta", "bert", "modernbert"] = "xlm-roberta"
    layers: int = Field(12, gt=0)
    hidden: int = Field(768, gt=0)
    heads: int = Field(12, gt=0)
    intermediate: int = Field(3072, gt=0)
    # Maximum sequence length, special tokens included.
    positions: int = Field(512, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)
    # Rows longer than 256 tokens use the flash kernel, which has no dropout: above 0, attention
    # is computed with padding instead.
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    # Adds a cross-attention to every layer (VECO): a copy of the layer's self-attention, random
    # weights, or the cross-attention of the model in `start`.
    cross_attention: Literal["self", "random", "start"] | None = None
    # Turns the encoder into an encoder–decoder, for objectives that generate text.
    decoder: DecoderSection | None = None

    @model_serializer(mode="wrap")
    def _serialize(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _drop_unset(write(self), "cross_attention", "decoder")

    @model_validator(mode="after")
    def _check_cross_attention(self) -> ModelSection:
        if self.cross_attention == "start" and self.start is None:
            raise ValueError("cross_attention=start needs a model in `start`")
        if self.cross_attention is not None and self.decoder is not None:
            raise ValueError("cross_attention and decoder exclude each other: train one, then both")
        return self

    @model_validator(mode="after")
    def _check_heads(self) -> ModelSection:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")
        n_matrices = self.layers * (4 * self.hidden + 2 * self.intermediate) + self.positions
        if n_matrices * self.hidden > MAX_PARAMETERS:
            n_billions = n_matrices * self.hidden / 1e9
            raise ValueError(f"the encoder would have {n_billions:,.0f} billion parameters")
        if self.architecture == "modernbert" and self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden={self.hidden} gives each of heads={self.heads} an odd width, but the "
                "rotary positions of modernbert need an even one"
            )
        return self


class TokenizerSection(Section):
    """The tokenizer: one that exists, or one trained on the text of the recipe."""

    # A folder, a hub name or calque-mini. Default: that of `model.start`, or a new one.
    path: str | None = None
    vocab_size: int = Field(32_000, gt=8, le=10_000_000)
    character_coverage: float = Field(0.9995, gt=0, le=1)
    # Characters of training text, divided among the languages by `alpha`.
    sample_characters: int = Field(50_000_000, gt=0)
    alpha: float = Field(0.5, ge=0, le=1)


class SourceSection(Section):
    """One or several files of text, bitext or word vectors; `*` in a path matches anything."""

    # Two bitext paths whose names end in two languages (news.en, news.de) are its two sides.
    path: str | list[str]
    # "vectors": static word vectors in word2vec's format.
    kind: Literal["bitext", "text", "vectors"]
    # Word links of the bitext, one line `0-0 1-2 …` per pair: one file per bitext, sorted by name.
    links: str | list[str] | None = None
    # Use the first words of the vectors only; files are sorted by frequency.
    max_words: int | None = Field(None, gt=0)
    # "en-de" or "de". Default: inferred from the file name.
    languages: str | None = None
    # Keep or drop the lines with these tags in their third column.
    include_tags: list[str] | None = None
    exclude_tags: list[str] = []
    # Multiplies the share of this source in the sampling.
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _check_kind(self) -> SourceSection:
        if self.links is not None and self.kind != "bitext":
            raise ValueError(f"links={self.links!r}, but only bitext has links")
        if self.max_words is not None and self.kind != "vectors":
            raise ValueError(f"max_words={self.max_words}, but it applies to vectors only")
        return self

    @model_serializer(mode="wrap")
    def _serialize(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _drop_unset(write(self), "links", "max_words")


class DataSection(Section):
    """The text: its sources, its cleaning, and how the languages share a batch."""

    sources: list[SourceSection] = []
    leave_out_languages: list[str] = []
    # Pairs of this file (language, source, target) are removed from the training text.
    hold_out: str | None = None
    # Languages are sampled with probability proportional to size ** alpha.
    alpha: float = Field(0.7, ge=0, le=1)
    # Longer examples are left out. Tokens of a sentence, or of a pair that is read as one sequence.
    # An objective may have a max_length of its own.
    max_length: int = Field(128, gt=8)
    # For objectives on single sentences: join consecutive sentences of a corpus to blocks of up to
    # max_length tokens. A longer sentence is divided among several blocks.
    join_sentences: bool = False
    # Cleaning rules by name, for example max_chars: 600; the others keep their defaults.
    cleaning: dict[str, Any] = {}
    # Examples of every corpus that are kept for validation.
    validation_examples: int = Field(200, ge=0)

    @field_validator("cleaning")
    @classmethod
    def _check_rules(cls, rules: dict[str, Any]) -> dict[str, Any]:
        types = get_type_hints(CleaningRules)
        for name, value in rules.items():
            if name not in types:
                raise ValueError(f"{name}: no such rule{suggest(name, types)}")
            try:
                TypeAdapter(types[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"{name}: {error.errors()[0]['msg']}, got {value!r}") from error
        CleaningRules(**rules)  # checks rules that depend on each other
        return rules

    @model_serializer(mode="wrap")
    def _serialize(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _drop_unset(write(self), "join_sentences")

    def cleaning_rules(self) -> CleaningRules:
        """Return the cleaning rules with the recipe's changes."""
        return CleaningRules(**self.cleaning)

    def find_max_length(self, objective: ObjectiveSettings) -> tuple[str, int]:
        """Return the maximum length of an objective's examples, after the key that sets it."""
        if objective.max_length is None:
            return "data.max_length", self.max_length
        return f"{objective.kind}.max_length", objective.max_length


class OptimizerSection(Section):
    """AdamW; weight decay applies to matrices, not to biases and layer norms."""

    learning_rate: float = Field(2e-4, gt=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.98], min_length=2, max_length=2
    )
    epsilon: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    # Maximum norm of the gradient; .inf for none.
    clip: float = Field(1.0, gt=0, allow_inf_nan=True)


class ScheduleSection(Section):
    """The number of steps and the course of the learning rate."""

    steps: int = Field(150_000, gt=0)
    kind: Literal["linear", "cosine", "constant"] = "linear"
    warmup: int = Field(10_000, ge=0)

    @model_validator(mode="after")
    def _check_warmup(self) -> ScheduleSection:
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup={self.warmup} exceeds steps={self.steps}: set schedule.warmup, too"
            )
        return self


class EngineSection(Section):
    """How a step is computed.

    Apart from rounding, only the number of micro-batches per step changes what is learned:
    `accumulation` times the number of processes.
    """

    accumulation: int = Field(1, gt=0)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    distributed: Literal["ddp", "fsdp"] = "ddp"
    # Worker processes per trainer that build batches in advance; auto: 2 with a GPU, 0 on a CPU.
    workers: Annotated[int, Field(ge=0, le=1000)] | Literal["auto"] = "auto"


class AverageSection(Section):
    """Averaged weights: an exponential moving average or the mean of the last checkpoints."""

    kind: Literal["none", "ema", "last"] = "none"
    decay: float = Field(0.999, gt=0, lt=1)
    last: int = Field(5, gt=1)


class CheckpointSection(Section):
    """When to save, and which weights become the finished model.

    With `final: best`, a checkpoint is written after every validation that improves on all others.
    """

    every: int = Field(1000, gt=0)
    keep: int = Field(2, gt=0)
    validate_every: int = Field(1000, gt=0)
    validation_batches: int = Field(8, gt=0)
    final: Literal["last", "best"] = "last"
    # Objectives whose validation losses decide which checkpoint is best. Default: all.
    best_by: list[str] | None = Field(None, min_length=1)
    # Data type of the finished model's file.
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class TelemetrySection(Section):
    """What is recorded during training."""

    # Record metrics after this many steps.
    every: int = Field(20, gt=0)
    tensorboard: bool = False


class ProbeSection(Section):
    """A small tagging task, trained on frozen states in one language and scored in others.

    Files are treebanks in CoNLL-U or `word ⇥ tag` lines. In `test`, `{language}` stands for a
    language code and `*` for anything: ud/{language}_*-dev.conllu.xz.
    """

    train: str
    test: str | dict[str, str]
    source: str = "en"
    # Default: all languages that `test` matches.
    languages: list[str] | None = Field(None, min_length=1)
    # Measured at step 0, after this many steps, and at the last step.
    every: int = Field(1000, gt=0)
    # Default: two thirds of the way up, where words align best.
    layer: int | None = None
    metric: ProbeMetric = "accuracy"
    # Maximum number of sentences, spread evenly over the file.
    train_sentences: int = Field(500, gt=0)
    test_sentences: int = Field(100, gt=0)

    def find_tests(self) -> dict[str, Path]:
        """Return the test file of every language: the source first, then the others by name."""
        found = self._match_files() if isinstance(self.test, str) else self._listed_files()
        wanted = list(found) if self.languages is None else [self.source, *self.languages]
        for name in wanted:
            if name not in found:
                raise InputError(
                    f"the probe has no test of {name!r}",
                    file=self.test,
                    fix=f"choose from: {' '.join(sorted(found))}",
                )
        if self.source not in found:
            raise InputError(
                f"the probe has no test of its source {self.source!r}",
                file=self.test,
                fix="add one, or set probe.source",
            )
        if not Path(self.train).is_file():
            raise InputError("no such file", file=self.train, fix="correct the path in probe.train")
        if found[self.source].resolve() == Path(self.train).resolve():
            raise InputError(
                "the probe would be trained on its test file",
                file=self.train,
                fix="set probe.train or probe.test to another file",
            )
        names = sorted(set(wanted) - {self.source})
        return {name: found[name] for name in (self.source, *names)}

    def _match_files(self) -> dict[str, Path]:
        """Return the files that the pattern `test` matches, by the languages in their names.

        Two files of one language are an error, because one would be ignored silently.
        """
        pattern = str(self.test)
        if pattern.count(LANGUAGE) != 1:
            fix = "use it once, as in ud/{language}_*-dev.conllu.xz, or list the files by language"
            raise InputError(f"probe.test does not contain {LANGUAGE} once", file=pattern, fix=fix)
        head, tail = (re.escape(part).replace(r"\*", ".*") for part in pattern.split(LANGUAGE))
        shape = re.compile(rf"{head}(?P<language>[a-z]{{2,3}})(?![a-z]){tail}", re.DOTALL)
        found: dict[str, Path] = {}
        for path in glob_language(pattern):
            matched = shape.fullmatch(path)
            if matched is None:
                continue
            name = matched["language"]
            if name in found:
                raise InputError(
                    f"{path} is a test of {name!r}, too",
                    file=found[name],
                    fix="make probe.test more specific",
                )
            found[name] = Path(path)
        if not found:
            raise InputError("probe.test matches no file", file=pattern, fix="correct the path")
        return found

    def _listed_files(self) -> dict[str, Path]:
        assert isinstance(self.test, dict)
        for path in self.test.values():
            if not Path(path).is_file():
                raise InputError("no such file", file=path, fix="correct the path in probe.test")
        return {name: Path(path) for name, path in self.test.items()}


class Recipe(Section):
    """Everything that determines a training run."""

    name: str
    seed: int = Field(1, ge=0, lt=2**63)
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    objectives: list[Annotated[AnySettings, Field(discriminator="kind")]] = Field(min_length=1)
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    # Names of parameters, with `*` for anything; a later pattern `!…` makes exceptions.
    freeze: list[str] = []
    # Number of steps for which they are frozen. Default: the whole run.
    freeze_steps: int | None = Field(None, gt=0)
    # Keep the first rows of the word embeddings, those of a vocabulary that was extended, and the
    # rows of special tokens.
    freeze_rows: int | None = Field(None, gt=0)
    average: AverageSection = AverageSection()
    checkpoints: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()
    # Measures cross-lingual transfer during training without affecting it.
    probe: ProbeSection | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not is_file_name(name):
            shown = reprlib.repr(name)
            raise ValueError(f"{shown} cannot be the name of a folder: use letters and digits")
        return name

    def fingerprint(self) -> str:
        """Return a hash of everything that a resumed run must share with the original run."""
        content = self.model_dump(exclude={"telemetry", "engine", "checkpoints", "probe"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Return the recipe as the text of a recipe file."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)

    @model_serializer(mode="wrap")
    def _serialize(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _drop_unset(write(self), "freeze_steps", "freeze_rows")

    @model_validator(mode="after")
    def _check_weights(self) -> Recipe:
        if not any(each.weight for each in self.objectives):
            raise ValueError("objectives: every weight is 0, so nothing would be learned")
        if self.average.kind != "none" and self.checkpoints.final == "best":
            raise ValueError(
                f"average.kind={self.average.kind} and checkpoints.final=best exclude each other"
            )
        return self

    @model_validator(mode="after")
    def _check_freeze_steps(self) -> Recipe:
        if self.freeze_steps is None:
            return self
        if not self.freeze:
            raise ValueError(f"freeze_steps={self.freeze_steps}, but nothing is frozen")
        if self.freeze_steps >= self.schedule.steps:
            raise ValueError(
                f"freeze_steps={self.freeze_steps} leaves none of schedule.steps="
                f"{self.schedule.steps} for all weights: lower it, or set freeze_steps=null to "
                "freeze for the whole run"
            )
        return self

    @model_validator(mode="after")
    def _check_freeze_rows(self) -> Recipe:
        if self.freeze_rows is None:
            return self
        if self.optimizer.weight_decay > 0:
            raise ValueError("freeze_rows needs optimizer.weight_decay=0, which changes all rows")
        if self.engine.distributed == "fsdp":
            raise ValueError("freeze_rows does not work with engine.distributed=fsdp")
        return self

    @model_validator(mode="after")
    def _check_objectives(self) -> Recipe:
        kinds = {each.kind for each in self.objectives}
        needs_cross_attention = "cross_attention_lm" in kinds
        if needs_cross_attention != (self.model.cross_attention is not None):
            wrong = "is missing" if needs_cross_attention else "is trained by no objective"
            raise ValueError(
                f"model.cross_attention {wrong}: it and cross_attention_lm need each other"
            )
        decoder = self.model.decoder
        if self.engine.distributed == "fsdp" and decoder is not None and decoder.tie == "all":
            raise ValueError(
                "model.decoder.tie=all does not work with engine.distributed=fsdp, which cannot "
                "share layers between encoder and decoder"
            )
        if self.probe is not None and "linear_map" in kinds:
            raise ValueError("probe: linear_map does not change the encoder; remove the probe")
        return self


def is_file_name(name: str) -> bool:
    """Return whether a name can be the name of a file or folder, without surprises.

    >>> [is_file_name(name) for name in ("x2s-dcca", "../x", ".x", " x", "", "x" * 200)]
    [True, False, False, False, False, False]
    """
    if not name.isprintable() or name.strip() != name or len(name.encode()) > MAX_NAME:
        return False
    return bool(name) and not name.startswith(".") and "/" not in name and "\\" not in name


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known name that a misspelled one resembles, or ""."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def glob_language(pattern: str) -> list[str]:
    """Return the files that match a pattern in which only `*` and `{language}` are special."""
    return sorted(glob.glob(glob.escape(pattern.replace(LANGUAGE, "*")).replace("[*]", "*")))


def _drop_unset(content: dict[str, Any], *newer: str) -> dict[str, Any]:
    """Leave out newer keys without a value, so that older recipes keep their fingerprint."""
    unset = (None, False)
    return {k: value for k, value in content.items() if k not in newer or value not in unset}
