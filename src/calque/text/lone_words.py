"""Which words a tokenizer encodes the same way alone and inside a sentence.

Many tokenizers cut text at spaces and never look across them. For these, the ids of a sentence
are those of its words, one after the other, unless a word touches the rules of the cutting
itself. Such a word is refused here: it holds a special token, its normalised form is empty or
holds white space or the mark of a word start, or it could melt into the space beside it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
