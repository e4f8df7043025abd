"""Speed of fine-tuning, side by side: Calque's loop and the Hugging Face Trainer.

Both train the same model for the same epochs on the same tokenized examples, with as many real
tokens an update on average, in bfloat16 on a GPU and in single precision on a CPU. The Trainer is
used as its documentation shows: the padding collator of the task, examples drawn at random or
grouped by length. Counted are real tokens, not padding, by the wall clock of the whole training:
batching included, tokenizing and loading not. A short run of each goes before.

    python benchmarks/finetuning.py --data DATA --device cuda
    python benchmarks/finetuning.py --data DATA --device cpu --examples 100 --tasks pos

DATA holds xtreme/udpos, xtreme/panx and xtreme/xnli, or udpos, panx and xnli.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from calque.evaluation.finetuning.finetune import fine_tune
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.classification import ClassExamples, TextClassifier, encode_texts
from calque.evaluation.tasks.classification import find_files as find_pairs
from calque.evaluation.tasks.tagging import TagExamples, Tagger, encode_tagged
from calque.evaluation.tasks.tagging import find_files as find_tagged
from calque.io.conllu import read_tagged, spread
from calque.io.labelled import read_pairs
from calque.models.encoder import Encoder
from calque.models.heads import NO_LABEL

TASKS = ("pos", "ner", "xnli")
RATE = 2e-4  # of the encoder, in all trainings


@dataclass(frozen=True)
class Job:
    """Examples of a task for Calque, the same ones for the Trainer, and the labels."""

    task: str
    examples: TagExamples | ClassExamples
    features: list[dict[str, Any]]
    labels: list[str]


@dataclass(frozen=True)
class Timed:
    """One training: how long it took, and the mean loss of its updates."""

    who: str
    seconds: float
    n_tokens: int
    loss: float


def main() -> None:
    """Time every task and print a table."""
    options = parse_options()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    rows = []
    for task in options.tasks.split(","):
        job = read_job(task, options)
        short = read_job(task, argparse.Namespace(**{**vars(options), "examples": options.warm_up}))
        runs = list_runs(options)
        for train in runs:
            train(short)
        timed = [train(job) for train in runs]
        rows += [show(task, one, timed) for one in timed]
        print_rows(rows[-len(timed) :])
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default=None, help="a folder; by default calque-mini")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--examples", type=int, default=6000, help="of a task, at most")
    parser.add_argument("--warm-up", type=int, default=200, help="examples of the run before")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("-o", "--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def read_job(task: str, options: argparse.Namespace) -> Job:
    """Read English examples and tokenize them once for both."""
    encoder = Encoder.load(options.model)
    tokenizer, longest = encoder.tokenizer, min(256, encoder.max_tokens)
    examples: TagExamples | ClassExamples
    if task == "xnli":
        files = find_pairs(options.data, "xnli")
        pairs = [p for f in files.train.get("en", files.dev["en"]) for p in read_pairs(f)]
        pairs = spread(pairs, options.examples)
        labels = sorted({pair.label for pair in pairs})
        examples = encode_texts(tokenizer, pairs, labels, longest)
        numbers: Sequence[Any] = examples.labels.tolist()
        return Job(
            task, examples, list_features(examples.text.ids, examples.lengths, numbers), labels
        )
    path = find_tagged(options.data, "pos" if task == "pos" else "ner").train["en"][0]
    sentences = read_tagged(path, options.examples)
    labels = sorted({tag for sentence in sentences for tag in sentence.tags})
    examples = encode_tagged(tokenizer, sentences, labels, longest=longest, overlap=0.25)
    batch = examples.collate(np.arange(len(examples.lengths)))
    ends = np.cumsum(examples.lengths)[:-1]
    by_token = [part.tolist() for part in np.split(batch.labels.numpy(), ends)]
    assert all(any(tag != NO_LABEL for tag in part) for part in by_token)
    return Job(
        task, examples, list_features(examples.windows.ids, examples.lengths, by_token), labels
    )


def list_features(
    ids: np.ndarray, lengths: np.ndarray, labels: Sequence[Any]
) -> list[dict[str, Any]]:
    """Write examples as the Trainer takes them."""
    parts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    return [{"input_ids": i, "labels": y} for i, y in zip(parts, labels, strict=True)]


def list_runs(options: argparse.Namespace) -> list[Callable[[Job], Timed]]:
    """Give the trainings to compare, on a GPU with and without recording."""
    settings = TaskSettings(
        epochs=options.epochs,
        learning_rate=RATE,
        batch_tokens=options.batch_tokens,
        graphs=False,
    )
    runs = [
        lambda job: train_with_trainer(job, options, "random"),
        lambda job: train_with_trainer(job, options, "group_by_length"),
        lambda job: train_with_calque(job, options, settings),
    ]
    if options.device == "cuda":
        recorded = replace(settings, graphs=True)
        runs.append(lambda job: train_with_calque(job, options, recorded))
    return runs


def train_with_calque(job: Job, options: argparse.Namespace, settings: TaskSettings) -> Timed:
    """Train with Calque's loop."""
    encoder = Encoder.load(options.model, device=options.device)
    generator = torch.Generator().manual_seed(0)
    model: Tagger | TextClassifier
    if job.task == "xnli":
        model = TextClassifier(encoder, len(job.labels), settings, generator)
    else:
        model = Tagger(encoder, job.labels, settings, generator)
    examples: Any = job.examples
    wait(options.device)
    started = time.perf_counter()
    report = fine_tune(model, examples, settings, seed=0)
    wait(options.device)
    who = "calque, recorded" if settings.graphs else "calque"
    seconds = time.perf_counter() - started
    return Timed(who, seconds, report.n_tokens, float(np.mean(report.losses)))


