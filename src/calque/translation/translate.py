"""Translation of a stream of lines by an encoder–decoder: beam search, like lengths together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.errors import InputError
from calque.io.outputs import pack_block
from calque.io.segmentation import find_code
from calque.models.inference import cut_blocks
from calque.tokens.ragged import bucket_batches
from calque.tokens.tokenizer import lift_limits
from calque.tokens.windows import TextWindows, split_lines_for_translation

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Int
    from torch import Tensor

    from calque.io.outputs import LinkSink
    from calque.models.seq2seq import Seq2Seq

    IntArray = npt.NDArray[np.int64]

# A block is what is tokenised, sorted by length and written at once; the second bound is for huge
# lines. Where blocks end depends on the text alone, never on where a run was interrupted.
BLOCK_LINES, BLOCK_CHARACTERS = 2048, 1 << 21
# Tokens of the sources of a batch, padding included; the search holds several times as many.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 14}
# A source may take this part of the positions, since a translation may be longer than it.
SOURCE_SHARE = 0.75
# A translation may have so many tokens for each of the source's, and so many more.
MAX_RATIO, MAX_EXTRA = 2.0, 20
# Scores of the search cost memory for the whole vocabulary at every step.
SCORED_SHARE = 8
# Languages whose sentences stand side by side without a space. Thai and its like, which have none
# between words, set one between sentences.
UNSPACED = frozenset({"ja", "zh"})


@dataclass(frozen=True, slots=True)
class Search:
    """How translations are searched for.

    The search goes on until no unfinished translation beats, at its length so far, the worst of as
    many finished ones as there are beams. To stop as soon as there are so many, as some do, would
    favor short and wrong ones.
    """

    beams: int = 5
    # Above 0, long translations are favored; the sum of log-probabilities is divided by length^p.
    length_penalty: float = 1.0
    n_best: int = 1

    def __post_init__(self) -> None:
        if not math.isfinite(self.length_penalty):
            raise InputError(f"--length-penalty {self.length_penalty}", fix="give a number")
        if self.n_best > self.beams:
            raise InputError(
                f"the {self.n_best} best of {self.beams} beams",
                fix="raise --beams or lower --nbest",
            )


@dataclass(frozen=True, slots=True)
class TranslateReport:
    """What was translated, and what was not usual about it."""

    n_lines: int = 0
    n_empty: int = 0
    # Lines split by sentence, sentences cut inside, and how many were translated in all.
    n_long: int = 0
    n_cut: int = 0
    n_segments: int = 0
    # Translations that reached the longest allowed before their end.
    n_unfinished: int = 0
    # Tokens read and written, of the best translations.
    n_read: int = 0
    n_written: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One translation of a line, and the mean log-probability of its tokens if it was asked for."""

    text: str
    score: float | None = None


