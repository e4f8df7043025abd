"""Distillation: the divergence by hand and against torch's, what a teacher reads, and the loss."""

from __future__ import annotations

import copy
import pickle
import runpy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.objectives.distillation import (
    PADDING_LOGIT,
    Distillation,
    DistillationSettings,
    Teacher,
    distillation_loss,
)
from calque.objectives.masked_lm import NO_LABEL, MaskedLM, MaskedLMSettings
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences
from calque.types import LossTerms

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.objectives.distillation import DistillationBatch

    MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
    Folders = dict[str, Path]

make_tokenizer: MakeTokenizer = runpy.run_path(
    str(Path(__file__).parents[1] / "toy_tokenizers.py")
)["make_tokenizer"]

ROOMY = BatchShape(tokens=1024, row=128, sequences=64, budget=1024)
# German, English and Finnish; the teachers know English.
LANGUAGES = ["de", "en", "fi"]
KINDS = ("same", "sentencepiece", "byte-level", "wordpiece")
WAYS = [("same", "tokens"), ("byte-level", "tokens"), ("byte-level", "states")]


# The tensor function


def test_two_rows_by_hand() -> None:
    teacher = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    student = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    first = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    second = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    ones = torch.ones(2)
    assert distillation_loss(student, teacher, ones, 1).item() == pytest.approx(
        (first + second) / 2
    )
    weights = torch.tensor([3.0, 1.0])
    mean = (3 * first + second) / 4
    assert distillation_loss(student, teacher, weights, 1).item() == pytest.approx(mean)
    # At a temperature of 2 probabilities become their square roots, normalized.
    p = np.sqrt([0.75, 0.25]) / np.sqrt([0.75, 0.25]).sum()
    expected = 4 * (p * np.log(p / 0.5)).sum()
    found = distillation_loss(student[:1], teacher[:1], ones[:1], 2)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=generator, dtype=torch.float64)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 9), st.floats(0.3, 5.0))
def test_it_equals_the_divergence_of_torch(seed: int, rows: int, classes: int, T: float) -> None:
    student, teacher = draw(seed, 2, rows, classes)
    p, q = (torch.distributions.Categorical(logits=x / T) for x in (teacher, student))
    expected = T**2 * torch.distributions.kl_divergence(p, q).mean()
    weights = torch.full((rows,), 0.7, dtype=torch.float64)
    found = distillation_loss(student, teacher, weights, T)
    torch.testing.assert_close(found, expected)
    assert found >= -1e-12
    moved = student + 5  # a softmax does not see it
    torch.testing.assert_close(distillation_loss(moved, teacher, weights, T), expected)


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 4.0))
def test_gradients_are_correct(seed: int, T: float) -> None:
    student, teacher = draw(seed, 2, 4, 5)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    sides = (student.requires_grad_(), teacher.requires_grad_())
    assert torch.autograd.gradcheck(lambda s, t: distillation_loss(s, t, weights, T), sides)


def test_at_high_temperatures_logits_are_matched() -> None:
    """Hinton et al., 2015, Eq. 4: the gradient is (z − v) / N, z and v of zero mean, over T²."""
    student, teacher = (x - x.mean(dim=1, keepdim=True) for x in draw(3, 2, 1, 6))
    student.requires_grad_()
    loss = distillation_loss(student, teacher, torch.ones(1, dtype=torch.float64), 1e4)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(gradient, ((student - teacher) / 6).detach(), rtol=1e-2, atol=1e-4)


def test_without_rows_the_loss_is_zero_and_not_nan() -> None:
    for n_rows in (0, 3):
        student = torch.randn(n_rows, 4, requires_grad=True)
        loss = distillation_loss(student, torch.randn(n_rows, 4), torch.zeros(n_rows), 2.0)
        (gradient,) = torch.autograd.grad(loss, student)
        assert loss.item() == 0
        assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_of_the_vocabulary_changes_nothing(dtype: torch.dtype) -> None:
    student, teacher = draw(5, 2, 3, 7).to(dtype)
    student.requires_grad_()
    wide = [F.pad(x, (0, 57), value=PADDING_LOGIT) for x in (student, teacher)]
    losses = [
        distillation_loss(s, t, torch.ones(3), 2.0) for s, t in ((student, teacher), tuple(wide))
    ]
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses)
    one, other = (torch.autograd.grad(loss, student)[0] for loss in losses)
    torch.testing.assert_close(one, other)


