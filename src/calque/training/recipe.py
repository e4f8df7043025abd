"""The recipe's `model.decoder`: what makes an encoder–decoder of the encoder.

The recipe's `probe`: which tagged sentences measure transfer along training, and how often.

The typed recipe: a YAML file, its overrides from the command line, and nothing unknown in it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
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

from calque.errors import InputError, first_line
from calque.io.cleaning import CleaningRules
from calque.models.seq2seq import DecoderPlan
from calque.models.tag_probe import Metric
from calque.objectives import AnySettings
from calque.training.recipe_io import describe_error, parse_yaml, suggest


class DecoderSection(BaseModel):
    """A decoder with the encoder's own shape and weights.

    Its cross-attention is that of `model.start`, if that has one (VECO's folder `veco`, or another
    encoder–decoder), and else random.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # How many of the encoder's layers it is made of, by default all; and which of them.
    layers: int | None = Field(None, gt=0)
    which: Literal["first", "last"] = "last"
    # "random" draws it even if `model.start` has some.
    cross_attention: Literal["start", "random"] = "start"
    # Weights that stay the encoder's own: none, the word embeddings, or all but cross-attention.
    tie: Literal["nothing", "embeddings", "all"] = "embeddings"
    # Languages it learns to write, each with a token to begin with; none needed for a single one.
    languages: list[str] = []

    def plan(self) -> DecoderPlan:
        """Give what the model is built from."""
        languages = tuple(self.languages)
        return DecoderPlan(self.layers, self.which, self.cross_attention, self.tie, languages)


LANGUAGE = "{language}"


