"""The JSON of requests and responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHARACTERS = 5_000  # of one text
MAX_TEXTS = 64
MAX_TOTAL_CHARACTERS = 100_000  # of all texts of a request
MAX_MATCHES = 100

Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class _Request(BaseModel):
    """A request; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class ErrorReply(BaseModel):
    """What was wrong, in one line."""

    error: str


class HealthReply(BaseModel):
    """What this server has."""

    status: Literal["ok"]
    version: str
    model: str
    models: list[str]
    n_layers: int
    default_layer: int
    methods: list[str]
    default_method: str
    default_threshold: float
    languages: list[str]
    views: list[str]


class TextPair(_Request):
    """A sentence and its translation."""

    src: Text
    tgt: Text


class AlignRequest(_Request):
    """Sentence pairs whose words are to be linked."""

    pairs: Annotated[list[TextPair], Field(min_length=1, max_length=MAX_TEXTS)]
    layer: int | None = Field(None, description="Layer; default: the model's best.")
    method: Literal["ot", "itermax", "argmax", "match"] | None = None
    threshold: float | None = Field(None, ge=-1, le=1, description="Minimum cosine of a link.")
    matrix: bool = Field(False, description="Return the cosines of all word pairs.")
    model: Name | None = None
    tokenize: bool = Field(True, description="Split the text into words; else at spaces only.")


class WordLink(BaseModel):
    """A link between two words, counted from 0, and its score from 0 to 1."""

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
    pairs: list[PairLinks]


class SearchRequest(_Request):
    """A sentence to search for."""

    text: Text
    n: int = Field(10, ge=1, le=MAX_MATCHES)
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
