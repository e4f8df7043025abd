"""Subword tokenizers: training, loading, encoding many sentences, and their special tokens."""

from __future__ import annotations

import json
import re
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

    IntArray = npt.NDArray[np.int64]

# XLM-R's order: these tokens have the first ids, <mask> has the last.
FIRST_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
MASK_TOKEN = "<mask>"
WORD_START = "▁"
# Typographic characters that are read as plain ones: both spellings have the same tokens.
TYPOGRAPHIC = {"'": "‘’‚‛ʼ′", '"': "“”„‟«»″", "-": "‐‑–—−"}
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
# Text that every tokenizer must encode, with characters that most vocabularies do not have.
SAMPLE = "a b \u6f22 \u0378 \U0001f600"
# The library adds this to the score of each further character that is in no learned piece.
SCORE_STEP = 1e-4
OS_ERROR = re.compile(r"(.*) \(os error ([0-9]+)\)")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of the special tokens that models expect around sentences.

    `n_between` special tokens separate the sentences of a pair: two for XLM-R
    (`<s> a </s></s> b </s>`), one for BERT. `all_ids` are the ids that are never masked.
    """

    cls_id: int
    sep_id: int
    n_between: int
    pad_id: int
    mask_id: int
    all_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        """Read the special tokens of a tokenizer; raise InputError if one is missing."""
        ids = {}
        for role in ("cls", "sep", "pad", "mask"):
            number = getattr(tokenizer, f"{role}_token_id")
            if number is None:
                raise InputError(
                    f"the tokenizer has no {role} token",
                    fix="use the tokenizer of a masked language model",
                )
            ids[f"{role}_id"] = int(number)
        return cls(
            **ids,
            n_between=tokenizer.num_special_tokens_to_add(pair=True) - 2,
            all_ids=tuple(special_ids(tokenizer)),
            vocab_size=len(tokenizer),
        )


def special_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that are never masked or pooled: all special tokens except `<unk>`."""
    roles = ("cls", "sep", "bos", "eos", "pad", "mask")
    ids = {getattr(tokenizer, f"{role}_token_id") for role in roles}
    return sorted(number for number in ids if number is not None)


def boundary_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int | None, int | None]:
    """Return the ids of the special tokens before and after a sequence (None if missing)."""
    return tokenizer.cls_token_id, tokenizer.sep_token_id


