"""eflomal and fast_align behind one class: links equal to those of the libraries; saved models."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calque.errors import InputError, MissingExtra
from calque.word_alignment import numbered_text
from calque.word_alignment.counts import LinkLexicon
from calque.word_alignment.eflomal_engine import EflomalCounts
from calque.word_alignment.fast_align_engine import FORWARD
from calque.word_alignment.numbered_text import WordNumbering, number_pairs
from calque.word_alignment.packed_links import read_pharaoh
from calque.word_alignment.protocol import AlignReport, WordPair
from calque.word_alignment.statistical import (
    LIBRARIES,
    StatisticalAligner,
    StatisticalKind,
    check_statistical,
)

LinkLists = list[list[tuple[int, int]]]

needs_eflomal = pytest.mark.skipif(
    importlib.util.find_spec("eflomal") is None, reason="eflomal is not installed"
)
needs_fast_align = pytest.mark.skipif(
    importlib.util.find_spec("systran_align") is None, reason="systran-align is not installed"
)
both_kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param("eflomal", marks=needs_eflomal),
        pytest.param("fast-align", marks=needs_fast_align),
    ],
)

DICTIONARY = {"dog": "chien", "cat": "chat", "house": "maison", "book": "livre", "tree": "arbre"}
DICTIONARY |= {"red": "rouge", "old": "vieux", "small": "petit", "white": "blanc", "sad": "triste"}
DICTIONARY |= {"sees": "voit", "wants": "veut", "likes": "aime", "sells": "vend", "is": "est"}
DICTIONARY |= {"water": "eau", "bread": "pain", "night": "nuit", "moon": "lune", "king": "roi"}


def make_bitext(n_pairs: int, seed: int, n_words: int | None = None) -> tuple[Any, LinkLists]:
    """Translate random words one by one, and swap some neighbors: the links are known."""
    generator = random.Random(seed)
    pairs, links = [], []
    for _ in range(n_pairs):
        words = generator.choices(list(DICTIONARY.items()), k=n_words or generator.randint(3, 8))
        order = list(range(len(words)))
        for place in range(0, len(words) - 1, 2):
            if generator.random() < 0.4:
                order[place : place + 2] = order[place + 1], order[place]
        pairs.append(([word[0] for word in words], [words[place][1] for place in order]))
        links.append(sorted((i, j) for j, i in enumerate(order)))
    return pairs, links


def score(found: LinkLists, gold: LinkLists) -> float:
    """Return the F1 of links."""
    n_right = sum(len(set(one) & set(other)) for one, other in zip(found, gold, strict=True))
    return 2 * n_right / (sum(map(len, found)) + sum(map(len, gold)))


def links_of(aligner: StatisticalAligner, pairs: list[WordPair]) -> LinkLists:
    return aligner.align(pairs)


def training_links(aligner: StatisticalAligner, n_pairs: int = 64) -> LinkLists:
    starts = range(0, aligner.n_pairs, n_pairs)
    blocks = [aligner.training_block(start, start + n_pairs) for start in starts]
    return [links for block in blocks for links in block.links.to_lists()]


@pytest.fixture(scope="module")
def train() -> Callable[[StatisticalKind], StatisticalAligner]:
    """Train on the toy language once for all tests; every tenth pair has an empty side."""
    trained: dict[str, StatisticalAligner] = {}

    def train(kind: StatisticalKind) -> StatisticalAligner:
        if kind not in trained:
            trained[kind] = StatisticalAligner.train(iter(toy_pairs()), kind)
        return trained[kind]

    return train


def toy_pairs() -> list[WordPair]:
    pairs, _ = make_bitext(300, seed=0)
    for number in range(0, len(pairs), 10):
        pairs[number] = ([], pairs[number][1]) if number % 20 else (pairs[number][0], [])
    return list(pairs)


@pytest.fixture(scope="module")
def real_pairs() -> list[WordPair]:
    """The 200 sentence pairs of the demo, all languages together, split into words."""
    from importlib import resources

    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t")[1:] for line in table.splitlines()[1:]]
    cut = re.compile(r"\w+|[^\w\s]")
    return [(cut.findall(english), cut.findall(other)) for english, other in rows]


# Both libraries


@both_kinds
def test_training_links_are_right_and_in_order(
    train: Callable[[StatisticalKind], StatisticalAligner], kind: StatisticalKind
) -> None:
    aligner = train(kind)
    _, gold = make_bitext(300, seed=0)
    gold = [[] if number % 10 == 0 else links for number, links in enumerate(gold)]
    found = training_links(aligner)
    assert [number for number, links in enumerate(found) if not links] == list(range(0, 300, 10))
    assert score(found, gold) > 0.97
    report = aligner.training_block(0, 1000).report
    assert report == AlignReport(n_pairs=300, n_links=sum(map(len, found)), n_empty=30)
    assert training_links(aligner, 1000) == found
    assert aligner.training_block(5, 8).links.to_lists() == found[5:8]


@both_kinds
def test_new_text_is_aligned_by_what_was_learned(
    train: Callable[[StatisticalKind], StatisticalAligner], kind: StatisticalKind
) -> None:
    aligner = train(kind)
    pairs, gold = make_bitext(6, seed=7)
    assert score(links_of(aligner, pairs), gold) > 0.9
    shouted = [([word.upper() for word in src], tgt) for src, tgt in pairs]
    assert score(links_of(aligner, shouted), gold) > 0.9
    # A single sentence is not enough to learn from: eflomal links its words by chance.
    if kind == "eflomal":
        one_by_one = [links_of(aligner, [pair])[0] for pair in pairs]
        untrained = [training_links(StatisticalAligner.train([pair], kind))[0] for pair in pairs]
        assert score(one_by_one, gold) > 0.9 > 0.75 > score(untrained, gold)


@both_kinds
def test_empty_sides_keep_their_positions(
    train: Callable[[StatisticalKind], StatisticalAligner], kind: StatisticalKind
) -> None:
    aligner = train(kind)
    (pair,), (gold,) = make_bitext(1, seed=3, n_words=8)
    block = aligner.align_block([([], pair[1]), pair, ([], []), (pair[0], [])])
    found = block.links.to_lists()
    assert found[0] == found[2] == found[3] == []
    assert score([found[1]], [gold]) > 0.8
    assert block.report == AlignReport(n_pairs=4, n_links=len(found[1]), n_empty=3)
    assert aligner.align_block([([], [])]).report == AlignReport(n_pairs=1, n_empty=1)
    assert aligner.align_block([]).report == AlignReport()


@both_kinds
def test_long_sentences_are_aligned_in_parts(
    train: Callable[[StatisticalKind], StatisticalAligner], kind: StatisticalKind
) -> None:
    pairs, gold = make_bitext(1, seed=4, n_words=1100)
    block = train(kind).align_block(pairs)
    assert score(block.links.to_lists(), gold) > 0.7
    n_links = len(block.links.pairs)
    assert block.report == AlignReport(n_pairs=1, n_links=n_links, n_long=1, n_windows=2)


@both_kinds
def test_long_sentences_are_learned_in_parts(
    kind: StatisticalKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbered_text, "MAX_WORDS", 20)
    pairs, gold = make_bitext(100, seed=5)
    pairs[7:7], gold[7:7] = make_bitext(1, seed=6, n_words=45)
    aligner = StatisticalAligner.train(pairs, kind)
    block = aligner.training_block(7, 8)
    assert (block.report.n_long, block.report.n_windows) == (1, 4)
    assert score(block.links.to_lists(), gold[7:8]) > 0.7
    assert score(training_links(aligner), gold) > 0.9


@both_kinds
def test_any_string_is_a_word(kind: StatisticalKind, tmp_path: Path) -> None:
    words = ["|||", "<eps>", "<null>", "a b", "\n", "\t", "\u00a0", "\u2028", "", "\ud800", "-1"]
    pairs = [(words, words), *make_bitext(40, seed=6)[0]]
    aligner = StatisticalAligner.train(pairs * 3, kind, stem=0)
    block = aligner.align_block([(words, words)])
    assert block.links.src.max() < len(words) and block.links.tgt.max() < len(words)
    aligner.save(tmp_path / "model")
    loaded = StatisticalAligner.load(tmp_path / "model")
    assert loaded.lexicon.src.words == aligner.lexicon.src.words
    assert set(words) <= set(loaded.lexicon.src.words)


@both_kinds
@pytest.mark.parametrize("pairs", [[(["ja"], ["yes"])], [(["a", "b"], ["x", "y"])] * 50])
def test_little_and_repeated_text(kind: StatisticalKind, pairs: list[WordPair]) -> None:
    aligner = StatisticalAligner.train(pairs, kind)
    assert aligner.n_pairs == len(pairs)
    assert len(training_links(aligner)) == len(pairs)
    assert len(links_of(aligner, [(["a", "new"], ["one"])])) == 1


@both_kinds
def test_case_is_kept_on_demand(kind: StatisticalKind) -> None:
    pairs = [(["Sie", "sie", "SIE"], ["You", "she", "she"])] * 5
    aligner = StatisticalAligner.train(pairs, kind, lowercase=False)
    assert aligner.lexicon.src.words == ["Sie", "sie", "SIE"]
    assert StatisticalAligner.train(pairs, kind).lexicon.src.words == ["sie"]


@both_kinds
def test_forms_of_a_word_are_learned_together(kind: StatisticalKind, tmp_path: Path) -> None:
    """Every word of the toy language has 40 endings, so that most forms occur once or twice."""
    generator = random.Random(1)

    def inflect(word: str) -> str:
        return f"{word:_<5}{generator.choice('abcdefgh')}{generator.choice('vwxyz')}"

    def inflect_all(pairs: list[WordPair]) -> list[WordPair]:
        return [(list(map(inflect, src)), list(map(inflect, tgt))) for src, tgt in pairs]

    (seen, gold), (new, new_gold) = make_bitext(100, seed=3), make_bitext(20, seed=4)
    seen, new = inflect_all(seen), inflect_all(new)
    stems, forms = (StatisticalAligner.train(seen, kind, stem=stem) for stem in (5, 0))
    assert score(training_links(stems), gold) > 0.9 > 0.8 > score(training_links(forms), gold)
    assert all(len(word) == 5 for word in stems.lexicon.src.words)
    stems.save(tmp_path / "stems")
    assert score(StatisticalAligner.load(tmp_path / "stems").align(new), new_gold) > 0.9


@both_kinds
def test_saved_models_of_earlier_versions_have_whole_words(
    kind: StatisticalKind, tmp_path: Path
) -> None:
    pairs = [(["arbeite", "arbeitet"], ["work", "works"])] * 5
    StatisticalAligner.train(pairs, kind, stem=0).save(tmp_path / "model")
    manifest = tmp_path / "model" / "manifest.json"
    settings = json.loads(manifest.read_text())
    assert settings.pop("stem") == 0
    manifest.write_text(json.dumps(settings))
    found = StatisticalAligner.load(tmp_path / "model").lexicon.src.find([["arbeitet", "arbei"]])
    assert found.ids.tolist() == [1, -1]


@both_kinds
def test_stages_are_reported(kind: StatisticalKind) -> None:
    stages: list[str] = []
    StatisticalAligner.train(
        make_bitext(5, seed=0)[0], kind, progress=lambda stage, done, total: stages.append(stage)
    )
    assert stages[:2] == [f"{kind}: reading", f"{kind}: training"] and len(stages) == 3


@both_kinds
@pytest.mark.parametrize("pairs", [[], [([], ["x"]), (["y"], [])]])
def test_nothing_to_learn_from(kind: StatisticalKind, pairs: list[WordPair]) -> None:
    with pytest.raises(InputError, match=f"nothing to learn from in {len(pairs)} sentence pairs"):
        StatisticalAligner.train(pairs, kind)


@pytest.mark.parametrize(
    ("kind", "symmetrize", "problem"),
    [
        ("giza", "union", "aligner giza does not exist.*eflomal, fast-align"),
        ("eflomal", "both", "symmetrize both does not exist.*grow-diag-final-and"),
        ("fast-align", "union", "fast-align supports only grow-diag-final-and.*eflomal"),
    ],
)
def test_impossible_choices(kind: str, symmetrize: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        check_statistical(kind, symmetrize)
    check_statistical("eflomal", "union")


@pytest.mark.parametrize(
    ("kind", "module", "fix"),
    [
        ("eflomal", "eflomal", "calque[eflomal]"),
        ("fast-align", "systran_align", "calque[align]', which needs Python 3.11"),
    ],
)
def test_a_missing_library_names_its_extra(
    kind: StatisticalKind, module: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    read: list[int] = []
    pairs = (read.append(1) or (["a"], ["b"]) for _ in range(3))  # type: ignore[func-returns-value]
    with pytest.raises(MissingExtra, match=re.escape(fix)):
        StatisticalAligner.train(pairs, kind)
    assert not read  # the check comes before a long text is read


@both_kinds
@pytest.mark.parametrize("what", [KeyboardInterrupt, "a code"])
def test_no_temporary_files_remain(
    kind: StatisticalKind, what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def fail(*args: Any, **options: Any) -> Any:
        seen.extend(tmp_path.iterdir())
        if what is KeyboardInterrupt:
            raise KeyboardInterrupt
        if options.get("check"):
            raise subprocess.CalledProcessError(-9, "eflomal")
        return subprocess.CompletedProcess(args, -9, "", "line\nkilled\n")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", fail)
    error = KeyboardInterrupt if what is KeyboardInterrupt else InputError
    with pytest.raises(
        error, match=None if error is KeyboardInterrupt else "failed with exit code -9"
    ):
        StatisticalAligner.train(make_bitext(3, seed=0)[0], kind)
    assert seen and not list(tmp_path.iterdir())


# Links and counts compared with direct calls of the libraries


@needs_fast_align
def test_fast_align_gives_the_links_that_direct_calls_give(
    real_pairs: list[WordPair], tmp_path: Path
) -> None:
    import systran_align

    aligner = StatisticalAligner.train(real_pairs, "fast-align")
    sides = [[[word.lower()[:5] for word in pair[side]] for pair in real_pairs] for side in (0, 1)]
    lines = [f"{' '.join(src)} ||| {' '.join(tgt)}\n" for src, tgt in zip(*sides, strict=True)]
    (tmp_path / "text").write_text("".join(lines), "utf-8")
    paths = [str(tmp_path / name) for name in ("text", "forward", "backward")]
    systran_align.generate_alignment_probabilities(
        *paths, favor_diagonal=True, optimize_tension=True, variational_bayes=True
    )
    direct = systran_align.Aligner(*paths[1:])
    # Sums in another order may decide otherwise where two links are equally likely.
    expected = [found["alignments"] for found in direct.align_batch(*sides)]
    assert sum(map(len, expected)) > 1000
    assert score(training_links(aligner), expected) > 0.995
    new = [(src, [*tgt, "unseen"]) for src, tgt in real_pairs[:50]]
    sides = [sides[0][:50], [[*tgt, "unseen"] for tgt in sides[1][:50]]]
    expected = [found["alignments"] for found in direct.align_batch(*sides)]
    assert score(links_of(aligner, new), expected) > 0.99
    assert aligner.directions(new) is None and aligner.training_directions(0, 5) is None


@needs_eflomal
def test_eflomal_gets_the_input_that_its_own_tool_writes(
    real_pairs: list[WordPair], monkeypatch: pytest.MonkeyPatch
) -> None:
    import eflomal

    kept: dict[str, bytes] = {}
    run = eflomal.align

    def align(*args: Any, **options: Any) -> None:
        run(*args, **options)
        kept.update({path.name: path.read_bytes() for path in Path(args[0]).parent.iterdir()})

    monkeypatch.setattr(eflomal, "align", align)
    aligner = StatisticalAligner.train(real_pairs, "eflomal", symmetrize="union", stem=0)
    for side, name in enumerate(("src", "tgt")):
        with tempfile.TemporaryFile() as stream:
            lines = [" ".join(pair[side]) for pair in real_pairs]
            eflomal.to_eflomal_text_file(lines, stream)
            stream.seek(0)
            assert kept[name] == stream.read()
    directions = aligner.training_directions(0, 200)
    assert directions is not None
    parsed: dict[str, LinkLists] = {}
    for name, links in zip(("forward", "backward"), directions, strict=True):
        cells = [re.findall(r"(\d+)-(\d+)", line) for line in kept[name].decode().splitlines()]
        parsed[name] = [sorted((int(i), int(j)) for i, j in line) for line in cells]
        assert links.to_lists() == parsed[name]
    assert sum(map(len, parsed["forward"])) > 1000
    union = [sorted({*a, *b}) for a, b in zip(parsed["forward"], parsed["backward"], strict=True)]
    assert training_links(aligner) == union


@needs_eflomal
def test_eflomal_counts_are_those_of_its_own_tool(
    real_pairs: list[WordPair], tmp_path: Path
) -> None:
    """Except that the lexicon is of both directions, and words without links have fertility 0."""
    import eflomal

    lines = [[" ".join(pair[side]).lower() for pair in real_pairs] for side in (0, 1)]
    paths = tmp_path / "forward", tmp_path / "backward"
    eflomal.Aligner().align(*lines, *map(str, paths))
    text = [path.read_text() for path in paths]
    theirs = eflomal.calculate_priors(*lines, *(part.splitlines() for part in text))
    swapped = eflomal.calculate_priors(*lines, *(part.splitlines() for part in text[::-1]))

    src, tgt = WordNumbering(), WordNumbering()
    numbered = number_pairs(real_pairs, src, tgt)
    found = read_pharaoh(paths[0]), read_pharaoh(paths[1])
    counts = EflomalCounts.count(numbered, *found, (len(src), len(tgt)))
    lexicon = LinkLexicon.count(src, tgt, numbered, found)

    mean = {key: (theirs[0][key] + swapped[0][key]) / 2 for key in {*theirs[0], *swapped[0]}}
    mine = {
        (src.words[key // len(tgt)], tgt.words[key % len(tgt)]): count
        for key, count in zip(lexicon.keys.tolist(), lexicon.counts.tolist(), strict=True)
    }
    assert mine == mean
    for jumps, expected in ((counts.forward_jumps, theirs[1]), (counts.backward_jumps, theirs[2])):
        assert {int(k) - 1024: int(jumps[k]) for k in np.flatnonzero(jumps)} == dict(expected)
    tables = counts.forward_fertilities, counts.backward_fertilities
    for side, (table, words) in enumerate(zip(tables, (src, tgt), strict=True)):
        capped: Counter[tuple[str, int]] = Counter()
        for (word, n_links), count in theirs[3 + side].items():
            capped[word, min(n_links, 7)] += count
        cells = np.argwhere(table[:, 1:]).tolist()
        assert {(words.words[i], k + 1): table[i, k + 1] for i, k in cells} == capped
        assert table.sum() == sum(len(line.split()) for line in lines[side])


def test_eflomal_priors_of_a_small_text() -> None:
    """By hand: the counts for a text of two words, and of all other words together."""
    src, tgt = WordNumbering(["das", "haus", "buch"]), WordNumbering(["the", "house", "book"])
    keys = np.array([0, 1, 4, 8])  # das-the, das-house, haus-house, buch-book
    lexicon = LinkLexicon(src, tgt, keys, np.array([5, 1.5, 2, 3], dtype=np.float32))
    jumps = np.zeros(2048, dtype=np.int64)
    jumps[[1025, 1023]] = 7, 2
    fertilities = np.zeros((3, 8), dtype=np.int64)
    fertilities[0, :3] = 1, 4, 2
    counts = EflomalCounts(jumps, np.zeros_like(jumps), fertilities, np.zeros_like(fertilities))
    stream = io.StringIO()
    counts._write_priors(stream, lexicon, WordNumbering(["neu", "das"]), WordNumbering(["the"]))
    assert stream.getvalue().splitlines() == [
        "4 3 2 2 0 3 0",  # words, including the empty and the additional one; rows of each table
        "2 1 5",  # das-the
        "2 2 1.5",  # das with words that are not in this text: house
        "-1 2",
        "1 7",
        "2 0 1",
        "2 1 4",
        "2 2 2",
    ]


# Saved models


@both_kinds
def test_a_saved_model_is_the_same_model(
    train: Callable[[StatisticalKind], StatisticalAligner], kind: StatisticalKind, tmp_path: Path
) -> None:
    aligner = train(kind)
    aligner.save(tmp_path / "model")
    loaded = StatisticalAligner.load(tmp_path / "model")
    assert (loaded.kind, loaded.symmetrize, loaded.n_pairs) == (kind, aligner.symmetrize, 300)
    assert training_links(loaded) == training_links(aligner)
    pairs, gold = make_bitext(5, seed=9)
    assert score(links_of(loaded, pairs), gold) > 0.9
    if kind == "fast-align":
        assert links_of(loaded, pairs) == links_of(aligner, pairs)
    np.testing.assert_array_equal(loaded.lexicon.keys, aligner.lexicon.keys)
    np.testing.assert_array_equal(loaded.lexicon.counts, aligner.lexicon.counts)
    loaded.save(tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


@both_kinds
def test_the_manifest_lists_all_files(
    train: Callable[[StatisticalKind], StatisticalAligner], kind: StatisticalKind, tmp_path: Path
) -> None:
    train(kind).save(tmp_path / "model")
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text("utf-8"))
    assert manifest["kind"] == kind and manifest["lowercase"] is True
    assert manifest["library"].split()[0] == LIBRARIES[kind].package
    assert (manifest["pairs"], manifest["words"]) == (300, [len(DICTIONARY)] * 2)
    for name, expected in manifest["files"].items():
        data = (tmp_path / "model" / name).read_bytes()
        assert expected == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert {*manifest["files"], "manifest.json"} == {
        path.name for path in (tmp_path / "model").iterdir()
    }


@needs_fast_align
def test_a_model_in_use_may_be_replaced(
    train: Callable[[StatisticalKind], StatisticalAligner], tmp_path: Path
) -> None:
    train("fast-align").save(tmp_path / "model")
    loaded = StatisticalAligner.load(tmp_path / "model")
    expected = training_links(train("fast-align"))
    StatisticalAligner.train(make_bitext(5, seed=1)[0], "fast-align").save(tmp_path / "model")
    assert training_links(loaded) == expected
    assert StatisticalAligner.load(tmp_path / "model").n_pairs == 5
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_fast_align
def test_loading_needs_no_library(
    train: Callable[[StatisticalKind], StatisticalAligner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train("fast-align").save(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "systran_align", None)
    loaded = StatisticalAligner.load(tmp_path / "model")
    assert len(training_links(loaded)) == 300
    with pytest.raises(MissingExtra):
        loaded.align_block([(["dog"], ["chien"])])


@needs_fast_align
def test_a_truncated_table_is_an_error(
    train: Callable[[StatisticalKind], StatisticalAligner], tmp_path: Path
) -> None:
    """The library itself would read it and give random links."""
    train("fast-align").save(tmp_path / "model")
    table = tmp_path / "model" / FORWARD
    table.write_bytes(table.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"fast-align\.forward: the file is damaged: .* bytes"):
        StatisticalAligner.load(tmp_path / "model")
