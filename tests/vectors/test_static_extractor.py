"""X2Static and pooling against slow loops, torch's SparseAdam and transformers' own states."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.tokens.ragged import Ragged
from calque.vectors import x2static as static_learners
from calque.vectors.corpus import (
    CorpusFilter,
    CorpusReader,
    CorpusReport,
    CutReport,
    VocabularyLimits,
    WordCorpus,
    count_words,
    cut_sentences,
    number_corpus,
)
from calque.vectors.static import read_vectors
from calque.vectors.x2static import (
    ExtractionFolder,
    ExtractJob,
    PoolingSettings,
    WordTable,
    X2StaticLearner,
    X2StaticSettings,
    embed_occurrences,
    extract_vectors,
    find_occurrences,
    keep_probabilities,
    learn,
    loss_of,
    make_learner,
    negative_sampling,
    plan_block,
    signs_of,
)

Row = tuple[str, str, str]
CPU = torch.device("cpu")
SMALL = VocabularyLimits(min_count=3)


@pytest.fixture(scope="module")
def sentences(demo_rows: list[Row]) -> list[list[str]]:
    """English sentences of the demo, in words."""
    texts = list(dict.fromkeys(row[1] for row in demo_rows))[:60]
    return [text.lower().replace(".", " .").split() for text in texts]


@pytest.fixture(scope="module")
def corpus(
    tiny_encoder: Encoder, sentences: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> WordCorpus:
    folder = tmp_path_factory.mktemp("corpus")
    return number_corpus(tiny_encoder.tokenizer, sentences, folder, room=126, limits=SMALL)


def states_of(
    encoder: Encoder, words: list[str], layer: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """Run transformers' own model on one sentence; the tokens of each word, marks counted."""
    tokenizer, ids, spans = encoder.tokenizer, [encoder.tokenizer.cls_token_id], []
    for word in words:
        pieces = tokenizer(word, add_special_tokens=False)["input_ids"]
        spans.append(list(range(len(ids), len(ids) + len(pieces))))
        ids += pieces
    ids.append(tokenizer.sep_token_id)
    with torch.no_grad():
        output = encoder.model(torch.tensor([ids]), output_hidden_states=True)
    return output.hidden_states[layer][0], spans


# The loss.


def test_loss_and_gradient_by_hand() -> None:
    """Two targets with two negatives each, in a table of three words."""
    table = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    contexts = torch.tensor([[1.0, 1.0], [0.5, -1.0]])
    words = torch.tensor([[0, 1, 2], [1, 0, 2]])
    scores = (table[words] * contexts[:, None]).sum(-1)
    assert scores.tolist() == [[1.0, 2.0, 0.0], [-2.0, 0.5, -1.5]]
    exponents, gradient = negative_sampling(scores, signs_of(3, CPU))

    def log1pexp(x: float) -> float:
        return math.log(1 + math.exp(x))

    first = log1pexp(-1) + log1pexp(2) + log1pexp(0)
    second = log1pexp(2) + log1pexp(0.5) + log1pexp(-1.5)
    assert loss_of(exponents).item() == pytest.approx(first + second, rel=1e-6)
    # d/ds log(1 + e^−s) = −1/(1 + e^s); d/ds log(1 + e^s) = 1/(1 + e^−s).
    assert gradient[0].tolist() == pytest.approx([-0.2689414 / 2, 0.8807971 / 2, 0.25], rel=1e-5)
    assert gradient[1].tolist() == pytest.approx(
        [-0.8807971 / 2, 0.6224593 / 2, 0.1824255 / 2], rel=1e-5
    )


def test_clamped_scores_have_a_bounded_loss_and_no_gradient() -> None:
    scores = torch.tensor([[-50.0, 50.0, 20.0]])
    exponents, gradient = negative_sampling(scores, signs_of(3, CPU))
    assert loss_of(exponents).item() == pytest.approx(60, abs=1e-6)
    assert gradient.tolist() == [[0.0, 0.0, pytest.approx(1.0)]]


