"""Checks that two versions of Calque write the same results, command by command.

    python benchmarks/compare_versions.py OLD_SRC NEW_SRC [--data DATA] [--only NAME …] [-o FOLDER]
    python benchmarks/compare_versions.py --tiny

OLD_SRC and NEW_SRC are the `src` folders of two checkouts. A case is a few command lines that both
versions execute on the same small input with one thread. Tensors, numbers, links and other text
must be identical, except for times and speeds. The output of the old version is kept in FOLDER/old,
so that later calls execute only the new version; --fresh-old executes both again.

The input is a part of DATA or, by default, the samples in `tests/data` of the old checkout. The
models that cases use are trained once, by the old version, in FOLDER/inputs. Each command runs in a
fork of a process that has imported the libraries. CPU seconds are those of the fork, except in the
cases `startup-*`, which start a new interpreter. `--tiny` compares this version with itself in a
few cases.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import lzma
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

# Words of the old command lines and what replaces them in the new version, by command ("*": all
# commands). Keys of `--set KEY=VALUE` are words, too. An empty list removes the word.
RENAMED: dict[str, dict[str, list[str]]] = {
    "*": {"--input": ["--input-format"], "--force": ["--overwrite"]},
    "align": {"--map-from": ["--languages"]},
    "embed": {"--map-from": ["--language"]},
    "links": {"--split": [], "spaces": ["--tokenized"]},
    "translate": {"--from": ["--src-lang"], "--to": ["--tgt-lang"]},
}
# Imported before the fork: only libraries, not Calque.
PRELOAD = (
    "pydantic",
    "rich.table",
    "safetensors.torch",
    "scipy.optimize",
    "scipy.stats",
    "tokenizers",
    "torch",
    "torch._dynamo",
    "torch.optim",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.encoder_decoder.modeling_encoder_decoder",
    "transformers.models.xlm_roberta.modeling_xlm_roberta",
    "typer",
    "yaml",
    "zstandard",
)
# Keys in JSON whose values differ between any two runs or versions: times, versions, hashes.
IGNORED_KEYS = {"seconds", "time", "tokens_per_second", "memory_mb", "versions"}
IGNORED_KEYS |= {"config", "items", "recipe", "fingerprint"}
# Files that describe a run. A new version may write them differently, which is only reported.
DESCRIPTIONS = ("recipe.yaml", "tokenizer_recipe.json", "prepared.json")
IGNORED_FILES = ("*.png", "*.svg", "*.pdf", ".cache/*", "stderr*")
TINY_CASES = ("startup-help", "links-given")

# Changes of recipes that make training tiny.
STEPS = {"schedule.steps": 6, "schedule.warmup": 2}
TINY: dict[str, Any] = STEPS | {
    "model.layers": 2,
    "model.hidden": 48,
    "model.heads": 2,
    "model.intermediate": 96,
    "model.positions": 128,
    "tokenizer.path": "tokenizer",
    "data.max_length": 96,
    "data.validation_examples": 5,
    "objectives.0.batch_tokens": 768,
    "optimizer.learning_rate": "4e-3",
    "checkpoints.every": 4,
    "checkpoints.validate_every": 3,
    "checkpoints.validation_batches": 1,
    "telemetry.every": 1,
}
PAIRED = {"objectives.1.batch_tokens": 768}
START = {"model.start": "tiny"}
RECIPES: dict[str, dict[str, Any]] = {
    "xlm": {},
    "xlm-tlm": PAIRED,
    "calque-mini": PAIRED | {"data.hold_out": "demo.tsv"},
    "calque-mini-align": PAIRED
    | START
    | {
        "data.hold_out": "demo.tsv",
        "objectives.0.layer": 1,
        "objectives.1.layer": 2,
        "objectives.2.batch_tokens": 768,
    },
    "xlm-align": PAIRED | START | {"engine.accumulation": 2},
    "adapt": START | {"objectives.0.label_layer": 1},
    "l2": START | {"objectives.0.hidden_weight": 0.1},
    "weak": START,
    "strong": START,
    "sentence-contrastive": PAIRED | START,
    "linear-map": START,
    "mlm-only": START,
    "veco": PAIRED | START | {"objectives.2.batch_tokens": 768, "freeze_steps": 2},
    "x2s-dcca": PAIRED | START,
    "x2s-mse": PAIRED | START | {"objectives.1.unit": "false"},
    "meta-pretrain": {"data.sources.0.path": "text/de.txt.xz"},
    "metaxlm": START,
    "metaxlm-dict": START,
    "metaxlm-frozen": START,
    "translate": START | {"model.decoder.layers": 1},
    "mbart": PAIRED | {"model.decoder.languages": "[en, de, ja]"},
    "xlm-kd": {"objectives.0.teacher": "mono", "objectives.0.languages": "[de]"},
}
FINE_TUNING = ["epochs=1", "batch_tokens=512", "train_examples=12", "test_examples=6"]
# Python code of cases.
USE_API = """
import json
import calque
import numpy as np