class Translator:
    """Translates blocks of lines; the order of lines is kept, whatever the order of batches."""

    def __init__(
        self,
        model: Seq2Seq,
        search: Search | None = None,
        *,
        target: str | None = None,
        source: str | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        """`target` is the language to write where there are several; `source` that of the text."""
        self.model, self.search = model, search or Search()
        self.start = model.start_token(target)
        known = model.directions
        self.target = target or (known[0][1] if known else "")
        self.source = source or next((src for src, tgt in known if tgt == self.target), "en")
        self.device = next(model.parameters()).device
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])
        self.longest = max(1, int(SOURCE_SHARE * model.max_tokens) - 2)
        lift_limits(model.tokenizer.backend_tokenizer)

    def translate(self, lines: Iterable[str]) -> Iterator[list[Candidate]]:
        """Translate a stream of lines, in constant memory; the best translation comes first."""
        if isinstance(lines, str):
            raise InputError("one string was given for lines", fix="give a list: [text]")
        for block in cut_blocks(lines, BLOCK_LINES, BLOCK_CHARACTERS):
            yield from self.translate_block(block)[0]

    def translate_block(self, lines: list[str]) -> tuple[list[list[Candidate]], TranslateReport]:
        """Translate some lines at once; an empty line has empty translations."""
        segments = split_lines_for_translation(
            self.model.tokenizer, lines, self.longest, self.source
        )
        found: list[list[Candidate]] = [[] for _ in segments.ids]
        n_unfinished = n_written = 0
        waiting = self.plan_batches(segments.lengths)[::-1]
        while waiting:
            rows = waiting.pop()
            written, scores = self._try([segments.ids[row] for row in rows])
            if written is None:
                waiting += halve(rows)
                continue
            is_whole = (written[:, 1:] == self.model.tokenizer.sep_token_id).any(1)
            n_unfinished += int((~is_whole[:: self.search.n_best]).sum())
            best = written[:: self.search.n_best, 1:]
            n_written += int((best != self.model.tokenizer.pad_token_id).sum())
            for row, group in zip(rows.tolist(), self._decode(written, scores), strict=True):
                found[row] = group
        report = TranslateReport(
            len(lines),
            segments.n_empty,
            segments.n_long,
            segments.n_long_sentences,
            len(segments.ids),
            n_unfinished,
            int(segments.lengths.sum()),
            n_written,
        )
        return self._join(segments, found), report

    def plan_batches(self, lengths: IntArray) -> list[IntArray]:
        """Group segments of like length, longest first."""
        share = SCORED_SHARE if self.search.n_best > 1 else 1
        return bucket_batches(lengths + 2, max(1, self.batch_tokens // share))

    @torch.inference_mode()
    def generate(self, sources: Sequence[IntArray]) -> tuple[Tensor, list[float] | None]:
        """Search for the translations of a batch: rows of tokens, those of one source together."""
        ids = self.pad(sources).to(self.device, non_blocking=True)
        limits = torch.tensor([self.limit(len(source) + 2) for source in sources])
        search, scored = self.search, self.search.n_best > 1
        model: Any = self.model.model
        result = model.generate(
            input_ids=ids,
            attention_mask=(ids != self.model.tokenizer.pad_token_id).long(),
            decoder_start_token_id=self.start,
            num_beams=search.beams,
            num_return_sequences=search.n_best,
            length_penalty=search.length_penalty if search.beams > 1 else None,
            do_sample=False,
            max_new_tokens=int(limits.max()),
            stopping_criteria=[end_at(limits.to(self.device))],
            return_dict_in_generate=True,
            output_scores=scored,
        )
        scores = result.sequences_scores.tolist() if scored else None
        return result.sequences.cpu(), scores

    def _try(self, sources: Sequence[IntArray]) -> tuple[Tensor | None, list[float] | None]:
        """Search, if there is memory for it; what an error holds on to is free afterwards."""
        try:
            return self.generate(sources)
        except torch.OutOfMemoryError:
            return None, None

    def pad(self, sources: Sequence[IntArray]) -> Tensor:
        """Put marks around sequences, and padding after the shorter ones."""
        tokenizer = self.model.tokenizer
        n_most = max(len(source) for source in sources) + 2
        ids = torch.full((len(sources), n_most), int(tokenizer.pad_token_id or 0))
        for row, source in zip(ids, sources, strict=True):
            row[0] = int(tokenizer.cls_token_id or 0)
            row[1 : len(source) + 1] = torch.from_numpy(source)
            row[len(source) + 1] = int(tokenizer.sep_token_id or 0)
        return ids.pin_memory() if self.device.type == "cuda" else ids

    def limit(self, n_source: int) -> int:
        """Give the most tokens that a translation of so many may have, marks included."""
        return min(int(MAX_RATIO * n_source) + MAX_EXTRA, self.model.max_tokens - 1)

    def _decode(self, written: Tensor, scores: list[float] | None) -> list[list[Candidate]]:
        """Turn tokens into text, n-best lists apart; a line break would be another line."""
        texts = self.model.tokenizer.batch_decode(written, skip_special_tokens=True)
        lines = [" ".join(text.splitlines()).strip() for text in texts]
        every = [
            Candidate(line, None if scores is None else scores[number])
            for number, line in enumerate(lines)
        ]
        step = self.search.n_best
        return [every[first : first + step] for first in range(0, len(every), step)]

    def _join(self, segments: TextWindows, found: list[list[Candidate]]) -> list[list[Candidate]]:
        """Put the translations of a line's segments together: all best ones, all second ones."""
        groups: list[list[list[Candidate]]] = [[] for _ in range(segments.n_lines)]
        for owner, group in zip(segments.line_numbers.tolist(), found, strict=True):
            groups[owner].append(group)
        gap = "" if find_code(self.target) in UNSPACED else " "
        return [
            group[0] if len(group) == 1 else join_parts(group, gap, self.search.n_best)
            for group in groups
        ]


def join_parts(parts: Sequence[list[Candidate]], gap: str, n_best: int) -> list[Candidate]:
    """Join the translations of consecutive segments, rank by rank; scores are averaged.

    >>> a, b = Candidate("Ja.", -0.5), Candidate("Nein.", -1.5)
    >>> join_parts([[a], [b]], " ", 1)
    [Candidate(text='Ja. Nein.', score=-1.0)]
    """
    if not parts:
        return [Candidate("", 0.0 if n_best > 1 else None)] * n_best
    joined = []
    for rank in zip(*parts, strict=True):
        scores = [each.score for each in rank if each.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        joined.append(Candidate(gap.join(each.text for each in rank if each.text), mean))
    return joined


def end_at(limits: Int[Tensor, "sources"]) -> Callable[..., Bool[Tensor, "rows"]]:
    """End every search at a length of its own: what else is in the batch must not matter.

    The rows that Hugging Face asks about are those of the first source, then of the second.
    """

    def is_over(ids: Int[Tensor, "rows tokens"], *_: Any, **__: Any) -> Bool[Tensor, "rows"]:
        n_written = ids.shape[1] - 1  # without the token to begin with
        return (n_written >= limits).repeat_interleave(len(ids) // len(limits))

    return is_over


def halve(rows: IntArray) -> list[IntArray]:
    """Cut a batch that was too large in two, the first part last; one line cannot be cut."""
    if len(rows) == 1:
        raise InputError("one line does not fit into memory", fix="lower --beams, or use the CPU")
    torch.cuda.empty_cache()
    return [rows[len(rows) // 2 :], rows[: len(rows) // 2]]


def write_translations(
    translator: Translator,
    lines: Iterable[str],
    sink: LinkSink,
    *,
    suffix: str = "",
    on_block: Callable[[int], None] | None = None,
) -> tuple[TranslateReport, int]:
    """Translate a stream of lines into a sink; also give how many were there before.

    A file's suffix decides its compression. N-best lists have the number of the line, counted from
    0, before every translation and the score after it, as Moses writes them.
    """
    first = 0
    for block in cut_blocks(lines, BLOCK_LINES, BLOCK_CHARACTERS):
        if sink.wants("\n".join(block).encode()):
            found, report = translator.translate_block(block)
            text = "".join(_format(first, found, translator.search.n_best))
            sink.append(pack_block(text.encode(), suffix), astuple(report))
        first += len(block)
        if on_block is not None:
            on_block(len(block))
    figures = sink.finish(pack_block(b"", suffix)) or (0,) * len(fields(TranslateReport))
    n_before = sink.figures_before[0] if sink.figures_before else 0
    return TranslateReport(*figures), n_before


def _format(first: int, found: Sequence[Sequence[Candidate]], n_best: int) -> Iterator[str]:
    for number, group in enumerate(found, start=first):
        for each in group:
            yield each.text + "\n" if n_best == 1 else _format_ranked(number, each)


def _format_ranked(number: int, translation: Candidate) -> str:
    return f"{number} ||| {translation.text} ||| {translation.score or 0.0:.4f}\n"