@settings(max_examples=20)
@given(
    st.lists(
        st.lists(
            st.floats(-25, 25).filter(lambda x: abs(abs(x) - 20) > 1e-3), min_size=3, max_size=3
        ),
        min_size=1,
        max_size=4,
    )
)
def test_gradient_is_that_of_the_loss(rows: list[list[float]]) -> None:
    scores = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    signs = signs_of(3, CPU).double()

    def mean_loss(scores: torch.Tensor) -> torch.Tensor:
        return loss_of(negative_sampling(scores, signs)[0]) / len(scores)

    (expected,) = torch.autograd.grad(mean_loss(scores), scores)
    torch.testing.assert_close(negative_sampling(scores, signs)[1], expected)
    assert torch.autograd.gradcheck(mean_loss, [scores])


# The table.


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(2, 12))
def test_steps_are_those_of_sparse_adam(seed: int, n_words: int) -> None:
    """Tables so small that words repeat in every step, as targets and as negatives."""
    table = WordTable.create(n_words, 6, seed, CPU)
    module = torch.nn.Embedding(n_words, 6, sparse=True)
    module.weight.data.copy_(table.vectors)
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(seed)
    for n_targets in ([5], [1, 4], [2, 2, 1]):
        contexts = 10 * torch.randn(5, 6, generator=random)
        words = torch.randint(0, n_words, (5, 4), generator=random)
        loss, expected = table.take_steps(contexts, words, n_targets, 1e-2), 0.0
        for context, step in zip(contexts.split(n_targets), words.split(n_targets), strict=True):
            scores = (module(step) * context[:, None]).sum(-1).clamp(-20, 20)
            # As in the release: the mean loss of the targets, and of each column of negatives.
            parts = [torch.log(1 + torch.exp(-scores[:, 0])).mean()]
            parts += [torch.log(1 + torch.exp(scores[:, k])).mean() for k in (1, 2, 3)]
            optimizer.zero_grad()
            torch.stack(parts).sum().backward()
            optimizer.step()
            expected += len(step) * sum(part.item() for part in parts)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(table.vectors, module.weight.detach(), atol=2e-6, rtol=0)


