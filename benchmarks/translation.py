"""Speed of translation: `calque translate`, from lines to lines, against a bare `generate()` call.

Both translate the same batches, sorted by length; the bare call receives them tokenized, padded and
on the device, and does not decode its tokens. Rounds alternate, and the best of each counts.

    python benchmarks/translation.py --model runs/translate/model --text test_2016_flickr.en
    python benchmarks/translation.py --tiny

Without a model, calque-mini with random cross-attention is used: its translations are nonsense of
the maximum length, at the same cost per token.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from calque.io.files import read_lines
from calque.io.resumable import StreamSink
from calque.models.inference import cut_blocks
from calque.models.loading import find_model
from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, read_initial_weights
from calque.tokens.tokenizer import load_tokenizer
from calque.tokens.windows import split_lines_for_translation
from calque.translation.translate import (
    BLOCK_CHARACTERS,
    BLOCK_LINES,
    Translator,
    stop_at,
    write_translations,
)


def main() -> None:
    options = parse_options()
    if options.tiny:
        options.limit, options.beams, options.rounds, options.threads = 2, 2, 1, 1
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = read_text(options.text, options.limit)
    with tempfile.TemporaryDirectory() as scratch:
        model = load_model(options.model, Path(scratch), device)
    translator = Translator(
        model,
        beams=options.beams,
        tgt_lang=options.tgt_lang,
        batch_tokens=options.batch_tokens,
    )
    programs: dict[str, Callable[[], int]] = {
        "bare generate()": prepare_bare(translator, lines),
        "calque translate": lambda: translate(translator, lines),
    }
    best, counts = {name: float("inf") for name in programs}, {}
    for _ in range(options.rounds):
        for name, work in programs.items():
            started = time.perf_counter()
            counts[name] = work()
            best[name] = min(best[name], time.perf_counter() - started)
    assert len(set(counts.values())) == 1, counts  # the same tokens
    show(best, counts, len(lines), device)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of an encoder–decoder")
    parser.add_argument("--tgt-lang", help="language to translate into, if there are several")
    parser.add_argument("--text", help="one sentence per line; default: the demo")
    parser.add_argument("--limit", type=int, help="lines; default: all")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, help="default: chosen for the device")
    parser.add_argument("--threads", type=int, default=0, help="0: the default of torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="two lines, once")
    return parser.parse_args()


def read_text(path: str | None, limit: int | None) -> list[str]:
    if path is not None:
        return list(read_lines(path))[:limit]
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return [line.split("\t")[1] for line in table.splitlines()[1:]][:limit]


def load_model(name: str | None, scratch: Path, device: torch.device) -> Seq2Seq:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name is None:
        plan, start = DecoderPlan(tie="all"), find_model("calque-mini")
        build_seq2seq(plan, read_initial_weights(start, plan), load_tokenizer(start)).save(scratch)
    return Seq2Seq.load(scratch if name is None else name, device=device, dtype=dtype)


def prepare_bare(translator: Translator, lines: list[str]) -> Callable[[], int]:
    """Tokenize, sort and pad before, so that only `generate()` is measured."""
    tokenizer = translator.model.tokenizer
    batches = []
    for block in cut_blocks(lines, BLOCK_LINES, BLOCK_CHARACTERS):
        segments = split_lines_for_translation(
            tokenizer, block, translator.max_source_tokens, translator.src_lang
        )
        for rows in translator.plan_batches(segments.lengths):
            ids = translator.pad([segments.ids[row] for row in rows]).to(translator.device)
            mask = (ids != tokenizer.pad_token_id).long()
            limits = torch.tensor([translator.max_length(n) for n in mask.sum(1).tolist()])
            batches.append((ids, mask, limits.to(translator.device)))

    @torch.inference_mode()
    def work() -> int:
        written = [
            translator.model.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                decoder_start_token_id=translator.start_token,
                num_beams=translator.beams,
                length_penalty=translator.length_penalty,
                do_sample=False,
                max_new_tokens=translator.max_length(ids.shape[1]),
                stopping_criteria=[stop_at(limits)],
            )
            for ids, mask, limits in batches
        ]
        return sum(int((rows[:, 1:] != tokenizer.pad_token_id).sum()) for rows in written)

    return work


def translate(translator: Translator, lines: list[str]) -> int:
    counts, _ = write_translations(translator, lines, StreamSink(io.BytesIO()))
    return counts.n_written


def show(
    best: dict[str, float], counts: dict[str, int], n_lines: int, device: torch.device
) -> None:
    place = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{n_lines:,} lines, {next(iter(counts.values())):,} tokens written; {place}")
    for name, seconds in best.items():
        print(f"{name:20s} {seconds:8.2f} s {counts[name] / seconds:12,.0f} tokens/s")
    bare, ours = best["bare generate()"], best["calque translate"]
    print(f"ratio {bare / ours:.3f} (goal: at least 0.9)")


if __name__ == "__main__":
    main()
