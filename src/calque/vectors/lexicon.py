"""Bilingual dictionaries out of word vectors in one space."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.io.dictionaries import Entry

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

import math
from typing import TYPE_CHECKING, Literal, TextIO

import numpy as np
import torch

from calque.algorithms.nearest import log_sums_both_ways, mean_of_nearest, nearest_both_ways
from calque.vectors.static import VectorSpace, check_widths

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    IntArray = npt.NDArray[np.int64]

Method = Literal["nn", "csls", "inverted-softmax"]
METHODS: tuple[Method, ...] = ("nn", "csls", "inverted-softmax")
TEMPERATURE = 1 / 30
BLOCK_ENTRIES = 1 << 14
LINE_ENDS = frozenset("\n\r\0\t")


@dataclass(frozen=True, slots=True)
class LexiconSettings:
    """How translations are found, and which of them are kept.

    Scores are cosines (nn), 2·cos(x, y) − r(x) − r(y) (csls, where r is a word's mean cosine to
    its nearest words of the other language), or the probability that the target word, asked for
    a source word, gives this one (inverted-softmax). `hub_words` looks for the nearest words of
    csls among the first, most frequent words only, which is quicker than among all.
    """

    method: Method = "csls"
    neighbors: int = 10
    hub_words: int | None = None
    best: int = 1
    mutual: bool = False
    min_score: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"no method {self.method!r}", fix=f"choose from: {', '.join(METHODS)}")
        for name in ("best", "neighbors", "hub_words"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} leaves nothing", fix="give 1 or more")
        if self.min_score is not None and math.isnan(self.min_score):
            raise InputError("min_score is no number", fix="give one")
        if self.mutual and self.best > 1:
            problem = f"best={self.best} with mutual, which leaves a word one translation"
            raise InputError(problem, fix="drop one of both")

    @property
    def n_passes(self) -> int:
        """How often all words are compared."""
        return 1 if self.method == "nn" else 2


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Entries in the order of source words, a word's best first: rows of two spaces, and scores."""

    src: IntArray
    tgt: IntArray
    scores: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class WordTranslator:
    """Finds translations by scale·cos(x, y) − penalty: a word near to everything has a high one.

    Penalties of both sides are known, so that it can be turned round at no cost.
    """

    src: VectorSpace
    tgt: VectorSpace
    settings: LexiconSettings
    scale: float
    src_penalties: Tensor | None
    tgt_penalties: Tensor | None

    @classmethod
    def make(
        cls,
        src: VectorSpace,
        tgt: VectorSpace,
        settings: LexiconSettings,
        on_rows: Callable[[int], None] | None = None,
    ) -> WordTranslator:
        """Compare all words with all others, unless the cosine alone counts.

        `on_rows` hears of source words that are done.
        """
        check_widths(src, tgt)
        if settings.method == "nn":
            return cls(src, tgt, settings, 1.0, None, None)
        if settings.method == "inverted-softmax":
            sums = log_sums_both_ways(src.rows, tgt.rows, 1 / TEMPERATURE, on_rows=on_rows)
            return cls(src, tgt, settings, 1 / TEMPERATURE, *sums)
        return cls(src, tgt, settings, 2.0, *_measure_hubness(src, tgt, settings, on_rows))

    def reverse(self) -> WordTranslator:
        """Give the translator of the other direction."""
        penalties = self.tgt_penalties, self.src_penalties
        return WordTranslator(self.tgt, self.src, self.settings, self.scale, *penalties)

    def find(self, rows: IntArray, k: int) -> IntArray:
        """Find the k best target words of some source words, the best first; all if they are few.

        All source words compete where a method looks at both sides, not only those asked for.
        """
        queries = self.src.rows[torch.from_numpy(rows).to(self.src.rows.device)]
        (_, places), _ = nearest_both_ways(
            queries,
            self.tgt.rows,
            min(k, len(self.tgt)),
            scale=self.scale,
            tgt_penalties=self.tgt_penalties,
        )
        found: IntArray = places.cpu().numpy()
        return found

    def induce(self, on_rows: Callable[[int], None] | None = None) -> Lexicon:
        """Find a translation, or several, for every source word, and keep what the settings say."""
        settings = self.settings
        if settings.best > len(self.tgt):
            n_words = len(self.tgt)
            problem, fix = (
                f"{settings.best} best of {n_words:,} words",
                f"ask for {n_words:,} or fewer",
            )
            raise InputError(problem, file=self.tgt.name, fix=fix)
        (scores, places), (_, backward) = nearest_both_ways(
            self.src.rows,
            self.tgt.rows,
            settings.best,
            int(settings.mutual),
            scale=self.scale,
            src_penalties=self.src_penalties,
            tgt_penalties=self.tgt_penalties,
            on_rows=on_rows,
        )
        scores = self._finish(scores)
        kept = torch.ones_like(places, dtype=torch.bool)
        if settings.mutual:
            own = torch.arange(len(places), device=places.device)
            kept &= backward[places, 0] == own[:, None]
        if settings.min_score is not None:
            kept &= scores >= settings.min_score
        rows = kept.nonzero()[:, 0]
        return Lexicon(*(part.cpu().numpy() for part in (rows, places[kept], scores[kept])))

    def _finish(self, scores: Tensor) -> Tensor:
        """Complete scores by what is the same for all translations of a word."""
        if self.settings.method == "inverted-softmax":
            return scores.exp()
        return scores if self.src_penalties is None else scores - self.src_penalties[:, None]