class ProbeSection(BaseModel):
    """A small tagging task learnt from frozen states in one language and scored in others.

    Files are treebanks in CoNLL-U or `word ⇥ tag` lines. In `test`, `{language}` stands for the
    name of a language and `*` for anything: ud/{language}_*-dev.conllu.xz.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    train: str
    test: str | dict[str, str]
    source: str = "en"
    # By default all that `test` finds.
    languages: list[str] | None = Field(None, min_length=1)
    # At step 0, every so many steps, and at the last.
    every: int = Field(1000, gt=0)
    # By default two thirds of the way up, where words align best.
    layer: int | None = None
    metric: Metric = "accuracy"
    # At most so many sentences, spread over the file.
    train_sentences: int = Field(500, gt=0)
    test_sentences: int = Field(100, gt=0)

    def is_due(self, step: int, last: bool) -> bool:
        """Tell whether the probe is taken after a step."""
        return last or step % self.every == 0

    def find_tests(self) -> dict[str, Path]:
        """Find the files to score, by language: the source first, then the others by name."""
        found = _match(self.test) if isinstance(self.test, str) else _take(self.test)
        wanted = list(found) if self.languages is None else [self.source, *self.languages]
        for name in wanted:
            if name not in found:
                fix = f"choose from: {' '.join(sorted(found))}"
                raise InputError(f"the probe has no test of {name!r}", file=self.test, fix=fix)
        if self.source not in found:
            raise InputError(f"the probe has no test of its source {self.source!r}", file=self.test)
        if not Path(self.train).is_file():
            raise InputError("no such file", file=self.train, fix="correct the path in probe.train")
        if found[self.source].resolve() == Path(self.train).resolve():
            raise InputError(
                "the probe would learn from its test", file=self.train, fix="give another file"
            )
        names = sorted(set(wanted) - {self.source})
        return {name: found[name] for name in (self.source, *names)}


def anchor_probe(probe: ProbeSection | None, base: Path) -> ProbeSection | None:
    """Make files beside the recipe findable from anywhere."""
    if probe is None:
        return None
    test: str | dict[str, str]
    if isinstance(probe.test, str):
        test = _beside(probe.test, base)
    else:
        test = {name: _beside(path, base) for name, path in probe.test.items()}
    return probe.model_copy(update={"train": _beside(probe.train, base), "test": test})


def _beside(path: str, base: Path) -> str:
    """Find a path or pattern beside the recipe, or leave it to the working directory."""
    expanded = os.path.expanduser(path)
    beside = str(base.resolve() / expanded)
    return beside if _glob(beside) else expanded


def _match(pattern: str) -> dict[str, Path]:
    """Find the files of a pattern and read their languages off the names.

    A language that several files have is an error, since one would be passed over in silence.
    """
    if pattern.count(LANGUAGE) != 1:
        fix = "write it once, as in ud/{language}_*-dev.conllu.xz, or list the files by language"
        raise InputError(f"no {LANGUAGE} in the probe's test", file=pattern, fix=fix)
    head, tail = (re.escape(part).replace(r"\*", ".*") for part in pattern.split(LANGUAGE))
    shape = re.compile(rf"{head}(?P<language>[a-z]{{2,3}})(?![a-z]){tail}", re.DOTALL)
    found: dict[str, Path] = {}
    for path in _glob(pattern):
        matched = shape.fullmatch(path)
        if matched is None:
            continue
        name = matched["language"]
        if name in found:
            raise InputError(
                f"{path} is of {name!r} too", file=found[name], fix="narrow probe.test down"
            )
        found[name] = Path(path)
    if not found:
        raise InputError("the probe's test finds no file", file=pattern, fix="correct the path")
    return found


def _glob(pattern: str) -> list[str]:
    """List the files of a pattern, in which nothing but `*` and `{language}` is special."""
    return sorted(glob.glob(glob.escape(pattern.replace(LANGUAGE, "*")).replace("[*]", "*")))


def _take(files: dict[str, str]) -> dict[str, Path]:
    for path in files.values():
        if not Path(path).is_file():
            raise InputError("no such file", file=path, fix="correct the path in probe.test")
    return {name: Path(path) for name, path in files.items()}


def _drop_unset(content: dict[str, Any], *newer: str) -> dict[str, Any]:
    """Leave out those of the newer keys that have no value."""
    return {k: value for k, value in content.items() if k not in newer or value is not None}


class Section(BaseModel):
    """A part of a recipe: an unknown key or a value of another type is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """The encoder: a checkpoint to start from, or a shape to start afresh."""

    start: str | None = None
    architecture: Literal["xlm-roberta", "roberta", "bert", "modernbert"] = "xlm-roberta"
    layers: int = Field(12, gt=0)
    hidden: int = Field(768, gt=0)
    heads: int = Field(12, gt=0)
    intermediate: int = Field(3072, gt=0)
    # The longest sequence, marks included.
    positions: int = Field(512, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)
    # With rows longer than 256 tokens the flash kernel is used, which has no dropout: above 0,
    # attention is then computed with padding.
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    # A cross-attention in every layer (VECO). It begins by looking as the layer's self-attention
    # does, at random, or as that of the model in `start`.
    cross_attention: Literal["self", "random", "start"] | None = None
    # Makes an encoder–decoder of the encoder, for objectives that write text.
    decoder: DecoderSection | None = None

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer keys without a value: a recipe without them keeps its fingerprint."""
        return _drop_unset(write(self), "cross_attention", "decoder")

    @model_validator(mode="after")
    def _start_has_cross_attention(self) -> ModelSection:
        if self.cross_attention == "start" and self.start is None:
            raise ValueError("cross_attention=start, but there is no model to start from")
        return self

    @model_validator(mode="after")
    def _one_use_of_cross_attention(self) -> ModelSection:
        if self.cross_attention is not None and self.decoder is not None:
            raise ValueError("cross_attention and decoder exclude each other: train one, then both")
        return self

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ModelSection:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")
        if self.architecture == "modernbert" and self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden={self.hidden} gives each of heads={self.heads} an odd width, and "
                "modernbert turns its positions in pairs"
            )
        return self


class TokenizerSection(Section):
    """A tokenizer to take (a folder or hub name), or one to train on the recipe's own text."""

    path: str | None = None
    vocab_size: int = Field(32_000, gt=8)
    character_coverage: float = Field(0.9995, gt=0, le=1)
    # Characters of text to train on, shared among the languages by `alpha`.
    sample_characters: int = Field(50_000_000, gt=0)
    alpha: float = Field(0.5, ge=0, le=1)


