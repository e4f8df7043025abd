"""MLM and TLM: the loss against torch and transformers, the batches against Hugging Face."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.objectives import build_objective
from calque.objectives.denoising_alignment import DenoisingAlignment, DenoisingAlignmentSettings
from calque.objectives.linked_words import LinkedWords, LinkedWordsSettings
from calque.objectives.masked_lm import (
    NO_LABEL,
    MaskedLM,
    MaskedLMSettings,
    TranslationLM,
    TranslationLMSettings,
    masked_lm_loss,
)
from calque.tokens.layout import swap_sides
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.tokens.tokenizer import SpecialTokens, encode_sentences
from calque.types import MaskedBatch
from calque.word_alignment.neural import AlignSettings

DemoRows = list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def bert_tokenizer(demo_rows: DemoRows) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer with BERT's template, `[CLS] a [SEP] b [SEP]`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=800, special_tokens=special_tokens, show_progress=False
    )
    tokenizer.train_from_iterator([text for row in demo_rows for text in row[1:]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = request.getfixturevalue(request.param)
    return found


both_templates = pytest.mark.parametrize(
    "tokenizer", ["tiny_tokenizer", "bert_tokenizer"], indirect=True
)
both_positions = pytest.mark.parametrize("positions", ["reset", "continue"])


def read_sides(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> tuple[Ragged, Ragged]:
    src, tgt = (Ragged.of(encode_sentences(tokenizer, texts)) for texts in zip(*pairs, strict=True))
    return src, tgt


def make_batch(
    objective: MaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    sides: tuple[Ragged, ...],
    shape: BatchShape | None = None,
    seed: int = 0,
) -> MaskedBatch:
    collate = objective.build_collator(SpecialTokens.of(tokenizer), shape)
    batch = collate(sides, torch.Generator().manual_seed(seed))
    assert isinstance(batch, MaskedBatch)
    return batch


def unmask(batch: MaskedBatch) -> Tensor:
    """Restore the masked tokens."""
    ids, real = batch.tokens.ids.clone(), batch.labels != NO_LABEL
    ids[batch.masked[real]] = batch.labels[real]
    return ids


def cut(values: Tensor, batch: MaskedBatch) -> list[list[int]]:
    """Cut a flat array at the ends of sequences; those that only fill a shape are empty."""
    bounds = batch.tokens.offsets.tolist()
    return [values[a:b].tolist() for a, b in pairwise(bounds)]


def pad_rows(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def loss_by_transformers(encoder: Encoder, batch: MaskedBatch) -> Tensor:
    """Hugging Face's own forward on padded rows, cross-entropy over all logits."""
    labels = torch.full_like(batch.tokens.ids, NO_LABEL)
    labels[batch.masked] = batch.labels
    pad = int(encoder.model.config.pad_token_id)
    ids = pad_rows(cut(batch.tokens.ids, batch), pad)
    positions = pad_rows(cut(batch.tokens.positions + pad + 1, batch), pad)
    model: Any = encoder.model
    output = model(
        input_ids=ids,
        attention_mask=(ids != pad).long(),
        position_ids=positions,
        labels=pad_rows(cut(labels, batch), NO_LABEL),
    )
    expected = torch.nn.CrossEntropyLoss(ignore_index=NO_LABEL)(
        output.logits.flatten(0, 1), pad_rows(cut(labels, batch), NO_LABEL).flatten()
    )
    torch.testing.assert_close(output.loss, expected)
    loss: Tensor = output.loss
    return loss


def test_gradient_is_correct() -> None:
    generator = torch.Generator().manual_seed(3)
    features, weight, bias = (
        torch.randn(*size, dtype=torch.float64, generator=generator, requires_grad=True)
        for size in ((5, 4), (7, 4), (7,))
    )
    labels = torch.tensor([3, NO_LABEL, 0, 6, NO_LABEL])
    assert torch.autograd.gradcheck(masked_lm_loss, (features, weight, bias, labels))

    def without_bias(features: Tensor, weight: Tensor) -> Tensor:
        return masked_lm_loss(features, weight, None, labels)

    assert torch.autograd.gradcheck(without_bias, (features, weight))
    loss = masked_lm_loss(features, weight, bias, labels)
    (gradient,) = torch.autograd.grad(loss, features)
    assert gradient[labels == NO_LABEL].eq(0).all()


def test_loss_by_hand() -> None:
    # Two tokens, logits (0, ln 3): the probabilities are 1/4 and 3/4.
    weight, bias = torch.zeros(2, 1), torch.tensor([0.0, float(np.log(3))])
    labels = torch.tensor([0, 1, NO_LABEL])
    loss = masked_lm_loss(torch.ones(3, 1), weight, bias, labels)
    assert loss.item() == pytest.approx((np.log(4) + np.log(4 / 3)) / 2)


