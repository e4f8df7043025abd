"""Bilingual dictionaries from word vectors of one space, and their precision."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, get_args

import numpy as np
import torch

from calque.algorithms.nearest import (
    compute_hubness,
    log_sum_exp_both_ways,
    nearest_neighbors_both_ways,
)
from calque.errors import InputError
from calque.io.dictionaries import Entry, read_dictionary
from calque.io.files import (
    PathLike,
    SkippedLines,
    check_skip_list,
    display_name,
    open_skip_list,
    write_atomically,
)
from calque.io.locks import lock_output
from calque.models.inference import choose_device
from calque.types import count_progress
from calque.vectors.static import MAX_WORDS, VectorSpace, check_same_width

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from calque.types import Progress

    IntArray = npt.NDArray[np.int64]
    OnRows = Callable[[int], None] | None

LexiconMethod = Literal["nn", "csls", "inverted-softmax"]
METHODS: tuple[LexiconMethod, ...] = get_args(LexiconMethod)
FORMATS = ("tsv", "muse")
PRECISION_AT = (1, 5, 10)
TEMPERATURE = 1 / 30  # of the inverted softmax
LINE_ENDS = frozenset("\n\r\0\t")


@dataclass(frozen=True, slots=True)
class LexiconResult:
    """A dictionary (source word, target word, score) or where it was written, and its precision.

    `scores` has the keys "forward" and "backward". `n_translated` of `n_src` source words have a
    translation among `n_tgt` target words. Of the `n_entries`, `n_unwritable` were not written,
    since words have white space around or line ends in them. Words with zero vectors and repeated
    words are left out.
    """

    output: Path | None
    entries: list[tuple[str, str, float]] | None
    scores: dict[str, DictionaryScores] | None
    n_entries: int
    n_translated: int
    n_src: int
    n_tgt: int
    n_unwritable: int
    n_zero: int
    n_duplicates: int
    n_skipped: int


def induce_lexicon(
    src: PathLike,
    tgt: PathLike,
    *,
    output: PathLike | None = None,
    method: str = "csls",
    neighbors: int = 10,
    hub_words: int = 0,
    best: int = 1,
    mutual: bool = False,
    min_score: float | None = None,
    max_words: int = MAX_WORDS,
    format: str = "tsv",
    evaluate: PathLike | None = None,
    skip_bad: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> LexiconResult:
    """Find the translations of words by their vectors, or measure their precision.

    The vectors of both languages must be of one space, such as `map_vectors` writes. With
    `evaluate` and without `output`, only the precision is computed.

    Args:
        src: Source vectors in word2vec format; plain, .gz, .xz or .zst.
        tgt: Target vectors.
        output: File for the dictionary, or "-" for standard output. Default: none.
        method: `nn` (cosine), `csls` (Conneau et al., 2018) or `inverted-softmax`.
        neighbors: Number of nearest neighbors of CSLS.
        hub_words: Search these neighbors among the first words only; 0 means all.
        best: Number of translations per word.
        mutual: Keep only pairs in which each word is the best translation of the other.
        min_score: Keep only entries with at least this score.
        max_words: Use the first words of each file; 0 means all.
        format: `tsv` (with scores) or `muse` (without).
        evaluate: Dictionary for which precision is computed in both directions.
        skip_bad: Skip invalid lines and list them in this file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        progress: Called with the stage, the words done and their number.

    Examples:
        >>> result = calque.induce_lexicon("en.vec", "de.vec", mutual=True)  # doctest: +SKIP
        >>> result.entries[:2]  # doctest: +SKIP
        [('the', 'der', 0.12), ('of', 'von', 0.21)]
    """
    for name, value, choices in (("method", method, METHODS), ("format", format, FORMATS)):
        if value not in choices:
            raise InputError(
                f"there is no {name} {value!r}", fix=f"choose from: {', '.join(choices)}"
            )
    for name, number in (("max_words", max_words), ("hub_words", hub_words)):
        if number < 0:
            raise InputError(f"{name} is {number}", fix="choose 0 for all words")
    target = None if output is None else os.fspath(output)
    inputs = [os.fspath(path) for path in (src, tgt, evaluate) if path is not None]
    for path in inputs:
        is_file = target and os.path.isfile(target) and os.path.exists(path)
        if is_file and os.path.samefile(str(target), path):
            raise InputError(
                "this file is both read and written", file=target, fix="write to another file"
            )
    skip_list = None if skip_bad is None else Path(skip_bad)
    check_skip_list(skip_list, inputs, None if target in (None, "-") else Path(target))
    any_method: Any = method
    settings = LexiconSettings(any_method, neighbors, hub_words or None, best, mutual, min_score)
    torch_device = choose_device(device)
    scores, entries = None, None
    n_entries = n_unwritable = n_translated = 0
    with ExitStack() as stack:
        skipped = open_skip_list(skip_list, stack)
        spaces = []
        for number, file in enumerate((src, tgt), start=1):
            skip = None if skipped is None else skipped.of(file)
            spaces.append(VectorSpace.load(file, max_words or None, torch_device, skip))
            if progress is not None:
                progress("reading", number, 2)
        src_space, tgt_space = spaces
        check_same_width(src_space, tgt_space)
        if evaluate is not None:
            scores = _evaluate(src_space, tgt_space, evaluate, settings, skipped, progress)
        if evaluate is None or target is not None:
            with ExitStack() as inner:
                stream = None  # opened first, so that a wrong path is reported before the work
                if target is not None:
                    inner.enter_context(lock_output(Path(target)))
                    stream = inner.enter_context(write_atomically(target))
                n_words = settings.n_passes * len(src_space)
                on_rows = count_progress(progress, "comparing", n_words)
                lexicon = build_lexicon(src_space, tgt_space, settings, on_rows=on_rows)
                n_entries, n_translated = len(lexicon), len(set(lexicon.src.tolist()))
                found = lexicon.iterate(src_space, tgt_space)
                if stream is None:
                    entries = list(found)
                else:
                    n_unwritable = write_entries(stream, found, with_scores=format == "tsv")
    return LexiconResult(
        output=None if target is None else Path(target),
        entries=entries,
        scores=scores,
        n_entries=n_entries,
        n_translated=n_translated,
        n_src=len(src_space),
        n_tgt=len(tgt_space),
        n_unwritable=n_unwritable,
        n_zero=src_space.n_zero + tgt_space.n_zero,
        n_duplicates=src_space.n_duplicates + tgt_space.n_duplicates,
        n_skipped=0 if skipped is None else skipped.n_lines,
    )


def _evaluate(
    src: VectorSpace,
    tgt: VectorSpace,
    dictionary: PathLike,
    settings: LexiconSettings,
    skipped: SkippedLines | None,
    progress: Progress | None,
) -> dict[str, DictionaryScores]:
    """Score both directions by nn, CSLS and the chosen method."""
    skip = None if skipped is None else skipped.of(dictionary)
    entries = list(read_dictionary(dictionary, skip))
    if not entries:
        raise InputError(
            "the dictionary has no entries", file=display_name(dictionary), fix="choose another one"
        )
    swapped = [(tgt_word, src_word) for src_word, tgt_word in entries]
    n_known, n_swapped = (len(_look_up(src, tgt, each)[0]) for each in (entries, swapped))
    if n_swapped > n_known:
        raise InputError(
            f"the columns seem to be swapped: {n_known:,} entries have vectors, {n_swapped:,} if "
            "the columns are swapped",
            file=display_name(dictionary),
            fix="pass the vectors in the order of the dictionary's columns, source first",
        )
    methods: list[LexiconMethod] = list(dict.fromkeys(("nn", "csls", settings.method)))
    advance = count_progress(progress, "comparing", (len(methods) - 1) * len(src))
    translators = [
        WordTranslator.build(src, tgt, replace(settings, method=method), advance)
        for method in methods
    ]
    forward = score_dictionary(translators, entries)
    if forward.n_known == 0:
        raise InputError(
            f"none of the {forward.n_words:,} words has a vector and a translation with a vector",
            file=display_name(dictionary),
            fix="check the languages and the case of the words",
        )
    backward = score_dictionary([translator.reverse() for translator in translators], swapped)
    return {"forward": forward, "backward": backward}


@dataclass(frozen=True, slots=True)
class LexiconSettings:
    """How translations are found, and which of them are kept.

    Scores are cosines (nn), 2·cos(x, y) − r(x) − r(y) (csls, where r is a word's mean cosine to its
    nearest words of the other language), or the probability of the source word given the target
    word (inverted-softmax). `hub_words` restricts the nearest words of csls to the most frequent
    ones, which is faster.
    """

    method: LexiconMethod = "csls"
    neighbors: int = 10
    hub_words: int | None = None
    best: int = 1
    mutual: bool = False
    min_score: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(
                f"there is no method {self.method!r}", fix=f"choose from: {', '.join(METHODS)}"
            )
        for name in ("best", "neighbors", "hub_words"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}", fix="choose 1 or more")
        if self.min_score is not None and math.isnan(self.min_score):
            raise InputError("min_score is not a number", fix="choose a number")
        if self.mutual and self.best > 1:
            raise InputError(
                f"best is {self.best}, but with mutual a word has one translation",
                fix="drop one of the two options",
            )

    @property
    def n_passes(self) -> int:
        """How many times all words are compared."""
        return 1 if self.method == "nn" else 2


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Rows of source and target words and their scores, by source word, the best first."""

    src: IntArray
    tgt: IntArray
    scores: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.src)

    def iterate(self, src: VectorSpace, tgt: VectorSpace) -> Iterator[tuple[str, str, float]]:
        """Return source words, target words and scores."""
        columns = self.src.tolist(), self.tgt.tolist(), self.scores.tolist()
        for src_row, tgt_row, score in zip(*columns, strict=True):
            yield src.words[src_row], tgt.words[tgt_row], score