model = calque.load(device="cpu")
lines = open("lines.txt", encoding="utf-8").read().splitlines()[:20]
np.save("vectors.npy", model.embed(lines))
np.save("layer3.npy", model.embed(lines, layer=3, normalize=True))
pairs = [line.split(" ||| ") for line in open("pairs.text", encoding="utf-8").read().splitlines()]
words = [(src.split(), tgt.split()) for src, tgt in pairs]
links = calque.WordAligner(model).align(words)
open("links.json", "w").write(json.dumps([[list(map(int, link)) for link in row] for row in links]))
"""
REMOVE_LAST_STEP = """
import shutil
for folder in ("step-00000006", "model"):
    shutil.rmtree(f"run/{folder}")
"""
# The numbers of the pieces differ from one training of a tokenizer to the next.
SORT_PIECES = """
import json, pathlib, shutil

content = json.loads(pathlib.Path("prepared/tokenizer/tokenizer.json").read_text())
pieces = sorted(piece for piece, _ in content["model"]["vocab"])
pathlib.Path("pieces.txt").write_text("".join(f"{piece}\\n" for piece in pieces))
shutil.rmtree("prepared")
"""
MONO = TINY | {"tokenizer.path": "null", "tokenizer.vocab_size": 500, "schedule.steps": 10}


def main() -> None:
    """Run the cases and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?", metavar="OLD_SRC")
    parser.add_argument("new", type=Path, nargs="?", metavar="NEW_SRC")
    parser.add_argument("--data", type=Path, help="folder of real data; default: the test samples")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names or patterns")
    parser.add_argument("-o", "--output", type=Path, default=Path("parity"), metavar="FOLDER")
    parser.add_argument("--fresh-old", action="store_true", help="run the old version again")
    parser.add_argument("--tiny", action="store_true", help="this version with itself, a few cases")
    options = parser.parse_args()
    if options.tiny:
        options.old = options.new = Path(__file__).resolve().parents[1] / "src"
        options.only = TINY_CASES
        with tempfile.TemporaryDirectory() as folder:
            options.output = Path(folder)
            n_bad = compare_versions(options)
    elif options.new is None:
        print("skipped: name the src folders of two versions (see --help), or use --tiny")
        return
    else:
        n_bad = compare_versions(options)
    sys.exit(n_bad > 0)


def compare_versions(options: argparse.Namespace) -> int:
    """Run the cases with both versions; return the number of those that differ or fail."""
    folder = options.output.resolve()
    inputs = folder / "inputs"
    n_bad, totals = 0, np.zeros(2)
    with (
        Server(options.old, {}, options.tiny) as old,
        Server(options.new, RENAMED, options.tiny) as new,
    ):
        make_inputs(options, old, inputs)
        print(f"{'case':28} {'old s':>7} {'new s':>7}  result")
        for case in list_cases(inputs):
            if options.only and not any(fnmatch(case.name, pattern) for pattern in options.only):
                continue
            folders = [folder / version / case.name for version in ("old", "new")]
            record = folders[0].with_suffix(".json")
            before = json.loads(record.read_text()) if record.exists() else None
            if options.fresh_old or not before or before["commands"] != case.commands:
                before = run_case(case, old, inputs, folders[0])
            after = run_case(case, new, inputs, folders[1])
            failures = [
                f"{version} failed, {run['failed']}"
                for version, run in (("old", before), ("new", after))
                if run["failed"]
            ]
            result = f"FAILED: {'; '.join(failures)}" if failures else judge(case, *folders)
            n_bad += result.startswith(("FAILED", "DIFFERS"))
            seconds = np.array([before["seconds"], after["seconds"]])
            totals += seconds
            print(f"{case.name:28} {seconds[0]:7.2f} {seconds[1]:7.2f}  {result}", flush=True)
    print(f"{'all':28} {totals[0]:7.2f} {totals[1]:7.2f}  {n_bad} differ or failed")
    return n_bad


# Cases.


@dataclass(frozen=True)
class Case:
    """Commands that are executed one after the other in a folder; `python` precedes Python code."""

    name: str
    commands: list[list[str]]
    tolerance: float = 0.0  # where the old version does not repeat its own results exactly
    new_process: bool = False  # starts an interpreter; its standard output is not compared


def settings(changes: dict[str, Any]) -> list[str]:
    """Return changes of a recipe as options."""
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def train(recipe: str, changes: dict[str, Any], output: str = "run") -> list[str]:
    """Return the command line of a training run."""
    return ["train", recipe, "-o", output, *settings(changes)]