def test_half_precision_is_summed_in_single() -> None:
    features, weight = torch.ones(1, 1).bfloat16(), torch.zeros(300, 1).bfloat16()
    loss = masked_lm_loss(features, weight, None, torch.tensor([0]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(np.log(300), abs=1e-5)


def test_mlm_loss_is_that_of_transformers(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    objective = MaskedLM(MaskedLMSettings())
    side = Ragged.of(encode_sentences(tiny_encoder.tokenizer, [row[2] for row in demo_rows[:20]]))
    batch = make_batch(objective, tiny_encoder.tokenizer, (side,))
    loss = objective(tiny_encoder, batch).loss
    torch.testing.assert_close(loss, loss_by_transformers(tiny_encoder, batch))


@both_positions
def test_tlm_loss_is_that_of_transformers(
    tiny_encoder: Encoder, demo_rows: DemoRows, positions: Any
) -> None:
    objective = TranslationLM(TranslationLMSettings(positions=positions))
    sides = read_sides(tiny_encoder.tokenizer, [row[1:] for row in demo_rows[:20]])
    batch = make_batch(objective, tiny_encoder.tokenizer, sides)
    loss = objective(tiny_encoder, batch).loss
    torch.testing.assert_close(loss, loss_by_transformers(tiny_encoder, batch))


@both_templates
def test_mlm_sequences_are_those_of_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, demo_rows: DemoRows
) -> None:
    texts = [row[2] for row in demo_rows]
    side = Ragged.of(encode_sentences(tokenizer, texts))
    batch = make_batch(MaskedLM(MaskedLMSettings()), tokenizer, (side,))
    assert cut(unmask(batch), batch) == tokenizer(texts)["input_ids"]


@both_templates
@both_positions
def test_tlm_sequences_are_those_of_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, positions: Any, demo_rows: DemoRows
) -> None:
    pairs = [row[1:] for row in demo_rows]
    objective = TranslationLM(TranslationLMSettings(positions=positions))
    batch = make_batch(objective, tokenizer, read_sides(tokenizer, pairs))
    assert batch.tokens.n_real == len(batch.tokens.ids)
    found = list(zip(cut(unmask(batch), batch), cut(batch.tokens.positions, batch), strict=True))
    assert len(found) == len(pairs)
    n_swapped = 0
    for (ids, places), (src, tgt) in zip(found, pairs, strict=True):
        straight, swapped = tokenizer(src, tgt)["input_ids"], tokenizer(tgt, src)["input_ids"]
        assert ids in (straight, swapped)
        n_swapped += ids != straight
        n_first = len(tokenizer(src if ids == straight else tgt)["input_ids"])
        n_second = len(ids) - n_first
        expected = [*range(n_first), *range(n_second)]
        assert places == (expected if positions == "reset" else [*range(len(ids))])
    assert 0.3 < n_swapped / len(pairs) < 0.7


def test_swapping_exchanges_whole_pairs() -> None:
    src, tgt = Ragged.of([[1], [2, 2], []]), Ragged.of([[4, 4], [5], [6]])
    orders = set()
    for seed in range(40):
        left, right = swap_sides(src, tgt, torch.Generator().manual_seed(seed))
        lefts = np.split(left.ids, np.cumsum(left.lengths)[:-1])
        rights = np.split(right.ids, np.cumsum(right.lengths)[:-1])
        found = [(a.tolist(), b.tolist()) for a, b in zip(lefts, rights, strict=True)]
        whole = [([1], [4, 4]), ([2, 2], [5]), ([], [6])]
        assert all(pair in (kept, kept[::-1]) for pair, kept in zip(found, whole, strict=True))
        orders.add(tuple(pair == kept for pair, kept in zip(found, whole, strict=True)))
    assert len(orders) == 8


@both_templates
def test_special_tokens_are_neither_masked_nor_inserted(
    tokenizer: PreTrainedTokenizerFast, demo_rows: DemoRows
) -> None:
    sides = read_sides(tokenizer, [row[1:] for row in demo_rows])
    special = torch.tensor(
        sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id, tokenizer.mask_token_id})
    )
    objective = TranslationLM(TranslationLMSettings(probability=0.5))
    batch = make_batch(objective, tokenizer, sides)
    n_ordinary = int((~torch.isin(unmask(batch), special)).sum())
    assert len(batch.masked) == round(0.5 * n_ordinary)
    assert not torch.isin(batch.labels, special).any()
    assert not torch.isin(batch.tokens.ids[batch.masked], special).any()
    assert torch.equal(torch.isin(batch.tokens.ids, special), torch.isin(unmask(batch), special))
    share = (batch.tokens.ids[batch.masked] == tokenizer.mask_token_id).float().mean()
    assert 0.75 < share < 0.85


