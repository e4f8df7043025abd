"""Files of evaluation tasks: XTREME's folder layout, treebanks by name, and language codes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from calque.errors import InputError
from calque.io.files import read_lines

# ISO 639-1 and ISO 639-3 codes; for a macrolanguage without data, the code of its main variety.
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

# train-en.tsv, dev-de.tsv.xz; translations of the training set are in a separate folder.
SPLIT_FILE = re.compile(r"(train|dev|test)-([a-z]{2,3})(?:\.tsv)?(?:\.(?:xz|gz|zst))?")
TRANSLATED = re.compile(
    r"(?:train-|[a-z]{2,3}-)([a-z]{2,3})(?:-translated)?(?:\.tsv)?(?:\.(?:xz|gz|zst))?"
)
# Translations of tagged training sentences, as plain text, and translations of test sentences.
UNTAGGED = re.compile(r"(?:train-)?([a-z]{2,3})\.txt(?:\.(?:xz|gz|zst))?")
TRANSLATED_TEST = re.compile(
    r"(?:(?:test|dev)-)?([a-z]{2,3})(?:-[a-z]{2,3})?(?:-translated)?(?:\.tsv|\.txt)?(?:\.(?:xz|gz|zst))?"
)
TREEBANK = re.compile(
    r"([a-z]{2,3})(?:_\w+)?-ud-(train|dev|test)[\w.-]*\.conllu(?:\.(?:xz|gz|zst))?"
)
# Folders of other data sets are not searched.
SETS = frozenset({"udpos", "ud", "panx", "xnli", "pawsx", "tydiqa", "mlqa", "xquad", "bucc2018"})
TRANSLATE_TRAIN, TRANSLATED_TESTS = "translate-train", "translate-test"


def two_letter_code(language: str) -> str:
    """Return the code under which results are reported: two letters if there are two.

    >>> two_letter_code("deu"), two_letter_code("de"), two_letter_code("ceb")
    ('de', 'de', 'ceb')
    """
    return TWO_LETTERS.get(language, language)


def three_letter_code(language: str) -> str:
    """Return the three-letter code of a language.

    >>> three_letter_code("zh"), three_letter_code("ceb")
    ('cmn', 'ceb')
    """
    return THREE_LETTERS.get(language, language)


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Training, development and test files of one task by language.

    `n_unlabeled` counts test files without labels, as XTREME distributes them; languages with such
    a file are tested on their development file. `untagged` are translations of the training
    sentences without labels, `translated_tests` translations of test sentences into the source
    language.
    """

    folder: Path
    train: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    dev: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    test: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    n_unlabeled: int = 0
    untagged: Mapping[str, Path] = field(default_factory=dict)
    translated_tests: Mapping[str, Path] = field(default_factory=dict)

    def test_files(self, language: str) -> tuple[Path, ...]:
        """Return the test files of a language if they have labels, and otherwise its dev files."""
        return self.test.get(language) or self.dev.get(language, ())

    def labeled_files(self, language: str) -> list[Path]:
        """Return the training, development and test files of a language."""
        splits = (self.train, self.dev, self.test)
        return [path for split in splits for path in split.get(language, ())]

    @property
    def test_languages(self) -> list[str]:
        """Languages that can be tested."""
        return sorted({*self.dev, *self.test})


def find_xtreme_files(data: Path, name: str, n_columns: int) -> TaskFiles | None:
    """Return the files `train-XX.tsv`, `dev-XX.tsv` and `test-XX.tsv` of a folder NAME.

    `data` is that folder, or one that contains it or `xtreme/NAME`. Files may be compressed.
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
        labeled = {
            language: paths
            for language, paths in splits["test"].items()
            if _has_columns(paths[0], n_columns)
        }
        return TaskFiles(
            folder,
            _freeze(splits["train"]),
            _freeze(splits["dev"]),
            _freeze(labeled),
            len(splits["test"]) - len(labeled),
            *_find_translations(folder),
        )
    return None


def find_treebanks(data: Path, name: str = "ud") -> TaskFiles | None:
    """Return files such as `de_gsd-ud-train.conllu`; all treebanks of a language are joined.

    They are in one folder or, as they are distributed, in folders named `UD_*`.
    """
    for folder in _candidates(data, name):
        splits: dict[str, dict[str, list[Path]]] = {"train": {}, "dev": {}, "test": {}}
        for path in sorted([*folder.iterdir(), *folder.glob("UD_*/*.conllu*")]):
            if (found := TREEBANK.fullmatch(path.name)) and path.is_file():
                splits[found[2]].setdefault(found[1], []).append(path)
        if any(splits.values()):
            train, dev, test = map(_freeze, splits.values())
            return TaskFiles(folder, train, dev, test, 0, *_find_translations(folder))
    return None


def check_data_folder(data: Path) -> None:
    """Raise InputError if the data folder does not exist."""
    if not data.is_dir():
        raise InputError("there is no such folder", file=data, fix="check --data")


def _candidates(data: Path, name: str) -> Sequence[Path]:
    check_data_folder(data)
    folders = [data / name, data / "xtreme" / name]
    if data.name == name or data.name not in SETS:
        folders.append(data)
    return [folder for folder in folders if folder.is_dir()]


def _find_translations(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Return translations of training sentences without labels, and translations of tests."""
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
        problem = f"{path.name} is a second file for the same language"
        raise InputError(problem, file=split[language][0], fix="remove one of them")
    split[language] = [path]


def _has_columns(path: Path, n_columns: int) -> bool:
    """Return whether the first lines have labels; an empty last column has none."""
    first = islice((line.rstrip() for line in read_lines(path) if line.strip()), 5)
    return any(line.count("\t") >= n_columns - 1 for line in first)


def _freeze(split: dict[str, list[Path]]) -> dict[str, tuple[Path, ...]]:
    return {language: tuple(paths) for language, paths in split.items()}