def list_cases(inputs: Path) -> list[Case]:
    """Return all cases; the folder of a case contains links to everything in `inputs`."""
    cpu = ["--device", "cpu"]
    cases: list[Case] = []

    def add(name: str, *commands: str | list[str], new_process: bool = False) -> None:
        split = [words.split() if isinstance(words, str) else words for words in commands]
        cases.append(Case(name, split, new_process=new_process))

    add("startup-help", "--help", new_process=True)
    add("startup-align", "align pairs.text --model tiny -o links", new_process=True)
    for method in ("ot", "itermax", "argmax", "match"):
        add(f"align-{method}", f"align pairs.text --method {method} --scores -o links")
    add("align-layers", *(f"align pairs.text --layer {k} -o links{k}" for k in (0, 3, -1)))
    for how in ("joint", "separate"):
        add(f"align-{how}", f"align pairs.text --encode {how} --scores -o links")
    add("align-formats", *(f"align pairs.text --format {f}" for f in ("pharaoh", "jsonl", "words")))
    add("align-raw", "align true.tsv --tokenize en-de --format words")
    add(
        "align-files",
        "align lines.txt translations.txt -o links --skip-bad bad.txt --model tiny",
        "align broken.tsv -o more --skip-bad more-bad.txt --input tsv --model tiny",
    )
    add("align-long", "align long.text --method ot --scores", "align long.text --encode separate")
    add("align-sweep", "align pairs.text --gold pairs.gold --sweep --model tiny")
    add("align-deberta", "align pairs.text --model deberta --scores -o links")
    for gold in sorted((inputs / "gold").glob("*.gold")):
        add(
            f"align-gold-{gold.stem}",
            f"align gold/{gold.stem}.text --gold gold/{gold.name} --format jsonl -o links.jsonl",
        )
    learn = "align pairs.text --bitext more.tsv --tokenize-bitext de-en --reverse-bitext"
    add("align-hybrid", f"{learn} --gold pairs.gold --save m -o links --scores")
    add("align-fast-align", f"{learn} --aligner fast-align --save m -o a")
    add("align-load", "align pairs.text --aligner hybrid --load aligner --scores -o links")
    add("align-adapt", f"{learn} --adapt --adapt-steps 3 --model tiny --save-model new -o links")
    add("links", "links bitext/en-de.tsv.xz -o made --scores --exclude-tags xnli")
    add("links-neural", "links bitext/en-de.tsv.xz -o made --aligner neural --model tiny")
    add("links-given", "links pairs.text --links pairs.links --languages de-en -o made")
    add(
        "clean",
        "clean more.tsv -o kept.tsv --languages en-de --report report.json",
        "clean lines.txt translations.txt -o a.txt -o b.txt --languages en-de --set max_ratio=1.3",
    )
    add("embed", "embed lines.txt -o v.npy")
    add(
        "embed-options",
        "embed lines.txt -o layer3.npy --layer 3",
        "embed lines.txt -o centered.npy --center --normalize",
        "embed text/ja.txt.xz -o packed.npy --model tiny --layer 0",
        "embed broken.tsv -o rest.npy --model tiny --skip-bad bad.txt",
    )
    add("embed-models", *(f"embed lines.txt -o {m}.npy --model {m}" for m in ("tiny", "deberta")))
    add(
        "neutralize",
        "neutralize tiny en.txt de.txt -o neutral --sentences 50",
        "embed lines.txt -o v.npy --model neutral",
        "embed lines.txt -o raw.npy --model neutral --raw",
    )
    mine = "mine lines.txt translations.txt"
    add(
        "mine",
        f"{mine} -o ratio.tsv --threshold 1.0",
        f"{mine} -o distance.tsv --margin distance --retrieval intersect --k 3 --model tiny",
        f"{mine} -o absolute.tsv --margin absolute --retrieval forward --dev true.tsv --model tiny",
    )
    extract = "extract en.txt --language en --model tiny --sentence-lines --no-filter --min-count 2"
    add("extract-x2static", f"{extract} -o en.vec --epochs 2 --subsample 0.01")
    add("extract-all", f"{extract} -o en.vec --epochs 1 --context all --layer 1 --binary")
    add("extract-pooling", f"{extract} -o en.vec --method pooling --layer 1")
    pattern = "--dictionary muse/{pivot}-{language}.0-5000.txt"
    methods = ("supervised", "semi-supervised", "identical", "unsupervised", "procrustes")
    for method in (*methods, "refine", "rcsls"):
        known = "" if method in ("identical", "unsupervised") else pattern
        files = "raw/en.vec raw/de.vec -o mapped-here --max-words 800 --cutoff 400"
        add(f"map-{method}", f"map {files} --method {method} {known}")
    dev = "--dev muse/{pivot}-{language}.5000-6500.txt"
    add("map-chosen", f"map raw/en.vec raw/de.vec -o here --max-words 800 {pattern} {dev}")
    add(
        "lexicon",
        "lexicon mapped/en.vec mapped/de.vec -o csls.tsv --best 3",
        "lexicon mapped/en.vec mapped/de.vec -o nn.tsv --method nn --mutual",
        "lexicon mapped/en.vec mapped/de.vec -o soft.txt --method inverted-softmax --format muse",
        "lexicon mapped/en.vec mapped/de.vec --evaluate muse/en-de.5000-6500.txt",
    )
    add(
        "grow",
        "grow mono --tokenizer tokenizer --language de --dictionary words.de-en.txt -o s",
        "grow mono --tokenizer tokenizer --language de --unmatched normal --initialize body -o t",
    )
    prepare = ["prepare", "--workers", "1", "-o", "prepared"]
    add("prepare", [*prepare, "veco", *settings(TINY | RECIPES["veco"])])
    unmade = TINY | PAIRED | {"tokenizer.path": "null", "tokenizer.vocab_size": 1200}
    add("prepare-tokenizer", [*prepare, "xlm-tlm", *settings(unmade)], ["python", SORT_PIECES])
    add(
        "prepare-workers",
        ["prepare", "xlm", "-o", "prepared", "--workers", "2", *settings(TINY)],
        new_process=True,
    )
    for recipe, changes in RECIPES.items():
        add(f"train-{recipe}", train(recipe, TINY | changes))
    for solver in ("procrustes", "least_squares"):
        solved = TINY | RECIPES["linear-map"] | {"objectives.0.solver": solver}
        embed = "embed translations.txt -o v.npy --model run/model --layer 1 --map-from de"
        align = "align pairs.text --model run/model --map-from de-en --scores -o links"
        score = "evaluate run/model --data data --maps beside --languages de,ja -o s.jsonl"
        add(f"train-{solver}", train("linear-map", solved), embed, align, score)
    once = train("xlm-tlm", TINY | PAIRED)
    add("train-resume", once, ["python", REMOVE_LAST_STEP], [*once, "--resume"])
    add("train-deberta", train("weak", TINY | {"model.start": "deberta", "tokenizer.path": "null"}))
    probe = {
        "probe.train": "data/ud/en_ewt-ud-train.conllu",
        "probe.test": "{en: data/ud/en_ewt-ud-dev.conllu, fr: data/ud/fr_gsd-ud-test.conllu}",
        "probe.every": 3,
    }
    add("train-probe", train("xlm-tlm", TINY | PAIRED | probe), "gap run --steps")
    add(
        "translate",
        "translate translator lines.txt -o greedy.de --beams 1",
        "translate translator lines.txt -o beams.de --score translations.txt",
        "translate translator lines.txt --beams 3 --nbest 2 --length-penalty 0.5",
    )
    attend = ["attention", "Take a seat and have a rest", "Setz dich und ruh dich aus"]
    add("attention", [*attend, "--model", "calque-mini", "--model", "veco"])
    for task in ("tatoeba", "word_alignment"):
        add(f"evaluate-{task}", f"evaluate calque-mini tiny --tasks {task} --data data -o s.jsonl")
    add("evaluate-tatoeba-centered", "evaluate tiny --data data --center --layers 1,-1 -o s.jsonl")
    add(
        "evaluate-neutral",
        "neutralize tiny en.txt de.txt -o neutral --sentences 50",
        "evaluate neutral --data data --neutral -o s.jsonl",
    )
    add("evaluate-probes", "evaluate tiny --tasks pos_probe,ner_probe --data data -o s.jsonl")
    for task in ("lexicon_induction", "word_similarity"):
        add(f"evaluate-{task}", f"evaluate mapped --tasks {task} --data data -o s.jsonl")
    grid = ["--data", "data", "--jobs", "0", *cpu, "-o", "results"]
    grid += [f"--set={key}" for key in FINE_TUNING]
    one = ["1" if word == "0" else word for word in grid]
    compare = "compare results --baseline tiny --bootstrap 200 -o report.md -o report.csv"
    add(
        "grid",
        ["evaluate", "tiny", "random:tiny", "--tasks", "pos,ner,xnli,pawsx", "--seeds", "2", *grid],
        compare,
    )
    add(
        "grid-parsing-questions",
        ["evaluate", "tiny", "--tasks", "parsing,xquad,mlqa,tydiqa", "--seeds", "1", *grid],
    )
    add(
        "grid-untrained",
        ["evaluate", "tiny", "--tasks", "tatoeba,word_alignment", "--seeds", "1", *grid],
    )
    add(
        "grid-translation",
        ["evaluate", "translator", "--tasks", "multi30k", "--languages", "en-de", *grid],
    )
    add(
        "grid-process",
        ["evaluate", "tiny", "--tasks", "xnli", "--seeds", "1", *one],
        new_process=True,
    )
    add("grid-reviews", ["evaluate", "tiny", "--tasks", "reviews", "--seeds", "1", *grid])
    more = ["--setting", "features", "--set=head=crf", "--set=select=best", "--seeds", "1"]
    add("grid-features", ["evaluate", "tiny", "--tasks", "ner", *more, *grid])
    plug = ["--setting", "translate-train-all", "--set=plug=in", "--seeds", "1"]
    add("grid-plug-in", ["evaluate", "in=veco", "--tasks", "xnli", *plug, *grid])
    add("grid-mini", ["evaluate", "calque-mini", "--tasks", "pos", "--seeds", "1", *grid])
    add(
        "compare-old-results", compare.replace("results", "shown", 1).replace("tiny", "calque-mini")
    )
    add("data-check", "data check data")
    add("demo", "demo")
    add("python", ["python", USE_API])
    return cases