def train_with_trainer(job: Job, options: argparse.Namespace, sampling: str) -> Timed:
    """Train with the Hugging Face Trainer and the padding collator of the task."""
    import transformers

    encoder = Encoder.load(options.model)
    classify = transformers.AutoModelForSequenceClassification
    collate: Any = transformers.DataCollatorWithPadding(encoder.tokenizer)
    if job.task != "xnli":
        classify = transformers.AutoModelForTokenClassification
        collate = transformers.DataCollatorForTokenClassification(encoder.tokenizer)
    # Single precision, whatever the file has: half-precision weights would learn worse and, on a
    # CPU, be many times slower.
    model = classify.from_pretrained(
        encoder.folder, num_labels=len(job.labels), dtype=torch.float32
    )
    lengths = job.examples.lengths
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=max(1, round(options.batch_tokens / lengths.mean())),
            learning_rate=RATE,
            warmup_steps=0.1,
            weight_decay=0.01,
            bf16=options.device == "cuda",
            use_cpu=options.device == "cpu",
            train_sampling_strategy=sampling,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        trainer = transformers.Trainer(
            model, arguments, data_collator=collate, train_dataset=job.features
        )
        trainer.remove_callback(transformers.PrinterCallback)
        wait(options.device)
        started = time.perf_counter()
        result = trainer.train()
        wait(options.device)
        seconds = time.perf_counter() - started
    n_tokens = int(lengths.sum()) * options.epochs
    return Timed(f"Trainer, {sampling}", seconds, n_tokens, float(result.training_loss))


def wait(device: str) -> None:
    """Wait until a GPU has done what it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()


def show(task: str, one: Timed, timed: Sequence[Timed]) -> dict[str, Any]:
    """Compare one training with the Trainer's faster one."""
    best = min(other.seconds for other in timed if other.who.startswith("Trainer"))
    return {
        "task": task,
        "who": one.who,
        "seconds": round(one.seconds, 2),
        "tokens_a_second": round(one.n_tokens / one.seconds),
        "times_the_faster_trainer": round(best / one.seconds, 2),
        "mean_loss": round(one.loss, 4),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of a task."""
    for row in rows:
        print(
            f"{row['task']:5} {row['who']:26} {row['seconds']:8.2f} s "
            f"{row['tokens_a_second']:10,} tokens/s {row['times_the_faster_trainer']:6.2f} × "
            f"loss {row['mean_loss']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