def induce_lexicon(
    src: VectorSpace,
    tgt: VectorSpace,
    settings: LexiconSettings | None = None,
    *,
    on_rows: Callable[[int], None] | None = None,
) -> Lexicon:
    """Find a translation, or several, for every source word.

    With `mutual`, only pairs stay in which either word is the other's best. `on_rows` hears of
    source words that are done, `settings.n_passes` times in all of each.
    """
    translator = WordTranslator.make(src, tgt, settings or LexiconSettings(), on_rows)
    return translator.induce(on_rows)


def write_lexicon(
    stream: TextIO, lexicon: Lexicon, src: VectorSpace, tgt: VectorSpace, *, scores: bool
) -> int:
    """Write a line an entry, MUSE's `source target` or, with scores, tab-separated.

    Gives the number of entries left out because no reader could tell their words apart.
    """
    n_left_out = 0
    for start in range(0, len(lexicon), BLOCK_ENTRIES):
        block = slice(start, start + BLOCK_ENTRIES)
        lines = list(_format_lines(lexicon, block, src, tgt, scores))
        kept = [line for line in lines if line is not None]
        n_left_out += len(lines) - len(kept)
        stream.writelines(kept)
    return n_left_out


def _measure_hubness(
    src: VectorSpace,
    tgt: VectorSpace,
    settings: LexiconSettings,
    on_rows: Callable[[int], None] | None,
) -> tuple[Tensor, Tensor]:
    """Give each word's mean cosine to its nearest words of the other language, CSLS's r."""
    k, n_hubs = settings.neighbors, settings.hub_words
    smaller = min(src, tgt, key=len)
    n_words = min(len(smaller), n_hubs or len(smaller))
    if k > n_words:
        fix = f"compare with {n_words} or fewer, or by the nearest neighbor alone"
        raise InputError(f"{k} neighbors of {n_words:,} words", file=smaller.name, fix=fix)
    if n_hubs is None:
        both = nearest_both_ways(src.rows, tgt.rows, k, k, on_rows=on_rows)
        src_hubness, tgt_hubness = (scores.mean(dim=1) for scores, _ in both)
    else:
        src_hubness = mean_of_nearest(src.rows, tgt.rows[:n_hubs], k)
        tgt_hubness = mean_of_nearest(tgt.rows, src.rows[:n_hubs], k)
        if on_rows is not None:
            on_rows(len(src))
    return src_hubness, tgt_hubness