# Input.


def make_inputs(options: argparse.Namespace, server: Server, inputs: Path) -> None:
    """Make the input of all cases once, or only its text for --tiny."""
    origin = str(options.data.resolve() if options.data else "samples")
    if inputs.exists():
        if (inputs / "origin.txt").read_text().strip() != origin:
            raise SystemExit(f"{inputs} was made from other data: choose another folder.")
        return
    draft = inputs.with_suffix(".partial")
    shutil.rmtree(draft, ignore_errors=True)
    make_text(options.old.resolve().parent, options.data, draft)
    write_lines(draft / "origin.txt", [origin])
    if not options.tiny:
        make_models(server, draft, options.data)
    draft.rename(inputs)


def read_lines(path: Path, n_lines: int | None = None) -> list[str]:
    """Read the first lines of a file, plain or .xz."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open() as file:
        return [line.rstrip("\n") for line in islice(file, n_lines)]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, plain or .xz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{line}\n" for line in lines)
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    else:
        path.write_text(text, "utf-8")


def make_text(repository: Path, data: Path | None, out: Path) -> None:
    """Write the text that all cases read."""
    samples = repository / "tests" / "data"
    demo = read_lines(repository / "src/calque/data/demo.tsv")
    write_lines(out / "demo.tsv", demo)
    rows = [row.split("\t") for row in demo[1:]]
    bitexts = data / "bitext" if data else samples
    ending = "tsv.xz" if data else "tsv"
    for language in ("de", "ja"):
        write_training_text(out, language, read_lines(bitexts / f"en-{language}.{ending}", 150))
    if data:
        more = [line.split("\t")[:2] for line in read_lines(bitexts / "en-de.tsv.xz", 1500)]
    else:
        more = [line.split("\t")[:2] for line in read_lines(samples / "en-de.tsv")]
        more += [[src, tgt] for name, src, tgt in rows if name == "de"]
    write_lines(out / "more.tsv", map("\t".join, more))
    write_lines(out / "en.txt", (src for src, _ in more))
    write_lines(out / "de.txt", (tgt for _, tgt in more))
    write_lines(out / "lines.txt", (src for src, _ in more[:40]))
    write_lines(out / "translations.txt", (tgt for _, tgt in more[:40]))
    broken = ["no tab in this line", "\t".join(more[1]), "", "\t".join(more[2]) + "\tand\tmore"]
    write_lines(out / "broken.tsv", ["\t".join(more[0]), *broken])
    for name, side in (("en", 0), ("de", 1)):
        file = out / f"data/translation/multi30k/test_2016_flickr.{name}"
        write_lines(file, (pair[side] for pair in more[:12]))
    write_lines(out / "true.tsv", ("\t".join(pair) for pair in more[:20]))
    write_lines(out / "words.de-en.txt", ("ist is", "nicht not", "auch also", "und and", "der the"))
    gold = data / "gold_alignments" if data else samples / "gold"
    for path in sorted(gold.glob("*.gold")):
        for part in (path, path.with_suffix(".text")):
            write_lines(out / "gold" / part.name, read_lines(part, 150))
    pairs = read_lines(gold / "de-en.text", 40)
    write_lines(out / "pairs.text", pairs)
    write_lines(out / "pairs.gold", read_lines(gold / "de-en.gold", 40))
    write_lines(out / "pairs.links", read_lines(gold / "de-en.gold", 40))
    sides = [pair.split(" ||| ") for pair in pairs[:12]]
    write_lines(out / "long.text", [" ||| ".join(map(" ".join, zip(*sides, strict=True)))])
    make_test_sets(samples, data, out / "data", rows)
    shutil.copytree(samples / "results", out / "shown")


def write_training_text(out: Path, language: str, lines: list[str]) -> None:
    """Write bitext, text, links and vectors where the bundled recipes expect them."""
    pairs = [line.split("\t")[:2] for line in lines]
    write_lines(out / f"bitext/en-{language}.tsv.xz", lines)
    write_lines(out / "bitext.tsv", lines)
    write_lines(out / f"text/{language}.txt.xz", (tgt for _, tgt in pairs))
    write_lines(out / f"linked/en-{language}.text", (f"{src} ||| {tgt}" for src, tgt in pairs))
    ranges = (range(min(len(src.split()), len(tgt.split()))) for src, tgt in pairs)
    write_lines(
        out / f"linked/en-{language}.links", (" ".join(f"{k}-{k}" for k in ks) for ks in ranges)
    )
    words = list(dict.fromkeys(word for _, tgt in pairs for word in tgt.split()))[:300]
    numbers = np.random.default_rng(0).normal(2, 1, size=(len(words), 48))
    vectors = (
        f"{word} {' '.join(f'{x:.3f}' for x in row)}"
        for word, row in zip(words, numbers, strict=True)
    )
    write_lines(out / f"vectors/{language}.vec", [f"{len(words)} 48", *vectors])


def make_test_sets(samples: Path, data: Path | None, out: Path, rows: list[list[str]]) -> None:
    """Write a folder for `calque evaluate`: samples of the tests, and parts of DATA."""
    for part in ("xtreme", "questions"):
        shutil.copytree(samples / part, out, dirs_exist_ok=True)
    shutil.copytree(samples / "ud", out / "ud")
    shutil.copytree(samples / "reviews", out / "cls-acl10-unprocessed")
    shutil.copytree(samples / "gold", out / "gold_alignments")
    for name, code in (("deu", "de"), ("fra", "fr"), ("jpn", "ja")):
        for column, side in enumerate(("eng", name), start=1):
            file = f"tatoeba/tatoeba.{name}-eng.{side}"
            lines = [row[column] for row in rows if row[0] == code]
            write_lines(out / file, read_lines(data / file, 100) if data else lines)
    if data:
        for part in ("0-5000", "5000-6500"):
            for pair in ("en-de", "de-en"):
                write_lines(
                    out / f"muse/{pair}.{part}.txt", read_lines(data / f"muse/{pair}.{part}.txt")
                )
        shutil.copytree(data / "word_similarity", out / "word_similarity")


def make_models(server: Server, out: Path, data: Path | None) -> None:
    """Train the models that cases use: a tokenizer, encoders, a translator, vectors."""
    own = TINY | {"tokenizer.path": "null", "tokenizer.vocab_size": 900}
    both = TINY | PAIRED
    memorize = {
        "schedule.steps": 60,
        "optimizer.learning_rate": "8e-3",
        "objectives.0.smoothing": 0,
    }
    base = "extract {0}.txt --language {0} --sentence-lines --no-filter --method pooling "
    base += f"--model tiny --min-count {2 if data else 1}"
    learn = "align pairs.text --aligner fast-align --bitext more.tsv --tokenize-bitext de-en "
    learn += "--reverse-bitext"
    commands: list[list[str]] = [
        ["prepare", "xlm-tlm", "-o", "made/text", "--workers", "1", *settings(own | PAIRED)],
        ["python", "import shutil; shutil.copytree('made/text/tokenizer', 'tokenizer')"],
        train("xlm-tlm", both | {"schedule.steps": 40}, "made/tiny"),
        train("meta-pretrain", MONO | RECIPES["meta-pretrain"], "made/mono"),
        ["python", "import os; [os.rename(f'made/{m}/model', m) for m in ('tiny', 'mono')]"],
        train("veco", TINY | RECIPES["veco"], "made/veco"),
        train("translate", TINY | RECIPES["translate"] | memorize, "made/translator"),
        ["python", "import os; [os.rename(f'made/{m}/model', m) for m in ('veco', 'translator')]"],
        ["python", "import os; os.mkdir('raw')"],
        *([*base.format(k).split(), "-o", f"raw/{k}.vec"] for k in ("en", "de")),
        [*learn.split(), "--save", "aligner", "-o", "made/links"],
        ["python", DEBERTA],
    ]  # fmt: skip
    for words in commands:
        server.run_or_exit(words, out)
    if not data:
        make_dictionaries(out)
    (out / "muse").symlink_to("data/muse")
    dictionary = ["--dictionary", "muse/{pivot}-{language}.0-5000.txt"]
    server.run_or_exit(["map", "raw/en.vec", "raw/de.vec", "-o", "mapped", *dictionary], out)
    shutil.rmtree(out / "made")


def make_dictionaries(out: Path) -> None:
    """Pair words by rank: wrong translations, which are good enough for a comparison."""
    columns = [
        [line.split()[0] for line in read_lines(out / f"raw/{k}.vec")[1:]] for k in ("en", "de")
    ]
    pairs = list(zip(*columns, strict=False))
    for name, order in (("en-de", 1), ("de-en", -1)):
        lines = [" ".join(pair[::order]) for pair in pairs]
        write_lines(out / f"data/muse/{name}.0-5000.txt", lines[::2])
        write_lines(out / f"data/muse/{name}.5000-6500.txt", lines[1::2])
    scored = (f"{src}\t{tgt}\t{k % 5}" for k, (src, tgt) in enumerate(pairs[:40]))
    write_lines(out / "data/word_similarity/rg65/rg65_EN-DE.txt", scored)


DEBERTA = """
import torch
from transformers import AutoTokenizer, DebertaV2Config, DebertaV2ForMaskedLM

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tokenizer")
sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96)
special = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
relative = dict(relative_attention=True, position_buckets=32, norm_rel_ebd="layer_norm")
relative |= dict(share_att_key=True, pos_att_type="p2c|c2p", position_biased_input=False)
config = DebertaV2Config(
    vocab_size=len(tokenizer),
    max_position_embeddings=128,
    type_vocab_size=0,
    **sizes,
    **special,
    **relative,
)
DebertaV2ForMaskedLM(config).save_pretrained("deberta")
tokenizer.save_pretrained("deberta")
"""


# Execution.


class Server:
    """A process of one version that executes command lines, each in a fork."""

    def __init__(self, source: Path, renamed: dict[str, dict[str, list[str]]], tiny: bool) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(source.resolve()),
            "PYTHONUTF8": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "COLUMNS": "160",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment.pop("CALQUE_DATA", None)
        self.renamed = renamed
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(source), *([] if tiny else PRELOAD)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.communicate()

    def rename(self, words: list[str]) -> list[str]:
        """Translate a command line of the old version for this one."""
        if words[0] == "python":
            return words
        table = self.renamed.get("*", {}) | self.renamed.get(words[0], {})
        renamed: list[str] = []
        for word in words:
            key, equals, value = word.partition("=")
            new = table.get(key, [key])
            renamed += [*new[:-1], f"{new[-1]}{equals}{value}"] if new else []
        return renamed

    def run(
        self, words: list[str], folder: Path, part: str = "", new_process: bool = False
    ) -> dict[str, Any]:
        """Execute one command in a folder; its output goes to files there."""
        job = {"words": self.rename(words), "folder": str(folder), "part": part}
        assert self.process.stdin and self.process.stdout
        print(json.dumps(job | {"new_process": new_process}), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("The process that executes the commands has ended.")
        result: dict[str, Any] = json.loads(answer)
        return result

    def run_or_exit(self, words: list[str], folder: Path) -> None:
        """Execute a command that must succeed."""
        if self.run(words, folder)["code"]:
            raise SystemExit(f"{words}\n{(folder / 'stderr').read_text()}")


def serve(source: Path, preload: list[str]) -> None:
    """Execute the jobs on standard input, one JSON per line; print exit codes and CPU seconds."""
    found = importlib.util.find_spec("calque")
    origin = Path(found.origin).resolve() if found and found.origin else Path()
    if source.resolve() not in origin.parents:
        raise SystemExit(f"Calque is imported from {origin} instead of {source}.")
    for name in preload:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run_job(json.loads(line))
        _, status, usage = os.wait4(pid, 0)
        code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        print(json.dumps({"code": code, "seconds": seconds}), flush=True)


def run_job(job: dict[str, Any]) -> None:
    """Execute a command, `python -m calque …` or Python code, and exit."""
    os.chdir(job["folder"])
    os.environ["XDG_CACHE_HOME"] = str(Path(job["folder"], ".cache"))
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(os.open(f"{name}{job['part']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    words, code = job["words"], 0
    if job["new_process"]:
        os.execv(sys.executable, [sys.executable, "-m", "calque", *words])
    try:
        if words[0] == "python":
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = ["calque", *words]
            runpy.run_module("calque", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 (the loop of the parent must never continue here)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_case(case: Case, server: Server, inputs: Path, folder: Path) -> dict[str, Any]:
    """Run a case in an empty folder with links to the input; return its seconds and its error."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in inputs.iterdir():
        if not path.name.startswith(("std", ".")):
            (folder / path.name).symlink_to(path)
    seconds, failed = 0.0, ""
    for k, words in enumerate(case.commands):
        result = server.run(words, folder, str(k), case.new_process)
        seconds += result["seconds"]
        if result["code"]:
            lines = (folder / f"stderr{k}").read_text().strip().splitlines()
            failed = f"exit code {result['code']}: {lines[-1] if lines else ''}"
            break
    record = {"commands": case.commands, "seconds": seconds, "failed": failed}
    folder.with_suffix(".json").write_text(json.dumps(record))
    return record


