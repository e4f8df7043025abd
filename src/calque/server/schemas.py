"""The JSON of requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHARACTERS = 5_000  # of one text
MAX_TEXTS = 200
MAX_TOTAL_CHARACTERS = 50_000  # of all texts of a request
MAX_POINTS = 1_000
MAX_CELLS = 250_000  # of all matrices of a response
MAX_MATCHES = 100
# Reading attention and translating take longer than encoding.
MAX_SHORT_CHARACTERS = 1_000
MAX_TRANSLATIONS = 32
MAX_BEAMS = 8

Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
ShortText = Annotated[str, Field(max_length=MAX_SHORT_CHARACTERS)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Request(BaseModel):
    """A request; unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorReply(BaseModel):
    """What was wrong, in one line."""

    error: str


class ServedModel(BaseModel):
    """A model of this server: its layers and heads, and what is used by default."""

    name: str
    n_layers: int
    n_heads: int
    default_layer: int = Field(description="Layer of /align.")
    default_method: str
    default_threshold: float
    probability_threshold: float | None = Field(
        description="Threshold of the method probability; null if the model is not calibrated."
    )
    map_languages: list[str] = Field(description="Languages that /embed can map.")


class HealthReply(BaseModel):
    """What this server has."""

    status: Literal["ok"]
    version: str
    models: list[ServedModel] = Field(description="The first one is the default.")
    methods: list[str]
    languages: list[str] = Field(description="Languages of the sentences that can be found.")
    vector_languages: list[str] = Field(description="Languages of the dictionary.")
    target_languages: list[str] = Field(description="Languages of the translator, if it has some.")
    views: list[str] = Field(description="What can be shown with the data of this server.")


class TextPair(_Request):
    """A sentence and its translation."""

    src: Text
    tgt: Text


class AlignRequest(_Request):
    """Sentence pairs whose words are to be linked."""

    pairs: Annotated[list[TextPair], Field(min_length=1, max_length=MAX_TEXTS)]
    layer: int | None = Field(None, description="Layer; default: the model's best.")
    method: Literal["ot", "itermax", "argmax", "match", "probability"] | None = None
    threshold: float | None = Field(None, ge=0, le=1, description="Minimum score of a link.")
    sharpness: float | None = Field(
        None, gt=0, le=1000, description="Factor of the cosines in optimal transport."
    )
    matrix: bool = Field(False, description="Return the cosines of all word pairs.")
    model: Name | None = None
    tokenize: bool = Field(True, description="Split the text into words; else at spaces only.")


class WordLink(BaseModel):
    """A link between two words, counted from 0, and its score from 0 to 1.

    The score is a probability if the reply says `calibrated`.
    """

    src: int
    tgt: int
    score: float


class PairLinks(BaseModel):
    """The words of a pair, their links, and the cosines of all word pairs if asked for."""

    src: list[str]
    tgt: list[str]
    links: list[WordLink]
    matrix: list[list[float]] | None


class AlignReply(BaseModel):
    """The links of every pair, and the settings they were made with."""

    model: str
    layer: int
    method: str
    threshold: float
    calibrated: bool = Field(description="Whether scores are probabilities.")
    pairs: list[PairLinks]


class SearchRequest(_Request):
    """A sentence to search for."""

    text: Text
    n: int = Field(10, ge=1, le=MAX_MATCHES, description="Sentences of each language.")
    languages: Annotated[list[Name], Field(max_length=MAX_TEXTS)] | None = None


class SearchMatch(BaseModel):
    """A sentence that was found: its language, its line in the file, and the cosine."""

    language: str
    text: str
    score: float
    line: int


class SearchReply(BaseModel):
    """The nearest sentences, the best first."""

    matches: list[SearchMatch]


