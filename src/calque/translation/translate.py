"""Translate text with an encoder-decoder model by beam search, in batches of similar length."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.errors import InputError
from calque.io.files import (
    check_skip_list,
    count_input_lines,
    open_skip_list,
    read_lines,
)
from calque.io.outputs import fingerprint
from calque.io.resumable import INPUT_SIZE, check_resumable_output, compress_block, open_sink
from calque.io.segmentation import language_code
from calque.models.inference import cut_blocks, device_of, load_encoder
from calque.models.seq2seq import Seq2Seq
from calque.tokens.ragged import batch_by_length
from calque.tokens.tokenizer import disable_truncation_and_padding
from calque.tokens.windows import TextWindows, split_lines_for_translation
from calque.translation.bleu import TranslationScores, load_metrics, score_translations

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Int
    from torch import Tensor

    from calque.io.files import PathLike
    from calque.io.resumable import BlockSink
    from calque.types import Progress

    IntArray = npt.NDArray[np.int64]

# A block is tokenized, sorted by length and written at once; the second limit is for very long
# lines. Where blocks end depends only on the text, so that a resumed run forms the same blocks.
BLOCK_LINES, BLOCK_CHARACTERS = 2048, 1 << 21
# Source tokens per batch, padding included; the beam search holds several times as many.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 14}
# A source may fill this fraction of the positions, since its translation may be longer.
SOURCE_FRACTION = 0.75
# A translation has at most this many tokens per source token, plus a constant.
MAX_LENGTH_RATIO, MAX_EXTRA_TOKENS = 2.0, 20
# The scores of n-best lists need memory for the whole vocabulary at every step.
SCORED_BATCH_DIVISOR = 8
# Languages that put no space between sentences. Thai and others without spaces between words have
# one between sentences.
NO_SENTENCE_SPACE = frozenset({"ja", "zh"})


@dataclass(frozen=True, slots=True)
class TranslationCounts:
    """What was translated.

    `n_long` lines were split into sentences, and `n_cut` of these sentences into windows;
    `n_segments` texts were translated in total. `n_unfinished` translations reached the maximum
    length. `n_read` and `n_written` count tokens of the sources and of the best translations.
    """

    n_lines: int = 0
    n_empty: int = 0
    n_long: int = 0
    n_cut: int = 0
    n_segments: int = 0
    n_unfinished: int = 0
    n_read: int = 0
    n_written: int = 0


@dataclass(frozen=True, slots=True)
class TranslateResult:
    """Where the translations were written (None: standard output), the counts and the scores.

    `n_resumed` lines were translated by an earlier, interrupted run.
    """

    output: Path | None
    counts: TranslationCounts
    n_resumed: int
    n_skipped: int
    scores: TranslationScores | None


def translate_file(
    model: str | Path | Seq2Seq,
    file: PathLike = "-",
    *,
    output: PathLike | None = None,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    beams: int = 5,
    length_penalty: float = 1.0,
    nbest: int = 1,
    score: PathLike | None = None,
    resume: bool = False,
    skip_bad: PathLike | None = None,
    batch_tokens: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> TranslateResult:
    """Translate a text line by line; line k of the output is the translation of line k.

    A line that is too long for the model is split into sentences, whose translations are joined.
    Empty lines stay empty. Until the output is complete, its blocks are kept in OUTPUT.partial.

    Args:
        model: Folder or hub name of an encoder-decoder model, or a loaded one.
        file: Text with one sentence per line; plain, .gz, .xz, .zst, or "-" for standard input.
        output: Output file; its suffix decides the compression. Default: standard output.
        src_lang: Language of the text, which decides how long lines are split into sentences.
            Default: the model's.
        tgt_lang: Language to translate into, if the model has several.
        beams: Number of beams.
        length_penalty: Exponent of the length by which scores are divided; a higher value favors
            longer translations.
        nbest: Number of translations per line; above 1, lines are `line ||| text ||| score`.
        score: File with reference translations: compute BLEU and chrF.
        resume: Continue an interrupted run with the same output.
        skip_bad: Leave invalid lines empty and list them in this file.
        batch_tokens: Source tokens per batch. Default: chosen for the device.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        progress: Called with the stage, the lines done and their number.

    Examples:
        >>> model = "runs/en-de/model"
        >>> result = calque.translate_file(model, "news.en", output="news.de")  # doctest: +SKIP
        >>> result.counts.n_lines  # doctest: +SKIP
        3003
    """
    target = None if output is None or os.fspath(output) == "-" else Path(output)
    skip_list = None if skip_bad is None else Path(skip_bad)
    check_search(beams, length_penalty, nbest)
    path = Path(file)
    is_rereadable = os.fspath(file) != "-" and (path.is_file() or not path.exists())
    if resume and (target is None or not is_rereadable):
        raise InputError(
            "only a run from a file to a file can be resumed",
            fix="name the input file, and the output file with -o",
        )
    if score is not None:
        if nbest > 1:
            raise InputError("n-best lists cannot be scored", fix="drop --nbest or --score")
        load_metrics()
    inputs = [os.fspath(each) for each in (file, score) if each is not None]
    if target is not None:
        check_resumable_output(target, inputs, resume=resume)
    check_skip_list(skip_list, inputs, target)
    if progress is not None:
        progress("reading", 0, None)
    n_lines = count_input_lines(file, skip_bad=skip_list is not None)
    references = None if score is None else _read_references(score, n_lines)
    translator = Translator(
        load_encoder(model, device, cls=Seq2Seq),
        src_lang=src_lang,
        tgt_lang=tgt_lang,
        beams=beams,
        length_penalty=length_penalty,
        nbest=nbest,
        batch_tokens=batch_tokens,
    )
    settings: dict[str, Any] = {INPUT_SIZE: n_lines}
    if target is not None:
        settings |= translator.describe() | {"skip_bad": skip_list is not None}
    # A regular file is read back for scoring, so that the lines of an earlier run are included.
    is_readable = target is not None and (target.is_file() or not target.exists())
    translations: list[str] | None = None if references is None or is_readable else []
    with ExitStack() as stack:
        skipped = open_skip_list(skip_list, stack)
        sink = stack.enter_context(open_sink(target, settings, resume=resume))
        counts, n_resumed = write_translations(
            translator,
            read_lines(file, skipped, blank_bad=True),
            sink,
            suffix="" if target is None else target.suffix,
            translations=translations,
            n_lines=n_lines,
            progress=progress,
        )
    scores = None
    if references is not None:
        if translations is None:
            translations = list(read_lines(str(target)))
        scores = score_translations(translations, references, translator.tgt_lang)
    n_skipped = 0 if skipped is None else skipped.n_lines
    return TranslateResult(target, counts, n_resumed, n_skipped, scores)


def _read_references(path: PathLike, n_lines: int | None) -> list[str]:
    references = list(read_lines(path))
    if n_lines is not None and len(references) != n_lines:
        raise InputError(
            f"there are {len(references):,} references for {n_lines:,} lines",
            file=path,
            fix="provide one reference per line",
        )
    return references


def check_search(beams: int, length_penalty: float, nbest: int) -> None:
    """Raise InputError for options of the beam search that make no sense."""
    if not math.isfinite(length_penalty):
        raise InputError(f"the length penalty is {length_penalty}", fix="choose a finite number")
    if nbest > beams:
        raise InputError(
            f"{nbest} translations are requested from {beams} beams",
            fix="raise --beams or lower --nbest",
        )


def write_translations(
    translator: Translator,
    lines: Iterable[str],
    sink: BlockSink,
    *,
    suffix: str = "",
    translations: list[str] | None = None,
    n_lines: int | None = None,
    progress: Progress | None = None,
) -> tuple[TranslationCounts, int]:
    """Translate lines into a sink; return the counts and how many lines an earlier run wrote.

    The suffix of a file decides its compression. N-best lists have the format of Moses: the number
    of the line, counted from 0, the translation and its score. The best translations are also
    appended to the list `translations`, if there is one.
    """
    n_done = 0
    for block in cut_blocks(lines, BLOCK_LINES, BLOCK_CHARACTERS):
        if sink.begin_block("\n".join(block).encode()):
            nbest_lists, counts = translator.translate_block(block)
            text = "".join(
                f"{each.text}\n"
                if translator.nbest == 1
                else f"{number} ||| {each.text} ||| {each.score or 0.0:.4f}\n"
                for number, hypotheses in enumerate(nbest_lists, start=n_done)
                for each in hypotheses
            )
            sink.append(compress_block(text.encode(), suffix), astuple(counts))
            if translations is not None:
                translations += [hypotheses[0].text for hypotheses in nbest_lists]
        n_done += len(block)
        if progress is not None:
            progress("translating", n_done, n_lines)
    total = sink.finish(compress_block(b"", suffix)) or (0,) * len(fields(TranslationCounts))
    n_resumed = sink.counts_before[0] if sink.counts_before else 0
    return TranslationCounts(*total), n_resumed


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One translation of a line; the score, the mean log-probability of its tokens, may be None."""

    text: str
    score: float | None = None


