"""Which words a tokenizer encodes the same way alone and inside a sentence.

Many tokenizers cut text at spaces and never look across them. For these, the ids of a sentence
are those of its words, one after the other, unless a word touches the rules of the cutting
itself. Such a word is refused here: it holds a special token, its normalised form is empty or
holds white space or the mark of a word start, or it could melt into the space beside it.

Encoding sentences in bulk, each distinct word once: several times the tokenizer's own speed.

The ids are the tokenizer's own, whatever the text: `lone_words` says which words may be looked
up, and a sentence that holds another is left to the tokenizer whole.

Subwords of sentences that are split into words already, each distinct word encoded once.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.tokens.ragged import Ragged, ranges
from calque.tokens.tokenizer import keeps_spaces, lift_limits

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    IdArray = npt.NDArray[np.uint32]
    IntArray = npt.NDArray[np.int64]

# Stands between words that are normalised in one go: a character that no text uses, and that
# no normaliser changes or joins to another.
BETWEEN = "\N{RIGHT ANGLE WITH DOWNWARDS ZIGZAG ARROW}"
# Normalisers that read characters or what Unicode composes of them; a space never composes.
LOCAL = {
    "BertNormalizer",
    "Lowercase",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Nmt",
    "Precompiled",  # reads grapheme clusters: see _may_melt
    "Strip",
    "StripAccents",
}
# Categories and characters that extend the grapheme before them, if it is a space; unassigned
# ones count, since the tokenizer's Unicode may be newer than Python's.
EXTENDING = {"Mn", "Mc", "Me", "Cc", "Cf", "Cn", "Co", "Cs", "Lm", "Sk"}
EXTENDING_LETTERS = "\N{THAI CHARACTER SARA AM}\N{LAO VOWEL SIGN AM}"
# Characters that open a grapheme which a space after them continues: those of the first plane,
# and all beyond it for safety.
OPENING = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U00010000-\U0010ffff]\\Z")

# White space that a neighbour could squeeze or trim, or nothing at all.
OUTER_SPACES = r"\A\Z|\A | \Z|  |[^\S ]"


class LoneWords:
    """Cuts words into the strings that the tokenizer's model reads, or refuses them.

    `of` makes it for tokenizers of a known build alone.
    """

    def __init__(self, tokenizer: Tokenizer, word_start: str | None) -> None:
        self._normalizer, self._pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        self._word_start = word_start
        special = "|".join(map(re.escape, [BETWEEN, *_special_forms(tokenizer)]))
        spaces = "" if word_start is None else f"{OUTER_SPACES}|{re.escape(word_start)}|"
        self._bad_word, self._bad_form = re.compile(special), re.compile(spaces + special)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LoneWords | None:
        """Read off the tokenizer whether words can stand alone; None if that is not certain."""
        reads_words, word_start = _find_word_start(_describe(tokenizer.pre_tokenizer))
        is_sure = (
            reads_words
            and all(map(_is_local, _list_steps(_describe(tokenizer.normalizer))))
            and not getattr(tokenizer.model, "dropout", None)
            # Otherwise special tokens would have to be looked for across words.
            and all(form.split() == [form] for form in _special_forms(tokenizer))
        )
        return cls(tokenizer, word_start) if is_sure else None

    def cut(self, words: Sequence[str]) -> list[list[str] | None]:
        """Give the strings each word becomes before the model reads it; None: refused."""
        bad_form, bad_word = self._bad_form.search, self._bad_word.search
        is_lone = [not (bad_word(word) or _may_melt(word)) for word in words]
        forms = self._normalize(
            [word if lone else "" for word, lone in zip(words, is_lone, strict=True)]
        )
        return [
            self._cut(form) if lone and not bad_form(form) else None
            for form, lone in zip(forms, is_lone, strict=True)
        ]

    def _normalize(self, words: Sequence[str]) -> Sequence[str]:
        """Normalise words one by one, in a single call; a form of `BETWEEN` cannot be told."""
        if self._normalizer is None:
            return words
        joined = BETWEEN + BETWEEN.join(words) + BETWEEN
        forms = self._normalizer.normalize_str(joined).split(BETWEEN)[1:-1]
        return forms if len(forms) == len(words) else [BETWEEN] * len(words)

    def _cut(self, form: str) -> list[str]:
        if self._word_start is not None:  # some characters stand for several words
            return [self._word_start + part for part in form.split(" ")]
        return [part for part, _ in self._pre_tokenizer.pre_tokenize_str(form)]


def _may_melt(word: str) -> bool:
    """Tell whether a word may make one grapheme cluster with a space before or after it."""
    if word.isascii():
        return False
    first = word[0]
    is_open = first.isascii() or unicodedata.category(first) not in EXTENDING
    return not is_open or first in EXTENDING_LETTERS or OPENING.search(word) is not None


def _special_forms(tokenizer: Tokenizer) -> list[str]:
    """List the tokens that are looked for in the text itself, as written and as normalised."""
    written = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    normalizer = tokenizer.normalizer
    return written + ([] if normalizer is None else list(map(normalizer.normalize_str, written)))


def _find_word_start(pre_tokenizer: dict[str, Any] | None) -> tuple[bool, str | None]:
    """Tell whether words are read apart, and the mark each one gets if it stays in one piece."""
    steps = _list_steps(pre_tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["BertPreTokenizer"]:
        return True, None
    if kinds not in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        return False, None
    scheme, splits = steps[-1]["prepend_scheme"], steps[-1]["split"]
    marks_all = scheme == "always" or (scheme == "first" and len(steps) == 1)
    return splits and marks_all, steps[-1]["replacement"]


def _is_local(step: dict[str, Any]) -> bool:
    """Tell whether a normaliser treats what stands between spaces alone."""
    if step["type"] != "Replace":
        return step["type"] in LOCAL
    pattern = step["pattern"]
    return pattern == {"Regex": " {2,}"} or " " not in pattern.get("String", " ")


def _list_steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    parts = component.get("normalizers", component.get("pretokenizers", ()))
    return [step for part in parts for step in _list_steps(part)]


def _describe(component: Any) -> dict[str, Any] | None:
    """Read the settings of a part of a tokenizer, without its vocabulary."""
    if component is None:
        return None
    settings: dict[str, Any] = json.loads(component.__getstate__())
    return settings


MAX_WORDS = 1 << 17  # about 20 MB
# Longer words, among them sentences in scripts without spaces, seldom come back.
MAX_CHARS = 20
REFUSED = -1


def make_sentence_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], Ragged]:
    """Choose the fastest way to encode sentences without special tokens, always the same ids."""
    lone_words = LoneWords.of(tokenizer)
    if lone_words is None:
        return lambda sentences: encode_whole(tokenizer, sentences)
    return WordCache(tokenizer, lone_words).encode


def encode_whole(tokenizer: Tokenizer, sentences: Sequence[str]) -> Ragged:
    """Encode sentences without special tokens, as they stand."""
    encodings = tokenizer.encode_batch_fast(list(sentences), add_special_tokens=False)
    return _flatten([encoding.ids for encoding in encodings])


class WordCache:
    """Remembers the ids of words; what it learns in one call serves the next."""

    def __init__(
        self, tokenizer: Tokenizer, lone_words: LoneWords, max_words: int = MAX_WORDS
    ) -> None:
        self._tokenizer, self._lone_words, self._max_words = tokenizer, lone_words, max_words
        self._lexicon, self._table = WordNumbers([""]), PieceTable.of_nothing().extend([None])
        self._uses = np.zeros(1, dtype=np.int64)

    def encode(self, sentences: Sequence[str]) -> Ragged:
        """Encode sentences without special tokens."""
        if not sentences:
            return _flatten([])
        if len(self._lexicon) > self._max_words:
            self._forget()
        words = " ".join(sentences).split(" ")
        index = np.fromiter(map(self._lexicon.__getitem__, words), np.int64, len(words))
        table = self._learn(index)
        n_words = np.fromiter((text.count(" ") + 1 for text in sentences), np.int64)
        firsts = np.cumsum(n_words) - n_words
        starts, lengths = table.starts[index], table.lengths[index]
        is_hard = np.minimum.reduceat(lengths, firsts) == REFUSED
        hard = np.flatnonzero(is_hard)
        whole = encode_whole(self._tokenizer, [sentences[k] for k in hard.tolist()])
        # A sentence encoded whole stands where its first word would.
        lengths[np.repeat(is_hard, n_words)] = 0
        lengths[firsts[hard]] = whole.lengths
        starts[firsts[hard]] = len(table.ids) + np.cumsum(whole.lengths) - whole.lengths
        ids = np.concatenate([table.ids, whole.ids])[ranges(starts, lengths)]
        return Ragged(ids, np.add.reduceat(lengths, firsts))

    def _learn(self, index: IntArray) -> PieceTable:
        """Take in the words that are new, and give the table to look all of them up in."""
        kept, passing = self._lexicon.take_new()
        self._uses = np.concatenate([self._uses, np.zeros(len(kept), dtype=np.int64)])
        self._uses += np.bincount(index[index >= 0], minlength=len(self._uses))
        self._table = self._table.extend(self._encode_words(kept))
        return self._table.extend(self._encode_words(passing[::-1]))  # −1 is the first of them

    def _forget(self) -> None:
        """Forget the words that came once, or all if too many came more often."""
        self._uses[0] = 2  # the empty word stays
        kept = np.flatnonzero(self._uses > 1)
        if len(kept) > self._max_words // 2:
            kept = kept[:1]
        words = list(self._lexicon)
        self._lexicon, self._table = WordNumbers(words[k] for k in kept), self._table.select(kept)
        self._uses = np.zeros(len(kept), dtype=np.int64)

    def _encode_words(self, words: Sequence[str]) -> list[list[int] | None]:
        tokenize = self._tokenizer.model.tokenize
        return [
            None if parts is None else [token.id for part in parts for token in tokenize(part)]
            for parts in self._lone_words.cut(words)
        ]


class WordNumbers(dict[str, int]):
    """Numbers words as they are looked up; long ones get −1, −2, … and are forgotten."""

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(zip(words, count(), strict=False))
        self._kept: list[str] = []
        self._passing: list[str] = []

    def __missing__(self, word: str) -> int:
        if len(word) > MAX_CHARS:
            self._passing.append(word)
            return -len(self._passing)
        self._kept.append(word)
        self[word] = number = len(self)
        return number

    def take_new(self) -> tuple[list[str], list[str]]:
        """Hand over the words to keep and the long ones that came since the last call."""
        taken = self._kept, self._passing
        self._kept, self._passing = [], []
        return taken


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The ids of every word; a length of `REFUSED` marks one that cannot stand alone."""

    ids: IdArray
    starts: IntArray
    lengths: IntArray

    @staticmethod
    def of_nothing() -> PieceTable:
        """Make a table without words."""
        nothing = np.zeros(0, dtype=np.int64)
        return PieceTable(nothing.astype(np.uint32), nothing, nothing)

    def select(self, index: IntArray) -> PieceTable:
        """Keep some of the words, in the order given."""
        lengths = self.lengths[index]
        n_ids = np.maximum(lengths, 0)
        ids = self.ids[ranges(self.starts[index], n_ids)]
        return PieceTable(ids, np.cumsum(n_ids) - n_ids, lengths)

    def extend(self, words: Sequence[Sequence[int] | None]) -> PieceTable:
        """Add words at the end."""
        if not words:
            return self
        lengths = np.array([REFUSED if ids is None else len(ids) for ids in words])
        n_ids = np.maximum(lengths, 0)
        flat = chain.from_iterable(ids for ids in words if ids)
        return PieceTable(
            np.concatenate([self.ids, np.fromiter(flat, np.uint32, n_ids.sum())]),
            np.concatenate([self.starts, len(self.ids) + np.cumsum(n_ids) - n_ids]),
            np.concatenate([self.lengths, lengths]),
        )


