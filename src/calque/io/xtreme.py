"""Names of languages: two letters where there are two (ISO 639-1), three elsewhere.

Where the files of a task are: XTREME's layout, and treebanks by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from calque.errors import InputError
from calque.io.files import read_lines

# Where a macro-language has no data of its own, the code of the variety that stands for it.
_PAIRS = """
af afr  am amh  ar ara  az aze  be bel  bg bul  bn ben  br bre  bs bos  ca cat  cs ces  cy cym
da dan  de deu  el ell  en eng  eo epo  es spa  et est  eu eus  fa pes  fi fin  fo fao  fr fra
fy fry  ga gle  gd gla  gl glg  he heb  hi hin  hr hrv  hu hun  hy hye  ia ina  id ind  ie ile
io ido  is isl  it ita  ja jpn  jv jav  ka kat  kk kaz  km khm  ko kor  ku kur  kw cor  la lat
lt lit  lv lvs  mk mkd  ml mal  mn mon  mr mar  ms zsm  nl nld  nn nno  no nob  oc oci  pl pol
pt por  ro ron  ru rus  sk slk  sl slv  sq sqi  sr srp  sv swe  sw swh  ta tam  te tel  th tha
tk tuk  tl tgl  tr tur  tt tat  ug uig  uk ukr  ur urd  uz uzb  vi vie  xh xho  yi yid  zh cmn
"""
THREE_LETTERS: dict[str, str] = dict(zip(*[iter(_PAIRS.split())] * 2, strict=True))
TWO_LETTERS: dict[str, str] = {long: short for short, long in THREE_LETTERS.items()}


def two_letter_code(language: str) -> str:
    """Give the name Calque reports a language under.

    >>> short_name("deu"), short_name("de"), short_name("ceb")
    ('de', 'de', 'ceb')
    """
    return TWO_LETTERS.get(language, language)


def three_letter_code(language: str) -> str:
    """Give the three-letter code of a language.

    >>> long_name("zh"), long_name("ceb")
    ('cmn', 'ceb')
    """
    return THREE_LETTERS.get(language, language)


# train-en.tsv, dev-de.tsv.xz; translations of the training set are in a folder of their own.
SPLIT_FILE = re.compile(r"(train|dev|test)-([a-z]{2,3})(?:\.tsv)?(?:\.(?:xz|gz|zst))?")
TRANSLATED = re.compile(
    r"(?:train-|[a-z]{2,3}-)([a-z]{2,3})(?:-translated)?(?:\.tsv)?(?:\.(?:xz|gz|zst))?"
)
# Lines of plain text, the translations of what is tagged; and translations of what is tested.
UNTAGGED = re.compile(r"(?:train-)?([a-z]{2,3})\.txt(?:\.(?:xz|gz|zst))?")
TRANSLATED_TEST = re.compile(
    r"(?:(?:test|dev)-)?([a-z]{2,3})(?:-[a-z]{2,3})?(?:-translated)?(?:\.tsv|\.txt)?(?:\.(?:xz|gz|zst))?"
)
TREEBANK = re.compile(
    r"([a-z]{2,3})(?:_\w+)?-ud-(train|dev|test)[\w.-]*\.conllu(?:\.(?:xz|gz|zst))?"
)
# Folders of other sets than the one asked for are not searched.
SETS = frozenset({"udpos", "ud", "panx", "xnli", "pawsx", "tydiqa", "mlqa", "xquad", "bucc2018"})
TRANSLATE_TRAIN, TRANSLATED_TESTS = "translate-train", "translate-test"


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Files of one task by language: to learn from, to choose by, and to be tested on.

    `unlabelled` counts test files that have no labels, as XTREME gives them out: of such languages
    the dev file is the test. `untagged` are lines without labels that translate the source's
    training sentences, `translated_tests` those of a language's test, in the source.
    """

    folder: Path
    train: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    dev: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    test: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    unlabelled: int = 0
    untagged: Mapping[str, Path] = field(default_factory=dict)
    translated_tests: Mapping[str, Path] = field(default_factory=dict)

    def to_test(self, language: str) -> tuple[Path, ...]:
        """Give the files that a language is tested on: its test if that has labels, or its dev."""
        return self.test.get(language) or self.dev.get(language, ())

    @property
    def tested(self) -> list[str]:
        """List the languages that can be tested in."""
        return sorted({*self.dev, *self.test})


