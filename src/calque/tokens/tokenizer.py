"""Subwords: training a tokenizer, encoding in bulk, and exact maps between words and subwords."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from calque.errors import InputError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# XLM-R's order: these ids come first, <mask> comes last.
FIRST_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
WORD_START = "▁"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")


@dataclass(frozen=True, slots=True)
class WordPieces:
    """A sentence's subwords (no special tokens) and the word each of them belongs to."""

    ids: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    n_words: int

    def first_pieces(self) -> npt.NDArray[np.int64]:
        """Index of every word's first subword; −1 for a word that has none.

        >>> WordPieces(np.array([7, 8, 9]), np.array([0, 0, 2]), 3).first_pieces().tolist()
        [0, -1, 2]
        """
        first = np.full(self.n_words, -1, dtype=np.int64)
        words, index = np.unique(self.words, return_index=True)
        first[words] = index
        return first


def train_tokenizer(
    sentences: Iterable[str],
    vocab_size: int,
    *,
    character_coverage: float = 0.9995,
    max_piece_length: int = 16,
) -> PreTrainedTokenizerFast:
    """Train a SentencePiece-style Unigram tokenizer with XLM-R's special tokens and ids.

    The rarest characters, beyond `character_coverage` of the text, become `<unk>` rather than
    take a row each: without that, Chinese characters alone would fill a small vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    sentences = list(sentences)
    alphabet = _frequent_characters(sentences, character_coverage)
    if not alphabet:
        raise InputError("no text to train a tokenizer on", fix="give sentences, or clean less")
    if len(alphabet) + len(FIRST_TOKENS) + 1 >= vocab_size:
        raise InputError(
            f"vocab_size={vocab_size} cannot hold the text's {len(alphabet)} characters",
            fix="raise vocab_size or lower character_coverage",
        )
    learner = Tokenizer(models.Unigram())
    learner.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.NFKC(),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Strip(),
        ]
    )
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START)
    learner.decoder = decoders.Metaspace(replacement=WORD_START)
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - 1,  # <mask> is appended below, as the last id
        special_tokens=list(FIRST_TOKENS),
        unk_token="<unk>",
        max_piece_length=max_piece_length,
        show_progress=False,
    )
    learner.train_from_iterator(_drop_characters(sentences, alphabet), trainer)
    return wrap_tokenizer(learner)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a bare tokenizer XLM-R's template, `<s> a </s>` and `<s> a </s></s> b </s>`."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens([MASK_TOKEN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        mask_token=MASK_TOKEN,
    )


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or a hub name; nothing in it is executed."""
    from transformers import AutoTokenizer

    fix = "give a folder with tokenizer.json, or a hub name"
    folder = Path(name)
    # Without its files, transformers would make up a tokenizer that knows no word.
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise InputError("no tokenizer here", file=name, fix=fix)
    _check_sentencepiece(folder)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more precise
        problem = f"no tokenizer could be loaded: {first_line(error)}"
        raise InputError(problem, file=name, fix=fix) from error
    if not tokenizer.is_fast:
        raise InputError(
            "this tokenizer has no fast version", file=name, fix="convert it to tokenizer.json"
        )
    return tokenizer  # type: ignore[no-any-return]


def _check_sentencepiece(folder: Path) -> None:
    """Refuse a tokenizer that is a SentencePiece file alone where nothing here can read it."""
    files = [path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern))]
    is_alone = bool(files) and all(path.suffix == ".model" for path in files)
    if is_alone and find_spec("sentencepiece") is None:
        raise InputError(
            "transformers reads this with the package sentencepiece, which is not installed",
            file=files[0],
            fix="pip install sentencepiece, or save the tokenizer as tokenizer.json elsewhere",
        )