def _flatten(sequences: Sequence[Sequence[int]]) -> Ragged:
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    ids = np.fromiter(chain.from_iterable(sequences), np.uint32, lengths.sum())
    return Ragged(ids, lengths)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """The subwords of many sentences in one array: how many a word has, how many words a line."""

    ids: IntArray
    n_pieces: IntArray  # of every word
    n_words: IntArray  # of every sentence

    @property
    def first_words(self) -> IntArray:
        """Where the words of every sentence begin, and where the last end."""
        return np.concatenate([[0], np.cumsum(self.n_words)])

    @property
    def first_pieces(self) -> IntArray:
        """Where the subwords of every word begin, and where the last end."""
        return np.concatenate([[0], np.cumsum(self.n_pieces)])

    def shorten(self, most: int) -> tuple[PieceCounts, int]:
        """Keep the first subwords of words that have more than `most`; count such words."""
        n_kept = np.minimum(self.n_pieces, most)
        n_cut = int((n_kept < self.n_pieces).sum())
        if not n_cut:
            return self, 0
        ids = self.ids[ranges(self.first_pieces[:-1], n_kept)]
        return PieceCounts(ids, n_kept, self.n_words), n_cut


class WordEncoder:
    """Encodes words apart from each other, as tokenizers do with text that is split already.

    What it learns in one call serves the next.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, max_words: int = MAX_WORDS) -> None:
        self._tokenizer, self._max_words = tokenizer, max_words
        self._spaced = keeps_spaces(tokenizer)
        self._numbers, self._table = _know_nothing()

    def encode(self, sentences: Sequence[Sequence[str]]) -> PieceCounts:
        """Encode sentences without special tokens."""
        if len(self._numbers) > self._max_words:
            self._numbers, self._table = _know_nothing()
        n_words = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words = list(chain.from_iterable(sentences))
        if self._spaced:
            words = _add_spaces(words, n_words)
        index = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        kept, passing = self._numbers.take_new()
        self._table = self._table.extend(self._encode(kept))
        table = self._table.extend(self._encode(passing[::-1]))  # −1 is the first of them
        n_pieces = table.lengths[index]
        ids = table.ids[ranges(table.starts[index], n_pieces)].astype(np.int64)
        return PieceCounts(ids, n_pieces, n_words)

    def _encode(self, words: Sequence[str]) -> list[list[int]]:
        encodings = lift_limits(self._tokenizer.backend_tokenizer).encode_batch_fast(
            [[word] for word in words], is_pretokenized=True, add_special_tokens=False
        )
        return [encoding.ids for encoding in encodings]


def _know_nothing() -> tuple[WordNumbers, PieceTable]:
    """Begin with the empty word, which has no subwords."""
    return WordNumbers([""]), PieceTable.of_nothing().extend([[]])


def _add_spaces(words: list[str], n_words: IntArray) -> list[str]:
    """Put the space before a word that byte-level tokenizers keep; not before a sentence's first.

    >>> _add_spaces(["a", "b", "", "c"], np.array([2, 0, 2]))
    ['a', ' b', '', ' c']
    """
    spaced = [" " + word if word else word for word in words]
    for first in np.unique((np.cumsum(n_words) - n_words)[n_words > 0]).tolist():
        spaced[first] = words[first]
    return spaced
