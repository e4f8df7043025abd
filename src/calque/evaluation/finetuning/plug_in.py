"""Plug-in fine-tuning of VECO: examples and their translations, each reading the other.

Luo et al. (2021), section 3.1: x is predicted from [H_x ; S_x], its translation y from [H_y ; S_y].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.labeled_corpus import are_parallel
from calque.io.xtreme import TRANSLATE_TRAIN
from calque.models.veco import Veco
from calque.objectives.base import TensorBatch
from calque.objectives.cross_attention_lm import encode_alone_and_paired
from calque.tokens.layout import PackedPairLayout, PairedTokens, build_packed_pair_layout
from calque.tokens.ragged import BatchShape, Ragged, reorder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float
    from torch import Tensor

    from calque.evaluation.finetuning.labeled_corpus import LabeledCorpus
    from calque.evaluation.finetuning.transfer import TransferRun
    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TranslatedExample(Generic[T]):
    """An example and its translation, if there is one; the translation may be trained on too."""

    example: T
    other: T | None = None
    learns_other: bool = False


Role = Literal["train", "select", "test"]


class TranslatedPairs(Generic[T]):
    """Finds the translations of examples.

    An example of another language is paired with one of the source language: by the original that
    its file names; line by line, if the files are parallel or the file is in `translate-train`; by
    the teacher that labeled it; and for tests first of all by the file in `translate-test`, which
    `read` reads. An example of the source is paired with the first language that has one.
    """

    def __init__(
        self,
        corpus: LabeledCorpus[T],
        read: Callable[[Path], list[T]],
        find_original: Callable[[T], T | None] = lambda example: None,
        is_empty: Callable[[T], bool] = lambda example: False,
    ) -> None:
        self.corpus, self._read = corpus, read
        self._find_original, self._is_empty = find_original, is_empty
        self._known: dict[tuple[str, Role], dict[int, T]] = {}

    def pair_training_examples(
        self, run: TransferRun, leave_out: Sequence[T]
    ) -> list[TranslatedExample[T]]:
        """Return the training pairs of a run; the source side is trained on once per language.

        Paper: bilingual instances are "English instance with its translated one".
        """
        source, held = self.corpus.settings.source, set(map(id, leave_out))
        pairs: list[TranslatedExample[T]] = []
        for language in run.sources:
            if language != source:
                found = self.pair(
                    language, self.corpus.training_examples(language, leave_out), "train"
                )
                for pair in found:
                    other = pair.other
                    learns = other is not None and source in run.sources and id(other) not in held
                    pairs.append(TranslatedExample(pair.example, other, learns))
        if source in run.sources:
            already_paired = {id(pair.other) for pair in pairs if pair.learns_other}
            rest = [
                e
                for e in self.corpus.training_examples(source, leave_out)
                if id(e) not in already_paired
            ]
            pairs = self.pair(source, rest, "train") + pairs
        check_any_translated(pairs, self.corpus.files.folder)
        return pairs

    def pair(self, language: str, examples: Sequence[T], role: Role) -> list[TranslatedExample[T]]:
        """Return examples of a language with their translations, if there are any."""
        key = language, role
        if key not in self._known:
            self._known[key] = self._find_translations(language, role)
        known = self._known[key]
        return [TranslatedExample(example, known.get(id(example))) for example in examples]

    def pairs_by_line(self, language: str) -> bool:
        """Return whether a test is paired line by line, that is with human translations."""
        return language not in self.corpus.files.translated_tests

    def _find_translations(self, language: str, role: Role) -> dict[int, T]:
        """Return the translations by the identity of the example."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test" and not self.pairs_by_line(language):
            return self._read_translated_test(language)
        if language != source:
            return {id(own): other for own, other in self._training_pairs(language, role)}
        for other in sorted({*files.train, *files.dev, *files.test, *self.corpus.teacher_labeled}):
            found = {} if other == source else dict(self._reversed_pairs(other, role))
            if found:
                return found
        return {}

    def _reversed_pairs(self, language: str, role: Role) -> Iterator[tuple[int, T]]:
        for own, other in self._training_pairs(language, role):
            yield id(other), own

    def _read_translated_test(self, language: str) -> dict[int, T]:
        """Read the translations of a test: one line for every example, which may be empty."""
        path = self.corpus.files.translated_tests[language]
        tests, lines = self.corpus.load(self.corpus.files.test_files(language)), self._read(path)
        if len(lines) != len(tests):
            problem = f"there are {len(lines):,} translations of {len(tests):,} test examples"
            raise InputError(problem, file=path, fix="write one line for every example, in order")
        pairs = zip(tests, lines, strict=True)
        return {id(test): line for test, line in pairs if not self._is_empty(line)}

    def _training_pairs(self, language: str, role: Role) -> Iterator[tuple[T, T]]:
        """Yield examples of another language with the source examples that they translate."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test":
            yield from self._pairs_by_line(files.test_files(language), files.test_files(source))
            return
        of_role = files.dev if role == "select" else files.train
        if role == "train":
            sources = self.corpus.load(files.train.get(source, ()))
            labeled = self.corpus.teacher_labeled.get(language, ())
            yield from ((own, sources[k]) for own, k in labeled)
            if language not in files.train and source not in files.train:
                of_role = files.dev
        originals = [p for p in of_role.get(source, ()) if p.parent.name != TRANSLATE_TRAIN]
        for path in of_role.get(language, ()):
            named = list(self._pairs_by_original(path, originals))
            yield from named or self._pairs_by_line((path,), originals)

    def _pairs_by_original(self, path: Path, originals: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Yield examples whose file names the original, with the example that has this text."""
        known: dict[T, T] | None = None
        for example in self.corpus.load((path,)):
            original = self._find_original(example)
            if original is not None:
                if known is None:
                    known = {found: found for found in self.corpus.load(originals)}
                yield example, known.get(original, original)

    def _pairs_by_line(self, own: Sequence[Path], others: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Yield the pairs of two parallel files, line by line."""
        if not own or not others:
            return
        if self.corpus.is_parallel or own[0].parent.name == TRANSLATE_TRAIN:
            sides = self.corpus.load(own), self.corpus.load(others)
            if are_parallel(sides[0], sides[1], self.corpus.label_of):
                yield from zip(*sides, strict=True)


def check_any_translated(pairs: Sequence[TranslatedExample[T]], folder: Path) -> None:
    """Raise an InputError if no training example has a translation."""
    if all(pair.other is None for pair in pairs):
        raise InputError(
            "plug=in needs translations, but no training example has one",
            file=folder,
            fix=f"put translations of the training set into {TRANSLATE_TRAIN}/ and set "
            "setting=translate-train-all, or set plug=out",
        )


def pair_windows(
    left: Sequence[Sequence[int]], right: Sequence[Sequence[int]], learns_right: Sequence[bool]
) -> PairRows:
    """Pair window k of every example with window k of its translation.

    `right` has no windows for an example without a translation. If one side has more windows, the
    additional ones read the last window of the other side. Every window of an example counts once,
    and every window of a translation that is trained on.
    """
    rows: list[tuple[int, int, bool, bool]] = []
    for own, others, learns in zip(left, right, learns_right, strict=True):
        n_own, n_others = len(own), len(others)
        for k in range(max(n_own, n_others)):
            other = others[min(k, n_others - 1)] if n_others else -1
            counts = k < n_own, learns and k < n_others
            rows.append((own[min(k, n_own - 1)], other, *counts))
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return PairRows(*table[:, :2].T, *table[:, 2:].T.astype(np.bool_))


@dataclass(frozen=True, slots=True)
class PlugInTokens(TensorBatch):
    """Pairs of sequences, and which of their tokens have a translation."""

    pairs: PairedTokens
    is_paired: Bool[Tensor, "tokens"]

    @property
    def ids(self) -> Tensor:
        """The token ids of all pairs."""
        return self.pairs.tokens.ids


@dataclass(frozen=True, slots=True)
class PairRows:
    """Pairs of sequences by number; −1 on the right if there is no translation.

    `counts_left` and `counts_right` say whose labels count in the loss.
    """

    left: IntArray
    right: IntArray
    counts_left: BoolArray
    counts_right: BoolArray

    def sequences(self, rows: IntArray) -> IntArray:
        """Return the sequences of some pairs, all left ones first; −1 if there is none."""
        return np.concatenate([self.left[rows], self.right[rows]])

    def counted(self, rows: IntArray) -> BoolArray:
        """Return whether the labels of the same sequences count."""
        return np.concatenate([self.counts_left[rows], self.counts_right[rows]])

    def count_tokens(self, text: Ragged) -> IntArray:
        """Return the number of tokens of every pair."""
        return text.lengths[self.left] + np.where(self.right < 0, 0, text.lengths[self.right])

    def collate(
        self, text: Ragged, rows: IntArray, *, pad_id: int, shape: BatchShape | None
    ) -> tuple[PlugInTokens, PackedPairLayout]:
        """Return a batch of some pairs, and the positions of their tokens."""
        right = self.right[rows]
        has_translation = right >= 0
        lengths = np.zeros(len(rows), dtype=np.int64)
        lengths[has_translation] = text.lengths[right[has_translation]]
        others = Ragged(reorder(text, right[has_translation]).ids, lengths)
        own = reorder(text, self.left[rows])
        layout = build_packed_pair_layout(own, others, pad_id=pad_id, shape=shape)
        is_paired = np.zeros(len(layout.pairs.tokens.ids), dtype=np.bool_)
        owners = np.concatenate(
            [np.repeat(has_translation, own.lengths), np.repeat(has_translation, lengths)]
        )
        is_paired[layout.slots[owners]] = True
        return PlugInTokens(layout.pairs, torch.from_numpy(is_paired)), layout


def encode_plug_in(encoder: Encoder, tokens: PlugInTokens) -> Float[Tensor, "tokens both"]:
    """Return [H ; S] of all tokens, or [H ; H] for a text without a translation.

    Paper: a missing translation is not discussed; [H ; H] uses the same head without the
    cross-attention, as in plug-out.
    """
    alone, paired = encode_alone_and_paired(encoder, tokens.pairs)
    return torch.cat([alone, torch.where(tokens.is_paired[:, None], paired, alone)], dim=-1)


def check_plug_in(encoder: Encoder, *, supports_plug_in: bool) -> None:
    """Raise InputError if the task or the model does not support plug-in fine-tuning."""
    if not supports_plug_in:
        fix = "set plug=out, or choose a task of tags, classes, questions or retrieval"
        raise InputError("this task does not support plug=in", fix=fix)
    if not isinstance(encoder, Veco):
        fix = "use a model trained with cross_attention_lm (RUN/model), or set plug=out"
        raise InputError("plug=in needs a model with cross-attention", fix=fix)