class EmbedRequest(_Request):
    """Sentences to embed."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    language: Name | None = Field(
        None, description="Language of the texts: apply the model's linear map of it."
    )
    model: Name | None = None


class EmbedReply(BaseModel):
    """One vector per sentence."""

    model: str
    dimension: int
    vectors: list[list[float]]


class LanguageText(_Request):
    """A text and its language."""

    text: Text
    language: Name


class ProjectionRequest(_Request):
    """Texts to show as points in two dimensions."""

    texts: Annotated[list[LanguageText], Field(min_length=1, max_length=MAX_POINTS)]
    unit: Literal["sentence", "word"] = Field(
        "sentence", description="One point for every sentence, or for every word in its context."
    )
    method: Literal["pca", "tsne", "umap"] = "pca"
    layer: int | None = Field(None, description="Layer; default: the model's best for the unit.")
    model: Name | None = None


class ProjectedPoint(BaseModel):
    """A sentence or word and where it is."""

    x: float
    y: float
    text: str
    language: str


class ProjectionReply(BaseModel):
    """The points of all sentences or words."""

    model: str
    method: str
    points: list[ProjectedPoint]


class AttentionRequest(_Request):
    """A sentence and its translation."""

    src: ShortText
    tgt: ShortText
    layer: int | None = Field(None, description="One layer, counted from 1. Default: all.")
    head: int | None = Field(None, description="One head, counted from 1. Default: their mean.")
    model: Name | None = None


class AttentionReading(BaseModel):
    """Attention of two sentences to each other.

    `src_to_tgt` has, for every layer, one matrix with a row for each source token. `shares` is the
    attention to the other sentence at each layer, `uniform` what it would be if attention were
    uniform.
    """

    model: str
    kind: str
    src: list[str]
    tgt: list[str]
    layers: list[int]
    src_to_tgt: list[list[list[float]]]
    tgt_to_src: list[list[list[float]]]
    shares: list[float]
    uniform: float


class AttentionReply(BaseModel):
    """Self-attention, and cross-attention if the model has it."""

    readings: list[AttentionReading]


class TranslateRequest(_Request):
    """Sentences to translate."""

    texts: Annotated[list[ShortText], Field(min_length=1, max_length=MAX_TRANSLATIONS)]
    src_lang: Name | None = None
    tgt_lang: Name | None = None
    beams: int = Field(4, ge=1, le=MAX_BEAMS)


class TranslateReply(BaseModel):
    """One translation per text."""

    translations: list[str]


class WordNeighbor(BaseModel):
    """A word near another, and the cosine."""

    word: str
    score: float


class LexiconReply(BaseModel):
    """The nearest words in every other language."""

    word: str
    language: str
    neighbors: dict[str, list[WordNeighbor]]


class RunReply(BaseModel):
    """The state of a training run; `updated` is in seconds since 1970."""

    name: str
    state: Literal["running", "finished", "stopped"]
    step: int
    steps: int | None
    tokens_per_second: float | None
    eta_seconds: float | None
    updated: float


class RunMetrics(BaseModel):
    """The metrics that a run has recorded after a step."""

    run: RunReply
    metrics: list[dict[str, float | int | str | None]]


class SeedScore(BaseModel):
    """The scores of a model and of the baseline with one seed."""

    seed: int | None
    score: float
    baseline: float | None


class StudyCell(BaseModel):
    """A model in one language of a task, or in its mean (`mean`) or transfer gap (`gap`)."""

    model: str
    language: str
    mean: float
    deviation: float | None
    baseline_mean: float
    baseline_deviation: float | None
    difference: float
    low: float | None
    high: float | None
    p: float | None
    category: str
    seeds: list[SeedScore]


class StudyVerdict(BaseModel):
    """A verdict as a sentence, and its category."""

    category: str
    text: str


class StudyTask(BaseModel):
    """A task: verdicts, scores, and the names of its plots."""

    task: str
    metric: str
    higher_is_better: bool
    languages: list[str]
    verdicts: list[StudyVerdict]
    cells: list[StudyCell]
    plots: list[str]


class StudyReply(BaseModel):
    """Comparisons of models with a baseline."""

    baseline: str
    models: list[str]
    notes: list[str]
    tasks: list[StudyTask]