# Comparison.


@dataclass(frozen=True)
class Difference:
    """How a file differs; `size` is None if the difference is not one of numbers."""

    file: str
    description: str
    size: float | None = None


def judge(case: Case, old: Path, new: Path) -> str:
    """Compare two runs of a case and summarize the differences."""
    files = find_files(old, case.new_process), find_files(new, case.new_process)
    differences = list(compare_folders(old, files[0], new, files[1]))
    described = {d.file for d in differences if d.file.rpartition("/")[2] in DESCRIPTIONS}
    real = [
        d
        for d in differences
        if d.file not in described and (d.size is None or not d.size <= case.tolerance)
    ]
    if real:
        worst = max(real, key=lambda d: float("inf") if d.size is None else d.size)
        by = "" if worst.size is None else f" by {worst.size:.2g}"
        n_files = len({d.file for d in real})
        return f"DIFFERS in {n_files} files: {worst.file}: {worst.description}{by}"
    largest = max((d.size for d in differences if d.size is not None), default=0.0)
    within = f" within {largest:.2g}" if largest else ""
    exceptions = f", except {', '.join(sorted(described))}" if described else ""
    reworded = sorted({d.file for d in differences if d.description == REWORDED} - described)
    if reworded:
        exceptions += f"; {REWORDED} in {', '.join(reworded)}"
    return f"identical{within}, files: {len(files[0])}{exceptions}"