@dataclass(frozen=True, slots=True)
class WordTranslator:
    """Find translations by scale·cos(x, y) − penalty; words near to everything have a high one.

    The penalties of both sides are known, so that the direction can be reversed at no cost.
    """

    src: VectorSpace
    tgt: VectorSpace
    settings: LexiconSettings
    scale: float
    src_penalties: Tensor | None
    tgt_penalties: Tensor | None

    @classmethod
    def build(
        cls, src: VectorSpace, tgt: VectorSpace, settings: LexiconSettings, on_rows: OnRows = None
    ) -> WordTranslator:
        """Compute the penalties, for which all words are compared (except for nn).

        `on_rows` is called with the number of source words done.
        """
        check_same_width(src, tgt)
        if settings.method == "nn":
            return cls(src, tgt, settings, 1.0, None, None)
        if settings.method == "inverted-softmax":
            sums = log_sum_exp_both_ways(src.rows, tgt.rows, 1 / TEMPERATURE, on_rows=on_rows)
            return cls(src, tgt, settings, 1 / TEMPERATURE, *sums)
        return cls(src, tgt, settings, 2.0, *_measure_hubness(src, tgt, settings, on_rows))

    def reverse(self) -> WordTranslator:
        """Return the translator of the opposite direction."""
        penalties = self.tgt_penalties, self.src_penalties
        return WordTranslator(self.tgt, self.src, self.settings, self.scale, *penalties)

    def find(self, rows: IntArray, k: int) -> IntArray:
        """Return the k best target words of source words, the best first; all if they are fewer."""
        queries = self.src.rows[torch.from_numpy(rows).to(self.src.rows.device)]
        (_, indices), _ = nearest_neighbors_both_ways(
            queries,
            self.tgt.rows,
            min(k, len(self.tgt)),
            scale=self.scale,
            tgt_penalties=self.tgt_penalties,
        )
        found: IntArray = indices.cpu().numpy()
        return found

    def build_lexicon(self, on_rows: OnRows = None) -> Lexicon:
        """Return the translations of all source words that the settings keep."""
        settings = self.settings
        if settings.best > len(self.tgt):
            n_words = len(self.tgt)
            raise InputError(
                f"{settings.best} translations are requested, but there are {n_words:,} words",
                file=self.tgt.name,
                fix=f"request {n_words:,} or fewer",
            )
        (scores, indices), (_, backward) = nearest_neighbors_both_ways(
            self.src.rows,
            self.tgt.rows,
            settings.best,
            int(settings.mutual),
            scale=self.scale,
            src_penalties=self.src_penalties,
            tgt_penalties=self.tgt_penalties,
            on_rows=on_rows,
        )
        # Complete the scores by what is the same for all translations of a word.
        if settings.method == "inverted-softmax":
            scores = scores.exp()
        elif self.src_penalties is not None:
            scores = scores - self.src_penalties[:, None]
        kept = torch.ones_like(indices, dtype=torch.bool)
        if settings.mutual:
            own = torch.arange(len(indices), device=indices.device)
            kept &= backward[indices, 0] == own[:, None]
        if settings.min_score is not None:
            kept &= scores >= settings.min_score
        rows = kept.nonzero()[:, 0]
        return Lexicon(*(part.cpu().numpy() for part in (rows, indices[kept], scores[kept])))


