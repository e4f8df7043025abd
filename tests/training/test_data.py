"""From files to streams: which text is found, shared out, left out and kept for validation."""

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
from calque.objectives.base import Marks
from calque.objectives.masked_lm import MaskedLM
from calque.tokens.prepare import PreparedCorpus, TextSource, prepare_corpora
from calque.tokens.ragged import BatchShape, assign_rows, fill_batches
from calque.tokens.streams import BatchPlan, BatchStream, Place, load_batches
from calque.training.data import StreamPair, _plan, find_sources, open_stream
from calque.training.recipe import DataSection, Recipe, SourceSection, apply_override, check_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]


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
def open_pair(
    corpora: tuple[Path, list[PreparedCorpus]],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Callable[..., StreamPair]:
    """Open the stream of the tiny recipe's first (MLM) or second (TLM) objective."""

    def open_one(which: int, *changes: str) -> StreamPair:
        recipe = tiny_recipe("data.validation_examples=3", "data.max_length=40", *changes)
        return open_stream(
            build_objective(recipe.objectives[which]),
            corpora[1],
            corpora[0],
            recipe.data,
            Marks.of(tiny_tokenizer),
            seed=3,
            fixed_shape=False,
        )

    return open_one


def shares_of(pair: StreamPair) -> list[tuple[str, float]]:
    return [(corpus.name, corpus.share) for corpus in pair.training.corpora]


def test_pairs_are_shared_by_language_then_by_corpus(open_pair: Callable[..., StreamPair]) -> None:
    # en-de counts 100 + 3·100, en-fr 40; with α = 0.5 they get 20 and √40.
    total = 20 + 40**0.5
    expected = [("en-de", 5 / total), ("en-de", 15 / total), ("en-fr", 40**0.5 / total)]
    found = shares_of(open_pair(1, "data.alpha=0.5"))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [share for _, share in found] == pytest.approx([share for _, share in expected])


def test_sentences_come_from_text_and_from_both_sides(
    open_pair: Callable[..., StreamPair],
) -> None:
    found = shares_of(open_pair(0, "data.alpha=1.0"))
    sizes = [("en", 100), ("de", 100), ("en", 300), ("de", 300), ("en", 40), ("fr", 40), ("fi", 25)]
    assert [name for name, _ in found] == [name for name, _ in sizes]
    total = sum(size for _, size in sizes)
    assert [share for _, share in found] == pytest.approx([size / total for _, size in sizes])


def test_a_stream_draws_by_its_shares(open_pair: Callable[..., StreamPair]) -> None:
    pair = open_pair(1, "data.alpha=0.0", "data.leave_out_languages=[]")
    corpora, _ = pair.training.sampler.block(0)
    counts = np.bincount(corpora) / len(corpora)
    assert counts == pytest.approx([1 / 8, 3 / 8, 1 / 2], abs=1e-3)


def test_languages_are_left_out_with_their_pairs(open_pair: Callable[..., StreamPair]) -> None:
    pair = open_pair(0, "data.leave_out_languages=[fr]")
    assert {name for name, _ in shares_of(pair)} == {"en", "de", "fi"}
    pair = open_pair(1, "data.leave_out_languages=[fr]")
    assert {name for name, _ in shares_of(pair)} == {"en-de"}
    with pytest.raises(InputError, match="translation_lm: no bitext of at most 40 tokens"):
        open_pair(1, "data.leave_out_languages=[en]")


def test_what_is_too_long_is_counted(open_pair: Callable[..., StreamPair]) -> None:
    # One English sentence in ten is too long.
    pair = open_pair(0)
    assert pair.n_too_long == 10 + 10 + 4
    assert pair.describe() == f"{pair.n_examples:,} examples, 24 too long"
    assert open_pair(0, "data.max_length=256").n_too_long == 0
    assert ", " not in open_pair(0, "data.max_length=256").describe()
    with pytest.raises(InputError, match="masked_lm: no text of at most 9 tokens an example"):
        open_pair(0, "data.max_length=9", "data.leave_out_languages=[en, fi]")


def test_no_objective_trains_on_what_any_validates(open_pair: Callable[..., StreamPair]) -> None:
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


def test_validation_is_the_same_every_time(open_pair: Callable[..., StreamPair]) -> None:
    def read(pair: StreamPair) -> list[list[int]]:
        assert pair.validation is not None
        walk = pair.validation.walk(Place(), lambda number: True)
        return [batch.tokens.ids.tolist() for _, batch in islice(walk, 3) if batch is not None]

    assert read(open_pair(1)) == read(open_pair(1))
    assert open_pair(1, "data.validation_examples=0").validation is None


def find(tmp_path: Path, *sections: dict[str, object], **data: object) -> list[TextSource]:
    sources = [SourceSection.model_validate(section) for section in sections]
    return find_sources(DataSection(sources=sources, **data), tmp_path / "recipes")  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files beside a recipe, and others in the working directory."""
    for name in ("recipes/en-de.tsv", "recipes/en-fr.tsv.gz", "work/en-fi.tsv", "work/de.txt.xz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("a.en", "a.de", "b.en", "b.de", "en-de.tsv"):
        (tmp_path / "work" / name).touch()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_paths_are_tried_beside_the_recipe_then_here(folder: Path) -> None:
    first, second = find(
        folder, {"path": "en-de.tsv", "kind": "bitext"}, {"path": "en-fi.tsv", "kind": "bitext"}
    )
    assert first.paths == (folder / "recipes/en-de.tsv",)
    assert (second.paths, second.languages) == ((Path("en-fi.tsv"),), ("en", "fi"))
    with pytest.raises(InputError, match=r"^sv\.txt: no such file"):
        find(folder, {"path": "sv.txt", "kind": "text"})


def test_a_star_names_many_files(folder: Path) -> None:
    found = find(folder, {"path": "en-*", "kind": "bitext", "weight": 2.0, "include_tags": ["a"]})
    assert [source.languages for source in found] == [("en", "de"), ("en", "fr")]
    assert {(source.weight, source.keep_tags) for source in found} == {(2.0, ("a",))}
    found = find(folder, {"path": "en-*", "kind": "bitext"}, leave_out_languages=["fr"])
    assert [source.languages for source in found] == [("en", "de")]
    with pytest.raises(InputError, match="the recipe names no text"):
        find(folder, {"path": "en-*", "kind": "bitext"}, leave_out_languages=["en"])
    with pytest.raises(InputError, match="the recipe names no text"):
        find(folder)


def test_two_sides_and_two_bitexts_are_told_apart(folder: Path) -> None:
    (moses,) = find(folder, {"path": ["a.en", "a.de"], "kind": "bitext"})
    assert (moses.paths, moses.languages) == ((Path("a.en"), Path("a.de")), ("en", "de"))
    many = find(folder, {"path": ["?.en", "?.de"], "kind": "bitext"})
    assert [source.paths for source in many] == [
        (Path("a.en"), Path("a.de")),
        (Path("b.en"), Path("b.de")),
    ]
    two = find(folder, {"path": ["en-de.tsv", "en-fi.tsv"], "kind": "bitext"})
    assert [source.languages for source in two] == [("en", "de"), ("en", "fi")]
    with pytest.raises(InputError, match="2 files on one side, 1 on the other"):
        find(folder, {"path": ["?.en", "a.de"], "kind": "bitext"})


def test_languages_come_from_the_name_or_the_recipe(folder: Path) -> None:
    (text,) = find(folder, {"path": "de.txt.xz", "kind": "text"})
    assert text.languages == ("de",)
    (named,) = find(folder, {"path": "a.en", "kind": "bitext", "languages": "sw-yo"})
    assert named.languages == ("sw", "yo")
    with pytest.raises(InputError, match=r"a\.en: cannot tell the languages.*languages: en-de"):
        find(folder, {"path": "a.en", "kind": "bitext"})


# Batches of so many examples, and pairs that are read apart


@pytest.fixture
def open_apart(
    corpora: tuple[Path, list[PreparedCorpus]],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> Callable[..., StreamPair]:
    """Open the stream of any objective."""

    def open_one(objective: str, max_length: int = 24, *, fixed_shape: bool = False) -> StreamPair:
        recipe = tiny_recipe(f"objectives=[{{{objective}}}]", f"data.max_length={max_length}")
        return open_stream(
            build_objective(recipe.objectives[0]),
            corpora[1],
            corpora[0],
            recipe.data,
            Marks.of(tiny_tokenizer),
            seed=3,
            fixed_shape=fixed_shape,
        )

    return open_one


def read_batches(stream: BatchStream[Any], n: int) -> list[Any]:
    walk = stream.walk(Place(), lambda number: True)
    return [batch for _, batch in islice(walk, n)]


@pytest.mark.parametrize("fixed_shape", [False, True])
@pytest.mark.parametrize("n_pairs", [1, 7, 40])
def test_batches_have_as_many_examples_as_asked_for(
    n_pairs: int, fixed_shape: bool, open_apart: Callable[..., StreamPair]
) -> None:
    kind = f"kind: sentence_contrastive, batch_tokens: 100000, batch_examples: {n_pairs}"
    pair = open_apart(kind, fixed_shape=fixed_shape)
    batches = read_batches(pair.training, 40)
    assert {int(batch.weights.sum()) for batch in batches} == {n_pairs}
    if fixed_shape:  # which is not that of 100,000 tokens
        assert {len(batch.weights) for batch in batches} == {n_pairs}
        assert len({len(batch.tokens.ids) for batch in batches}) == 1
        assert len({len(batch.tokens.offsets) for batch in batches}) == 1
        assert len(batches[0].tokens.ids) <= 2 * n_pairs * 32


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_tokens_may_forbid_so_many_examples(
    fixed_shape: bool, open_apart: Callable[..., StreamPair]
) -> None:
    objective = "kind: sentence_contrastive, batch_tokens: 256, batch_examples: 40"
    batches = read_batches(open_apart(objective, fixed_shape=fixed_shape).training, 40)
    sizes = [int(batch.weights.sum()) for batch in batches]
    assert 4 < min(sizes) <= max(sizes) < 40
    assert all(batch.tokens.n_real <= 256 for batch in batches)


def test_any_objective_may_count_its_examples(open_apart: Callable[..., StreamPair]) -> None:
    for fixed_shape in (False, True):
        pair = open_apart(
            "kind: masked_lm, batch_tokens: 100000, batch_examples: 12", fixed_shape=fixed_shape
        )
        batches = read_batches(pair.training, 20)
        # Only real sequences begin with the first mark.
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
def test_rows_do_for_the_examples_whatever_their_lengths(name: str, n_examples: int) -> None:
    """Every batch is full, fits into the shape, and the shape is not far too large for it."""
    lengths = LENGTHS[name]
    settings = ObjectiveSettings(kind="any", batch_tokens=1 << 20, batch_examples=n_examples)
    shape, plan = _plan(Objective(settings), lengths, 4, 96)
    others = np.random.default_rng(7).permutation(lengths)[: 300 * n_examples]
    n_rows = []
    for batch in fill_batches(others.sum(axis=1), plan.max_tokens, plan.max_sequences):
        assert len(batch) == n_examples or batch[-1] == len(others) - 1
        n_rows.append(assign_rows(others[batch].ravel(), shape.row).max() + 1)
    assert plan.max_sequences == n_examples
    assert shape.sequences == n_examples * lengths.shape[1]
    assert np.mean(np.array(n_rows) * shape.row > shape.tokens) < 0.01
    assert shape.tokens <= shape.row * (np.mean(n_rows) + 4 * np.std(n_rows) + 3)
    assert shape.tokens <= shape.row * shape.sequences


def test_without_so_many_examples_shapes_are_as_ever() -> None:
    """A run that began before `batch_examples` was known goes on with the same batches."""
    lengths = LENGTHS["single"]
    settings = ObjectiveSettings(kind="any", batch_tokens=8192)
    shape, plan = _plan(Objective(settings), lengths, 3, 96)
    assert shape == BatchShape.fit(8192, lengths[:, 0], 96)
    assert plan == BatchPlan(shape.budget, shape.sequences, 3)


def test_sides_that_are_read_apart_may_each_be_as_long_as_an_example(
    open_apart: Callable[..., StreamPair],
) -> None:
    apart, joint = (open_apart(f"kind: {k}") for k in ("sentence_contrastive", "translation_lm"))

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
    assert open_apart("kind: sentence_contrastive", longest + 2).n_too_long == 24
    assert open_apart("kind: sentence_contrastive", longest + 1).n_too_long > 24


class _Named(MaskedLM):
    needs_languages = True


def test_languages_are_listed_and_numbered(
    corpora: tuple[Path, list[PreparedCorpus]],
    open_pair: Callable[..., StreamPair],
    tiny_recipe: MakeRecipe,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_pair(0).languages == ("de", "en", "fi", "fr")
    assert open_pair(1).languages == ("en-de", "en-fr")
    assert open_pair(1).training.numbers is None
    recipe = tiny_recipe("data.validation_examples=1")
    objective = _Named(recipe.objectives[0])
    monkeypatch.setattr(objective, "make_collate", lambda marks, shape: lambda arrays, _: arrays)
    pair = open_stream(
        objective,
        corpora[1],
        corpora[0],
        recipe.data,
        Marks.of(tiny_tokenizer),
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
) -> Callable[..., StreamPair]:
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
            Marks.of(tiny_tokenizer),
            seed=3,
            fixed_shape=True,
        )

    return open_one


def test_an_objective_that_needs_links_reads_linked_text_alone(
    open_linked: Callable[..., StreamPair],
) -> None:
    pair = open_linked("linked_words")
    assert [name for name, _ in shares_of(pair)] == ["en-de"]
    assert (pair.n_examples, pair.n_too_long) == (52, 6)  # of 60; 2 more are for validation
    assert pair.validation is not None
    for stream in (pair.training, pair.validation):
        _, batch = next(stream.walk(Place(), lambda number: True))
        assert batch is not None
        # Both words of every pair are linked, one of them by a fifth.
        weights = batch.joint.weights[batch.joint.weights > 0].tolist()
        assert weights.count(1.0) == len(weights) / 2 > 20
        assert sorted(set(weights)) == pytest.approx([0.2, 1.0])
    with pytest.raises(InputError, match="linked_words: no linked bitext of at most 40 tokens"):
        open_linked("linked_words", n_corpora=1)


def test_other_objectives_read_linked_text_as_any_bitext(
    open_linked: Callable[..., StreamPair],
) -> None:
    assert [name for name, _ in shares_of(open_linked("translation_lm"))] == ["en-de", "en-fr"]
    names = [name for name, _ in shares_of(open_linked("masked_lm"))]
    assert names == ["en", "de", "en", "fr"]
    next(open_linked("translation_lm").training.walk(Place(), lambda number: True))


def test_raw_text_is_text_without_links(open_linked: Callable[..., StreamPair]) -> None:
    """Words of linked text are set apart by spaces, which is not how sentences are written."""
    pair = open_linked("sentence_contrastive", text="raw")
    assert [name for name, _ in shares_of(pair)] == ["en-fr"]
    assert pair.languages == ("en-fr",)
    names = [name for name, _ in shares_of(open_linked("masked_lm", text="raw"))]
    assert names == ["en", "fr"]
    assert open_linked("sentence_contrastive").languages == ("en-de", "en-fr")
    for kind in ("linked_words", "word_contrastive"):
        with pytest.raises(InputError, match=f"{kind}: no linked bitext"):
            open_linked(kind, text="raw")


def test_links_are_found_with_their_bitext(folder: Path) -> None:
    for name in ("en-de.links", "en-fr.links"):
        (folder / "recipes" / name).touch()
    found = find(
        folder, {"path": ["en-de.tsv", "en-fr.tsv.gz"], "kind": "bitext", "links": "*.links"}
    )
    assert [source.links for source in found] == [
        folder / "recipes/en-de.links",
        folder / "recipes/en-fr.links",
    ]
    (moses,) = find(folder, {"path": ["a.en", "a.de"], "kind": "bitext", "links": ["en-de.links"]})
    assert moses.links == folder / "recipes/en-de.links"
    with pytest.raises(InputError, match=r"\*\.links: 2 files of links for 1 bitexts"):
        find(folder, {"path": "en-de.tsv", "kind": "bitext", "links": "*.links"})
    with pytest.raises(InputError, match=r"no\.links: no such file"):
        find(folder, {"path": "en-de.tsv", "kind": "bitext", "links": "no.links"})


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
            # What the vector says is in the word too.
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
            apply_override(content, change)
        recipe = check_recipe(content, "a recipe")
        settings = {"seed": 3, "fixed_shape": False} | options
        opened = [
            open_stream(
                build_objective(settings_),
                prepared,
                folder,
                recipe.data,
                Marks.of(tiny_tokenizer),
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


def test_words_and_sentences_keep_apart(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
) -> None:
    words, sentences = vectors("data.alpha=1.0")
    assert shares_of(words) == [("de", 0.6), ("fi", 0.4)]
    assert shares_of(sentences) == [("fi", 1.0)]
    with pytest.raises(InputError, match="masked_lm: no text of at most 24 tokens"):
        vectors("data.leave_out_languages=[fi]")
    with pytest.raises(InputError, match=r"static_target: no vectors of at most 24 .*of vectors"):
        vectors("data.leave_out_languages=[de, fi]")


def test_vectors_of_several_widths_are_refused(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
) -> None:
    with pytest.raises(InputError, match="vectors of 3 and of 5 dimensions"):
        vectors(width=5)


def test_vectors_travel_to_loading_workers(
    vectors: Callable[..., tuple[StreamPair, StreamPair]],
) -> None:
    """As paths: what is sent does not grow with the vectors."""
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


def test_vectors_are_found_as_text_is(folder: Path) -> None:
    for name in ("recipes/de.vec", "recipes/fi.vec.gz"):
        (folder / name).touch()
    found = find(folder, {"path": "*.vec*", "kind": "vectors", "max_words": 10, "weight": 2.0})
    assert [source.languages for source in found] == [("de",), ("fi",)]
    assert {(source.vectors, source.max_words, source.weight) for source in found} == {
        (True, 10, 2.0)
    }
    (text,) = find(folder, {"path": "de.txt.xz", "kind": "text"})
    assert (text.vectors, text.max_words) == (False, None)
