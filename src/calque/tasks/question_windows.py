"""Questions as examples: `<s> question </s></s> part of the text </s>`, window after window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.text.batching import BatchShape, Ragged, ranges, reorder
from calque.text.placing import place_sequences
from calque.text.tokenization import lift_limits
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.text.questions import Answer, Question
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

# Tokens of a question that are read at most, and never more than half a window.
MAX_QUESTION = 64
# Where an answer "stands" that is not in the window: at its first token.
NOT_HERE = 0


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows, and between which of their tokens the answer lies.

    `cells` are the places of all tokens among windows × longest, counted row by row, or the one
    beyond for padding. `is_text` marks the tokens an answer may consist of.
    """

    tokens: TokenBatch
    cells: Int[Tensor, "tokens"]
    is_text: Bool[Tensor, "windows longest"]
    starts: Int[Tensor, "windows"]
    ends: Int[Tensor, "windows"]

    def to(self, device: torch.device | str) -> WindowBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        names = ("cells", "is_text", "starts", "ends")
        moved = (getattr(self, name).to(device, non_blocking=True) for name in names)
        return WindowBatch(self.tokens.to(device), *moved)


@dataclass(frozen=True, slots=True)
class QuestionExamples:
    """Windows on the texts of questions; window w is of question `owners[w]`.

    Its text begins at token `firsts[w]` and has `n_text[w]` tokens, of which number `offsets[w]` of
    the whole text is the first. `spans[q]` are the characters of the tokens of question q's text.
    """

    windows: Ragged
    owners: IntArray
    firsts: IntArray
    n_text: IntArray
    offsets: IntArray
    starts: IntArray
    ends: IntArray
    spans: Sequence[IntArray]
    pad_id: int
    n_cut_questions: int
    n_lost_answers: int  # that no window holds whole

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every window."""
        return self.windows.lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> WindowBatch:
        """Lay out some windows, without padding or up to a fixed shape."""
        chosen = reorder(self.windows, rows)
        placed = place_sequences(chosen, pad_id=self.pad_id, shape=shape)
        n_rows, longest = len(rows), int(chosen.lengths.max(initial=1))
        if shape is not None:
            n_rows, longest = max(shape.sequences, n_rows), shape.row
        columns = np.arange(longest)
        cells = np.full(len(placed.tokens.ids), n_rows * longest)
        begins = np.arange(len(rows)) * longest
        cells[ranges(placed.starts, chosen.lengths)] = ranges(begins, chosen.lengths)
        is_text = np.zeros((n_rows, longest), dtype=bool)
        firsts, n_text = self.firsts[rows][:, None], self.n_text[rows][:, None]
        is_text[: len(rows)] = (columns >= firsts) & (columns < firsts + n_text)
        labels = np.full((2, n_rows), -100)
        labels[:, : len(rows)] = self.starts[rows], self.ends[rows]
        return WindowBatch(
            placed.tokens,
            torch.from_numpy(cells),
            torch.from_numpy(is_text),
            torch.from_numpy(labels[0]),
            torch.from_numpy(labels[1]),
        )

    def count_longer(self, questions: Sequence[Question], most: int) -> int:
        """Count the questions of which every answer has more than so many tokens."""
        n_longer = 0
        for question, spans in zip(questions, self.spans, strict=True):
            places = [find_tokens(spans, answer) for answer in question.answers]
            sizes = [place[1] - place[0] + 1 for place in places if place is not None]
            n_longer += bool(sizes) and min(sizes) > most
        return n_longer

    def characters(self, window: int, start: int, end: int) -> tuple[int, int]:
        """Give the characters of the original text that tokens of a window stand for."""
        spans = self.spans[int(self.owners[window])]
        shift = int(self.offsets[window] - self.firsts[window])
        return int(spans[start + shift, 0]), int(spans[end + shift, 1])


def encode_questions(
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    longest: int,
    *,
    stride: int,
) -> QuestionExamples:
    """Cut texts into windows that begin `stride` tokens apart, or half a window if that is less.

    So every answer of up to half a window stands whole in one of them.
    """
    marks = _find_marks(tokenizer)
    n_marks = sum(map(len, marks))
    most = min(MAX_QUESTION, (longest - n_marks) // 2)
    if most < 1:
        raise InputError(f"a window of {longest} tokens holds no question", fix="raise max_length")
    asked = _encode(tokenizer, [question.text for question in questions])
    texts = _encode(tokenizer, [question.context for question in questions])
    ids: list[IntArray] = []
    rows: list[tuple[int, ...]] = []
    n_lost = 0
    for number, question in enumerate(questions):
        query = asked[question.text][0][:most]
        pieces, spans = texts[question.context]
        head = np.concatenate([marks[0], query, marks[1]])
        room = longest - n_marks - len(query)
        answer = find_tokens(spans, question.answers[0]) if question.answers else None
        is_found = not question.answers
        for begin in _window_starts(len(pieces), room, stride):
            part = pieces[begin : begin + room]
            label = (NOT_HERE, NOT_HERE)
            if answer is not None and begin <= answer[0] and answer[1] < begin + len(part):
                label = (answer[0] - begin + len(head), answer[1] - begin + len(head))
                is_found = True
            ids.append(np.concatenate([head, part, marks[2]]))
            rows.append((number, len(head), len(part), begin, *label))
        n_lost += not is_found
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return QuestionExamples(
        Ragged.of(ids),
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        columns[4],
        columns[5],
        spans=[texts[question.context][1] for question in questions],
        pad_id=tokenizer.pad_token_id or 0,
        n_cut_questions=sum(len(asked[question.text][0]) > most for question in questions),
        n_lost_answers=n_lost,
    )


def find_tokens(spans: IntArray, answer: Answer) -> tuple[int, int] | None:
    """Give the first and last token that have a character of an answer; none may have."""
    start = answer.start + len(answer.text) - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _window_starts(n_tokens: int, room: int, stride: int) -> range:
    """Begin windows so far apart until one reaches the end.

    >>> list(_window_starts(10, room=4, stride=3)), list(_window_starts(4, room=4, stride=1))
    ([0, 2, 4, 6], [0])
    """
    step = min(stride, max(1, room // 2))
    n_more = max(0, -(-(n_tokens - room) // step))
    return range(0, n_more * step + 1, step)


def _find_marks(tokenizer: PreTrainedTokenizerFast) -> list[IntArray]:
    """Find what a tokenizer puts before, between and after the two texts of a pair."""
    example = lift_limits(tokenizer.backend_tokenizer).encode("a", "a")
    kinds = [None if kind is None else int(kind) for kind in example.sequence_ids]
    first, second = kinds.index(0), kinds.index(1)
    last_first = len(kinds) - 1 - kinds[::-1].index(0)
    last_second = len(kinds) - 1 - kinds[::-1].index(1)
    ids = np.asarray(example.ids, dtype=np.int64)
    return [ids[:first], ids[last_first + 1 : second], ids[last_second + 1 :]]


def _encode(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]
) -> dict[str, tuple[IntArray, IntArray]]:
    """Encode every distinct text once: its tokens, and the characters each stands for."""
    distinct = list(dict.fromkeys(texts))
    encodings = lift_limits(tokenizer.backend_tokenizer).encode_batch(
        distinct, add_special_tokens=False
    )
    return {
        text: (
            np.asarray(encoding.ids, dtype=np.int64),
            np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
        )
        for text, encoding in zip(distinct, encodings, strict=True)
    }