def build_lexicon(
    src: VectorSpace,
    tgt: VectorSpace,
    settings: LexiconSettings | None = None,
    *,
    on_rows: OnRows = None,
) -> Lexicon:
    """Return one or several translations of every source word.

    `on_rows` is called with the number of source words done, `settings.n_passes` times for each.
    """
    translator = WordTranslator.build(src, tgt, settings or LexiconSettings(), on_rows)
    return translator.build_lexicon(on_rows)


def _measure_hubness(
    src: VectorSpace, tgt: VectorSpace, settings: LexiconSettings, on_rows: OnRows
) -> tuple[Tensor, Tensor]:
    """Return each word's mean cosine to its nearest words of the other language, r of CSLS."""
    k, n_hubs = settings.neighbors, settings.hub_words
    smaller = min(src, tgt, key=len)
    n_words = min(len(smaller), n_hubs or len(smaller))
    if k > n_words:
        raise InputError(
            f"{k} neighbors are requested, but there are {n_words:,} words",
            file=smaller.name,
            fix=f"choose {n_words} neighbors or fewer, or the method nn",
        )
    if n_hubs is None:
        both = nearest_neighbors_both_ways(src.rows, tgt.rows, k, k, on_rows=on_rows)
        src_hubness, tgt_hubness = (scores.mean(dim=1) for scores, _ in both)
    else:
        src_hubness = compute_hubness(src.rows, tgt.rows[:n_hubs], k)
        tgt_hubness = compute_hubness(tgt.rows, src.rows[:n_hubs], k)
        if on_rows is not None:
            on_rows(len(src))
    return src_hubness, tgt_hubness