def drop_padding(batch: MaskedBatch, pad: int) -> MaskedBatch:
    """Concatenate the sequences of a fixed-shape batch."""
    sequences: list[slice] = []
    moved: dict[int, int] = {}
    n_before = 0
    bounds = batch.tokens.offsets.tolist()
    for start, stop in pairwise(bounds):
        if start < stop and batch.tokens.ids[start] != pad:
            sequences.append(slice(start, stop))
            moved |= {start + k: n_before + k for k in range(stop - start)}
            n_before += stop - start
    ragged = Ragged.of([batch.tokens.ids[part].numpy() for part in sequences])
    positions = np.concatenate([batch.tokens.positions[part].numpy() for part in sequences])
    real = batch.labels != NO_LABEL
    masked = torch.tensor([moved[place] for place in batch.masked[real].tolist()])
    return MaskedBatch(pack(ragged, positions=positions, pad_id=pad), masked, batch.labels[real])


@pytest.mark.parametrize("settings", [MaskedLMSettings(), TranslationLMSettings()])
def test_a_fixed_shape_changes_no_loss(
    settings: Any, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    objective = build_objective(settings)
    assert isinstance(objective, MaskedLM)
    tokenizer = tiny_encoder.tokenizer
    lengths = np.full(50, 20)
    shape = BatchShape.fit(2048, lengths, 128)
    sizes = set()
    for rows in (demo_rows[:10], demo_rows[50:65]):
        sides = read_sides(tokenizer, [row[1:] for row in rows])[: objective.n_sides]
        filled = make_batch(objective, tokenizer, sides, shape)
        bare = drop_padding(filled, int(tokenizer.pad_token_id))
        assert filled.tokens.n_real == bare.tokens.n_real == len(bare.tokens.ids)
        assert len(filled.labels) > len(bare.labels)
        sizes.add((len(filled.tokens.ids), len(filled.masked), len(filled.tokens.offsets)))
        torch.testing.assert_close(
            objective(tiny_encoder, filled).loss, objective(tiny_encoder, bare).loss
        )
    assert len(sizes) == 1


def test_an_objective_stores_nothing_of_the_model(
    tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    objective = MaskedLM(MaskedLMSettings())
    side = Ragged.of(encode_sentences(tiny_encoder.tokenizer, [demo_rows[0][2]]))
    objective(tiny_encoder, make_batch(objective, tiny_encoder.tokenizer, (side,)))
    assert not list(objective.modules())[1:]
    assert not list(objective.parameters())
    assert tiny_encoder not in vars(objective).values()


def test_batches_repeat_with_their_generator(
    tiny_tokenizer: PreTrainedTokenizerFast, demo_rows: DemoRows
) -> None:
    sides = read_sides(tiny_tokenizer, [row[1:] for row in demo_rows[:30]])
    objective = TranslationLM(TranslationLMSettings())
    first, again, other = (
        make_batch(objective, tiny_tokenizer, sides, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.tokens.ids, again.tokens.ids)
    assert torch.equal(first.masked, again.masked)
    assert not torch.equal(unmask(first), unmask(other))


def test_a_tokenizer_without_a_mask_is_an_error(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match="the tokenizer has no"):
        SpecialTokens.of(bare)


READ_PAIRS = [
    (TranslationLM, TranslationLMSettings),
    (DenoisingAlignment, DenoisingAlignmentSettings),
    (LinkedWords, LinkedWordsSettings),
]


@pytest.mark.parametrize("positions", ["reset", "continue"])
@pytest.mark.parametrize(("kind", "choices"), READ_PAIRS)
def test_the_model_stores_how_positions_are_counted_in_a_pair(
    kind: Any, choices: Any, positions: Any, tiny_encoder: Encoder
) -> None:
    """`calque align` and `calque attention` must count positions in the same way."""
    encoder = copy.deepcopy(tiny_encoder)
    objective = kind(choices(positions=positions))
    objective.start(encoder, ["en-de"])
    assert AlignSettings.of(encoder).positions == positions
    encoder.config.calque = {"recipe": "x", "alignment": {"layer": 2, "positions": "reset"}}
    objective.start(encoder, ["en-de"])
    assert encoder.settings == {"recipe": "x", "alignment": {"layer": 2, "positions": positions}}