def find_files(folder: Path, new_process: bool) -> dict[str, Path]:
    """Return the files that a case wrote, by name without hashes; equal names are numbered."""
    ignored = (*IGNORED_FILES, *(["stdout*"] if new_process else []))
    files: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not Path(parent, name).is_symlink()]
        for path in (Path(parent, name) for name in names):
            key = str(path.relative_to(folder))
            if not path.is_symlink() and not any(fnmatch(key, pattern) for pattern in ignored):
                files[key] = path
    found: dict[str, Path] = {}
    for key, path in sorted(files.items(), key=lambda item: item[1].read_bytes()):
        plain = re.sub(r"\.(?:[0-9a-f]{30}|[0-9a-f]{8})(?=[./])", "", key)
        n_equal = sum(name.startswith(f"{plain} #") for name in found)
        found[f"{plain} #{n_equal}" if n_equal or plain != key else key] = path
    return found


def compare_folders(
    old: Path, old_files: dict[str, Path], new: Path, new_files: dict[str, Path]
) -> Iterator[Difference]:
    """Compare all files of two runs of a case."""
    for name in sorted(old_files.keys() | new_files.keys()):
        if name not in new_files or name not in old_files:
            yield Difference(name, "is missing" if name in old_files else "is new")
            continue
        paths = old_files[name], new_files[name]
        if paths[0].suffix in (".npy", ".npz", ".safetensors"):
            yield from compare_arrays(name, *paths)
        elif paths[0].read_bytes() != paths[1].read_bytes():
            yield from compare_texts(name, read_text(paths[0], old), read_text(paths[1], new))