def lift_limits(backend: Tokenizer) -> Tokenizer:
    """Stop a tokenizer's engine from truncating and padding, and return it.

    Either may come with a tokenizer's file, or stay behind from a call of it.
    """
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode_sentences(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[str]
) -> list[npt.NDArray[np.int64]]:
    """Encode sentences without special tokens, in the tokenizer's own threads."""
    encodings = lift_limits(tokenizer.backend_tokenizer).encode_batch_fast(
        list(sentences), add_special_tokens=False
    )
    return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


def encode_words(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[Sequence[str]]
) -> list[WordPieces]:
    """Encode sentences that are already split into words; each subword knows its word.

    A word the tokenizer's normaliser deletes whole (a lone zero-width joiner, say) has no subword.
    """
    spaced = keeps_spaces(tokenizer)
    prepared = [_add_spaces(words) if spaced else list(words) for words in sentences]
    encodings = lift_limits(tokenizer.backend_tokenizer).encode_batch(
        prepared, is_pretokenized=True, add_special_tokens=False
    )
    return [
        WordPieces(
            np.asarray(encoding.ids, dtype=np.int64),
            np.asarray(encoding.word_ids, dtype=np.int64),
            len(words),
        )
        for encoding, words in zip(encodings, sentences, strict=True)
    ]


def boundary_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int | None, int | None]:
    """Return the ids of the special tokens before and after a sequence (None if missing)."""
    return tokenizer.cls_token_id, tokenizer.sep_token_id


def special_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids that are never masked nor pooled: sentence marks, padding, mask; not the unknown."""
    marks = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id}
    marks |= {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id}
    return sorted(mark for mark in marks if mark is not None)


def keeps_spaces(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Tell whether the space before a word is part of its first piece, and only if it is given.

    So it is with byte-level tokenizers (RoBERTa's), and with those of SentencePiece's kind that put
    none before the first word (Gemma's).
    """
    backend = tokenizer.backend_tokenizer
    if "ByteLevel" in str(backend.pre_tokenizer):
        return True
    return _cut_words(backend, "a a") != 2 * _cut_words(backend, "a")


def _cut_words(backend: Tokenizer, text: str) -> str:
    """Give a text as the model behind normaliser and pre-tokenizer sees it."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return text
    return "".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))


def _add_spaces(words: Sequence[str]) -> list[str]:
    return [" " + word if word and i else word for i, word in enumerate(words)]


def _frequent_characters(sentences: Sequence[str], coverage: float) -> set[str]:
    """Return the most frequent characters that together make up `coverage` of the text."""
    counts = Counter(chain.from_iterable(sentences))
    total, covered, kept = sum(counts.values()), 0, set()
    for character, count in counts.most_common():
        if covered >= coverage * total:
            break
        kept.add(character)
        covered += count
    return kept


def _drop_characters(sentences: Iterable[str], alphabet: set[str]) -> Iterator[list[str]]:
    """Yield blocks of sentences with each character outside the alphabet made a space."""
    stream = iter(sentences)
    while block := list(islice(stream, 10_000)):
        rare = {ord(c): " " for c in set("".join(block)) - alphabet}
        yield [sentence.translate(rare) for sentence in block]


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens around sentences, read off the tokenizer."""

    cls_id: int
    sep_id: int
    n_between: int
    pad_id: int
    mask_id: int
    all_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        """Read `<s>`, `</s>` and their like; XLM-R puts two marks between a pair, BERT one."""
        n_pair_marks = tokenizer.num_special_tokens_to_add(pair=True)
        return cls(
            cls_id=_id(tokenizer.cls_token_id),
            sep_id=_id(tokenizer.sep_token_id),
            n_between=n_pair_marks - 2,
            pad_id=_id(tokenizer.pad_token_id),
            mask_id=_id(tokenizer.mask_token_id),
            all_ids=tuple(special_ids(tokenizer)),
            vocab_size=len(tokenizer),
        )


def _id(value: int | None) -> int:
    if value is None:
        from calque.errors import InputError

        raise InputError(
            "the tokenizer lacks a first, last, padding or mask token",
            fix="use the tokenizer of a masked language model",
        )
    return value