def write_entries(
    stream: TextIO, entries: Iterable[tuple[str, str, float]], *, with_scores: bool
) -> int:
    """Write one line per entry: MUSE's `source target` or, with scores, tab-separated columns.

    Return the number of entries that were left out, since their words could not be read back.
    """
    n_left_out = 0
    for src_word, tgt_word, score in entries:
        words = src_word, tgt_word
        if not all(word and word == word.strip() and LINE_ENDS.isdisjoint(word) for word in words):
            n_left_out += 1
        elif with_scores:
            stream.write(f"{src_word}\t{tgt_word}\t{score:.4f}\n")
        else:
            has_spaces = any(len(word.split()) > 1 for word in words)
            stream.write(("\t" if has_spaces else " ").join(words) + "\n")
    return n_left_out


@dataclass(frozen=True, slots=True, eq=False)
class DictionaryScores:
    """How well the source words of a dictionary were translated, by method.

    A word counts once, and any of its translations is correct. It is known if it and at least one
    of its translations have vectors; MUSE and VecMap leave the other words out. `ranks` are those
    of the known words.
    """

    n_words: int
    n_unknown_src: int
    n_unknown_tgt: int
    ranks: Mapping[str, IntArray]

    @property
    def n_known(self) -> int:
        """Number of known words."""
        return self.n_words - self.n_unknown_src - self.n_unknown_tgt

    @property
    def coverage(self) -> float:
        """Fraction of known words."""
        return self.n_known / self.n_words

    def precision(self, method: str, k: int, *, known: bool = False) -> float:
        """Return P@k; unknown words count as wrong or, with `known`, are left out."""
        return precision_at_k(self.ranks[method], k, None if known else self.n_words)