class Translator:
    """Translate lines with an encoder-decoder model by beam search.

    The search continues until no unfinished hypothesis scores better, at its current length, than
    the worst of as many finished ones as there are beams. Stopping as soon as there are so many, as
    some programs do, would favor short and wrong translations.

    Args:
        model: Folder or hub name of an encoder-decoder model, or a loaded one.
        src_lang: Language of the text, which decides how long lines are split into sentences.
        tgt_lang: Language to translate into, if the model has several.
        beams: Number of beams.
        length_penalty: Exponent of the length by which scores are divided; a higher value favors
            longer translations.
        nbest: Number of translations per line.
        batch_tokens: Source tokens per batch. Default: chosen for the device.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...; not used for a loaded model.

    Examples:
        >>> translator = calque.Translator("runs/en-de/model")  # doctest: +SKIP
        >>> list(translator.translate(["Good morning!"]))  # doctest: +SKIP
        ['Guten Morgen!']
    """

    def __init__(
        self,
        model: str | Path | Seq2Seq,
        *,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        beams: int = 5,
        length_penalty: float = 1.0,
        nbest: int = 1,
        batch_tokens: int | None = None,
        device: str = "auto",
    ) -> None:
        check_search(beams, length_penalty, nbest)
        self.model: Seq2Seq = load_encoder(model, device, cls=Seq2Seq)
        for role in ("cls", "sep", "pad"):
            if getattr(self.model.tokenizer, f"{role}_token_id") is None:
                problem, fix = f"the tokenizer has no {role} token", "copy the model again"
                raise InputError(problem, file=self.model.folder, fix=fix)
        self.start_token = self.model.start_token(tgt_lang)
        directions = self.model.directions
        self.tgt_lang = tgt_lang or (directions[0][1] if directions else "")
        self.src_lang = src_lang or next(
            (src for src, tgt in directions if tgt == self.tgt_lang), "en"
        )
        self.beams, self.length_penalty, self.nbest = beams, length_penalty, nbest
        self.device = device_of(self.model)
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(self.device.type, BATCH_TOKENS["cpu"])
        self.max_source_tokens = max(1, int(SOURCE_FRACTION * self.model.max_tokens) - 2)
        disable_truncation_and_padding(self.model.tokenizer.backend_tokenizer)

    def translate(self, lines: Iterable[str]) -> Iterator[str]:
        """Return the best translation of every line of a stream, in constant memory."""
        return (hypotheses[0].text for hypotheses in self.translate_nbest(lines))

    def translate_nbest(self, lines: Iterable[str]) -> Iterator[list[Hypothesis]]:
        """Return the `nbest` best translations of every line of a stream, the best first."""
        if isinstance(lines, str):
            raise InputError("the lines are a single string", fix="pass a list of strings: [text]")
        for block in cut_blocks(lines, BLOCK_LINES, BLOCK_CHARACTERS):
            yield from self.translate_block(block)[0]

    def translate_block(self, lines: list[str]) -> tuple[list[list[Hypothesis]], TranslationCounts]:
        """Translate lines at once; the translations of an empty line are empty."""
        tokenizer = self.model.tokenizer
        segments = split_lines_for_translation(
            tokenizer, lines, self.max_source_tokens, self.src_lang
        )
        found: list[list[Hypothesis]] = [[] for _ in segments.ids]
        n_unfinished = n_written = 0
        batches = self.plan_batches(segments.lengths)[::-1]
        while batches:
            rows = batches.pop()
            try:
                output_ids, scores = self.generate([segments.ids[row] for row in rows])
            except torch.OutOfMemoryError:
                output_ids = None
            if output_ids is None:  # outside of the handler, where the error holds no memory
                batches += halve_batch(rows)
                continue
            best = output_ids[:: self.nbest, 1:]
            n_unfinished += int((~(best == tokenizer.sep_token_id).any(1)).sum())
            n_written += int((best != tokenizer.pad_token_id).sum())
            for row, hypotheses in zip(rows, self._decode(output_ids, scores), strict=True):
                found[row] = hypotheses
        counts = TranslationCounts(
            n_lines=len(lines),
            n_empty=segments.n_empty,
            n_long=segments.n_long,
            n_cut=segments.n_long_sentences,
            n_segments=len(segments.ids),
            n_unfinished=n_unfinished,
            n_read=int(segments.lengths.sum()),
            n_written=n_written,
        )
        return self._join(segments, found), counts

    def plan_batches(self, lengths: IntArray) -> list[IntArray]:
        """Return batches of segments with similar length, the longest first."""
        divisor = SCORED_BATCH_DIVISOR if self.nbest > 1 else 1
        return batch_by_length(lengths + 2, max(1, self.batch_tokens // divisor))

    @torch.inference_mode()
    def generate(self, sources: Sequence[IntArray]) -> tuple[Tensor, list[float] | None]:
        """Return the token ids and the scores of the translations of a batch, source by source."""
        ids = self.pad(sources).to(self.device, non_blocking=True)
        limits = torch.tensor([self.max_length(len(source) + 2) for source in sources])
        with_scores = self.nbest > 1
        model: Any = self.model.model
        result = model.generate(
            input_ids=ids,
            attention_mask=(ids != self.model.tokenizer.pad_token_id).long(),
            decoder_start_token_id=self.start_token,
            num_beams=self.beams,
            num_return_sequences=self.nbest,
            length_penalty=self.length_penalty if self.beams > 1 else None,
            do_sample=False,
            max_new_tokens=int(limits.max()),
            stopping_criteria=[stop_at(limits.to(self.device))],
            return_dict_in_generate=True,
            output_scores=with_scores,
        )
        scores = result.sequences_scores.tolist() if with_scores else None
        return result.sequences.cpu(), scores

    def pad(self, sources: Sequence[IntArray]) -> Tensor:
        """Return sequences with special tokens and padding as one tensor."""
        tokenizer = self.model.tokenizer
        n_tokens = max(len(source) for source in sources) + 2
        ids = torch.full((len(sources), n_tokens), int(tokenizer.pad_token_id or 0))
        for row, source in zip(ids, sources, strict=True):
            row[0] = int(tokenizer.cls_token_id or 0)
            row[1 : len(source) + 1] = torch.from_numpy(source)
            row[len(source) + 1] = int(tokenizer.sep_token_id or 0)
        return ids.pin_memory() if self.device.type == "cuda" else ids

    def max_length(self, n_source: int) -> int:
        """Return the maximum length of a translation, both lengths with special tokens."""
        return min(int(MAX_LENGTH_RATIO * n_source) + MAX_EXTRA_TOKENS, self.model.max_tokens - 1)

    def describe(self) -> dict[str, Any]:
        """Return all settings that the translations depend on, for runs that are resumed."""
        return {
            "calque": version("calque"),
            "model": fingerprint(self.model.folder),
            "device": self.device.type,
            "tgt_lang": self.tgt_lang,
            "src_lang": self.src_lang,
            "beams": self.beams,
            "length_penalty": self.length_penalty,
            "nbest": self.nbest,
            "batch_tokens": self.batch_tokens,
        }

    def _decode(self, output_ids: Tensor, scores: list[float] | None) -> list[list[Hypothesis]]:
        """Return the text of token ids as n-best lists; line breaks become spaces."""
        texts = self.model.tokenizer.batch_decode(output_ids, skip_special_tokens=True)
        hypotheses = [
            Hypothesis(" ".join(text.splitlines()).strip(), scores[row] if scores else None)
            for row, text in enumerate(texts)
        ]
        starts = range(0, len(hypotheses), self.nbest)
        return [hypotheses[start : start + self.nbest] for start in starts]

    def _join(self, segments: TextWindows, found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        """Join the translations of the segments of every line."""
        lines: list[list[list[Hypothesis]]] = [[] for _ in range(segments.n_lines)]
        for number, hypotheses in zip(segments.line_numbers.tolist(), found, strict=True):
            lines[number].append(hypotheses)
        separator = "" if language_code(self.tgt_lang) in NO_SENTENCE_SPACE else " "
        return [
            parts[0] if len(parts) == 1 else join_parts(parts, separator, self.nbest)
            for parts in lines
        ]


def join_parts(parts: Sequence[list[Hypothesis]], separator: str, nbest: int) -> list[Hypothesis]:
    """Join the translations of consecutive segments rank by rank, and average their scores.

    >>> a, b = Hypothesis("Ja.", -0.5), Hypothesis("Nein.", -1.5)
    >>> join_parts([[a], [b]], " ", 1)
    [Hypothesis(text='Ja. Nein.', score=-1.0)]
    """
    if not parts:
        return [Hypothesis("", 0.0 if nbest > 1 else None)] * nbest
    joined = []
    for hypotheses in zip(*parts, strict=True):
        scores = [each.score for each in hypotheses if each.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        text = separator.join(each.text for each in hypotheses if each.text)
        joined.append(Hypothesis(text, mean))
    return joined


def stop_at(limits: Int[Tensor, "sources"]) -> Callable[..., Bool[Tensor, "rows"]]:
    """Return a stopping criterion with a maximum length for every source.

    So a translation does not depend on the other sources in its batch. The rows that Hugging Face
    passes are those of the first source, then of the second, and so on.
    """

    def is_done(ids: Int[Tensor, "rows tokens"], *_: Any, **__: Any) -> Bool[Tensor, "rows"]:
        n_written = ids.shape[1] - 1  # without the start token
        return (n_written >= limits).repeat_interleave(len(ids) // len(limits))

    return is_done


def halve_batch(rows: IntArray) -> list[IntArray]:
    """Split a batch that was too large for the memory into two, the first half last."""
    if len(rows) == 1:
        raise InputError(
            "a single line does not fit into memory", fix="lower --beams, or use the CPU"
        )
    torch.cuda.empty_cache()
    return [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
