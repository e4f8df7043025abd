"""Maps of several languages into one space: choices, precision, files and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from calque.algorithms.nearest import nearest_neighbors, normalize_rows
from calque.algorithms.procrustes import IndexPairs, normalize_space, solve_rotation
from calque.algorithms.self_learning import LearningRound, SelfLearningSettings
from calque.errors import InputError
from calque.vectors import mapping
from calque.vectors.mapping import (
    MappedSpaces,
    SeedDictionary,
    check_folder,
    load_dictionary,
    map_spaces,
    name_languages,
    read_maps,
    write_mapped,
)
from calque.vectors.method_selection import (
    METHODS,
    TO_PIVOT,
    UNALIGNED,
    FittedTrial,
    MappingMethod,
    MapSettings,
    Trial,
    choose_trial,
    compute_precision,
    find_identical_words,
)
from calque.vectors.static import WordVectors

N_WORDS, HIDDEN = 400, 20
FEW = SelfLearningSettings(patience=4, n_neighbors=5)
LANGUAGES = ("en", "de", "fr", "sw")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rotation(seed: int) -> Tensor:
    q, _ = torch.linalg.qr(draw(HIDDEN, HIDDEN, seed=seed))
    return q


def make_spaces(languages: Iterable[str] = LANGUAGES, noise: float = 0.2) -> dict[str, WordVectors]:
    """Word i of all languages means the same; some are identical. English is not rotated."""
    strengths = torch.arange(1, HIDDEN + 1) ** -0.5
    topics = torch.multinomial(torch.arange(1, 31) ** -0.7, N_WORDS, True, generator=seeded())
    common = (draw(30, HIDDEN, seed=1)[topics] + 0.7 * draw(N_WORDS, HIDDEN, seed=2)) * strengths
    spaces = {}
    for number, language in enumerate(languages):
        turned = common @ rotation(number) if language != "en" else common
        own = turned + noise * draw(N_WORDS, HIDDEN, seed=50 + number) * strengths.mean()
        words = [f"{i}" if i % 10 == 0 else f"{language}{i}" for i in range(N_WORDS)]
        spaces[language] = WordVectors(words, own.numpy().astype(np.float32))
    return spaces


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def make_dictionary(
    spaces: Mapping[str, WordVectors], language: str, rows: Iterable[int]
) -> SeedDictionary:
    en, other = spaces["en"].words, spaces[language].words
    return SeedDictionary([(en[row], other[row]) for row in rows], f"en-{language}.txt")


def train_and_dev(
    spaces: Mapping[str, WordVectors], n_train: int = 150
) -> dict[str, dict[str, SeedDictionary]]:
    others = [language for language in spaces if language != "en"]
    return {
        "train": {each: make_dictionary(spaces, each, range(n_train)) for each in others},
        "dev": {each: make_dictionary(spaces, each, range(200, 300)) for each in others},
    }


def precision(src: WordVectors, tgt: WordVectors) -> float:
    rows = [normalize_rows(torch.from_numpy(each.matrix)) for each in (src, tgt)]
    found = nearest_neighbors(rows[0], rows[1], 1)[1][:, 0]
    return float((found == torch.arange(N_WORDS)).float().mean())


def apply_all(mapped: MappedSpaces, spaces: Mapping[str, WordVectors]) -> dict[str, WordVectors]:
    return {language: mapped.apply(language, vectors) for language, vectors in spaces.items()}


def report_of(mapped: MappedSpaces, language: str) -> object:
    return next(report for report in mapped.reports if report.language == language)


# All methods.


@pytest.mark.parametrize(
    ("method", "space"),
    [
        *((method, "pivot") for method in METHODS),
        *((method, "joint") for method in METHODS if method not in TO_PIVOT),
    ],
)
def test_every_method_recovers_rotated_languages(method: Method, space: str) -> None:
    spaces = make_spaces(("en", "de", "fr"))
    n_train = 25 if method == "semi-supervised" else 150
    settings = MapSettings(methods=(method,), space=space, learning=FEW)  # type: ignore[arg-type]
    mapped = map_spaces(spaces, "en", settings, **train_and_dev(spaces, n_train))
    found = apply_all(mapped, spaces)
    # de and fr are near to each other too, though no dictionary was between them.
    for src in spaces:
        for tgt in spaces:
            if src != tgt:
                assert precision(found[src], found[tgt]) > 0.95, (src, tgt)
    assert precision(spaces["de"], spaces["en"]) < 0.1
    report = report_of(mapped, "de")
    assert report.chosen == method  # type: ignore[attr-defined]
    assert report.precision > 0.95  # type: ignore[attr-defined]


# One space.


def test_the_pivot_stays_in_its_own_space() -> None:
    spaces = make_spaces()
    settings = MapSettings(methods=("procrustes",), space="pivot")
    mapped = map_spaces(spaces, "en", settings, **train_and_dev(spaces))
    expected, _ = normalize_space(torch.from_numpy(spaces["en"].matrix))
    found = apply_all(mapped, spaces)
    np.testing.assert_allclose(found["en"].matrix, expected.numpy(), atol=1e-6)
    for language in ("de", "fr", "sw"):  # distances within a language stay too
        own, _ = normalize_space(torch.from_numpy(spaces[language].matrix))
        now = torch.from_numpy(found[language].matrix)
        torch.testing.assert_close(now @ now.T, own @ own.T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("space", ["joint", "pivot"])
def test_all_languages_share_one_space(space: str) -> None:
    """All languages are near to the same English vectors."""
    spaces = make_spaces()
    settings = MapSettings(methods=("supervised",), space=space)  # type: ignore[arg-type]
    mapped = map_spaces(spaces, "en", settings, **train_and_dev(spaces))
    found = apply_all(mapped, spaces)
    for language in ("de", "fr", "sw"):
        cosines = torch.nn.functional.cosine_similarity(
            torch.from_numpy(found[language].matrix), torch.from_numpy(found["en"].matrix)
        )
        assert float(cosines.mean()) > 0.9


def test_any_language_may_be_the_pivot() -> None:
    spaces = make_spaces(("en", "de"))
    en, de = spaces["en"].words, spaces["de"].words
    dictionary = SeedDictionary([(de[i], en[i]) for i in range(150)], "de-en.txt")
    settings = MapSettings(methods=("procrustes",), space="pivot")
    mapped = map_spaces(spaces, "de", settings, train={"en": dictionary})
    assert [report.chosen for report in mapped.reports] == ["pivot", "procrustes"]
    found = apply_all(mapped, spaces)
    assert precision(found["en"], found["de"]) > 0.95
    expected, _ = normalize_space(torch.from_numpy(spaces["de"].matrix))
    np.testing.assert_allclose(found["de"].matrix, expected.numpy(), atol=1e-6)


# Choices.


@pytest.mark.parametrize("space", ["joint", "pivot"])
def test_a_language_that_no_method_helps_keeps_its_vectors(space: str, tmp_path: Path) -> None:
    spaces = make_spaces()
    # Swahili is aligned already, and its dictionary is wrong.
    spaces["sw"] = WordVectors(spaces["sw"].words, spaces["en"].matrix.copy())
    dictionaries = train_and_dev(spaces)
    wrong = [
        (en, sw) for (en, _), (_, sw) in zip(*shifted(dictionaries["train"]["sw"]), strict=True)
    ]
    dictionaries["train"]["sw"] = SeedDictionary(wrong, "en-sw.txt")
    settings = MapSettings(methods=("supervised",), space=space)  # type: ignore[arg-type]
    mapped = map_spaces(spaces, "en", settings, **dictionaries)
    reports = {report.language: report for report in mapped.reports}
    assert reports["sw"].chosen == UNALIGNED
    assert reports["sw"].reason.startswith("alignment does not help: P@1 100.0 against ")
    assert reports["de"].chosen == "supervised"
    assert "unaligned" in reports["de"].reason
    assert {trial.method for trial in reports["de"].trials} == {UNALIGNED, "supervised"}
    write_mapped(mapped, spaces, tmp_path, settings, binary=True)
    written = WordVectors.load(tmp_path / "sw.bin", cache=False)
    np.testing.assert_array_equal(written.matrix, spaces["sw"].matrix, strict=True)
    assert set(read_maps(tmp_path)) == {"en", "de", "fr"}
    # The precision of the report is that of the vectors that are written.
    found = apply_all(mapped, spaces)
    rows = [normalize_rows(torch.from_numpy(found[name].matrix)) for name in ("sw", "en")]
    dev = IndexPairs(torch.arange(200, 300), torch.arange(200, 300))
    ways = compute_precision(*rows, dev), compute_precision(*rows[::-1], dev)
    assert reports["sw"].precision == pytest.approx(sum(ways) / 2)
    assert precision(found["de"], found["en"]) > 0.9


def test_nothing_changes_if_no_language_is_aligned(tmp_path: Path) -> None:
    spaces = make_spaces(("en", "de"))
    spaces["de"] = WordVectors(spaces["de"].words, spaces["en"].matrix.copy())
    dictionaries = train_and_dev(spaces)
    settings = MapSettings(methods=("supervised",))
    mapped = map_spaces(spaces, "en", settings, **dictionaries)
    write_mapped(mapped, spaces, tmp_path, settings)
    for language, vectors in spaces.items():
        vectors.save(tmp_path / "before.vec")
        written = (tmp_path / f"{language}.vec").read_bytes()
        assert written == (tmp_path / "before.vec").read_bytes()
    assert read_maps(tmp_path) == {}
    report = mapped.reports[1]
    assert (report.chosen, report.precision) == (UNALIGNED, report.trials[0].precision)


def shifted(
    dictionary: SeedDictionary,
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    entries = list(dictionary.entries)
    return entries, [*entries[37:], *entries[:37]]


def test_each_language_gets_its_best_method() -> None:
    spaces = make_spaces(("en", "de", "fr"), noise=0.3)
    dictionaries = train_and_dev(spaces, 40)
    dictionaries["train"]["fr"] = SeedDictionary(
        [(en, fr) for (en, _), (_, fr) in zip(*shifted(dictionaries["train"]["fr"]), strict=True)],
        "en-fr.txt",
    )
    settings = MapSettings(methods=("procrustes", "unsupervised"), space="pivot", learning=FEW)
    mapped = map_spaces(spaces, "en", settings, **dictionaries)
    reports = {report.language: report for report in mapped.reports}
    assert reports["fr"].chosen == "unsupervised"
    for report in (reports["de"], reports["fr"]):
        best = max(report.trials, key=lambda trial: trial.precision or 0)
        assert report.chosen == best.method
        assert [trial.method for trial in report.trials] == [
            UNALIGNED,
            "procrustes",
            "unsupervised",
        ]


def test_without_a_development_dictionary_nothing_is_compared() -> None:
    spaces = make_spaces(("en", "de"))
    dictionaries = train_and_dev(spaces)
    mapped = map_spaces(spaces, "en", MapSettings(("supervised",)), train=dictionaries["train"])
    (_, report) = mapped.reports
    assert (report.chosen, report.precision) == ("supervised", None)
    assert report.reason == "no development dictionary to compare by"


def test_unaligned_vectors_are_kept_if_no_method_is_better() -> None:
    def fit(method: str, precision: float | None) -> FittedTrial:
        return FittedTrial(Trial(method, precision))

    best, why = choose_trial([fit(UNALIGNED, 0.5), fit("rcsls", 0.5), fit("refine", 0.25)])
    assert best.trial.method == UNALIGNED
    assert why == "alignment does not help: P@1 50.0 against 50.0 rcsls, 25.0 refine"
    best, why = choose_trial([fit(UNALIGNED, 0.5), fit("rcsls", 0.6)])
    assert (best.trial.method, why) == ("rcsls", "P@1 60.0 against 50.0 unaligned")


def test_counts_of_the_report() -> None:
    spaces = make_spaces(("en", "de"))
    matrix = spaces["de"].matrix.copy()
    matrix[5] = 0
    spaces["de"] = WordVectors(spaces["de"].words, matrix)
    dictionaries = train_and_dev(spaces)
    entries = [*dictionaries["train"]["de"].entries, ("unknown", "de1"), ("en1", "nie")]
    dictionaries["train"]["de"] = SeedDictionary(entries, "en-de.txt")
    mapped = map_spaces(spaces, "en", MapSettings(("supervised",)), **dictionaries)
    report = mapped.reports[1]
    assert (report.n_train, report.n_train_entries) == (150, 152)
    assert (report.n_dev, report.n_dev_entries, report.n_zero) == (100, 100, 1)
    assert not mapped.apply("de", spaces["de"]).matrix[5].any()


def test_rounds_are_reported() -> None:
    spaces = make_spaces(("en", "de"))
    seen: list[tuple[str, str, LearningRound | None]] = []
    settings = MapSettings(("identical",), learning=FEW)
    mapped = map_spaces(spaces, "en", settings, on_round=lambda *what: seen.append(what))
    assert seen[0] == ("de", "identical", None)
    assert len(seen) - 1 == mapped.reports[1].trials[0].n_rounds > 10


# Reproducibility.


@pytest.mark.parametrize("method", ["unsupervised", "rcsls", "refine"])
def test_same_seed_same_maps(method: MappingMethod) -> None:
    spaces = make_spaces(("en", "de"))
    settings = MapSettings(
        (method,), space="pivot" if method in TO_PIVOT else "joint", learning=FEW, seed=4
    )
    runs = [map_spaces(spaces, "en", settings, **train_and_dev(spaces)) for _ in range(2)]
    for language in spaces:
        assert torch.equal(runs[0].maps[language].weight, runs[1].maps[language].weight)


def test_languages_are_independent_in_the_space_of_the_pivot() -> None:
    spaces = make_spaces()
    settings = MapSettings(("unsupervised",), space="pivot", learning=FEW)
    alone = map_spaces({each: spaces[each] for each in ("en", "fr")}, "en", settings)
    together = map_spaces(spaces, "en", settings)
    assert torch.equal(alone.maps["fr"].weight, together.maps["fr"].weight)


# Parts.


def test_identical_words() -> None:
    spaces = make_spaces(("en", "de"))
    pairs = find_identical_words(spaces["en"], spaces["de"], 100)
    assert pairs.src.tolist() == pairs.tgt.tolist() == list(range(0, 100, 10))


def test_precision_by_hand() -> None:
    src, tgt = torch.eye(4), torch.eye(4)[[1, 0, 2, 3]]
    # Word 0 has two translations, one of which is nearest; word 1's is another.
    gold = IndexPairs(torch.tensor([0, 0, 1, 2]), torch.tensor([3, 1, 3, 2]))
    assert compute_precision(src, tgt, gold) == pytest.approx(2 / 3)


def test_maps_apply_to_other_words() -> None:
    spaces = make_spaces(("en", "de"))
    dictionaries = train_and_dev(spaces)
    settings = MapSettings(("procrustes",), space="pivot")
    mapped = map_spaces(spaces, "en", settings, **dictionaries)
    whole = mapped.apply("de", spaces["de"])
    some = WordVectors(spaces["de"].words[7:9], spaces["de"].matrix[7:9])
    np.testing.assert_allclose(mapped.apply("de", some).matrix, whole.matrix[7:9], atol=1e-6)


def test_the_map_is_the_procrustes_solution() -> None:
    spaces = make_spaces(("en", "de"))
    settings = MapSettings(("procrustes",), space="pivot")
    mapped = map_spaces(spaces, "en", settings, **train_and_dev(spaces))
    x, z = (normalize_space(torch.from_numpy(spaces[name].matrix))[0] for name in ("de", "en"))
    pairs = IndexPairs(torch.arange(150), torch.arange(150))
    expected = solve_rotation(x, z, pairs)
    torch.testing.assert_close(mapped.maps["de"].weight, expected, atol=1e-5, rtol=0)


# Dictionaries.


def test_dictionaries_of_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "en-de.txt").write_text("cat Katze\n")
    (tmp_path / "fr-en.5.txt").write_text("chat cat\n")
    pattern = str(tmp_path / "{pivot}-{language}.txt")
    found = load_dictionary(pattern, "en", "de")
    assert found is not None
    assert found.entries == [("cat", "Katze")]
    assert load_dictionary(pattern, "en", "sw") is None
    turned = load_dictionary(str(tmp_path / "{language}-{pivot}.5.txt"), "en", "fr")
    assert turned is not None
    assert turned.entries == [("cat", "chat")]


def test_swapped_columns() -> None:
    spaces = make_spaces(("en", "de"))
    entries = [(de, en) for en, de in make_dictionary(spaces, "de", range(50)).entries]
    with pytest.raises(
        InputError, match=r"my\.txt: the columns seem to be swapped: 5 entries .* 50 if"
    ):
        SeedDictionary(entries, "my.txt").find_pairs(spaces["en"], spaces["de"])


# The folder.


@pytest.mark.parametrize("binary", [False, True])
def test_files_of_the_output_folder(tmp_path: Path, binary: bool) -> None:
    spaces = make_spaces(("en", "de"))
    settings = MapSettings(("procrustes",), space="pivot")
    mapped = map_spaces(spaces, "en", settings, **train_and_dev(spaces))
    folder = tmp_path / "new" / "mapped"
    check_folder(folder, overwrite=False)
    write_mapped(mapped, spaces, folder, settings, binary=binary)
    suffix = "bin" if binary else "vec"
    for language in spaces:
        written = WordVectors.load(folder / f"{language}.{suffix}", cache=False)
        assert list(written.words) == list(spaces[language].words)
        expected = mapped.apply(language, spaces[language]).matrix
        np.testing.assert_allclose(written.matrix, expected, atol=1e-5)
    maps = read_maps(folder)
    assert set(maps) == {"en", "de"}
    rows = torch.from_numpy(spaces["de"].matrix)
    torch.testing.assert_close(maps["de"].apply(rows), mapped.maps["de"].apply(rows))
    with pytest.raises(InputError, match="not empty"):
        check_folder(folder, overwrite=False)
    check_folder(folder, overwrite=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_failed_run_changes_nothing(
    tmp_path: Path, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = make_spaces(("en", "de"))
    settings = MapSettings(("procrustes",), space="pivot")
    mapped = map_spaces(spaces, "en", settings, **train_and_dev(spaces))
    folder = tmp_path / "mapped"
    if not is_new:
        write_mapped(mapped, spaces, folder, settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for failure in (InputError("no room left"), KeyboardInterrupt(), OSError(28, "No Space")):

        def fail(*args: object, failure: BaseException = failure) -> None:
            raise failure

        monkeypatch.setattr(mapping, "save", fail)  # after the vectors
        with pytest.raises((InputError, KeyboardInterrupt)):
            write_mapped(mapped, spaces, folder, settings)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        assert folder.exists() != is_new


def test_no_maps(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no maps"):
        read_maps(tmp_path)
    (tmp_path / "maps.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"maps\.safetensors"):
        read_maps(tmp_path)


# Errors.


def test_invalid_settings() -> None:
    with pytest.raises(InputError, match="there is no method 'magic'"):
        MapSettings(methods=("magic",))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="each method must be named once"):
        MapSettings(methods=("rcsls", "rcsls"), space="pivot")
    with pytest.raises(InputError, match="each method must be named once"):
        MapSettings(methods=())
    with pytest.raises(InputError, match="there is no space 'outer'"):
        MapSettings(space="outer")  # type: ignore[arg-type]
    for seed in (-1, 1 << 63):
        with pytest.raises(InputError, match=f"the seed is {seed}"):
            MapSettings(seed=seed)
    with pytest.raises(InputError, match="refine leaves the pivot unchanged"):
        MapSettings(methods=("refine",))


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", "..", "", "a\nb", "a\0"])
def test_languages_are_not_paths(name: str) -> None:
    with pytest.raises(InputError, match="is not the name of a language"):
        name_languages({name: "a.vec", "en": "en.vec"})


def test_invalid_spaces() -> None:
    spaces = make_spaces(("en", "de"))
    settings = MapSettings(("identical",), learning=FEW)
    with pytest.raises(InputError, match="there are no vectors of the pivot 'fr'"):
        map_spaces(spaces, "fr", settings)
    with pytest.raises(InputError, match="there is only one language"):
        map_spaces({"en": spaces["en"]}, "en", settings)
    narrow = WordVectors(spaces["de"].words, spaces["de"].matrix[:, :7].copy())
    with pytest.raises(InputError, match="de have 7 dimensions, those of en have 20"):
        map_spaces({"en": spaces["en"], "de": narrow}, "en", settings)
    matrix = spaces["de"].matrix.copy()
    matrix[3, 3] = np.nan
    with pytest.raises(InputError, match="de has vectors that are not finite"):
        map_spaces(
            {"en": spaces["en"], "de": WordVectors(spaces["de"].words, matrix)}, "en", settings
        )


def test_missing_pairs() -> None:
    spaces = make_spaces(("en", "de"))
    with pytest.raises(InputError, match="supervised: there are no word pairs of de and en"):
        map_spaces(spaces, "en", MapSettings(("supervised",)))
    other = WordVectors([f"x{i}" for i in range(N_WORDS)], spaces["de"].matrix)
    with pytest.raises(InputError, match="identical: there are no word pairs of de and en"):
        map_spaces({"en": spaces["en"], "de": other}, "en", MapSettings(("identical",)))