def _format_lines(
    lexicon: Lexicon, block: slice, src: VectorSpace, tgt: VectorSpace, scores: bool
) -> Iterator[str | None]:
    rows = (part[block].tolist() for part in (lexicon.src, lexicon.tgt, lexicon.scores))
    for src_row, tgt_row, score in zip(*rows, strict=True):
        words = src.words[src_row], tgt.words[tgt_row]
        if not all(map(_is_writable, words)):
            yield None
        elif scores:
            yield f"{words[0]}\t{words[1]}\t{score:.4f}\n"
        else:
            is_plain = all(len(word.split()) == 1 for word in words)
            yield (" " if is_plain else "\t").join(words) + "\n"


def _is_writable(word: str) -> bool:
    """Tell whether a word is the same when it is read from a line again."""
    return bool(word) and word == word.strip() and LINE_ENDS.isdisjoint(word)


AT = (1, 5, 10)


@dataclass(frozen=True, slots=True, eq=False)
class DictionaryScores:
    """How translations of a dictionary's source words were found, by method.

    A word counts once, and any of its translations is right. It is known if it and at least one
    of its translations have vectors; MUSE and VecMap leave the others out. `ranks` are those of
    the known words.
    """

    n_words: int
    n_unknown_src: int
    n_unknown_tgt: int
    ranks: Mapping[str, IntArray]

    @property
    def n_known(self) -> int:
        """Words that could be translated right."""
        return self.n_words - self.n_unknown_src - self.n_unknown_tgt

    @property
    def coverage(self) -> float:
        """The share of words that are known."""
        return self.n_known / self.n_words

    def precision(self, method: str, k: int, *, known: bool = False) -> float:
        """Give P@k, with the unknown words counted as wrong or, asked for the known, left out."""
        return precision_at_k(self.ranks[method], k, None if known else self.n_words)


def score_dictionary(
    translators: Sequence[WordTranslator], entries: Iterable[Entry]
) -> DictionaryScores:
    """Translate the source words of a dictionary by several methods, of one pair of spaces."""
    src, tgt, entries = translators[0].src, translators[0].tgt, list(entries)
    words = {src_word for src_word, _ in entries}
    if not words:
        raise InputError("the dictionary has no entries", fix="give another")
    src_rows = src.look_up(src_word for src_word, _ in entries)
    tgt_rows = tgt.look_up(tgt_word for _, tgt_word in entries)
    has_both = (src_rows >= 0) & (tgt_rows >= 0)
    queries, owners = np.unique(src_rows[has_both], return_inverse=True)
    n_with_vector = len(np.unique(src_rows[src_rows >= 0]))
    ranks: dict[str, IntArray] = {}
    for translator in translators:
        found = translator.find(queries, max(AT))
        ranks[translator.settings.method] = find_ranks(found, owners, tgt_rows[has_both])
    return DictionaryScores(
        n_words=len(words),
        n_unknown_src=len(words) - n_with_vector,
        n_unknown_tgt=n_with_vector - len(queries),
        ranks=ranks,
    )


def find_ranks(found: IntArray, queries: IntArray, answers: IntArray) -> IntArray:
    """Give the place of each query's first right answer, counted from 0; the width if none is.

    Row q of `found` holds what was found for query q, the best first; `queries[e]` may be answered
    by `answers[e]`, and a query by several.

    >>> find_ranks(np.array([[7, 8], [9, 7]]), np.array([0, 1, 1]), np.array([8, 5, 9])).tolist()
    [1, 0]
    """
    is_right = found[queries] == answers[:, None]
    n_queries, width = found.shape
    places = np.where(is_right.any(axis=1), is_right.argmax(axis=1), width)
    ranks = np.full(n_queries, width, dtype=np.int64)
    np.minimum.at(ranks, queries, places)
    return ranks


def precision_at_k(ranks: IntArray, k: int, n_queries: int | None = None) -> float:
    """Give the share of queries with a right answer among their first k; of none, 0.

    With `n_queries`, that many were asked: those without a rank found nothing.

    >>> precision_at_k(np.array([0, 4, 1]), 2), precision_at_k(np.array([0, 4, 1]), 2, 4)
    (0.6666666666666666, 0.5)
    """
    n_asked = len(ranks) if n_queries is None else n_queries
    return int((ranks < k).sum()) / n_asked if n_asked else 0.0
