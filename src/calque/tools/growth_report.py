"""What a grown model started from: rows by rule and script, examples, shares of real text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.models.vocabulary import RULES, SPECIAL, UNMATCHED
from calque.text.corpora import read_sentences
from calque.text.pieces import Vocabulary, is_whole
from calque.text.scripts import script_of
from calque.text.tokenization import lift_limits
from calque.text.word_cache import make_sentence_encoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.models.vocabulary import RuleArray, VocabularyMatch
    from calque.text.files import PathLike
    from calque.text.translations import DictionaryUse

N_EXAMPLES, N_AT_ONCE = 12, 10_000
BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Example:
    """A new piece, the old pieces it starts from, and the translations that led there."""

    piece: str
    sources: list[str]
    meanings: list[str]


@dataclass(frozen=True, slots=True)
class TextShare:
    """How much of a text starts matched, by token: in all, without dictionaries, and by rule.

    The unknown token and other special ones count as tokens, but not as matched.
    """

    name: str
    n_tokens: int
    matched: float
    matched_without: float
    rules: dict[str, float]


@dataclass(frozen=True, slots=True)
class MatchReport:
    """Rows by rule, with and without dictionaries, and by script; examples; shares of texts."""

    rules: dict[str, int]
    rules_without: dict[str, int]
    scripts: dict[str, dict[str, int]]
    examples: dict[str, list[Example]]
    dictionaries: list[DictionaryUse]
    n_unspelled: int
    texts: list[TextShare]

    @property
    def matched(self) -> float:
        """The share of rows that start matched."""
        n_rows = sum(self.rules.values())
        return 1 - self.rules[RULES[UNMATCHED]] / n_rows if n_rows else 0.0


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What was grown from what, and how; `match` is None where embeddings start anew."""

    mono: str
    tokenizer: str
    output: str
    language: str
    initialize: str
    unmatched: str
    prefer: str
    composes: bool
    seed: int
    n_rows: int
    n_mono_rows: int
    has_head: bool
    special: dict[str, tuple[str, str | None]]
    match: MatchReport | None

    def to_dict(self) -> dict[str, Any]:
        """Give what `growth.json` holds."""
        return asdict(self)


def report_match(
    new: Vocabulary,
    mono: Vocabulary,
    match: VocabularyMatch,
    texts: Iterable[PathLike],
    tokenizer: PreTrainedTokenizerFast,
) -> MatchReport:
    """Count rows, pick examples, and weigh both by the tokens of texts."""
    return MatchReport(
        _count_rules(match.rules),
        _count_rules(match.rules_without),
        _count_scripts(new, match.rules),
        {rule: _pick_examples(new, mono, match, k) for k, rule in enumerate(RULES)},
        match.dictionaries,
        match.n_unspelled,
        [_weigh_text(path, tokenizer, match) for path in texts],
    )


def weigh_others(texts: Sequence[TextShare], language: str) -> TextShare | None:
    """Put texts of other languages together, each with the weight of its tokens."""
    others = [text for text in texts if text.name != language]
    n_tokens = sum(text.n_tokens for text in others)
    if not n_tokens:
        return None

    def mean(values: Iterable[float]) -> float:
        shares = zip(others, values, strict=True)
        return sum(text.n_tokens * value for text, value in shares) / n_tokens

    return TextShare(
        "others",
        n_tokens,
        mean(text.matched for text in others),
        mean(text.matched_without for text in others),
        {rule: mean(text.rules[rule] for text in others) for rule in RULES},
    )


def pair_special(new: Vocabulary, mono: Vocabulary) -> dict[str, tuple[str, str | None]]:
    """Say which token takes which one's place, role by role."""
    return {
        role: (new.tokens[row], mono.tokens[mono.roles[role]] if role in mono.roles else None)
        for role, row in new.roles.items()
    }


def _count_rules(rules: RuleArray) -> dict[str, int]:
    counts = np.bincount(rules, minlength=len(RULES))
    return dict(zip(RULES, counts.tolist(), strict=True))


def _count_scripts(vocabulary: Vocabulary, rules: RuleArray) -> dict[str, dict[str, int]]:
    """Count the rules of each script's rows, the largest script first; special rows aside."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(vocabulary.texts):
        if text is not None:
            rows.setdefault(script_of(text) if is_whole(text) else BYTES, []).append(row)
    ordered = sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))
    return {script: _count_rules(rules[each]) for script, each in ordered}


def _pick_examples(
    new: Vocabulary, mono: Vocabulary, match: VocabularyMatch, rule: int
) -> list[Example]:
    """Give the first rows of a rule: in most vocabularies the most frequent pieces."""
    rows = np.flatnonzero(match.rules == rule)[:N_EXAMPLES].tolist()
    starts = np.searchsorted(match.sources.rows, rows, side="left").tolist()
    ends = np.searchsorted(match.sources.rows, rows, side="right").tolist()
    return [
        Example(
            new.tokens[row],
            [mono.tokens[k] for k in match.sources.sources[start:end].tolist()],
            match.meanings.get(row, []),
        )
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]


def _weigh_text(
    path: PathLike, tokenizer: PreTrainedTokenizerFast, match: VocabularyMatch
) -> TextShare:
    counts = _count_tokens(path, tokenizer, len(match.rules))
    n_tokens = int(counts.sum())
    shares = np.bincount(match.rules, counts, len(RULES)) / max(n_tokens, 1)
    without = np.bincount(match.rules_without, counts, len(RULES)) / max(n_tokens, 1)
    return TextShare(
        Path(path).name.split(".")[0],
        n_tokens,
        _matched_share(shares),
        _matched_share(without),
        dict(zip(RULES, shares.tolist(), strict=True)),
    )


def _matched_share(shares: npt.NDArray[np.float64]) -> float:
    return float(shares.sum() - shares[UNMATCHED] - shares[SPECIAL])


def _count_tokens(
    path: PathLike, tokenizer: PreTrainedTokenizerFast, n_rows: int
) -> npt.NDArray[np.int64]:
    encode = make_sentence_encoder(lift_limits(tokenizer.backend_tokenizer))
    counts = np.zeros(n_rows, dtype=np.int64)
    stream = read_sentences(path)
    while sentences := list(islice(stream, N_AT_ONCE)):
        counts += np.bincount(encode(sentences).ids, minlength=n_rows)
    return counts