class Operators(TorchDispatchMode):
    """Counts what torch is asked to compute; views compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def test_steps_are_few_operators_that_wait_for_nothing(
    tiny_encoder: Encoder, corpus: WordCorpus
) -> None:
    """A GPU would be idle while steps are sent to it, or while one asks for a result."""

    def count(batch_sentences: int) -> Counter[str]:
        settings = X2StaticSettings(subsample=1, batch_sentences=batch_sentences, n_epochs=1)
        learner = make_learner(corpus, tiny_encoder, settings)
        found = find_occurrences(corpus, np.arange(len(corpus)), learner.choose(0))
        block = plan_block(tiny_encoder, corpus, found, learner.view)
        vectors = torch.randn(len(block.rows), tiny_encoder.hidden_size)
        with Operators() as operators:
            learner.absorb(0, block, vectors)
        return operators.counts

    one, three = count(len(corpus)), count(len(corpus) // 3)
    assert three.total() - one.total() <= 2 * 21
    waiting = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"}
    assert not waiting & set(three)
    assert "_to_copy" not in three  # the block brings all that is needed


def test_a_table_begins_near_zero() -> None:
    table = WordTable.create(500, 40, 1, CPU)
    assert table.vectors.abs().max() <= 1 / 40
    assert table.vectors.std().item() == pytest.approx(2 / 40 / math.sqrt(12), rel=0.02)
    assert table.vectors.equal(WordTable.create(500, 40, 1, CPU).vectors)
    assert not table.vectors.equal(WordTable.create(500, 40, 2, CPU).vectors)


# The vocabulary.


def test_words_are_counted(corpus: WordCorpus, sentences: list[list[str]]) -> None:
    counts = Counter(itertools.chain.from_iterable(sentences))
    frequent = {word: count for word, count in counts.items() if count >= 3}
    assert dict(zip(corpus.words, corpus.counts.tolist(), strict=True)) == frequent
    # Python's sort is stable and a Counter remembers what came first.
    assert list(corpus.words) == sorted(frequent, key=lambda word: -frequent[word])


def test_a_vocabulary_by_hand(tiny_encoder: Encoder, tmp_path: Path) -> None:
    text = [["b", "a", "b", "c"], ["a", "b", "d"], ["c"]]
    limits = VocabularyLimits(max_words=2, min_count=2)
    found = number_corpus(tiny_encoder.tokenizer, text, tmp_path, room=126, limits=limits)
    assert (found.words, found.counts.tolist()) == (("b", "a"), [3, 2])
    assert found.rows[found.sentences.gather(np.arange(3)).ids].tolist() == [
        0,
        1,
        0,
        -1,
        1,
        0,
        -1,
        -1,
    ]


def test_no_word_is_frequent_enough(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="no word occurs 10 times or more: the most frequent one 2"
    ):
        number_corpus(
            tiny_encoder.tokenizer, [["a", "a"]], tmp_path, room=9, limits=VocabularyLimits()
        )
    with pytest.raises(InputError, match="there is none"):
        count_words([], np.zeros(0, dtype=np.int64), VocabularyLimits())


def test_words_cut_off_are_no_targets(tiny_encoder: Encoder, tmp_path: Path) -> None:
    """Neither counted nor found, nor half of them part of a context."""
    n_pieces = {
        word: len(tiny_encoder.tokenizer(word, add_special_tokens=False)["input_ids"])
        for word in ("one", "extraordinarily", "last")
    }
    assert n_pieces["extraordinarily"] > 1
    sentence = ["one", "extraordinarily", "last"]
    room = n_pieces["one"] + n_pieces["extraordinarily"] - 1
    found = number_corpus(
        tiny_encoder.tokenizer,
        [sentence, ["last"]],
        tmp_path,
        room=room,
        limits=VocabularyLimits(min_count=1),
    )
    assert (found.words, found.counts.tolist()) == (("one", "last"), [1, 1])
    assert found.cut == CutReport(n_sentences=1, n_words=2)
    occurrences = find_occurrences(found, np.array([0, 1]), lambda rows, n_others: rows >= 0)
    assert occurrences.rows.tolist() == [0, 1]
    assert occurrences.n_pieces.tolist() == [n_pieces["one"], n_pieces["last"]]


def test_a_sentence_that_begins_with_a_huge_word_is_dropped() -> None:
    text = Ragged(np.array([1, 0, 0]), np.array([2, 1]))
    kept, cut = cut_sentences(text, np.array([1, 9]), room=5)
    assert (kept.ids.tolist(), kept.lengths.tolist()) == ([0], [1])
    assert cut == CutReport(n_empty=1)


def test_byte_level_forms_are_one_word(tmp_path: Path) -> None:
    """RoBERTa's tokenizer keeps the space before a word: it looks other at a sentence's start."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    backend.train_from_iterator(["the cat sat on the mat"] * 9, vocab_size=300, min_frequency=1)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend._tokenizer)
    text = [["the", "cat"], ["cat", "the"]]
    limits = VocabularyLimits(min_count=2)
    found = number_corpus(tokenizer, text, tmp_path, room=99, limits=limits)
    assert (found.words, found.counts.tolist()) == (("the", "cat"), [2, 2])
    pieces = [found.pieces.gather(found.sentences.gather(np.array([k])).ids).ids for k in (0, 1)]
    assert [tokenizer.decode(ids) for ids in pieces] == ["the cat", "cat the"]
    assert pieces[0].tolist() == tokenizer("the cat")["input_ids"]