class SourceSection(Section):
    """One or many files of text, bitext or word vectors; `*` stands for anything in a path."""

    # Two paths of bitext whose names end in two languages (news.en, news.de) are its two sides.
    path: str | list[str]
    # "vectors": words with their vectors, in word2vec's format.
    kind: Literal["bitext", "text", "vectors"]
    # Word links of the bitext, `0-0 1-2 …` a pair: as many files as bitexts, in sorted order.
    links: str | list[str] | None = None
    # Of vectors, the first so many words, which are the most frequent.
    max_words: int | None = Field(None, gt=0)
    # "en-de" or "de"; by default read off the file name.
    languages: str | None = None
    include_tags: list[str] | None = None
    exclude_tags: list[str] = []
    # Multiplies this source's share in the sampling.
    weight: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> SourceSection:
        if self.links is not None and self.kind != "bitext":
            raise ValueError(f"links={self.links!r}, but only bitext has links")
        if self.max_words is not None and self.kind != "vectors":
            raise ValueError(f"max_words={self.max_words}, but only vectors are cut by words")
        return self

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer keys without a value: a recipe without them keeps its fingerprint."""
        return _drop_unset(write(self), "links", "max_words")


class DataSection(Section):
    """What is read, how it is cleaned, and how languages share a batch."""

    sources: list[SourceSection] = []
    leave_out_languages: list[str] = []
    # Pairs in this file (language, src, tgt) never enter training.
    hold_out: str | None = None
    alpha: float = Field(0.7, ge=0, le=1)
    max_length: int = Field(128, gt=8)
    # Rules by name, such as max_chars: 600; those not named keep their defaults.
    cleaning: dict[str, Any] = {}
    # Examples of every corpus kept for validation.
    validation_examples: int = Field(200, ge=0)

    @field_validator("cleaning")
    @classmethod
    def _rules_exist(cls, rules: dict[str, Any]) -> dict[str, Any]:
        types = get_type_hints(CleaningRules)
        for name, value in rules.items():
            if name not in types:
                raise ValueError(f"{name}: no such rule{suggest(name, types)}")
            try:
                TypeAdapter(types[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"{name}: {error.errors()[0]['msg']}, got {value!r}") from error
        CleaningRules(**rules)  # looks at rules that must fit together
        return rules


class OptimizerSection(Section):
    """AdamW; biases and layer norms are not decayed."""

    learning_rate: float = Field(2e-4, gt=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.98], min_length=2, max_length=2
    )
    epsilon: float = Field(1e-6, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip: float = Field(1.0, gt=0)


class ScheduleSection(Section):
    """How long, and how the learning rate rises and falls."""

    steps: int = Field(150_000, gt=0)
    kind: Literal["linear", "cosine", "constant"] = "linear"
    warmup: int = Field(10_000, ge=0)

    @model_validator(mode="after")
    def _warmup_ends(self) -> ScheduleSection:
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup={self.warmup} exceeds steps={self.steps}: set schedule.warmup, too"
            )
        return self


class EngineSection(Section):
    """How a step is computed; beyond rounding, only the micro-batches a step change what is learnt.

    Those are `accumulation` times the number of processes.
    """

    accumulation: int = Field(1, gt=0)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    distributed: Literal["ddp", "fsdp"] = "ddp"
    # Processes per trainer that build batches ahead; auto: 2 beside a GPU, none on a CPU.
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"


class AverageSection(Section):
    """Weights averaged over time, an exponential average or the mean of the last checkpoints."""

    kind: Literal["none", "ema", "last"] = "none"
    decay: float = Field(0.999, gt=0, lt=1)
    last: int = Field(5, gt=1)


class CheckpointSection(Section):
    """When to save, and which weights the finished run gives.

    With `final: best`, every validation that is better than all before is saved at once.
    """

    every: int = Field(1000, gt=0)
    keep: int = Field(2, gt=0)
    validate_every: int = Field(1000, gt=0)
    validation_batches: int = Field(8, gt=0)
    final: Literal["last", "best"] = "last"
    # The objectives, by name, whose validation losses decide which is best; by default all.
    best_by: list[str] | None = Field(None, min_length=1)
    # Floating type of the finished model's file.
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class TelemetrySection(Section):
    """What is shown while training."""

    every: int = Field(20, gt=0)
    tensorboard: bool = False


class Recipe(Section):
    """Everything that decides a training run."""

    name: str
    seed: int = Field(1, ge=0, lt=2**63)
    model: ModelSection = ModelSection()
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection = DataSection()
    objectives: list[Annotated[AnySettings, Field(discriminator="kind")]] = Field(min_length=1)
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    engine: EngineSection = EngineSection()
    # Parameters by name, `*` for anything; those of a later pattern `!…` are excepted.
    freeze: list[str] = []
    # For how many steps they are frozen; by default for all.
    freeze_steps: int | None = Field(None, gt=0)
    average: AverageSection = AverageSection()
    checkpoints: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()
    # Measures transfer along training, and changes nothing of it.
    probe: ProbeSection | None = None

    @model_validator(mode="after")
    def _something_to_learn(self) -> Recipe:
        if not any(each.weight for each in self.objectives):
            raise ValueError("objectives: every weight is 0, so that nothing would be learnt")
        return self

    @model_validator(mode="after")
    def _one_final_model(self) -> Recipe:
        if self.average.kind != "none" and self.checkpoints.final == "best":
            raise ValueError(
                f"average.kind={self.average.kind} and checkpoints.final=best exclude each other"
            )
        return self

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer keys without a value: a recipe without them keeps its fingerprint."""
        return _drop_unset(write(self), "freeze_steps")

    @model_validator(mode="after")
    def _something_to_thaw(self) -> Recipe:
        if self.freeze_steps is not None and not self.freeze:
            raise ValueError(f"freeze_steps={self.freeze_steps}, but nothing is frozen")
        return self

    @model_validator(mode="after")
    def _thaws_in_time(self) -> Recipe:
        if self.freeze_steps is not None and self.freeze_steps >= self.schedule.steps:
            raise ValueError(
                f"freeze_steps={self.freeze_steps} leaves none of schedule.steps="
                f"{self.schedule.steps} for all weights: lower it, or set freeze_steps=null to "
                "freeze to the end"
            )
        return self

    @model_validator(mode="after")
    def _pairs_are_read(self) -> Recipe:
        reads = any(each.kind == "cross_attention_lm" for each in self.objectives)
        if reads != (self.model.cross_attention is not None):
            wrong = "is missing" if reads else "is trained by no objective"
            raise ValueError(
                f"model.cross_attention {wrong}: it and cross_attention_lm go together"
            )
        return self

    @model_validator(mode="after")
    def _layers_are_whole(self) -> Recipe:
        decoder = self.model.decoder
        if self.engine.distributed == "fsdp" and decoder is not None and decoder.tie == "all":
            raise ValueError(
                "model.decoder.tie=all, but engine.distributed=fsdp cannot share layers between "
                "encoder and decoder"
            )
        return self

    @model_validator(mode="after")
    def _something_to_probe(self) -> Recipe:
        if self.probe is not None and any(each.kind == "linear_map" for each in self.objectives):
            raise ValueError("probe: linear_map leaves the encoder as it is; drop the probe")
        return self

    def fingerprint(self) -> str:
        """Identify everything that a resumed run must share with the run it resumes."""
        content = self.model_dump(exclude={"telemetry", "engine", "checkpoints", "probe"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """Write the recipe as the file it could have come from."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a path or, by its bare name, from those that come with Calque."""
    path = find_recipe(name)
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or first_line(error)
        raise InputError(
            f"not valid YAML: {problem}", file=path, line=mark.line + 1 if mark else None
        ) from error
    if not isinstance(content, dict):
        raise InputError("a recipe is a mapping of keys to values", file=path)
    for override in overrides:
        apply_override(content, override)
    return check_recipe(content, path)


def check_recipe(content: dict[str, Any], source: object) -> Recipe:
    """Validate a recipe's content; the first error becomes one line that names the key."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise InputError(describe_error(error, content, Recipe), file=source) from error


def find_recipe(name: str | Path) -> Path:
    """Find a recipe by path or by the bare name of a bundled one."""
    path = Path(name)
    if path.is_file():
        return path
    bundled = bundled_recipes()
    bare = str(name).removesuffix(".yaml")
    if bare in bundled:
        return bundled[bare]
    raise InputError(
        "no such recipe", file=name, fix=f"give a path, or one of {', '.join(bundled)}"
    )


def bundled_recipes() -> dict[str, Path]:
    """Name the recipes that come with Calque: in the wheel, or in the checkout beside src."""
    package = Path(str(resources.files("calque")))
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def apply_override(content: dict[str, Any], override: str) -> None:
    """Apply `a.b=c` to a recipe's content; `objectives.0.weight=2` reaches into a list.

    >>> content = {"schedule": {"steps": 10}}
    >>> apply_override(content, "schedule.steps=20")
    >>> content
    {'schedule': {'steps': 20}}
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override}: not of the form key=value", fix="write a.b=c")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or first_line(error)
        raise InputError(f"--set {override}: not valid YAML: {problem}") from error
    *path, last = key.split(".")
    place: Any = content
    for part in path:
        place = _descend(place, part, override)
    if isinstance(place, list):
        place[_list_index(place, last, override)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise InputError(f"--set {override}: {path[-1]} holds a value, not keys")


def _descend(place: Any, part: str, override: str) -> Any:
    if isinstance(place, list):
        return place[_list_index(place, part, override)]
    if isinstance(place, dict):
        if place.get(part) is None:
            place[part] = {}
        return place[part]
    raise InputError(f"--set {override}: nothing lies above {part!r}")


def _list_index(place: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(place):
        raise InputError(
            f"--set {override}: {part!r} is not one of the {len(place)} entries",
            fix="count from 0",
        )
    return int(part)