def train_tokenizer(
    sentences: Iterable[str],
    vocab_size: int,
    *,
    character_coverage: float = 0.9995,
    max_piece_length: int = 16,
) -> PreTrainedTokenizerFast:
    """Train a SentencePiece-style Unigram tokenizer with XLM-R's special tokens and ids.

    The rarest characters, beyond `character_coverage` of the text, become `<unk>`. Otherwise
    Chinese characters alone would fill a small vocabulary.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    sentences = list(sentences)
    alphabet = _find_frequent_characters(sentences, character_coverage)
    if not alphabet:
        raise InputError(
            "there is no text to train a tokenizer on",
            fix="pass sentences, or use less strict cleaning rules",
        )
    if len(alphabet) + len(FIRST_TOKENS) + 1 >= vocab_size:
        raise InputError(
            f"vocab_size={vocab_size} cannot hold the {len(alphabet)} characters of the text",
            fix="raise vocab_size or lower character_coverage",
        )
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.NFKC(),
            *(
                normalizers.Replace(Regex(f"[{variants}]"), plain)
                for plain, variants in TYPOGRAPHIC.items()
            ),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START)
    tokenizer.decoder = decoders.Metaspace(replacement=WORD_START)
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - 1,  # <mask> is appended below, as the last id
        special_tokens=list(FIRST_TOKENS),
        unk_token="<unk>",
        max_piece_length=max_piece_length,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_remove_characters(sentences, alphabet), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary = _sort_vocabulary([(piece, score) for piece, score in model["vocab"]])
    tokenizer.model = models.Unigram(vocabulary, model["unk_id"], model["byte_fallback"])
    return wrap_tokenizer(tokenizer)


def _find_frequent_characters(sentences: Sequence[str], coverage: float) -> set[str]:
    """Return the most frequent characters that together make up `coverage` of the text."""
    counts = Counter(chain.from_iterable(sentences))
    total, covered, kept = sum(counts.values()), 0, set()
    for character, count in counts.most_common():
        if covered >= coverage * total:
            break
        kept.add(character)
        covered += count
    return kept


def _remove_characters(sentences: Iterable[str], alphabet: set[str]) -> Iterator[list[str]]:
    """Yield blocks of sentences in which every character outside the alphabet is a space."""
    stream = iter(sentences)
    while block := list(islice(stream, 10_000)):
        rare = {ord(c): " " for c in set("".join(block)) - alphabet}
        yield [sentence.translate(rare) for sentence in block]


def _sort_vocabulary(vocabulary: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Order a Unigram vocabulary so that the same text gives the same tokenizer in every run.

    The library adds up counts in a random order, so that scores differ by up to 4e-11 between runs,
    and gives rare characters the scores `lowest + k · SCORE_STEP` in the order of a hash table.
    Rounding hides the differences, except where a score is that close to a rounding boundary: of
    1,000 vocabularies of 32,000 pieces, three have such a score.
    """
    special, pieces = vocabulary[: len(FIRST_TOKENS)], dict(vocabulary[len(FIRST_TOKENS) :])
    lowest = min(pieces.values())
    steps = {piece: (score - lowest) / SCORE_STEP for piece, score in pieces.items()}
    rare = sorted(p for p, k in steps.items() if len(p) == 1 and abs(k - round(k)) < 1e-5)
    scores = sorted((pieces[piece] for piece in rare), reverse=True)
    pieces |= dict(zip(rare, scores, strict=True))
    rounded = [(piece, round(score, 6)) for piece, score in pieces.items()]
    return special + sorted(rounded, key=lambda item: (-item[1], item[0]))


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Add XLM-R's templates, `<s> a </s>` and `<s> a </s></s> b </s>`, to a bare tokenizer."""
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
    """Load a fast tokenizer from a folder or a hub name; code in the folder is not executed."""
    from transformers import AutoTokenizer

    fix = "pass a folder with tokenizer.json, or a hub name"
    folder = Path(name)
    files = [path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern))]
    # Without these files, transformers would build a tokenizer with an empty vocabulary.
    if folder.is_dir() and not files:
        raise InputError("the folder has no tokenizer", file=name, fix=fix)
    is_sentencepiece = bool(files) and all(path.suffix == ".model" for path in files)
    if is_sentencepiece and find_spec("sentencepiece") is None:
        raise InputError(
            "reading this tokenizer needs the package sentencepiece, which is not installed",
            file=files[0],
            fix="run `pip install sentencepiece`, or save the tokenizer as tokenizer.json",
        )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(name), trust_remote_code=False)
        if tokenizer.is_fast:
            for part in _pre_tokenize(tokenizer.backend_tokenizer, SAMPLE):
                tokenizer.backend_tokenizer.model.tokenize(part)
    except BaseException as error:
        # The library raises nothing more precise, and its panics are not even exceptions.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = f"the tokenizer could not be loaded: {first_line(error)}"
        raise InputError(problem, file=name, fix=fix) from error
    if not tokenizer.is_fast:
        raise InputError(
            "this tokenizer has no fast version", file=name, fix="convert it to tokenizer.json"
        )
    return tokenizer  # type: ignore[no-any-return]


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files of a tokenizer into a folder; raise OSError if that is not possible."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The tokenizers library raises a plain Exception: "No space left on device (os error 28)".
        if found := OS_ERROR.search(str(error)):
            raise OSError(int(found[2]), found[1]) from error
        raise


def disable_truncation_and_padding(backend: Tokenizer) -> Tokenizer:
    """Disable truncation and padding, which a tokenizer file or an earlier call may have set."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode_sentences(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[str]
) -> list[IntArray]:
    """Encode sentences without special tokens, in the threads of the tokenizers library."""
    backend = disable_truncation_and_padding(tokenizer.backend_tokenizer)
    encodings = backend.encode_batch_fast(list(sentences), add_special_tokens=False)
    return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


def keeps_leading_space(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the space before a word must be passed along to get its usual first subword.

    This holds for byte-level tokenizers (RoBERTa), and for SentencePiece-style tokenizers that add
    no space before the first word (Gemma).
    """
    backend = tokenizer.backend_tokenizer
    if "ByteLevel" in str(backend.pre_tokenizer):
        return True
    word, words = ("".join(_pre_tokenize(backend, text)) for text in ("a", "a a"))
    return words != 2 * word


def _pre_tokenize(backend: Tokenizer, text: str) -> list[str]:
    """Return the parts of a text that the tokenizer's model receives."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
