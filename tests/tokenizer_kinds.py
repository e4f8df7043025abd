"""Small tokenizers of every kind, trained on sentences: for tests of text that is read anew."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from calque.text.tokenization import train_tokenizer, wrap_tokenizer

KINDS = ("sentencepiece", "byte-level", "wordpiece")
BERT_MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(kind: str, sentences: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer; WordPiece lower-cases and strips accents, as BERT's does."""
    if kind == "sentencepiece":
        return train_tokenizer(sentences, size, character_coverage=1.0)
    return {"byte-level": _make_byte_level, "wordpiece": _make_wordpiece}[kind](sentences, size)


def _make_byte_level(sentences: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(sentences, trainer)
    return wrap_tokenizer(learner)


def _make_wordpiece(sentences: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer()
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=BERT_MARKS, show_progress=False
    )
    learner.train_from_iterator(sentences, trainer)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    marks = dict(zip(names, BERT_MARKS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=learner, **marks)