# Contexts.


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("view", ["word", "others", "all"])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_views_of_an_occurrence(
    tiny_encoder: Encoder,
    corpus: WordCorpus,
    sentences: list[list[str]],
    layer: int,
    view: str,
    batch_tokens: int,
) -> None:
    index = np.array([4, 0, 9, 7])
    found = find_occurrences(corpus, index, lambda rows, n_others: (rows >= 0) & (n_others > 0))
    block = plan_block(tiny_encoder, corpus, found, view, batch_tokens)
    vectors = embed_occurrences(tiny_encoder, block, layer, view)
    expected, rows = [], []
    for number in index:
        states, spans = states_of(tiny_encoder, sentences[number], layer)
        for word, span in zip(sentences[number], spans, strict=True):
            if word not in corpus.words:
                continue
            rows.append(corpus.words.index(word))
            others = [k for k in range(1, len(states) - 1) if k not in span]
            chosen = {"word": span, "others": others, "all": range(len(states))}[view]
            expected.append(states[list(chosen)].mean(0))
    assert found.rows.tolist() == rows
    torch.testing.assert_close(vectors, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_blocks_hold_what_transformers_would_be_given(
    tiny_encoder: Encoder, corpus: WordCorpus, sentences: list[list[str]]
) -> None:
    """Ids and positions of every sentence, wherever it lies; those without targets are left out."""
    wanted = 2
    found = find_occurrences(corpus, np.arange(20), lambda rows, n_others: rows == wanted)
    block = plan_block(tiny_encoder, corpus, found, "word", batch_tokens=30)
    batches, laid_out = block.batches(), []
    for batch in batches:
        offsets = batch.tokens.offsets.tolist()
        assert batch.tokens.longest == max(np.diff(offsets))
        assert batch.tokens.n_real == offsets[-1]
        for first, end in itertools.pairwise(offsets):
            assert batch.tokens.positions[first:end].tolist() == list(range(end - first))
            laid_out.append(batch.tokens.ids[first:end].tolist())
    word = corpus.words[wanted]
    texts = [" ".join(words) for words in sentences[:20] if word in words]
    expected = [tiny_encoder.tokenizer(text)["input_ids"] for text in texts]
    assert len(texts) > len(batches) > 1
    assert sorted(laid_out) == sorted(expected)
    assert block.rows.tolist() == [wanted] * sum(text.split().count(word) for text in texts)


def test_a_block_without_occurrences(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    found = find_occurrences(corpus, np.arange(9), lambda rows, n_others: rows > len(corpus.words))
    block = plan_block(tiny_encoder, corpus, found, "others")
    assert block.batches() == []
    assert embed_occurrences(tiny_encoder, block, 2, "others").shape == (
        0,
        tiny_encoder.hidden_size,
    )


def test_a_lone_word_has_no_context(tiny_encoder: Encoder, tmp_path: Path) -> None:
    limits = VocabularyLimits(min_count=1)
    corpus = number_corpus(tiny_encoder.tokenizer, [["cat"]], tmp_path, room=9, limits=limits)
    for context, n_targets in (("others", 0), ("all", 1)):
        settings = X2StaticSettings(context=context, subsample=1, n_epochs=1)
        learner = make_learner(corpus, tiny_encoder, settings)
        assert isinstance(learner, X2StaticLearner)
        learn(tiny_encoder, corpus, learner, 2)
        assert learner.figures[0] == n_targets
        assert learner.vectors().isfinite().all()


def test_no_layer_beyond_the_asked_one_runs(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    ran: list[int] = []
    layers = tiny_encoder.family.layers_of(tiny_encoder.model)
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(layers, start=1)
    ]
    learn(tiny_encoder, corpus, make_learner(corpus, tiny_encoder, PoolingSettings()), 2)
    for hook in hooks:
        hook.remove()
    assert set(ran) == {1, 2}


# Learning.


def test_keep_probabilities_by_hand() -> None:
    # f = 0.8 and 0.2: √(0.1/0.8) + 0.1/0.8 and √(0.1/0.2) + 0.1/0.2, at most 1.
    assert keep_probabilities(np.array([80, 20]), 0.1) == pytest.approx([0.47855339, 1])


def test_negatives_follow_the_root_of_the_count(tiny_encoder: Encoder, tmp_path: Path) -> None:
    text = [["a"] * 64 + ["b"] * 16 + ["c"] * 4]
    corpus = number_corpus(
        tiny_encoder.tokenizer, text, tmp_path, room=126, limits=VocabularyLimits(min_count=1)
    )
    learner = X2StaticLearner(corpus, 4, X2StaticSettings(), CPU)
    drawn = learner._draw_negatives(0, 5000)
    assert drawn.shape == (5000, 10)
    shares = torch.bincount(drawn.flatten(), minlength=3) / drawn.numel()
    # √64 : √16 : √4 = 8 : 4 : 2; three standard deviations of a share are 0.007 at most.
    np.testing.assert_allclose(shares, [8 / 14, 4 / 14, 2 / 14], atol=0.007)
    assert not drawn.equal(learner._draw_negatives(1, 5000))


@pytest.mark.parametrize("context", ["others", "all"])
def test_one_epoch_is_that_of_a_slow_loop(
    tiny_encoder: Encoder,
    corpus: WordCorpus,
    sentences: list[list[str]],
    context: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same draws, but one sentence, one word, one negative at a time, and torch's optimizer."""
    monkeypatch.setattr(static_learners, "BLOCK_SENTENCES", 12)
    settings = X2StaticSettings(context, 3, 0.02, 0.01, batch_sentences=4, n_epochs=1, seed=5)
    learner = make_learner(corpus, tiny_encoder, settings)
    assert isinstance(learner, X2StaticLearner)
    module = torch.nn.Embedding(len(corpus.words), tiny_encoder.hidden_size, sparse=True)
    module.weight.data.copy_(learner.vectors())
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.01)
    order, n_targets = learner.order(0), 0
    for block in range(-(-len(order) // 12)):
        index = order[block * 12 : block * 12 + 12]
        found = find_occurrences(corpus, index, learner.choose(block))
        negatives = iter(learner._draw_negatives(block, len(found.rows)))
        targets = iter(zip(found.rows.tolist(), found.starts.tolist(), strict=True))
        for first in range(0, len(index), 4):
            losses = []
            for number, n_found in zip(
                index[first : first + 4], found.n_found[first : first + 4], strict=True
            ):
                states, spans = states_of(tiny_encoder, sentences[number], 2)
                for row, start in itertools.islice(targets, int(n_found)):
                    word = sentences[number][[span[0] - 1 for span in spans].index(start)]
                    assert word == corpus.words[row]
                    own = next(span for span in spans if span[0] - 1 == start)
                    tokens = range(len(states))
                    if context == "others":
                        tokens = [k for k in tokens[1:-1] if k not in own]
                    mean = states[list(tokens)].mean(0)
                    scores = [(1, mean @ module(torch.tensor(row)))]
                    scores += [(-1, mean @ module(negative)) for negative in next(negatives)]
                    losses.append(sum(torch.log(1 + torch.exp(-y * s)) for y, s in scores))
            if losses:
                optimizer.zero_grad()
                torch.stack(losses).mean().backward()
                optimizer.step()
                n_targets += len(losses)
    learn(tiny_encoder, corpus, learner, 2)
    assert learner.figures[0] == n_targets > 20
    torch.testing.assert_close(learner.vectors(), module.weight.detach(), atol=2e-5, rtol=0)


def test_frequent_words_are_seldom_targets(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    learner = X2StaticLearner(corpus, 4, X2StaticSettings(subsample=1e-3), CPU)
    index = np.arange(len(corpus))
    counts = np.zeros(len(corpus.words))
    for block in range(200):
        found = find_occurrences(corpus, index, learner.choose(block))
        counts += np.bincount(found.rows, minlength=len(counts))
    kept = keep_probabilities(corpus.counts, 1e-3)
    np.testing.assert_allclose(counts / 200, kept * corpus.counts, rtol=0.25)


@pytest.mark.parametrize("layer", [0, 3])
def test_pooling_is_that_of_a_loop(
    tiny_encoder: Encoder, corpus: WordCorpus, sentences: list[list[str]], layer: int
) -> None:
    learner = make_learner(corpus, tiny_encoder, PoolingSettings())
    learn(tiny_encoder, corpus, learner, layer)
    seen: dict[str, list[torch.Tensor]] = {word: [] for word in corpus.words}
    for words in sentences:
        states, spans = states_of(tiny_encoder, words, layer)
        for word, span in zip(words, spans, strict=True):
            if word in seen:
                seen[word].append(states[span].mean(0))
    expected = torch.stack([torch.stack(found).mean(0) for found in seen.values()])
    torch.testing.assert_close(learner.vectors(), expected, atol=1e-5, rtol=1e-4)


def test_the_seed_decides(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    def learn_with(seed: int) -> torch.Tensor:
        settings = X2StaticSettings(subsample=0.01, n_epochs=2, seed=seed)
        learner = make_learner(corpus, tiny_encoder, settings)
        learn(tiny_encoder, corpus, learner, 2)
        return learner.vectors()

    assert learn_with(1).equal(learn_with(1))
    assert not torch.allclose(learn_with(1), learn_with(2))


def test_words_are_told_from_others(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    """The loss begins at 11 log 2 and falls."""
    settings = X2StaticSettings(subsample=1, n_epochs=1, learning_rate=1e-6)
    learner = make_learner(corpus, tiny_encoder, settings)
    assert isinstance(learner, X2StaticLearner)
    learn(tiny_encoder, corpus, learner, 2)
    assert (learner.figures[1] / learner.figures[0]).item() == pytest.approx(
        11 * math.log(2), rel=0.02
    )
    settings = X2StaticSettings(subsample=1, n_epochs=30, learning_rate=1e-2, batch_sentences=8)
    learner = make_learner(corpus, tiny_encoder, settings)
    assert isinstance(learner, X2StaticLearner)
    learn(tiny_encoder, corpus, learner, 2)
    assert (learner.figures[1] / learner.figures[0]).item() < 5


@pytest.mark.parametrize(
    "settings",
    [
        {"n_epochs": 0},
        {"subsample": 0},
        {"n_negatives": 0},
        {"learning_rate": -1},
        {"context": "x"},
    ],
)
def test_settings_that_make_no_sense(
    tiny_encoder: Encoder, corpus: WordCorpus, settings: dict[str, object]
) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        make_learner(corpus, tiny_encoder, X2StaticSettings(**settings))


@pytest.mark.gpu
def test_a_gpu_learns_the_same(tiny_folder: Path, corpus: WordCorpus) -> None:
    """Negatives are drawn by the device's own generator: pooling draws none."""
    encoder = Encoder.load(tiny_folder, device="cuda")
    expected = make_learner(corpus, Encoder.load(tiny_folder), PoolingSettings())
    learn(Encoder.load(tiny_folder), corpus, expected, 2)
    learner = make_learner(corpus, encoder, PoolingSettings())
    learn(encoder, corpus, learner, 2)
    torch.testing.assert_close(learner.vectors().cpu(), expected.vectors(), atol=1e-4, rtol=1e-3)
    tables = [WordTable.create(20, 8, 1, torch.device(name)) for name in ("cpu", "cuda")]
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        contexts = torch.randn(30, 8, generator=random)
        words = torch.randint(0, 20, (30, 4), generator=random)
        for table in tables:
            device = table.vectors.device
            table.take_steps(contexts.to(device), words.to(device), [10, 20], 1e-2)
    torch.testing.assert_close(tables[1].vectors.cpu(), tables[0].vectors, atol=1e-5, rtol=0)


# Files.


@pytest.fixture
def text_file(tmp_path: Path, demo_rows: list[Row]) -> Path:
    path = tmp_path / "en.txt"
    path.write_text("".join(f"{row[1]} {row[1]}\n" for row in demo_rows[::2]), "utf-8")
    return path


def make_job(**changes: object) -> ExtractJob:
    settings = X2StaticSettings(subsample=0.01, batch_sentences=16, n_epochs=2)
    values = {"method": settings, "limits": SMALL, **changes}
    return ExtractJob(CorpusReader("en", CorpusFilter(min_tokens=3)), **values)


class Killed(BaseException):
    """Like SIGKILL, nothing can stop it."""


@pytest.mark.parametrize("method", [None, PoolingSettings()])
@pytest.mark.parametrize("n_blocks", [0, 1, 3])
def test_a_killed_run_goes_on_to_the_same_vectors(
    tiny_folder: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: object,
    n_blocks: int,
) -> None:
    monkeypatch.setattr(static_learners, "BLOCK_SENTENCES", 64)
    monkeypatch.setattr(static_learners.PoolingLearner, "block_sentences", 64)
    encoder = Encoder.load(tiny_folder)
    job = make_job() if method is None else make_job(method=method)
    whole, halved = (text_file.with_name(name) for name in ("whole.vec", "halved.vec"))
    paths = [str(text_file)]
    extract_vectors(encoder, paths, whole, job)
    left = iter(range(n_blocks))
    save = ExtractionFolder.save_if_due

    def save_or_die(self: ExtractionFolder, *args: object) -> None:
        if next(left, None) is None:
            raise Killed
        save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ExtractionFolder, "save_if_due", save_or_die)
        with pytest.raises(Killed):
            extract_vectors(encoder, paths, halved, job, seconds_between=0)
    folder = halved.with_name("halved.vec.partial")
    assert (folder / "state.safetensors").exists() == (n_blocks > 0)
    assert not halved.exists()
    with pytest.raises(InputError, match=r"an unfinished run is here .go on with --resume"):
        extract_vectors(encoder, paths, halved, job)
    other = make_job(method=job.method, limits=VocabularyLimits(min_count=4))
    with pytest.raises(InputError, match="this run began with min_count 3, not 4"):
        extract_vectors(encoder, paths, halved, other, resume=True)
    done: list[int] = []
    report = extract_vectors(
        encoder, paths, halved, job, resume=True, show_phase=lambda name, total: Tally(done, total)
    )
    assert report.is_resumed
    assert not folder.exists()
    assert halved.read_bytes() == whole.read_bytes()
    assert sum(done) == 0


class Tally:
    """Counts what is left of a phase."""

    def __init__(self, done: list[int], total: int | None) -> None:
        self.done = done
        self.done.append(total or 0)

    def __enter__(self) -> object:
        return lambda n_done: self.done.append(-n_done)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_kill_while_reading_leaves_nothing_to_go_on_with(
    tiny_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, output = Encoder.load(tiny_folder), text_file.with_name("en.vec")

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("calque.vectors.x2static.number_corpus", die)
        with pytest.raises(Killed):
            extract_vectors(encoder, [str(text_file)], output, make_job())
    assert sorted(path.name for path in text_file.parent.iterdir()) == ["en.txt"]
    # Had it been a real kill, its files would lie there: they are no hindrance.
    folder = output.with_name("en.vec.partial")
    folder.mkdir()
    (folder / "settings.json").write_text("{}")
    (folder / "sentences.ids.npy").write_bytes(b"")
    extract_vectors(encoder, [str(text_file)], output, make_job())
    assert not folder.exists()


def test_files_of_others_are_left_alone(tiny_folder: Path, text_file: Path) -> None:
    folder = text_file.with_name("en.vec.partial")
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(InputError, match="something else is where unfinished work would be kept"):
        extract_vectors(
            Encoder.load(tiny_folder), [str(text_file)], text_file.with_name("en.vec"), make_job()
        )
    assert (folder / "thesis.tex").exists()


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    with ExtractionFolder(tmp_path / "x.vec", {}) as folder:
        (folder.path / "state.safetensors").write_bytes(b"nothing")
        with pytest.raises(InputError, match=r"state.safetensors: damaged"):
            folder.read_state()
        (folder.path / "corpus.json").write_text("{}")
        with pytest.raises(InputError, match=r"corpus.json: damaged"):
            WordCorpus.open(folder.path)


def test_what_is_written(tiny_folder: Path, text_file: Path) -> None:
    encoder, output = Encoder.load(tiny_folder), text_file.with_name("en.vec")
    report = extract_vectors(encoder, [str(text_file)] * 2, output, make_job(layer=-1))
    vectors = read_vectors(output, cache=False)
    assert report.layer == encoder.n_layers
    assert report.n_words == len(vectors) > 20
    assert vectors.counts is not None
    assert (np.diff(vectors.counts) <= 0).all()
    words = list(make_job().reader.read([text_file]))
    counts = Counter(itertools.chain.from_iterable(words))
    assert vectors.counts.tolist() == [2 * counts[word] for word in vectors.words]
    assert report.n_running_words == vectors.counts.sum()
    assert report.corpus.n_sentences == 2 * len(words)


# The text.


def read(text: str, tmp_path: Path, **options: object) -> tuple[list[list[str]], CorpusReport]:
    (tmp_path / "text").write_text(text, "utf-8")
    report = CorpusReport()
    reader = CorpusReader(
        options.pop("language", "en"), CorpusFilter(**options.pop("filter", {})), **options
    )
    return list(reader.read([tmp_path / "text"], report)), report


LONG = "This is a sentence of several words."


def test_the_papers_filter(tmp_path: Path) -> None:
    """Seven tokens, full stop included; two sentences a paragraph."""
    text = f"A headline of more than enough words here\n{LONG} Too short. {LONG}\n\nOne. Two.\n"
    kept, report = read(text, tmp_path)
    assert kept == [["this", "is", "a", "sentence", "of", "several", "words", "."]] * 2
    assert report == CorpusReport(n_lines=4, n_sentences=2, n_lone=1, n_short=3)
    assert len(read("One two three four five six. One two three four five.\n", tmp_path)[0]) == 1


def test_lines_that_are_sentences(tmp_path: Path) -> None:
    text = f"{LONG} {LONG}\n{LONG}\n \n{LONG}\n\n\n{LONG}\n{LONG}\n{LONG}"
    kept, report = read(text, tmp_path, sentence_lines=True)
    assert [len(words) for words in kept] == [16, 8, 8, 8, 8]
    assert (report.n_lone, report.n_lines) == (1, 9)


def test_no_more_than_enough(tmp_path: Path) -> None:
    text = f"{LONG} {LONG}\n" * 3
    kept, report = read(text, tmp_path, filter={"max_sentences": 5})
    assert len(kept) == 5
    assert report.is_full
    kept, report = read(text, tmp_path, filter={"max_sentences": 6})
    assert (len(kept), report.is_full) == (6, False)


def test_case_and_tokens(tmp_path: Path) -> None:
    off = {"min_tokens": 1, "min_sentences": 1}
    assert read("IRMAK İyi", tmp_path, filter=off, language="tr")[0] == [["ırmak", "iyi"]]
    assert read("IRMAK Iyi", tmp_path, filter=off)[0] == [["irmak", "iyi"]]
    assert read("Well-known U.S.", tmp_path, filter=off, keep_case=True)[0] == [
        ["Well-known", "U.S."]
    ]
    assert read("a, b", tmp_path, filter=off, tokenized=True)[0] == [["a,", "b"]]


def test_languages_without_spaces(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Thai puts no spaces between words.*--tokenized"):
        read("ภาษาไทย", tmp_path, language="th")
    assert read(
        "ภาษา ไทย",
        tmp_path,
        language="th",
        tokenized=True,
        filter={"min_tokens": 1, "min_sentences": 1},
    )[0] == [["ภาษา", "ไทย"]]
