"""Speed of fine-tuning: Calque's loop and the Hugging Face Trainer side by side.

Both train the same model for the same epochs on the same tokenized examples, with the same number
of real tokens per update on average, in bfloat16 on a GPU and in float32 on a CPU. The Trainer is
used as its documentation shows: the padding collator of the task, examples in random order or
grouped by length. Real tokens without padding are counted; the time is that of the whole training,
without tokenizing and loading. A short warm-up run precedes each measurement.

    python benchmarks/finetuning.py --data DATA --device cuda
    python benchmarks/finetuning.py --data DATA --device cpu --examples 100 --tasks pos
    python benchmarks/finetuning.py --tiny

DATA contains xtreme/udpos, xtreme/panx and xtreme/xnli, or udpos, panx and xnli.
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
from tiny_data import SAMPLES, save_encoder
from transformers.utils import logging as transformers_logging

from calque.evaluation.finetuning.finetune import fine_tune
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.classification import ClassExamples, TextClassifier, encode_texts
from calque.evaluation.tasks.classification import find_files as find_pairs
from calque.evaluation.tasks.tagging import TagExamples, Tagger, encode_tagged
from calque.evaluation.tasks.tagging import find_files as find_tagged
from calque.io.conllu import read_tagged, sample_evenly
from calque.io.labeled import read_labeled_pairs
from calque.models.encoder import Encoder
from calque.models.heads import NO_LABEL

TASKS = ("pos", "ner", "xnli")
LEARNING_RATE = 2e-4  # of the encoder


@dataclass(frozen=True)
class Job:
    """The examples of a task, in the formats of Calque and of the Trainer, and the labels."""

    task: str
    examples: TagExamples | ClassExamples
    features: list[dict[str, Any]]
    labels: list[str]


@dataclass(frozen=True)
class Timed:
    """The time of one training run, and the mean loss of its updates."""

    who: str
    seconds: float
    n_tokens: int
    loss: float


def main() -> None:
    """Measure every task and print a table."""
    options = parse_options()
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            options.data, options.model = SAMPLES, str(save_encoder(Path(folder) / "model"))
            options.examples, options.warm_up, options.batch_tokens = 8, 4, 128
            measure_tasks(options)
    elif options.data is None:
        print("skipped: this benchmark needs --data or --tiny")
    else:
        measure_tasks(options)


def measure_tasks(options: argparse.Namespace) -> None:
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
        rows += [compare(task, one, timed) for one in timed]
        print_rows(rows[-len(timed) :])
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default=None, help="a model folder; default: calque-mini")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--examples", type=int, default=6000, help="at most, per task")
    parser.add_argument("--warm-up", type=int, default=200, help="examples of the warm-up run")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("-o", "--out", type=Path, help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and 8 examples")
    return parser.parse_args()


def read_job(task: str, options: argparse.Namespace) -> Job:
    """Read English examples and tokenize them once for both programs."""
    encoder = Encoder.load(options.model)
    tokenizer, longest = encoder.tokenizer, min(256, encoder.max_tokens)
    examples: TagExamples | ClassExamples
    if task == "xnli":
        files = find_pairs(options.data, "xnli")
        pairs = [p for f in files.train.get("en", files.dev["en"]) for p in read_labeled_pairs(f)]
        pairs = sample_evenly(pairs, options.examples)
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
    """Return examples in the format of the Trainer."""
    parts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    return [{"input_ids": i, "labels": y} for i, y in zip(parts, labels, strict=True)]


def list_runs(options: argparse.Namespace) -> list[Callable[[Job], Timed]]:
    """Return the training runs to compare; on a GPU, Calque runs with and without CUDA graphs."""
    settings = TaskSettings(
        epochs=options.epochs,
        learning_rate=LEARNING_RATE,
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
    who = "calque, CUDA graphs" if settings.graphs else "calque"
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
    # Always in float32: weights in half precision learn worse and are slow on a CPU.
    model = classify.from_pretrained(
        encoder.folder, num_labels=len(job.labels), dtype=torch.float32
    )
    lengths = job.examples.lengths
    with tempfile.TemporaryDirectory() as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=max(1, round(options.batch_tokens / lengths.mean())),
            learning_rate=LEARNING_RATE,
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
    """Wait until the GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def compare(task: str, one: Timed, timed: Sequence[Timed]) -> dict[str, Any]:
    """Compare one training run with the faster one of the Trainer."""
    best = min(other.seconds for other in timed if other.who.startswith("Trainer"))
    return {
        "task": task,
        "who": one.who,
        "seconds": round(one.seconds, 2),
        "tokens_per_second": round(one.n_tokens / one.seconds),
        "times_the_faster_trainer": round(best / one.seconds, 2),
        "mean_loss": round(one.loss, 4),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of a task."""
    for row in rows:
        print(
            f"{row['task']:5} {row['who']:26} {row['seconds']:8.2f} s "
            f"{row['tokens_per_second']:10,} tokens/s {row['times_the_faster_trainer']:6.2f} × "
            f"loss {row['mean_loss']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
