"""Streams of batches: which text is sampled, left out and kept for validation."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.cleaning import CleaningRules
from calque.objectives import Objective, ObjectiveSettings, build_objective
from calque.objectives.masked_lm import MaskedLM
from calque.tokens.prepare import PreparedCorpus, TextSource, prepare_corpora
from calque.tokens.ragged import BatchShape, assign_rows, batch_in_order
from calque.tokens.streams import BatchLimits, BatchStream, StreamPosition, load_batches
from calque.tokens.tokenizer import SpecialTokens
from calque.training.data import StreamPair, choose_shape, open_stream
from calque.training.recipe import Recipe
from calque.training.recipe_io import apply_setting, parse_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]
OpenStream = Callable[..., StreamPair]


@pytest.fixture(scope="module")
def corpora(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[PreparedCorpus]]:
    """Numbered sentences: en-de 100 pairs twice (weights 1 and 3), en-fr 40 pairs, 25 Finnish."""
    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("prepared")
    sizes = {"en-de": 100, "more.en-de": 100, "en-fr": 40}
    for name, size in sizes.items():
        lines = [
            f"one {name} {k} {'long ' * 60 if k % 10 == 9 else ''}\tzwei {name} {k}\n"
            for k in range(size)
        ]
        (files / f"{name}.tsv").write_text("".join(lines))
    (files / "fi.txt").write_text("".join(f"kolme {k}\n" for k in range(25)))
    sources = [
        TextSource((files / "en-de.tsv",), ("en", "de")),
        TextSource((files / "more.en-de.tsv",), ("en", "de"), weight=3.0),
        TextSource((files / "en-fr.tsv",), ("en", "fr")),
        TextSource((files / "fi.txt",), ("fi",)),
    ]
    rules = CleaningRules(max_ratio=None, check_scripts=False, max_nonletters=None)
    return folder, prepare_corpora(sources, tiny_tokenizer, folder, rules=rules)


@pytest.fixture
def open_any(
    corpora: tuple[Path, list[PreparedCorpus]],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> OpenStream:
    """Open the stream of an objective on numbered sentences."""

    def open_one(
        objective: str, *changes: str, max_length: int = 40, fixed_shape: bool = False
    ) -> StreamPair:
        recipe = tiny_recipe(
            f"objectives=[{{{objective}}}]",
            "data.validation_examples=3",
            f"data.max_length={max_length}",
            *changes,
        )
        return open_stream(
            build_objective(recipe.objectives[0]),
            corpora[1],
            corpora[0],
            recipe.data,
            SpecialTokens.of(tiny_tokenizer),
            seed=3,
            fixed_shape=fixed_shape,
        )

    return open_one


@pytest.fixture
def open_pair(open_any: OpenStream) -> OpenStream:
    """Open the stream of MLM (0) or TLM (1)."""
    kinds = ("kind: masked_lm, batch_tokens: 512", "kind: translation_lm, batch_tokens: 512")
    return lambda which, *changes: open_any(kinds[which], *changes)


def shares_of(pair: StreamPair) -> list[tuple[str, float]]:
    return [(corpus.name, corpus.share) for corpus in pair.training.corpora]


def test_shares_of_pairs_by_language_then_by_corpus(open_pair: OpenStream) -> None:
    # en-de counts 100 + 3·100, en-fr 40; with α = 0.5 they get 20 and √40.
    total = 20 + 40**0.5
    expected = [("en-de", 5 / total), ("en-de", 15 / total), ("en-fr", 40**0.5 / total)]
    found = shares_of(open_pair(1, "data.alpha=0.5"))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [share for _, share in found] == pytest.approx([share for _, share in expected])


def test_sentences_come_from_text_and_from_both_sides(
    open_pair: OpenStream,
) -> None:
    found = shares_of(open_pair(0, "data.alpha=1.0"))
    sizes = [("en", 100), ("de", 100), ("en", 300), ("de", 300), ("en", 40), ("fr", 40), ("fi", 25)]
    assert [name for name, _ in found] == [name for name, _ in sizes]
    total = sum(size for _, size in sizes)
    assert [share for _, share in found] == pytest.approx([size / total for _, size in sizes])


def test_stream_samples_by_its_shares(open_pair: OpenStream) -> None:
    pair = open_pair(1, "data.alpha=0.0", "data.leave_out_languages=[]")
    corpora, _ = pair.training.sampler.block(0)
    counts = np.bincount(corpora) / len(corpora)
    assert counts == pytest.approx([1 / 8, 3 / 8, 1 / 2], abs=1e-3)


def test_languages_are_left_out_with_their_pairs(open_pair: OpenStream) -> None:
    pair = open_pair(0, "data.leave_out_languages=[fr]")
    assert {name for name, _ in shares_of(pair)} == {"en", "de", "fi"}
    pair = open_pair(1, "data.leave_out_languages=[fr]")
    assert {name for name, _ in shares_of(pair)} == {"en-de"}
    with pytest.raises(InputError, match=r"translation_lm: there is no bitext .* at most 40"):
        open_pair(1, "data.leave_out_languages=[en]")


def test_long_examples_are_left_out_and_counted(open_pair: OpenStream) -> None:
    # One English sentence in ten is too long.
    pair = open_pair(0)
    assert pair.n_too_long == 10 + 10 + 4
    assert pair.describe() == f"{pair.n_examples:,} examples, 24 too long"
    assert open_pair(0, "data.max_length=256").n_too_long == 0
    assert ", " not in open_pair(0, "data.max_length=256").describe()
    with pytest.raises(InputError, match=r"masked_lm: there is no text .* at most 9 tokens"):
        open_pair(0, "data.max_length=9", "data.leave_out_languages=[en, fi]")
    with pytest.raises(InputError, match=r"at most 9 tokens .*raise masked_lm\.max_length"):
        open_pair(0, "objectives.0.max_length=9", "data.leave_out_languages=[en, fi]")


def test_no_objective_is_trained_on_validation_examples_of_another(open_pair: OpenStream) -> None:
    pairs = [open_pair(which, "data.validation_examples=4") for which in (0, 1)]
    trained: dict[str, set[int]] = {}
    validated: dict[str, set[int]] = {}
    for pair in pairs:
        assert pair.validation is not None
        for stream, seen in ((pair.training, trained), (pair.validation, validated)):
            for corpus in stream.corpora:
                for store in corpus.sides:
                    key = str(store.ids.filename).rpartition("/")[0]  # type: ignore[attr-defined]
                    seen.setdefault(key, set()).update(corpus.index.tolist())
    assert len(validated) == 4
    assert all(trained[key].isdisjoint(validated[key]) for key in validated)
    assert sorted(map(len, validated.values())) == [1, 2, 4, 4]


def test_validation_is_the_same_every_time(open_pair: OpenStream) -> None:
    def read(pair: StreamPair) -> list[list[int]]:
        assert pair.validation is not None
        iterator = pair.validation.iterate(StreamPosition(), lambda number: True)
        return [batch.tokens.ids.tolist() for _, batch in islice(iterator, 3) if batch is not None]

    assert read(open_pair(1)) == read(open_pair(1))
    assert open_pair(1, "data.validation_examples=0").validation is None


# Numbers of examples per batch, and pairs that are encoded separately


def read_batches(stream: BatchStream[Any], n: int) -> list[Any]:
    iterator = stream.iterate(StreamPosition(), lambda number: True)
    return [batch for _, batch in islice(iterator, n)]


@pytest.mark.parametrize("fixed_shape", [False, True])
@pytest.mark.parametrize("n_pairs", [1, 7, 40])
def test_batches_have_the_requested_number_of_examples(
    n_pairs: int, fixed_shape: bool, open_any: OpenStream
) -> None:
    kind = f"kind: sentence_contrastive, batch_tokens: 100000, batch_examples: {n_pairs}"
    pair = open_any(kind, max_length=24, fixed_shape=fixed_shape)
    batches = read_batches(pair.training, 40)
    assert {int(batch.weights.sum()) for batch in batches} == {n_pairs}
    if fixed_shape:  # which is not that of 100,000 tokens
        assert {len(batch.weights) for batch in batches} == {n_pairs}
        assert len({len(batch.tokens.ids) for batch in batches}) == 1
        assert len({len(batch.tokens.offsets) for batch in batches}) == 1
        assert len(batches[0].tokens.ids) <= 2 * n_pairs * 32


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_token_budget_limits_the_number_of_examples(
    fixed_shape: bool, open_any: OpenStream
) -> None:
    objective = "kind: sentence_contrastive, batch_tokens: 256, batch_examples: 40"
    batches = read_batches(open_any(objective, fixed_shape=fixed_shape).training, 40)
    sizes = [int(batch.weights.sum()) for batch in batches]
    assert 4 < min(sizes) <= max(sizes) < 40
    assert all(batch.tokens.n_real <= 256 for batch in batches)


def test_number_of_examples_applies_to_every_objective(open_any: OpenStream) -> None:
    for fixed_shape in (False, True):
        pair = open_any(
            "kind: masked_lm, batch_tokens: 100000, batch_examples: 12", fixed_shape=fixed_shape
        )
        batches = read_batches(pair.training, 20)
        # Only real sequences start with the token 0.
        assert {int((batch.tokens.ids == 0).sum()) for batch in batches} == {12}
    assert len({len(batch.tokens.ids) for batch in batches}) == 1


LENGTHS = {
    "alike": np.full((20_000, 2), 49),  # only one fits into a row of 96
    "short": np.random.default_rng(0).integers(3, 12, (20_000, 2)),
    "uneven": np.random.default_rng(1).choice(
        [4, 9, 20, 95], (20_000, 2), p=[0.4, 0.4, 0.15, 0.05]
    ),
    "single": np.random.default_rng(2).integers(3, 97, (20_000, 1)),
}


@pytest.mark.parametrize("n_examples", [1, 8, 128])
@pytest.mark.parametrize("name", LENGTHS)
def test_shape_fits_examples_of_any_lengths(name: str, n_examples: int) -> None:
    """Every batch is full, fits into the shape, and the shape is not far too large for it."""
    lengths = LENGTHS[name]
    settings = ObjectiveSettings(kind="any", batch_tokens=1 << 20, batch_examples=n_examples)
    shape, plan = choose_shape(Objective(settings), lengths, 4, 96)
    others = np.random.default_rng(7).permutation(lengths)[: 300 * n_examples]
    n_rows = []
    for batch in batch_in_order(others.sum(axis=1), plan.max_tokens, plan.max_sequences):
        assert len(batch) == n_examples or batch[-1] == len(others) - 1
        n_rows.append(assign_rows(others[batch].ravel(), shape.row).max() + 1)
    assert plan.max_sequences == n_examples
    assert shape.sequences == n_examples * lengths.shape[1]
    assert np.mean(np.array(n_rows) * shape.row > shape.tokens) < 0.01
    assert shape.tokens <= shape.row * (np.mean(n_rows) + 4 * np.std(n_rows) + 3)
    assert shape.tokens <= shape.row * shape.sequences


def test_shape_without_a_number_of_examples_depends_on_tokens_only() -> None:
    """Runs that started before `batch_examples` existed are resumed with the same batches."""
    lengths = LENGTHS["single"]
    settings = ObjectiveSettings(kind="any", batch_tokens=8192)
    shape, plan = choose_shape(Objective(settings), lengths, 3, 96)
    assert shape == BatchShape.fit(8192, lengths[:, 0], 96)
    assert plan == BatchLimits(shape.budget, shape.sequences, 3)


def test_maximum_length_applies_to_sides_that_are_encoded_separately(
    open_any: OpenStream,
) -> None:
    apart, joint = (
        open_any(f"kind: {k}", max_length=24) for k in ("sentence_contrastive", "translation_lm")
    )

    def sides_of(pair: StreamPair) -> list[Any]:
        return [
            np.stack([store.lengths(corpus.index) for store in corpus.sides])
            for corpus in pair.training.corpora
        ]

    assert all((sides + 2 <= 24).all() for sides in sides_of(apart))
    assert any((sides.sum(axis=0) + 4 > 24).any() for sides in sides_of(apart))
    assert all((sides.sum(axis=0) + 4 <= 24).all() for sides in sides_of(joint))
    assert joint.n_too_long > apart.n_too_long == 24  # one English sentence in ten
    # A pair with one side too long is left out, however short the other is.
    longest = max(int(sides.max()) for sides in sides_of(apart))
    assert open_any("kind: sentence_contrastive", max_length=longest + 2).n_too_long == 24
    assert open_any("kind: sentence_contrastive", max_length=longest + 1).n_too_long > 24


def find_lengths(pair: StreamPair) -> list[int]:
    batches = read_batches(pair.training, 30)
    return [int(n) for batch in batches for n in batch.tokens.offsets.diff()]


@pytest.mark.parametrize(("own", "n_too_long"), [(12, None), (256, 0)])
def test_objective_has_its_own_maximum_length(
    own: int, n_too_long: int | None, open_any: OpenStream
) -> None:
    """Its limit may be below or above that of the data; batches are as if it were that limit."""
    objective = "kind: masked_lm, batch_tokens: 512"
    found = open_any(f"{objective}, max_length: {own}", max_length=40)
    same, other = open_any(objective, max_length=own), open_any(objective, max_length=40)
    assert n_too_long in (None, found.n_too_long)
    assert found.n_too_long == same.n_too_long != other.n_too_long
    lengths = find_lengths(found)
    assert lengths == find_lengths(same)
    assert max(lengths) <= own
    assert (max(lengths) > 40) == (own > 40)
    fixed = open_any(f"{objective}, max_length: {own}", max_length=40, fixed_shape=True)
    assert {batch.tokens.longest for batch in read_batches(fixed.training, 5)} == {
        {12: 16, 256: 256}[own]
    }


def test_maximum_length_of_one_objective_does_not_change_another(
    corpora: tuple[Path, list[PreparedCorpus]],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    def open_both(*changes: str) -> list[StreamPair]:
        recipe = tiny_recipe("data.max_length=40", "data.validation_examples=3", *changes)
        return [
            open_stream(
                build_objective(settings),
                corpora[1],
                corpora[0],
                recipe.data,
                SpecialTokens.of(tiny_tokenizer),
                seed=number,
                fixed_shape=True,
            )
            for number, settings in enumerate(recipe.objectives)
        ]

    def read_ids(pair: StreamPair) -> list[list[int]]:
        streams = [stream for stream in (pair.training, pair.validation) if stream is not None]
        return [batch.tokens.ids.tolist() for each in streams for batch in read_batches(each, 10)]

    before, after = open_both(), open_both("objectives.0.max_length=12")
    assert [pair.n_too_long for pair in before] != [pair.n_too_long for pair in after]
    assert read_ids(before[0]) != read_ids(after[0])
    assert read_ids(before[1]) == read_ids(after[1])


# Sentences joined to blocks


def take_epoch(stream: BatchStream[Any]) -> dict[str, list[list[int]]]:
    """Return the examples of every corpus, in its order."""
    found: dict[str, list[list[int]]] = {}
    for corpus in stream.corpora:
        text = corpus.sides[0].gather(corpus.index)
        parts = np.split(text.ids, np.cumsum(text.lengths)[:-1])
        found.setdefault(corpus.name, []).extend(part.tolist() for part in parts)
    return found


@pytest.mark.parametrize(
    ("changes", "longest"),
    [([], 40), (["data.max_length=9"], 9), (["objectives.0.max_length=60"], 60)],
)
def test_joined_sentences_are_all_read_once(
    changes: list[str], longest: int, open_any: OpenStream
) -> None:
    """Training and validation have the tokens of single sentences, in blocks of full length."""
    kind, joins = "kind: masked_lm, batch_tokens: 512", "data.join_sentences=true"
    single = open_any(kind, "data.max_length=256")
    joined = open_any(kind, joins, *changes)
    for one, other in ((single.training, joined.training), (single.validation, joined.validation)):
        assert one is not None and other is not None
        sentences, blocks = take_epoch(one), take_epoch(other)
        assert sentences.keys() == blocks.keys()
        for language, found in blocks.items():
            tokens = [token for block in found for token in block]
            assert tokens == [token for sentence in sentences[language] for token in sentence]
            assert max(map(len, found)) <= longest - 2
    assert joined.n_too_long == 0
    lengths = find_lengths(joined)
    assert np.mean(lengths) > 0.7 * longest and max(lengths) == longest
    (share,) = {corpus.share for corpus in joined.training.corpora if corpus.name == "fi"}
    assert share < min(each for name, each in shares_of(single) if name == "fi")  # short sentences


def test_joining_does_not_change_pairs(open_pair: OpenStream) -> None:
    plain, joined = (open_pair(1, f"data.join_sentences={value}") for value in ("false", "true"))
    assert take_epoch(plain.training) == take_epoch(joined.training)
    assert shares_of(plain) == shares_of(joined)


def test_stream_of_blocks_resumes_at_any_batch(open_any: OpenStream) -> None:
    stream = open_any("kind: masked_lm, batch_tokens: 256", "data.join_sentences=true").training
    batches = list(islice(load_batches(stream), 12))
    for position, _ in batches[:10:3]:
        copy = pickle.loads(pickle.dumps(stream))
        resumed = islice(load_batches(copy, position=position), 12 - position.count)
        for (_, batch), (_, other) in zip(batches[position.count :], resumed, strict=True):
            assert batch.tokens.ids.tolist() == other.tokens.ids.tolist()
            assert batch.labels.tolist() == other.labels.tolist()


class _Named(MaskedLM):
    needs_languages = True


def test_languages_are_listed_and_numbered(
    corpora: tuple[Path, list[PreparedCorpus]],
    open_pair: OpenStream,
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_pair(0).languages == ("de", "en", "fi", "fr")
    assert open_pair(1).languages == ("en-de", "en-fr")
    assert open_pair(1).training.numbers is None
    recipe = tiny_recipe("data.validation_examples=1")
    objective = _Named(recipe.objectives[0])
    monkeypatch.setattr(objective, "build_collator", lambda marks, shape: lambda arrays, _: arrays)
    pair = open_stream(
        objective,
        corpora[1],
        corpora[0],
        recipe.data,
        SpecialTokens.of(tiny_tokenizer),
        seed=3,
        fixed_shape=False,
    )
    assert pair.validation is not None
    for stream in (pair.training, pair.validation):
        ids, numbers = read_batches(stream, 1)[0]
        assert numbers.lengths.tolist() == [1] * len(ids.lengths)
        first = np.split(ids.ids, np.cumsum(ids.lengths)[:-1])
        for tokens, number in zip(first, numbers.ids.tolist(), strict=True):
            word = tiny_tokenizer.decode(tokens).split()[0]
            language = pair.languages[number]
            assert word == {"en": "one", "fi": "kolme"}.get(language, "zwei")


# Bitext with links


@pytest.fixture(scope="module")
def linked_corpora(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[PreparedCorpus]]:
    """60 linked pairs of numbered words, every tenth too long, and 40 pairs without links."""
    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("prepared")
    text = [f"one {k} {'long ' * 60 if k % 10 == 9 else ''}||| zwei {k}\n" for k in range(60)]
    (files / "en-de.text").write_text("".join(text))
    (files / "en-de.links").write_text("0-0 1-1:0.2\n" * 60)
    (files / "en-fr.tsv").write_text("".join(f"one {k}\tun {k}\n" for k in range(40)))
    sources = [
        TextSource((files / "en-de.text",), ("en", "de"), links=files / "en-de.links"),
        TextSource((files / "en-fr.tsv",), ("en", "fr")),
    ]
    rules = CleaningRules(max_ratio=None, check_scripts=False, max_nonletters=None)
    return folder, prepare_corpora(sources, tiny_tokenizer, folder, rules=rules)


@pytest.fixture
def open_linked(
    linked_corpora: tuple[Path, list[PreparedCorpus]],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> OpenStream:
    def open_one(kind: str, *, n_corpora: int = 2, text: str = "any") -> StreamPair:
        recipe = tiny_recipe(
            "data.validation_examples=3",
            "data.max_length=40",
            f"objectives=[{{kind: {kind}, text: {text}}}]",
        )
        return open_stream(
            build_objective(recipe.objectives[0]),
            linked_corpora[1][-n_corpora:],
            linked_corpora[0],
            recipe.data,
            SpecialTokens.of(tiny_tokenizer),
            seed=3,
            fixed_shape=True,
        )

    return open_one


def test_objective_with_links_reads_linked_text_only(
    open_linked: OpenStream,
) -> None:
    pair = open_linked("linked_words")
    assert [name for name, _ in shares_of(pair)] == ["en-de"]
    assert (pair.n_examples, pair.n_too_long) == (52, 6)  # of 60; 2 more are for validation
    assert pair.validation is not None
    for stream in (pair.training, pair.validation):
        _, batch = next(stream.iterate(StreamPosition(), lambda number: True))
        assert batch is not None
        # Both words of every pair are linked, one of them by a fifth.
        weights = batch.joint.weights[batch.joint.weights > 0].tolist()
        assert weights.count(1.0) == len(weights) / 2 > 20
        assert sorted(set(weights)) == pytest.approx([0.2, 1.0])
    with pytest.raises(InputError, match="linked_words: there is no linked bitext"):
        open_linked("linked_words", n_corpora=1)


def test_other_objectives_read_linked_text_like_any_bitext(
    open_linked: OpenStream,
) -> None:
    assert [name for name, _ in shares_of(open_linked("translation_lm"))] == ["en-de", "en-fr"]
    names = [name for name, _ in shares_of(open_linked("masked_lm"))]
    assert names == ["en", "de", "en", "fr"]
    next(open_linked("translation_lm").training.iterate(StreamPosition(), lambda number: True))


def test_raw_text_is_text_without_links(open_linked: OpenStream) -> None:
    """Words of linked text are separated by spaces, unlike those of natural text."""
    pair = open_linked("sentence_contrastive", text="raw")
    assert [name for name, _ in shares_of(pair)] == ["en-fr"]
    assert pair.languages == ("en-fr",)
    names = [name for name, _ in shares_of(open_linked("masked_lm", text="raw"))]
    assert names == ["en", "fr"]
    assert open_linked("sentence_contrastive").languages == ("en-de", "en-fr")
    for kind in ("linked_words", "word_contrastive"):
        with pytest.raises(InputError, match=f"{kind}: there is no linked bitext"):
            open_linked(kind, text="raw")


# Words with vectors


def spell(language: str, number: int) -> str:
    return f"{language}{'aeiounrst'[number // 9]}{'aeiounrst'[number % 9]}"


@pytest.fixture
def vectors(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[..., tuple[StreamPair, StreamPair]]:
    """Streams of words and of sentences: 60 German and 40 Finnish words, and some Finnish text."""

    def open_both(*changes: str, width: int = 3, **options: Any) -> tuple[StreamPair, StreamPair]:
        sources = []
        for number, (language, size) in enumerate({"de": 60, "fi": 40}.items()):
            n_numbers = width if language == "fi" else 3
            # The vector contains the number in the word.
            rows = [
                f"{spell(language, k)} {k} {number} {' '.join('7' * (n_numbers - 2))}\n"
                for k in range(size)
            ]
            (tmp_path / f"{language}.vec").write_text("".join(rows))
            sources.append(TextSource((tmp_path / f"{language}.vec",), (language,), vectors=True))
        (tmp_path / "fi.txt").write_text("".join(f"kolme {k}\n" for k in range(25)))
        sources.append(TextSource((tmp_path / "fi.txt",), ("fi",)))
        rules = CleaningRules(max_nonletters=None)
        folder = tmp_path / "prepared"
        prepared = prepare_corpora(sources, tiny_tokenizer, folder, rules=rules)
        content = {
            "name": "words",
            "data": {"validation_examples": 2, "max_length": 24},
            "objectives": [
                {"kind": "static_target", "batch_tokens": 256, "unit": False},
                {"kind": "masked_lm", "batch_tokens": 256},
            ],
        }
        for change in changes:
            apply_setting(content, change)
        recipe = parse_recipe(content, "a recipe")
        settings = {"seed": 3, "fixed_shape": False} | options
        opened = [
            open_stream(
                build_objective(settings_),
                prepared,
                folder,
                recipe.data,
                SpecialTokens.of(tiny_tokenizer),
                **settings,
            )
            for settings_ in recipe.objectives
        ]
        return opened[0], opened[1]

    return open_both


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_words_come_with_their_own_vectors(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
    fixed_shape: bool,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    pair, _ = vectors(fixed_shape=fixed_shape)
    seen = set()
    for batch in read_batches(pair.training, 6):
        n_words = int(batch.weights.sum())
        assert n_words > 8
        for k in range(n_words):
            word = tiny_tokenizer.decode(batch.tokens.ids[batch.words == k]).replace(" ", "")
            number, language, _ = batch.vectors[k].tolist()
            assert word == spell(("de", "fi")[int(language)], int(number))
            seen.add(word)
    assert len(seen) > 30
    assert pair.languages == ("de", "fi")
    assert pair.validation is not None
    assert pair.n_examples == 60 - 2 + 40 - 2


def test_words_and_sentences_are_separate(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
) -> None:
    words, sentences = vectors("data.alpha=1.0")
    assert shares_of(words) == [("de", 0.6), ("fi", 0.4)]
    assert shares_of(sentences) == [("fi", 1.0)]
    with pytest.raises(InputError, match="masked_lm: there is no text with"):
        vectors("data.leave_out_languages=[fi]")
    with pytest.raises(InputError, match=r"static_target: there is no vectors .*of vectors"):
        vectors("data.leave_out_languages=[de, fi]")


def test_vectors_of_several_dimensions_are_an_error(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
) -> None:
    with pytest.raises(InputError, match="different dimensions, from 3 to 5"):
        vectors(width=5)


def test_loading_workers_open_vectors_by_path(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
) -> None:
    """What is sent to workers does not grow with the vectors."""
    pair, _ = vectors()
    stores = pickle.loads(pickle.dumps([corpus.extras for corpus in pair.training.corpora]))
    assert all(isinstance(store.rows, np.memmap) for (store,) in stores)
    alone = load_batches(pair.training)
    shared = load_batches(pair.training, n_workers=2)
    for _ in range(4):
        (place, batch), (other_place, other) = next(alone), next(shared)
        assert place == other_place
        assert batch.tokens.ids.equal(other.tokens.ids)
        assert batch.vectors.equal(other.vectors)