def compare_arrays(name: str, old: Path, new: Path) -> Iterator[Difference]:
    """Compare arrays by shape, type and bits."""
    before, after = read_arrays(old), read_arrays(new)
    if before.keys() != after.keys():
        yield Difference(name, f"has other arrays: {sorted(before.keys() ^ after.keys())[:3]}")
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(name, f"{key} is {b.dtype}{b.shape}, was {a.dtype}{a.shape}")
        elif a.tobytes() != b.tobytes():
            if a.dtype.kind in "fiu":
                size = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
                yield Difference(name, key, float(size))
            else:
                yield Difference(name, f"{key} differs")


def read_arrays(path: Path) -> dict[str, Any]:
    """Read all arrays of a file by name."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = load_file(path).items()
        return {
            key: (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
            for key, value in tensors
        }
    loaded = np.load(path)
    return {"array": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)


REWORDED = "other words, the same numbers"
ANY_NUMBER = re.compile(r"\d+(?:\.\d+)?")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+", re.IGNORECASE)


def compare_texts(name: str, old: str, new: str) -> Iterator[Difference]:
    """Compare texts: numbers by value if the words are equal, and words if the numbers are."""
    if old == new:
        return
    if ANY_NUMBER.findall(old) == ANY_NUMBER.findall(new):
        yield Difference(name, REWORDED, 0.0)
        return
    if NUMBER.sub("", old) != NUMBER.sub("", new):
        lines = zip(old.splitlines(), new.splitlines(), strict=False)
        first = next((k for k, (a, b) in enumerate(lines, start=1) if a != b), "last")
        yield Difference(name, f"the text differs from line {first} on")
        return
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    yield Difference(name, "numbers", max(abs(float(a) - float(b)) for a, b in pairs))


def read_text(path: Path, folder: Path) -> str:
    """Read text without the parts that differ from run to run: paths, times, ignored keys."""
    text = path.read_bytes().decode("utf-8", "backslashreplace").replace(str(folder.resolve()), "")
    if path.suffix in (".json", ".jsonl"):
        documents = text.splitlines() if path.suffix == ".jsonl" else [text]
        return "\n".join(json.dumps(drop_ignored(json.loads(part))) for part in documents)
    return re.sub(r"\b[\d.]+ s\b", "", text)


def drop_ignored(value: Any) -> Any:
    """Remove the ignored keys at all depths."""
    if isinstance(value, dict):
        return {key: drop_ignored(item) for key, item in value.items() if key not in IGNORED_KEYS}
    return [drop_ignored(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
