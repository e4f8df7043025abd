"""Speed of translation: `calque translate`, from lines to lines, against a bare `generate()` call.

Both search the same batches, sorted by length; the bare call gets them tokenised, padded and on the
device, and its tokens stay tokens. Rounds alternate, and each one's best counts.

    python benchmarks/translation.py --model runs/translate/model --text test_2016_flickr.en

Without a model, calque-mini with a cross-attention drawn at random is made into one: it writes
nonsense of the longest length allowed, at the same cost a token.
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
from calque.io.outputs import LinkStream
from calque.models.inference import cut_blocks
from calque.models.loading import find_folder
from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, read_weights
from calque.tokens.tokenizer import load_tokenizer
from calque.tokens.windows import cut_segments
from calque.translation.translate import (
    BLOCK_CHARACTERS,
    BLOCK_LINES,
    Search,
    Translator,
    end_at,
    write_translations,
)


def main() -> None:
    options = parse_options()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = read_text(options.text, options.limit)
    with tempfile.TemporaryDirectory() as scratch:
        model = load_model(options.model, Path(scratch), device)
    translator = Translator(
        model, Search(options.beams), target=options.to, batch_tokens=options.batch_tokens
    )
    ways: dict[str, Callable[[], int]] = {
        "bare generate()": prepare_bare(translator, lines),
        "calque translate": lambda: translate(translator, lines),
    }
    best, counts = {name: float("inf") for name in ways}, {}
    for _ in range(options.rounds):
        for name, work in ways.items():
            started = time.perf_counter()
            counts[name] = work()
            best[name] = min(best[name], time.perf_counter() - started)
    assert len(set(counts.values())) == 1, counts  # the very same tokens
    show(best, counts, len(lines), device)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of an encoder–decoder")
    parser.add_argument("--to", help="the language to write, if the model has several")
    parser.add_argument("--text", help="one sentence a line; default: the demo's English")
    parser.add_argument("--limit", type=int, help="lines; default: all")
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int, help="default: what suits the device")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def read_text(path: str | None, limit: int | None) -> list[str]:
    if path is not None:
        return list(read_lines(path))[:limit]
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return [line.split("\t")[1] for line in table.splitlines()[1:]][:limit]


def load_model(name: str | None, scratch: Path, device: torch.device) -> Seq2Seq:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name is None:
        plan, start = DecoderPlan(tie="all"), find_folder("calque-mini")
        build_seq2seq(plan, read_weights(start, plan), load_tokenizer(start)).save(scratch)
    return Seq2Seq.load(scratch if name is None else name, device=device, dtype=dtype)


def prepare_bare(translator: Translator, lines: list[str]) -> Callable[[], int]:
    """Tokenise, sort and pad beforehand; what is left is `generate()` alone."""
    tokenizer, search = translator.model.tokenizer, translator.search
    batches = []
    for block in cut_blocks(lines, BLOCK_LINES, BLOCK_CHARACTERS):
        segments = cut_segments(tokenizer, block, translator.longest, translator.source)
        for rows in translator.plan_batches(segments.lengths):
            ids = translator.pad([segments.ids[row] for row in rows]).to(translator.device)
            mask = (ids != tokenizer.pad_token_id).long()
            limits = torch.tensor([translator.limit(n) for n in mask.sum(1).tolist()])
            batches.append((ids, mask, limits.to(translator.device)))

    @torch.inference_mode()
    def work() -> int:
        written = [
            translator.model.model.generate(  # type: ignore[operator]
                input_ids=ids,
                attention_mask=mask,
                decoder_start_token_id=translator.start,
                num_beams=search.beams,
                length_penalty=search.length_penalty,
                do_sample=False,
                max_new_tokens=translator.limit(ids.shape[1]),
                stopping_criteria=[end_at(limits)],
            )
            for ids, mask, limits in batches
        ]
        return sum(int((rows[:, 1:] != tokenizer.pad_token_id).sum()) for rows in written)

    return work


def translate(translator: Translator, lines: list[str]) -> int:
    report, _ = write_translations(translator, lines, LinkStream(io.BytesIO()))
    return report.n_written


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
