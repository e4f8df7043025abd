"""Small tokenizers of three kinds, given their pieces or trained, and a reference word encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from calque.tokens.tokenizer import keeps_leading_space, train_tokenizer

KINDS = ("sentencepiece", "byte-level", "wordpiece")
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def word_piece(pieces: Sequence[str], *, lowercase: bool = True) -> PreTrainedTokenizerFast:
    """Build a BERT-style tokenizer: `##` inside words, [PAD] has id 0."""
    every = dict.fromkeys([*BERT.values(), *pieces])
    vocabulary = {piece: number for number, piece in enumerate(every)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return wrap(tokenizer, BERT)


def sentence_piece(
    pieces: Sequence[str], special: Sequence[str] = ("<s>", "<pad>", "</s>", "<unk>")
) -> PreTrainedTokenizerFast:
    """Build an XLM-R-style tokenizer: `▁` at word starts; <pad> has id 1 by default."""
    every = dict.fromkeys([*special, *pieces, "<mask>"])
    scores = [(piece, -float(10 - len(piece))) for piece in every]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=list(special).index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrap(tokenizer, ROBERTA)


def byte_level(
    sentences: Sequence[str], n_pieces: int = 400, *, prefix_space: bool = True
) -> PreTrainedTokenizerFast:
    """Train a RoBERTa-style tokenizer: byte-level, `Ġ` at word starts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_pieces,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return wrap(tokenizer, ROBERTA)


def make_tokenizer(kind: str, sentences: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of one of the three kinds."""
    if kind == "sentencepiece":
        return train_tokenizer(sentences, size, character_coverage=1.0)
    if kind == "byte-level":
        return byte_level(sentences, size, prefix_space=False)
    tokenizer = word_piece([]).backend_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(BERT.values()), show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return wrap(tokenizer, BERT)


def wrap(tokenizer: Tokenizer, roles: dict[str, str]) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{roles['cls']} $A {roles['sep']}",
        pair=f"{roles['cls']} $A {roles['sep']} $B {roles['sep']}",
        special_tokens=[
            (roles[role], tokenizer.token_to_id(roles[role])) for role in ("cls", "sep")
        ],
    )
    tokenizer.add_special_tokens(list(roles.values()))
    named = {f"{role}_token": token for role, token in roles.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


@dataclass(frozen=True, slots=True)
class WordPieces:
    """The subwords of one sentence (no special tokens) and the word each belongs to."""

    ids: np.ndarray
    words: np.ndarray
    n_words: int

    def first_pieces(self) -> np.ndarray:
        """Return the index of every word's first subword; −1 for a word without subwords."""
        first = np.full(self.n_words, -1, dtype=np.int64)
        words, index = np.unique(self.words, return_index=True)
        first[words] = index
        return first


def encode_words(
    tokenizer: PreTrainedTokenizerFast, sentences: Sequence[Sequence[str]]
) -> list[WordPieces]:
    """Encode sentences given as lists of words.

    A word that the tokenizer's normalizer deletes (for example a zero-width joiner) has no subword.
    """
    if keeps_leading_space(tokenizer):
        sentences = [
            [" " + word if word and k else word for k, word in enumerate(words)]
            for words in sentences
        ]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    encodings = backend.encode_batch(
        [list(words) for words in sentences], is_pretokenized=True, add_special_tokens=False
    )
    return [
        WordPieces(
            np.asarray(encoding.ids, dtype=np.int64),
            np.asarray(encoding.word_ids, dtype=np.int64),
            len(words),
        )
        for encoding, words in zip(encodings, sentences, strict=True)
    ]