# What the teacher reads


@pytest.fixture(scope="module")
def sentences(demo_rows: list[tuple[str, str, str]]) -> list[tuple[int, str]]:
    """Sentences and the numbers of their languages."""
    found = [(1, english) for _, english, _ in demo_rows[:8]]
    found += [(0, text) for language, _, text in demo_rows if language == "de"][:4]
    found += [(2, text) for language, _, text in demo_rows if language == "fi"][:4]
    return [found[k] for k in np.random.default_rng(0).permutation(len(found))]


@pytest.fixture(scope="module")
def teachers(
    demo_rows: list[tuple[str, str, str]],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Folders:
    """Random models with other tokenizers and sizes; large weights make predictions differ."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("teachers")
    english, folders = [row[1] for row in demo_rows], {}
    for kind in KINDS:
        tokenizer = tiny_tokenizer if kind == "same" else make_tokenizer(kind, english, 700)
        config = AutoConfig.for_model(
            "bert" if kind == "wordpiece" else "roberta",
            vocab_size=len(tokenizer),
            hidden_size=48 if kind == "byte-level" else 64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=130,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng():
            torch.manual_seed(len(kind))
            encoder = Encoder(build_model(config), tokenizer)
            with torch.no_grad():
                for name, weight in encoder.named_parameters():
                    is_output = len(weight) == len(tokenizer)
                    if (weight.ndim > 1 or is_output) and "position" not in name:
                        weight.normal_(0, 0.3)
        encoder.save(folder / kind)
        folders[kind] = folder / kind
    return folders


def make_objective(teacher: Path, **changes: Any) -> Distillation:
    values = {"teacher": str(teacher), "languages": ["en"], **changes}
    return Distillation(DistillationSettings(**values))


def begin(encoder: Encoder, teacher: Path, **changes: Any) -> Distillation:
    """Prepare an objective as a run does before its first batch."""
    objective = make_objective(teacher, **changes)
    objective.add_weights(encoder.hidden_size, torch.Generator().manual_seed(1))
    objective.start(encoder, LANGUAGES)
    return objective


def collate(
    objective: Any,
    encoder: Encoder,
    sentences: list[tuple[int, str]],
    shape: BatchShape | None = None,
    seed: int = 0,
) -> Any:
    text = Ragged.of(encode_sentences(encoder.tokenizer, [text for _, text in sentences]))
    sides: tuple[Ragged, ...] = (text,)
    if objective.needs_languages:
        sides += (Ragged.of([[number] for number, _ in sentences]),)
    build = objective.build_collator(SpecialTokens.of(encoder.tokenizer), shape)
    return build(sides, torch.Generator().manual_seed(seed))


def split(batch: Any) -> list[list[int]]:
    """Return the sequences of a packed batch, without trailing padding."""
    bounds = batch.offsets.tolist()
    return [batch.ids[a:b].tolist() for a, b in pairwise(bounds) if b > a]


@pytest.mark.parametrize("shape", [None, ROOMY])
@pytest.mark.parametrize("target", ["tokens", "states"])
def test_the_student_reads_what_masked_lm_reads(
    shape: BatchShape | None,
    target: str,
    tiny_encoder: Encoder,
    teachers: Folders,
    sentences: list[tuple[int, str]],
) -> None:
    """Bit for bit: a run with a teacher differs from one without only in the teacher."""
    objective = begin(tiny_encoder, teachers["byte-level"], target=target)
    batch = collate(objective, tiny_encoder, sentences, shape)
    plain = collate(MaskedLM(MaskedLMSettings()), tiny_encoder, sentences, shape)
    assert batch.masked.masked.equal(plain.masked)
    assert batch.masked.labels.equal(plain.labels)
    for name in ("ids", "positions", "offsets"):
        assert getattr(batch.tokens, name).equal(getattr(plain.tokens, name))
    assert (batch.tokens.n_real, batch.tokens.row) == (plain.tokens.n_real, plain.tokens.row)


@pytest.mark.parametrize("shape", [None, ROOMY])
def test_a_teacher_of_the_same_vocabulary_sees_what_the_student_sees(
    shape: BatchShape | None,
    tiny_encoder: Encoder,
    teachers: Folders,
    sentences: list[tuple[int, str]],
) -> None:
    objective = begin(tiny_encoder, teachers["same"], probability=0.4)
    batch = collate(objective, tiny_encoder, sentences, shape)
    english = encode_sentences(
        tiny_encoder.tokenizer, [text for number, text in sentences if number == 1]
    )
    seen = split(batch.teacher_text)
    mine = split(batch.tokens)
    assert [len(ids) for ids in seen] == [len(ids) + 2 for ids in english]
    assert all(ids in mine for ids in seen)
    n_taught = int(batch.weights.sum())
    places, heard = batch.student_tokens[:n_taught], batch.teacher_tokens[:n_taught]
    assert batch.tokens.ids[places].equal(batch.teacher_text.ids[heard])
    # Every hidden token of an English sentence is taught, whatever stands there now.
    changed = {
        tuple(ids): list(clean) for ids, clean in zip(map(tuple, seen), english, strict=True)
    }
    n_changed = sum(
        int(now != was)
        for ids, clean in changed.items()
        for now, was in zip(ids[1:-1], clean, strict=True)
    )
    hidden = batch.masked.masked[batch.masked.labels != NO_LABEL].tolist()
    assert set(places.tolist()) < set(hidden)
    assert n_taught >= n_changed > 0
    assert batch.share.item() == pytest.approx(n_taught / len(hidden))
    n_english = sum(len(ids) for ids in english)
    n_all = sum(len(ids) - 2 for ids in mine if ids[0] == 0)
    assert batch.share.item() == pytest.approx(n_english / n_all, abs=0.1)


def spans(tokenizer: PreTrainedTokenizerFast, ids: list[int], text: str) -> list[tuple[int, int]]:
    """Find where pieces lie in the text, one after the other, spaces left out of both.

    A space alone lies where the first character after it does.
    """
    bare, found, at = text.replace(" ", ""), [], 0
    for number in ids:
        token = tokenizer.convert_ids_to_tokens(number)
        piece = token.removeprefix("▁")
        assert bare.startswith(piece, at)
        found.append((at, at + max(1, len(piece))))
        at += len(piece)
    assert at == len(bare)
    return found


@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level", "wordpiece"])
def test_tokens_masked_for_the_student_are_masked_for_the_teacher(
    kind: str, tiny_encoder: Encoder, teachers: Folders
) -> None:
    """Compared with a loop over the offsets of the teacher's tokenizer."""
    sentence = "We wanted to see the other houses, but nobody was there."
    objective = begin(tiny_encoder, teachers[kind], probability=0.3)
    theirs = objective.teacher.encoder.tokenizer
    clean = encode_sentences(tiny_encoder.tokenizer, [sentence])[0].tolist()
    mine = spans(tiny_encoder.tokenizer, clean, sentence)
    encoding = theirs.backend_tokenizer.encode(sentence, add_special_tokens=False)
    bare = [len(sentence[:k].replace(" ", "")) for k in range(len(sentence) + 1)]
    yours = [(bare[a], max(bare[a] + 1, bare[b])) for a, b in encoding.offsets]
    cuts = {0} | {end for _, end in mine} & {end for _, end in yours}
    n_taught = n_hidden = n_seen = 0
    for seed in range(12):
        batch = collate(objective, tiny_encoder, [(1, sentence)], seed=seed)
        seen, read = split(batch.tokens)[0][1:-1], split(batch.teacher_text)[0]
        assert (read[0], read[-1]) == (theirs.cls_token_id, theirs.sep_token_id)
        changed = [span for span, now, was in zip(mine, seen, clean, strict=True) if now != was]
        for (start, end), now, was in zip(yours, read[1:-1], encoding.ids, strict=True):
            first = max(cut for cut in cuts if cut <= start)
            last = min(cut for cut in cuts if cut >= end)
            if any(a < last and first < b for a, b in changed):
                assert now != was
                n_hidden += 1
            else:
                assert now == was
                n_seen += 1
        for place, heard in zip(
            batch.student_tokens.tolist(), batch.teacher_tokens.tolist(), strict=True
        ):
            assert place in batch.masked.masked
            assert mine[place - 1] == yours[heard - 1]
            label, answer = clean[place - 1], encoding.ids[heard - 1]
            spelled = tiny_encoder.tokenizer.convert_ids_to_tokens(label)
            other = theirs.convert_ids_to_tokens(answer)
            assert spelled.strip("▁") == other.strip("▁Ġ#")
            n_taught += 1
    assert min(n_taught, n_hidden, n_seen) > 12


def test_a_random_piece_is_translated(tiny_encoder: Encoder, teachers: Folders) -> None:
    """The teacher sees the same random piece if its vocabulary has it."""
    objective = begin(tiny_encoder, teachers["byte-level"])
    assert objective.reader.shared is not None
    src, tgt = (ids.tolist() for ids in objective.reader.shared)
    partners = dict(zip(src, tgt, strict=True))
    text = encode_sentences(tiny_encoder.tokenizer, ["Tom was there"])[0]
    special_tokens = objective.reader.special_tokens
    shared = src[100]
    alone = next(n for n in range(50, 1400) if n not in partners)
    place = tiny_encoder.tokenizer.convert_ids_to_tokens(text.tolist()).index("▁the")
    for token, expected in ((shared, partners[shared]), (alone, special_tokens.mask_id)):
        seen = text.copy()
        seen[place] = token
        hidden = np.arange(len(text)) == place
        taught = objective.reader.read(Ragged.of([text]), np.array([1]), seen, hidden)
        assert taught.student_tokens.tolist() == [place]
        assert taught.text.ids[taught.teacher_tokens[0]] == expected
        assert (taught.text.ids == expected).sum() == 1
    # Where more than one piece stands on either side, a mask stands in for each: here for `Ġwas`.
    seen = text.copy()
    seen[place - 1] = shared
    hidden = np.arange(len(text)) == place - 1
    taught = objective.reader.read(Ragged.of([text]), np.array([1]), seen, hidden)
    assert not len(taught.student_tokens)
    tokenizer = objective.teacher.encoder.tokenizer
    assert tokenizer.convert_ids_to_tokens(taught.text.ids.tolist())[-3:] == [
        "<mask>",
        "Ġthe",
        "re",
    ]


def test_the_teacher_stays_in_evaluation_mode(tiny_encoder: Encoder) -> None:
    teacher = Teacher(copy.deepcopy(tiny_encoder).train())
    assert not any(module.training for module in teacher.encoder.modules())
    assert not any(weight.requires_grad for weight in teacher.encoder.parameters())


def test_states_are_taught_by_the_first_pieces_of_segments(
    tiny_encoder: Encoder, teachers: Folders
) -> None:
    sentence = "We wanted to see the other houses, but nobody was there."
    objective = begin(tiny_encoder, teachers["sentencepiece"], target="states")
    batch = collate(objective, tiny_encoder, [(0, "Das ist gut."), (1, sentence)])
    theirs = objective.teacher.encoder.tokenizer
    clean = encode_sentences(tiny_encoder.tokenizer, [sentence])[0].tolist()
    other = encode_sentences(theirs, [sentence])[0].tolist()
    assert split(batch.teacher_text) == [[0, *other, 2]]  # nothing is hidden from it
    mine, yours = spans(tiny_encoder.tokenizer, clean, sentence), spans(theirs, other, sentence)
    starts = sorted({a for a, _ in mine} & {a for a, _ in yours})
    first = batch.tokens.offsets[1].item() + 1
    expected = [
        ([a for a, _ in mine].index(start) + first, [a for a, _ in yours].index(start) + 1)
        for start in starts
    ]
    assert [
        *zip(batch.student_tokens.tolist(), batch.teacher_tokens.tolist(), strict=True)
    ] == expected
    n_german = len(encode_sentences(tiny_encoder.tokenizer, ["Das ist gut."])[0])
    assert batch.share.item() == pytest.approx(len(clean) / (len(clean) + n_german))


@pytest.mark.parametrize("target", ["tokens", "states"])
def test_the_taught_part_has_few_sizes(
    target: str, tiny_encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    objective = begin(tiny_encoder, teachers["wordpiece"], target=target)
    sizes = {}
    german = [(0, text) for _, text in sentences]
    for name, text in (("some", sentences), ("none", german), ("all", [(1, t) for _, t in german])):
        batch = collate(objective, tiny_encoder, text, ROOMY)
        free = collate(objective, tiny_encoder, text)
        assert len(batch.student_tokens) == len(batch.teacher_tokens) == len(batch.weights)
        n_taught = int(batch.weights.sum())
        assert batch.weights.tolist() == [1] * n_taught + [0] * (
            len(batch.student_tokens) - n_taught
        )
        assert (n_taught == 0) == (name == "none")
        assert len(free.student_tokens) == free.weights.sum()
        sizes[name] = len(batch.student_tokens)
    most = len(batch.masked.masked) if target == "tokens" else 1024
    step = -(-most // 4)
    assert sizes["none"] == step
    assert all(size % step == 0 for size in sizes.values())


def test_sentences_too_long_for_the_teacher_are_counted(
    tiny_encoder: Encoder, teachers: Folders
) -> None:
    short, long = "Tom was there.", "They said nothing about the other houses. " * 3
    objective = begin(tiny_encoder, teachers["sentencepiece"], probability=0.9)
    tokenizer = objective.teacher.encoder.tokenizer
    objective.reader._max_tokens = len(encode_sentences(tokenizer, [short])[0]) + 2
    batch = collate(objective, tiny_encoder, [(1, long), (1, short), (0, long)])
    assert batch.unread.item() == 0.5
    assert len(split(batch.teacher_text)) == 1
    first, last = batch.tokens.offsets[1:3].tolist()
    assert len(batch.student_tokens)
    assert ((batch.student_tokens > first) & (batch.student_tokens < last)).all()
    special_tokens = SpecialTokens.of(tiny_encoder.tokenizer)
    sides = (
        Ragged.of(encode_sentences(tiny_encoder.tokenizer, [long, short])),
        Ragged.of([[1], [1]]),
    )
    longest = objective.reader._max_tokens
    problem = objective.find_problem(tiny_encoder, special_tokens, iter([sides]))
    assert problem is not None
    assert problem.startswith("50% of the teacher's sentences are longer than its ")
    assert longest < 130


def test_batches_are_built_in_other_processes(
    tiny_encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    """Workers receive the collator after `start`, without any model."""
    objective = make_objective(teachers["byte-level"])
    build = objective.build_collator(SpecialTokens.of(tiny_encoder.tokenizer), None)
    objective.start(tiny_encoder, LANGUAGES)  # a run makes its streams first
    carried = pickle.dumps(build)
    assert len(carried) < 1_000_000
    text = Ragged.of(encode_sentences(tiny_encoder.tokenizer, [text for _, text in sentences]))
    sides = (text, Ragged.of([[number] for number, _ in sentences]))
    one, other = (
        make(sides, torch.Generator().manual_seed(0)) for make in (build, pickle.loads(carried))
    )
    assert one.teacher_text.ids.equal(other.teacher_text.ids)
    assert one.student_tokens.equal(other.student_tokens)
    moved = one.to("cpu")
    assert moved.masked.labels.equal(one.masked.labels)
    assert moved.tokens.n_real == one.tokens.n_real


# The objective


@pytest.fixture
def encoder(tiny_encoder: Encoder) -> Encoder:
    """A copy that may be changed, without dropout."""
    return copy.deepcopy(tiny_encoder).eval()


def compute(objective: Distillation, encoder: Encoder, batch: DistillationBatch) -> LossTerms:
    """Compute the loss as a training step does."""
    terms = objective(encoder, objective.prepare(encoder, batch))
    assert isinstance(terms, LossTerms)
    return terms


def say(encoder: Encoder, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits and last states of a packed batch, by Hugging Face, one sequence at a time."""
    logits, states = [], []
    with torch.no_grad():
        for ids in split(batch):
            model: Any = encoder.model
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
            logits.append(out.logits[0])
            states.append(out.hidden_states[-1][0])
    return torch.cat(logits), torch.cat(states)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_equals_that_of_plain_models(
    kind: str, encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    objective = begin(encoder, teachers[kind], temperature=3.0, teacher_weight=0.5)
    batch = collate(objective, encoder, sentences)
    terms = compute(objective, encoder, batch)
    student, _ = say(encoder, batch.tokens)
    teacher, _ = say(objective.teacher.encoder, batch.teacher_text)
    mine = theirs = torch.arange(student.shape[1])
    if kind != "same":
        assert objective.reader.shared is not None
        mine, theirs = map(torch.from_numpy, objective.reader.shared)
        assert 100 < len(mine) < 700
    log_q = (student[batch.student_tokens][:, mine] / 3).log_softmax(-1)
    p = (teacher[batch.teacher_tokens][:, theirs] / 3).softmax(-1)
    kl = 9 * F.kl_div(log_q, p, reduction="batchmean")
    mlm = F.cross_entropy(student[batch.masked.masked], batch.masked.labels)
    share = len(batch.student_tokens) / len(batch.masked.masked)
    assert share > 0.1
    assert kl > 0.01
    torch.testing.assert_close(terms.metrics["teacher"], kl, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(terms.metrics["mlm"], mlm, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(terms.loss, mlm + 0.5 * share * kl, rtol=1e-4, atol=1e-5)
    # With a fixed shape it is the same.
    filled = compute(objective, encoder, collate(objective, encoder, sentences, ROOMY))
    assert filled.metrics["teacher"].isfinite()
    assert filled.metrics["share"] > 0


@pytest.mark.parametrize("kind", ["same", "byte-level"])
def test_states_equal_those_of_plain_models(
    kind: str, encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    objective = begin(encoder, teachers[kind], target="states")
    batch = collate(objective, encoder, sentences)
    terms = compute(objective, encoder, batch)
    _, student = say(encoder, batch.tokens)
    _, teacher = say(objective.teacher.encoder, batch.teacher_text)
    mine = student[batch.student_tokens]
    if kind == "byte-level":  # 48 dimensions, not 64
        assert objective.projection is not None
        mine = objective.projection(mine)
    else:
        assert objective.projection is None
    expected = F.mse_loss(mine, teacher[batch.teacher_tokens])
    torch.testing.assert_close(terms.metrics["teacher"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mine", "theirs"), [(0, 5), (7, 0), (3, 64)])
def test_rows_beyond_the_vocabulary_do_not_count(
    mine: int,
    theirs: int,
    tiny_encoder: Encoder,
    teachers: Folders,
    sentences: list[tuple[int, str]],
    tmp_path: Path,
) -> None:
    """Models may have more embeddings than their tokenizer has pieces."""
    encoders, n_pieces = [], len(tiny_encoder.tokenizer)
    for source, n_more in ((tiny_encoder, mine), (Encoder.load(teachers["same"]), theirs)):
        encoder = copy.deepcopy(source)
        encoder.model.resize_token_embeddings(n_pieces + n_more, mean_resizing=False)
        encoders.append(encoder.eval())
    encoders[1].save(tmp_path)
    objective = begin(encoders[0], tmp_path, temperature=1.0)
    batch = collate(objective, encoders[0], sentences)
    found = compute(objective, encoders[0], batch).metrics["teacher"]
    student, teacher = say(encoders[0], batch.tokens)[0], say(encoders[1], batch.teacher_text)[0]
    log_q = student[batch.student_tokens, :n_pieces].log_softmax(-1)
    p = teacher[batch.teacher_tokens, :n_pieces].softmax(-1)
    expected = F.kl_div(log_q, p, reduction="batchmean")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_learns_nothing_from_itself(
    tiny_folder: Path, sentences: list[tuple[int, str]]
) -> None:
    """Equal weights give equal predictions: no divergence and no gradient."""
    encoder = Encoder.load(tiny_folder)
    objective = begin(encoder, tiny_folder)
    batch = collate(objective, encoder, sentences)
    terms = compute(objective, encoder, batch)
    assert terms.metrics["teacher"].item() == pytest.approx(0, abs=1e-5)
    assert terms.metrics["share"] > 0.2
    gradients = torch.autograd.grad(terms.metrics["teacher"], list(encoder.parameters()))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 1e-5


def test_the_teacher_is_not_trained(
    encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    for target in ("tokens", "states"):
        objective = begin(encoder, teachers["sentencepiece"], target=target)
        assert not list(objective.parameters())
        assert not objective.state_dict()
        teacher = objective.teacher.encoder
        before = {name: weight.clone() for name, weight in teacher.named_parameters()}
        objective.train()
        encoder.train()
        assert not any(module.training for module in teacher.modules())
        compute(objective, encoder, collate(objective, encoder, sentences)).loss.backward()
        for name, weight in teacher.named_parameters():
            assert not weight.requires_grad
            assert weight.grad is None
            assert weight.equal(before[name])
        assert not objective._teacher.encoder.training  # type: ignore[union-attr]


def test_only_the_projection_is_kept(encoder: Encoder, teachers: Folders) -> None:
    objective = begin(encoder, teachers["byte-level"], target="states")
    assert set(objective.state_dict()) == {"projection.weight", "projection.bias"}
    state = torch.get_rng_state()
    again = begin(encoder, teachers["byte-level"], target="states")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.projection is not None and objective.projection is not None
    assert again.projection.weight.equal(objective.projection.weight)
    tokens = begin(encoder, teachers["byte-level"])
    assert tokens.projection is None


@pytest.mark.parametrize("target", ["tokens", "states"])
@pytest.mark.parametrize("shape", [None, ROOMY])
def test_without_the_teachers_language_it_is_masked_lm(
    target: str,
    shape: BatchShape | None,
    encoder: Encoder,
    teachers: Folders,
    sentences: list[tuple[int, str]],
) -> None:
    objective = begin(encoder, teachers["byte-level"], target=target)
    batch = collate(objective, encoder, [(0, text) for _, text in sentences], shape)
    assert len(batch.teacher_text.ids) == 0
    terms = compute(objective, encoder, batch)
    plain = MaskedLM(MaskedLMSettings())
    expected = plain(encoder, collate(plain, encoder, sentences, shape)).loss
    assert terms.loss.equal(expected)
    terms.loss.backward()
    # DDP waits for every weight: each has a gradient even then.
    for name, weight in [*encoder.named_parameters(), *objective.named_parameters()]:
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all()


@pytest.mark.parametrize(("kind", "target"), WAYS)
def test_a_student_learns_the_predictions_of_its_teacher(
    kind: str,
    target: str,
    encoder: Encoder,
    teachers: Folders,
    sentences: list[tuple[int, str]],
) -> None:
    objective = begin(encoder, teachers[kind], target=target, probability=0.3)
    batch = objective.prepare(encoder, collate(objective, encoder, sentences))
    weights = [*encoder.parameters(), *objective.parameters()]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    metrics = []
    for _ in range(40):
        metrics.append(objective(encoder, batch).metrics["teacher"])
        optimizer.zero_grad()
        metrics[-1].backward()
        optimizer.step()
    assert metrics[-1] < 0.3 * metrics[0]


def test_half_precision_is_close(
    encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    objective = begin(encoder, teachers["sentencepiece"])
    batch = collate(objective, encoder, sentences)
    exact = compute(objective, encoder, batch)
    with torch.autocast("cpu", torch.bfloat16):
        near = compute(objective, encoder, batch)
    assert near.loss.dtype == torch.float32
    for name in ("mlm", "teacher"):
        torch.testing.assert_close(near.metrics[name], exact.metrics[name], rtol=0.05, atol=0.02)
    near.loss.backward()
    first: Any = encoder.model.get_input_embeddings()
    assert first.weight.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "target"), WAYS)
def test_batches_of_the_same_taught_size_share_a_graph(
    kind: str,
    target: str,
    compilable_encoder: Encoder,
    teachers: Folders,
    sentences: list[tuple[int, str]],
) -> None:
    torch._dynamo.reset()
    encoder = compilable_encoder
    objective = begin(encoder, teachers[kind], target=target)
    objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for text in (sentences, sentences[3:], sentences[:-4]):
            batch = objective.prepare(encoder, collate(objective, encoder, text, ROOMY))
            compiled = objective(encoder, batch).loss
            torch.testing.assert_close(compiled, objective.forward(encoder, batch).loss)
            compiled.backward()


# What is refused, and what is warned of


def test_a_language_without_text_is_an_error(tiny_encoder: Encoder, teachers: Folders) -> None:
    objective = make_objective(teachers["same"], languages=["sw", "en"])
    with pytest.raises(
        InputError, match=r"no text in the teacher's language sw \(the text is in de, en"
    ):
        objective.start(tiny_encoder, LANGUAGES)


def test_a_teacher_without_a_head_can_only_teach_states(
    tiny_encoder: Encoder, teachers: Folders, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    AutoModel.from_pretrained(teachers["wordpiece"]).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(teachers["wordpiece"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no language-modeling head.*\(set target: states"):
        begin(tiny_encoder, tmp_path)
    begin(tiny_encoder, tmp_path, target="states")


def test_a_missing_teacher_is_an_error(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        begin(tiny_encoder, tmp_path)


def test_a_teacher_without_shared_pieces_is_an_error_or_a_warning(
    tiny_encoder: Encoder, teachers: Folders, tmp_path: Path
) -> None:
    """Old Italic pieces, none of which is a piece of the student."""
    student = copy.deepcopy(tiny_encoder)
    for kind in ("wordpiece", "sentencepiece"):
        tokenizer = make_tokenizer(kind, ["𐌀𐌁𐌂 𐌃𐌄𐌅 𐌆𐌇𐌈", "𐌀𐌁 𐌂𐌃 𐌄𐌅"], 40)
        config = copy.deepcopy(Encoder.load(teachers[kind]).model.config)
        config.vocab_size = len(tokenizer)
        Encoder(build_model(config), tokenizer).save(tmp_path / kind)
    with pytest.raises(InputError, match=r"have no piece in common \(set target: states\)"):
        begin(student, tmp_path / "wordpiece")
    objective = begin(student, tmp_path / "sentencepiece")
    assert objective.reader.shared is not None
    assert len(objective.reader.shared[0]) == 1  # the space
    text = encode_sentences(student.tokenizer, ["Tom was there.", "Nobody said that."])
    sides = (Ragged.of(text), Ragged.of([[1], [1]]))
    problem = objective.find_problem(
        student, SpecialTokens.of(student.tokenizer), iter([sides] * 3)
    )
    n_tokens = 3 * sum(map(len, text))
    assert problem is not None
    assert problem.startswith(f"only 0% of {n_tokens} tokens are pieces of the teacher too")
    # Sentences that are too long for the teacher are reported too, as a share of all sentences.
    longer = (Ragged.of([[*text[0]] * 40]), Ragged.of([[1]]))
    problem = objective.find_problem(
        student, SpecialTokens.of(student.tokenizer), iter([sides, longer])
    )
    assert problem is not None
    assert problem.startswith("33% of the teacher's sentences are longer than its ")
    assert "; only 0% of " in problem
    states = begin(student, tmp_path / "sentencepiece", target="states")
    assert states.find_problem(student, SpecialTokens.of(student.tokenizer), iter([sides])) is None


def test_a_suitable_teacher_gives_no_warning(
    tiny_encoder: Encoder, teachers: Folders, sentences: list[tuple[int, str]]
) -> None:
    text = Ragged.of(encode_sentences(tiny_encoder.tokenizer, [text for _, text in sentences]))
    sides = (text, Ragged.of([[number] for number, _ in sentences]))
    special_tokens = SpecialTokens.of(tiny_encoder.tokenizer)
    for kind in KINDS:
        objective = begin(tiny_encoder, teachers[kind])
        assert objective.find_problem(tiny_encoder, special_tokens, iter([sides])) is None


def test_invalid_settings_are_errors() -> None:
    good = {"teacher": "x", "languages": ["en"]}
    DistillationSettings.model_validate(good)
    for wrong in (
        {"temperature": 0.0},
        {"languages": []},
        {"target": "logits"},
        {"teacher_weight": -1.0},
        {"probability": 1.0},
        {"layer": 2},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DistillationSettings.model_validate(good | wrong)
    for missing in good:
        with pytest.raises(ValueError, match=missing):
            DistillationSettings.model_validate({k: v for k, v in good.items() if k != missing})
