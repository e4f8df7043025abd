"""Small tokenizers of the three kinds: of the pieces a test needs, or learnt from sentences."""

from __future__ import annotations

from collections.abc import Sequence

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

from calque.tokens.tokenizer import train_tokenizer

KINDS = ("sentencepiece", "byte-level", "wordpiece")
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}


def word_piece(pieces: Sequence[str], *, lowercase: bool = True) -> PreTrainedTokenizerFast:
    """BERT's kind: `##` inside words, [PAD] has id 0."""
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
    """XLM-R's kind: `▁` where words start, <pad> has id 1 unless `special` has another order."""
    every = dict.fromkeys([*special, *pieces, "<mask>"])
    scores = [(piece, -float(10 - len(piece))) for piece in every]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=list(special).index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrap(tokenizer, ROBERTA)


def byte_level(
    sentences: Sequence[str], n_pieces: int = 400, *, prefix_space: bool = True
) -> PreTrainedTokenizerFast:
    """RoBERTa's kind, learnt from sentences: `Ġ` where words start, bytes in disguise."""
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
    """Learn a tokenizer of one of the three kinds from sentences."""
    if kind == "sentencepiece":
        return train_tokenizer(sentences, size, character_coverage=1.0)
    if kind == "byte-level":
        return byte_level(sentences, size, prefix_space=False)
    learner = word_piece([]).backend_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(BERT.values()), show_progress=False
    )
    learner.train_from_iterator(sentences, trainer)
    return wrap(learner, BERT)


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