def _look_up(
    src: VectorSpace, tgt: VectorSpace, entries: Sequence[Entry]
) -> tuple[IntArray, IntArray]:
    """Return the rows of the entries whose words both have vectors."""
    src_rows = src.look_up(src_word for src_word, _ in entries)
    tgt_rows = tgt.look_up(tgt_word for _, tgt_word in entries)
    has_both = (src_rows >= 0) & (tgt_rows >= 0)
    return src_rows[has_both], tgt_rows[has_both]


def score_dictionary(
    translators: Sequence[WordTranslator], entries: Iterable[Entry]
) -> DictionaryScores:
    """Translate the source words of a dictionary by several methods, with the same vectors."""
    src, tgt, entries = translators[0].src, translators[0].tgt, list(entries)
    words = {src_word for src_word, _ in entries}
    if not words:
        raise InputError("the dictionary has no entries", fix="choose another one")
    src_rows, tgt_rows = _look_up(src, tgt, entries)
    queries, owners = np.unique(src_rows, return_inverse=True)
    known = src.look_up(words)
    n_with_vector = len(np.unique(known[known >= 0]))
    ranks: dict[str, IntArray] = {}
    for translator in translators:
        found = translator.find(queries, max(PRECISION_AT))
        ranks[translator.settings.method] = find_ranks(found, owners, tgt_rows)
    return DictionaryScores(
        n_words=len(words),
        n_unknown_src=len(words) - n_with_vector,
        n_unknown_tgt=n_with_vector - len(queries),
        ranks=ranks,
    )


def find_ranks(found: IntArray, queries: IntArray, answers: IntArray) -> IntArray:
    """Return the rank from 0 of the first correct answer of each query; the width if there is none.

    Row q of `found` has the answers to query q, the best first; `answers[e]` is a correct answer to
    `queries[e]`, and a query may have several.

    >>> find_ranks(np.array([[7, 8], [9, 7]]), np.array([0, 1, 1]), np.array([8, 5, 9])).tolist()
    [1, 0]
    """
    is_correct = found[queries] == answers[:, None]
    n_queries, width = found.shape
    first = np.where(is_correct.any(axis=1), is_correct.argmax(axis=1), width)
    ranks = np.full(n_queries, width, dtype=np.int64)
    np.minimum.at(ranks, queries, first)
    return ranks


def precision_at_k(ranks: IntArray, k: int, n_queries: int | None = None) -> float:
    """Return the fraction of queries with a correct answer among their first k; 0 without queries.

    Queries without a rank, if there are more than ranks, have no correct answer.

    >>> precision_at_k(np.array([0, 4, 1]), 2), precision_at_k(np.array([0, 4, 1]), 2, 4)
    (0.6666666666666666, 0.5)
    """
    total = len(ranks) if n_queries is None else n_queries
    return int((ranks < k).sum()) / total if total else 0.0