def find_xtreme_files(data: Path, name: str, n_columns: int) -> TaskFiles | None:
    """Find `train-XX.tsv`, `dev-XX.tsv` and `test-XX.tsv` in a folder NAME, wherever that is.

    `data` is that folder, or one that holds it or `xtreme/NAME`. Files may be packed.
    """
    for folder in _candidates(data, name):
        splits: dict[str, dict[str, list[Path]]] = {"train": {}, "dev": {}, "test": {}}
        for path in sorted(folder.iterdir()):
            if (found := SPLIT_FILE.fullmatch(path.name)) and path.is_file():
                _add(splits[found[1]], found[2], path)
        if not any(splits.values()):
            continue
        for path in sorted((folder / TRANSLATE_TRAIN).glob("*")):
            if found := TRANSLATED.fullmatch(path.name):
                splits["train"].setdefault(found[1], []).append(path)
        labelled = {
            language: paths
            for language, paths in splits["test"].items()
            if _has_columns(paths[0], n_columns)
        }
        return TaskFiles(
            folder,
            _freeze(splits["train"]),
            _freeze(splits["dev"]),
            _freeze(labelled),
            len(splits["test"]) - len(labelled),
            *_find_translations(folder),
        )
    return None


def find_treebanks(data: Path, name: str = "ud") -> TaskFiles | None:
    """Find `de_gsd-ud-train.conllu` and its like; several treebanks of a language count as one.

    They lie side by side or, as they are given out, in folders of their own.
    """
    for folder in _candidates(data, name):
        splits: dict[str, dict[str, list[Path]]] = {"train": {}, "dev": {}, "test": {}}
        for path in sorted([*folder.iterdir(), *folder.glob("UD_*/*.conllu*")]):
            if found := TREEBANK.fullmatch(path.name):
                splits[found[2]].setdefault(found[1], []).append(path)
        if any(splits.values()):
            train, dev, test = map(_freeze, splits.values())
            return TaskFiles(folder, train, dev, test, 0, *_find_translations(folder))
    return None


def check_data_folder(data: Path) -> None:
    """Refuse what is no folder."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")


def _candidates(data: Path, name: str) -> Sequence[Path]:
    check_data_folder(data)
    folders = [data / name, data / "xtreme" / name]
    if data.name == name or data.name not in SETS:
        folders.append(data)
    return [folder for folder in folders if folder.is_dir()]


def _find_translations(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Find translations of training sentences without labels, and translations of tests."""
    found: list[dict[str, list[Path]]] = []
    for name, pattern in ((TRANSLATE_TRAIN, UNTAGGED), (TRANSLATED_TESTS, TRANSLATED_TEST)):
        files: dict[str, list[Path]] = {}
        for path in sorted((folder / name).glob("*")):
            if match := pattern.fullmatch(path.name):
                _add(files, match[1], path)
        found.append(files)
    untagged, tests = ({name: paths[0] for name, paths in files.items()} for files in found)
    return untagged, tests


def _add(split: dict[str, list[Path]], language: str, path: Path) -> None:
    if language in split:
        problem = f"{path.name} is there too"
        raise InputError(problem, file=split[language][0], fix="keep one of them")
    split[language] = [path]


def _has_columns(path: Path, n_columns: int) -> bool:
    """Tell a labelled file by its first lines; an empty last column holds no labels."""
    first = islice((line.rstrip() for line in read_lines(path) if line.strip()), 5)
    return any(line.count("\t") >= n_columns - 1 for line in first)


def _freeze(split: dict[str, list[Path]]) -> dict[str, tuple[Path, ...]]:
    return {language: tuple(paths) for language, paths in split.items()}
