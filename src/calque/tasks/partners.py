"""Which example is the translation of which: in files that translate each other, or beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from calque.tasks.corpus import translate_each_other
from calque.tasks.plugging import Paired
from calque.text.xtreme import TRANSLATIONS
from calque.types import InputError

if TYPE_CHECKING:
    from calque.tasks.corpus import Corpus
    from calque.tasks.transfer import Run

T = TypeVar("T")
Role = Literal["learn", "choose", "test"]


class Partners(Generic[T]):
    """Finds the translation of an example in the source language, or of one of the source.

    An example of another language is paired with the source's: by the original that its file
    names; line by line, where the set translates itself or the file is in `translate-train`; by
    the teacher that labelled it; and in a test first of all by the file in `translate-test`,
    which `read` reads. An example of the source is paired with the first language that has one.
    """

    def __init__(
        self,
        corpus: Corpus[T],
        read: Callable[[Path], list[T]],
        find_original: Callable[[T], T | None] = lambda example: None,
        is_empty: Callable[[T], bool] = lambda example: False,
    ) -> None:
        self.corpus, self._read = corpus, read
        self._find_original, self._is_empty = find_original, is_empty
        self._known: dict[tuple[str, Role], dict[int, T]] = {}

    def pair_lessons(self, run: Run, leave_out: Sequence[T]) -> list[Paired[T]]:
        """Pair what is learnt from in a run; the source's side is learnt from once a language.

        Paper: bilingual instances are "English instance with its translated one".
        """
        source, held = self.corpus.settings.source, set(map(id, leave_out))
        pairs: list[Paired[T]] = []
        for language in run.sources:
            if language != source:
                found = self.pair(language, self.corpus.learn_from(language, leave_out), "learn")
                for pair in found:
                    other = pair.other
                    learns = other is not None and source in run.sources and id(other) not in held
                    pairs.append(Paired(pair.example, other, learns))
        if source in run.sources:
            met = {id(pair.other) for pair in pairs if pair.learns_other}
            rest = [e for e in self.corpus.learn_from(source, leave_out) if id(e) not in met]
            pairs = self.pair(source, rest, "learn") + pairs
        if all(pair.other is None for pair in pairs):
            raise InputError(
                "plug=in: nothing to learn from has a translation",
                file=self.corpus.files.folder,
                fix=f"put translations of the training set into {TRANSLATIONS}/ and set "
                "setting=translate-train-all, or set plug=out",
            )
        return pairs

    def pair(self, language: str, examples: Sequence[T], role: Role) -> list[Paired[T]]:
        """Pair examples of a language with their translations, as far as there are any."""
        key = language, role
        if key not in self._known:
            self._known[key] = self._find(language, role)
        known = self._known[key]
        return [Paired(example, known.get(id(example))) for example in examples]

    def reads_lines(self, language: str) -> bool:
        """Tell whether a test is paired line by line: with what people wrote, not a machine."""
        return language not in self.corpus.files.translated_tests

    def _find(self, language: str, role: Role) -> dict[int, T]:
        """Give the translation of every example that has one, by the example's identity."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test" and not self.reads_lines(language):
            return self._read_beside(language)
        if language != source:
            return {id(own): other for own, other in self._list_pairs(language, role)}
        for other in sorted({*files.train, *files.dev, *files.test, *self.corpus.taught}):
            found = {} if other == source else dict(self._turn(other, role))
            if found:
                return found
        return {}

    def _turn(self, language: str, role: Role) -> Iterator[tuple[int, T]]:
        for own, other in self._list_pairs(language, role):
            yield id(other), own

    def _read_beside(self, language: str) -> dict[int, T]:
        """Read the translation of a test; it has a line for every example, perhaps an empty one."""
        path = self.corpus.files.translated_tests[language]
        tests, lines = self.corpus.load(self.corpus.files.to_test(language)), self._read(path)
        if len(lines) != len(tests):
            problem = f"{len(lines):,} translations of {len(tests):,} tests"
            raise InputError(problem, file=path, fix="give one for every test, in their order")
        pairs = zip(tests, lines, strict=True)
        return {id(test): line for test, line in pairs if not self._is_empty(line)}

    def _list_pairs(self, language: str, role: Role) -> Iterator[tuple[T, T]]:
        """List examples of another language, each with the source's that it translates."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test":
            yield from self._match(files.to_test(language), files.to_test(source))
            return
        of_role = files.dev if role == "choose" else files.train
        if role == "learn":
            learnt = self.corpus.load(files.train.get(source, ()))
            yield from ((own, learnt[k]) for own, k in self.corpus.taught.get(language, ()))
            if language not in files.train and source not in files.train:
                of_role = files.dev
        originals = [p for p in of_role.get(source, ()) if p.parent.name != TRANSLATIONS]
        for path in of_role.get(language, ()):
            named = list(self._name_originals(path, originals))
            yield from named or self._match((path,), originals)

    def _name_originals(self, path: Path, originals: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Pair examples whose file names what they translate, with that example if there is one."""
        known: dict[T, T] | None = None
        for example in self.corpus.load((path,)):
            original = self._find_original(example)
            if original is not None:
                if known is None:
                    known = {found: found for found in self.corpus.load(originals)}
                yield example, known.get(original, original)

    def _match(self, own: Sequence[Path], others: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Pair line by line the files of two languages that translate each other."""
        if not own or not others:
            return
        if self.corpus.is_parallel or own[0].parent.name == TRANSLATIONS:
            sides = self.corpus.load(own), self.corpus.load(others)
            if translate_each_other(sides[0], sides[1], self.corpus.label_of):
                yield from zip(*sides, strict=True)
