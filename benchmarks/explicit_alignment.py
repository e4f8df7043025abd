"""Measure explicit alignment of an encoder: retrieval and word alignment by layer, over seeds.

    calque prepare weak -o TEXT
    python benchmarks/explicit_alignment.py TEXT --tatoeba DIR --gold DIR -o OUT [--jobs 6]
    python benchmarks/explicit_alignment.py --report-only -o OUT
    python benchmarks/explicit_alignment.py --tiny

TEXT is a folder written by `calque prepare` from linked bitext. Every method is a recipe of Calque,
trained from the same encoder on the same text for the same number of steps, with the schedule
shortened in proportion. Each run is a process, `--jobs` of them at a time; it writes
OUT/NAME-SEED.json and is skipped if this file exists. OUT/study.md and its plots are made from
these files, also later and elsewhere (`--report-only`). `--tiny` runs two methods on sentences of
the demo.

Tatoeba is the mean accuracy of both directions by cosine of mean-pooled hidden states. AER is that
of mutual argmax, with sentences encoded separately or jointly. With linear maps, states of other
languages than English are mapped; these maps are meant for separately encoded sentences.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from study_cells import make_table, show

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.training.recipe import Recipe

    Results = dict[str, list[dict[str, Any]]]
    Values = npt.NDArray[np.float64]

# Recipes and their changes. The methods of the first group are the default.
NONE = "none"
METHODS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    NONE: (None, ()),
    "l2": ("l2", ()),
    "weak": ("weak", ()),
    "strong": ("strong", ()),
    "linear-map": ("linear-map", ()),
    "procrustes": (
        "linear-map",
        (
            "objectives.0.solver=procrustes",
            "objectives.0.batch_examples=1024",
            "objectives.0.batch_tokens=131072",
        ),
    ),
}
VARIANTS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "least-squares": (
        "linear-map",
        ("objectives.0.solver=least_squares", *METHODS["procrustes"][1][1:]),
    ),
    "l2-parameters": (  # the regularizer of the paper
        "l2",
        ("objectives.0.parameter_weight=1.0", "objectives.0.hidden_weight=0.0"),
    ),
    "l2-mean": ("l2", ("objectives.0.words=mean",)),
    "weak-mean": ("weak", ("objectives.0.words=mean",)),
    "weak-free": ("weak", ("objectives.0.parameter_weight=0.0",)),
    "weak-plain": ("weak", ("objectives.0.features=null",)),
    "weak-text": ("weak", ("objectives.0.spare=text",)),
    "weak-queue": ("weak", ("objectives.0.queue=4096",)),
    "strong-mean": ("strong", ("objectives.0.words=mean",)),
    "strong-free": ("strong", ("objectives.0.parameter_weight=0.0",)),
    "strong-plain": ("strong", ("objectives.0.features=null",)),
    "sentence": (
        "sentence-contrastive",
        ("objectives=[{kind: sentence_contrastive, temperature: 0.05, batch_tokens: 98304}]",),
    ),
    "sentence+tlm": ("sentence-contrastive", ()),
    "mini-align": ("calque-mini-align", ()),  # also needs text without links
}
ALL = METHODS | VARIANTS
# Not trained: the result does not depend on the seed.
DETERMINISTIC = {NONE, "procrustes", "least-squares"}
LANGUAGES = "de,fr,es,ro,cs,hi,ja,sv,pt,ru,zh,ar,tr,vi,fi"
TATOEBA, SEPARATE, JOINT = "tatoeba", "aer_apart", "aer_joint"
MEASURES = {TATOEBA: "Tatoeba accuracy", SEPARATE: "AER, separate", JOINT: "AER, joint"}
TO_ENGLISH = "tatoeba_to_english"
# 1 if higher is better, −1 otherwise.
SIGNS = {TATOEBA: 1, SEPARATE: -1, JOINT: -1}


def main() -> None:
    """Do one run, or all missing runs and the report."""
    options = parse_options()
    if options.one is not None:
        method, seed = options.one
        do_run(options, method, int(seed))
    elif options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            make_tiny(options, Path(folder))
            for method in options.methods:
                do_run(options, method, 1)
            write_report(options)
            print(options.report.read_text(encoding="utf-8"))
    elif not options.report_only and None in (options.text, options.tatoeba, options.gold):
        print("skipped: this study needs a prepared TEXT, --tatoeba and --gold, or --tiny")
    else:
        n_failed = 0 if options.report_only else do_all(options)
        write_report(options)
        if n_failed:
            sys.exit(f"{n_failed} runs failed: the same command repeats them")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?", help="prepared folder of linked bitext")
    parser.add_argument("--tatoeba", type=Path, help="folder of tatoeba.xxx-eng.xxx")
    parser.add_argument("--gold", type=Path, help="folder of NAME.text and NAME.gold")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("study"), help="folder for the results"
    )
    parser.add_argument("--start", default="calque-mini", help="encoder to start from")
    parser.add_argument(
        "--methods", default=",".join(METHODS), help=f"choose from {', '.join(ALL)}"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs")
    parser.add_argument("--languages", default=LANGUAGES, help="languages of Tatoeba")
    parser.add_argument("--compile", action="store_true", help="pays off in long runs")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, for all recipes")
    parser.add_argument("--keep", action="store_true", help="keep the models in OUT/NAME.run")
    parser.add_argument("--report", type=Path, help="default: OUT/study.md")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="three methods, tiny model and data")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = list(dict.fromkeys([NONE, *options.methods.split(",")]))
    unknown = [name for name in options.methods if name not in ALL]
    if unknown:
        parser.error(f"there is no method {unknown[0]}: choose from {', '.join(ALL)}")
    return options


def make_tiny(options: argparse.Namespace, folder: Path) -> None:
    """Write tiny data and a tiny model, and choose settings for them."""
    from tiny_data import write_data

    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora
    from calque.tokens.tokenizer import load_tokenizer

    start = write_data(folder)
    options.gold, options.tatoeba = folder / "gold_alignments", folder / "tatoeba"
    options.text, options.out, options.start = folder / "text", folder / "out", str(start)
    text, links = options.gold / "de-en.text", options.gold / "de-en.gold"
    source = TextSource((text,), ("de", "en"), links=links)
    prepare_corpora([source], load_tokenizer(start), options.text, rules=CleaningRules())
    for path in options.gold.glob("*.gold"):  # maps of other languages are not trained
        if path.stem != "de-en":
            path.unlink()
    options.out.mkdir()
    options.report = options.out / "study.md"
    options.methods, options.languages, options.steps = [NONE, "weak", "procrustes"], "de", 2
    options.set = ["objectives.0.batch_tokens=512", "data.validation_examples=2"]


# Runs.


def do_all(options: argparse.Namespace) -> int:
    """Do the missing runs, several at the same time; return the number of failures."""
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        (method, seed)
        for method in options.methods
        for seed in range(1, 2 if method in DETERMINISTIC else options.seeds + 1)
    ]
    missing = [job for job in wanted if not is_done(options, *job)]
    print(f"{len(missing)} runs of {len(wanted)} to do, {options.jobs} at a time", flush=True)
    n_threads = max(1, (os.cpu_count() or 1) // options.jobs)
    threads = {name: str(n_threads) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}

    def call(job: tuple[str, int]) -> bool:
        method, seed = job
        log, started = result_path(options.out, method, seed, ".log"), time.perf_counter()
        command = [sys.executable, *sys.argv, "--one", method, str(seed)]
        with log.open("w", encoding="utf-8") as stream:
            done = subprocess.run(command, stdout=stream, stderr=stream, env=os.environ | threads)
        failed = done.returncode != 0
        word = f"failed, see {log}" if failed else "done"
        print(f"{method} {seed}: {word}, {time.perf_counter() - started:.0f} s", flush=True)
        return failed

    with ThreadPoolExecutor(options.jobs) as pool:
        return sum(pool.map(call, missing))


def is_done(options: argparse.Namespace, method: str, seed: int) -> bool:
    """Return whether a run has a result for the same recipe, text and tests."""
    path = result_path(options.out, method, seed)
    return path.exists() and json.loads(path.read_text())["key"] == run_key(options, method, seed)


def result_path(out: Path, method: str, seed: int, suffix: str = ".json") -> Path:
    return out / f"{method}-{seed}{suffix}"


def run_key(options: argparse.Namespace, method: str, seed: int) -> str:
    """Return a hash of everything that a result depends on."""
    from calque.tokens.prepare import open_prepared

    text = [[*corpus.languages, *corpus.n_tokens] for corpus in open_prepared(options.text)]
    recipe = make_recipe(options, method, seed)
    weights = hash_weights(options.start)
    content = [weights, options.languages, recipe and [recipe.fingerprint(), text]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@cache
def hash_weights(start: str) -> str:
    """Return a hash of the weights of an encoder."""
    from calque.models.loading import find_model

    digest = hashlib.sha256()
    for path in sorted(find_model(start).glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_recipe(options: argparse.Namespace, method: str, seed: int) -> Recipe | None:
    """Return a bundled recipe, shortened to the steps of the study."""
    from calque.training.recipe_io import load_recipe

    name, overrides = ALL[method]
    if name is None:
        return None
    full = load_recipe(name)
    warmup = round(full.schedule.warmup / full.schedule.steps * options.steps)
    # The best maps by validation loss are kept: validate as often as in a full run.
    validations = full.schedule.steps // full.checkpoints.validate_every
    settings = [
        f"model.start={options.start}",
        f"seed={seed}",
        f"schedule.steps={options.steps}",
        f"schedule.warmup={warmup}",
        "checkpoints.every=1000000000",
        f"checkpoints.validate_every={max(1, options.steps // min(validations, 20))}",
        "telemetry.every=100",
        f"engine.compile={'auto' if options.compile else 'false'}",
        "checkpoints.dtype=float32",
    ]
    return load_recipe(name, [*overrides, *settings, *options.set])


def do_run(options: argparse.Namespace, method: str, seed: int) -> None:
    """Train one method with one seed, score it, and write the result."""
    import torch

    from calque.io.files import write_atomically

    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = result_path(options.out, method, seed)
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=options.out) as scratch:
        folder = result_path(options.out, method, seed, ".run") if options.keep else Path(scratch)
        if options.keep:
            shutil.rmtree(folder, ignore_errors=True)  # left by a failed run or another recipe
        started = time.perf_counter()
        model = train_method(options, method, seed, folder)
        trained = time.perf_counter()
        scores = score_model(options, model, device)
    result = {
        "method": method,
        "seed": seed,
        "key": run_key(options, method, seed),
        "steps": 0 if method in DETERMINISTIC else options.steps,
        "text": describe_text(options.text),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "train_seconds": round(trained - started, 1),
        "score_seconds": round(time.perf_counter() - trained, 1),
        "scores": scores,
    }
    with write_atomically(path) as stream:
        json.dump(result, stream)


def describe_text(text: Path) -> dict[str, int]:
    """Count the languages and linked pairs of the text."""
    from calque.tokens.prepare import open_prepared

    linked = [corpus for corpus in open_prepared(text) if corpus.linked]
    languages = {language for corpus in linked for language in corpus.languages}
    return {"languages": len(languages - {"en"}), "pairs": sum(c.n_examples for c in linked)}


def train_method(options: argparse.Namespace, method: str, seed: int, folder: Path) -> Path:
    """Train a method and return the folder of its model, or that of the start for `none`."""
    from calque.models.loading import find_model
    from calque.training.loop import train

    recipe = make_recipe(options, method, seed)
    if recipe is None:
        return find_model(options.start)
    return train(recipe, output=folder, prepared=options.text).model


# Scores.


def score_model(
    options: argparse.Namespace, folder: Path, device: str
) -> dict[str, dict[str, list[float]]]:
    """Return the scores of a model in percent by measure, language and layer."""
    from calque.models.encoder import Encoder
    from calque.models.language_maps import ABOUT_FILE, load_maps

    # In float32, so that differences are only due to training.
    encoder = Encoder.load(folder, device=device)
    if (folder / ABOUT_FILE).exists():
        maps = load_maps(folder, encoder.hidden_size, encoder.n_layers)
        encoder.maps = maps.to(device)
    scores = score_retrieval(encoder, options.tatoeba, options.languages.split(","))
    scores[SEPARATE] = score_alignment(encoder, options.gold, "separate")
    if encoder.maps is None:
        scores[JOINT] = score_alignment(encoder, options.gold, "joint")
    return scores


def score_retrieval(
    encoder: Encoder, data: Path, languages: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Return the accuracy on Tatoeba, as the mean of both directions and into English."""
    from calque.evaluation.settings import TaskSettings
    from calque.evaluation.tasks.tatoeba import measure as measure_tatoeba

    found = measure_tatoeba(encoder, data, languages=languages, settings=TaskSettings())
    return {
        measure: {
            each.language: [metrics[name] for metrics in each.layers.values()] for each in found
        }
        for measure, name in ((TATOEBA, "accuracy"), (TO_ENGLISH, "accuracy_to_english"))
    }


def score_alignment(encoder: Encoder, data: Path, encode: Any) -> dict[str, list[float]]:
    """Return the AER of mutual argmax on every gold set."""
    from calque.evaluation.tasks.alignment_error import list_languages, read_test
    from calque.word_alignment.neural import WordAligner
    from calque.word_alignment.scoring import count_layers

    found = {}
    for name in list_languages(data):
        src, _, tgt = name.partition("-")
        sides = None if encoder.maps is None else (src, tgt)
        aligner = WordAligner(
            encoder, method="argmax", encode=encode, languages=sides, spelling=0.0
        )
        counts = count_layers(aligner, *read_test(data, name), range(encoder.n_layers + 1))
        found[name] = [100 * by_layer.aer for by_layer in counts.values()]
    return found


# Report.


def write_report(options: argparse.Namespace) -> None:
    """Write tables and plots of all results."""
    results = read_results(options.out)
    path = options.report or options.out / "study.md"
    plots = draw_plots(results, path)
    parts = [
        describe_runs(results),
        tabulate_summary(results),
        *(f"![By layer]({plot.name})" for plot in plots),
        *(f"## {title} by layer\n\n{tabulate_layers(results, m)}" for m, title in MEASURES.items()),
        *(
            f"## {title} by language, at the best layer\n\n{tabulate_languages(results, measure)}"
            for measure, title in MEASURES.items()
        ),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{path}: {sum(map(len, results.values()))} runs of {len(results)} methods")


def read_results(out: Path) -> Results:
    """Read the results of all runs by method, in the order of METHODS and VARIANTS."""
    found: Results = {name: [] for name in ALL}
    for path in sorted(out.glob("*-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found[content["method"]].append(content)
    if not found[NONE]:
        sys.exit(f"{out} has no result of the method {NONE}, with which the others are compared")
    return {name: runs for name, runs in found.items() if runs}


def describe_runs(results: Results) -> str:
    """Describe the runs and the tables."""
    steps = sorted({run["steps"] for runs in results.values() for run in runs} - {0})
    shown = " and ".join(f"{n:,}" for n in steps)
    text, n_layers = results[NONE][0]["text"], len(collect(results[NONE], TATOEBA)[0]) - 1
    languages = ", ".join(results[NONE][0]["scores"][TATOEBA])
    pairs = ", ".join(results[NONE][0]["scores"][SEPARATE])
    devices = ", ".join(sorted({run["device"] for runs in results.values() for run in runs}))
    return f"""# Explicit alignment by method and layer

{text["pairs"]:,} linked pairs of English and {text["languages"]} languages; {shown} steps; layers
0 (the embedding) to {n_layers}; {devices}. Tatoeba: {languages}. AER: {pairs}.

Means ± standard deviations over seeds (ddof 1). In parentheses: the difference from the start,
which has no seeds. The best layer is that with the best mean over seeds on these tests. Linear maps
are fitted to separately encoded sentences."""


def collect(runs: Iterable[dict[str, Any]], measure: str, language: str | None = None) -> Values:
    """Return runs × layers of a language or of the mean of all; empty if not measured."""
    tables = [run["scores"][measure] for run in runs if measure in run["scores"]]
    if language is None:
        return np.array([np.mean(list(table.values()), axis=0) for table in tables])
    return np.array([table[language] for table in tables])


def find_best(values: Values, measure: str) -> int:
    """Return the layer with the best mean."""
    return int((SIGNS[measure] * values.mean(axis=0)).argmax())


def tabulate_summary(results: Results) -> str:
    """Compare methods at their best layers and, for retrieval, at the last layer."""
    header = [
        "",
        "seeds",
        "Tatoeba, best layer",
        "last layer",
        *list(MEASURES.values())[1:],
        "seconds",
    ]
    rows = []
    for method, runs in results.items():
        seconds = np.mean([run["train_seconds"] for run in runs])
        cells = [method, "–" if method in DETERMINISTIC else str(len(runs))]
        for measure, layer in ((TATOEBA, None), (TATOEBA, -1), (SEPARATE, None), (JOINT, None)):
            values, old = collect(runs, measure), collect(results[NONE], measure)
            if not len(values):
                cells.append("–")
                continue
            here = find_best(values, measure) if layer is None else layer
            then = find_best(old, measure) if layer is None else layer
            note = f" at {here}" if layer is None else ""
            before = None if method == NONE else old[:, then]
            cells.append(show(values[:, here], before, note=note))
        rows.append([*cells, f"{seconds:.0f}" if method != NONE else "–"])
    return make_table(header, rows)


def tabulate_layers(results: Results, measure: str) -> str:
    """Compare methods layer by layer."""
    old = collect(results[NONE], measure)
    rows = []
    for method, runs in results.items():
        values = collect(runs, measure)
        if len(values):
            before = [None] * old.shape[1] if method == NONE else old.T
            columns = zip(values.T, before, strict=True)
            rows.append([method, *(show(column, then) for column, then in columns)])
    return make_table(["layer", *map(str, range(old.shape[1]))], rows)


def tabulate_languages(results: Results, measure: str) -> str:
    """Compare methods language by language, each at its best layer."""
    languages = list(results[NONE][0]["scores"][measure])
    rows = []
    for method, runs in results.items():
        values = collect(runs, measure)
        if len(values):
            layer = find_best(values, measure)
            cells = [show(collect(runs, measure, name)[:, layer]) for name in languages]
            rows.append([method, str(layer), *cells])
    return make_table(["", "layer", *languages], rows)


def draw_plots(results: Results, report: Path) -> list[Path]:
    """Plot all measures by layer, a few methods per plot, if matplotlib is installed."""
    from calque.errors import MissingExtra
    from calque.report.plots import COLORS, check_plot, plot_layers, save_plot

    others = [name for name in results if name != NONE]
    n_lines = len(COLORS) - 1
    groups = [others[start : start + n_lines] for start in range(0, len(others), n_lines)]
    paths = []
    for number, group in enumerate(groups, start=1):
        path = report.with_name(f"{report.stem}-{number}.png")
        try:
            check_plot(path)
        except MissingExtra as error:
            print(f"no plots: {error}")
            return []
        panels = {
            title: {
                method: dict(enumerate(values.mean(axis=0).tolist()))
                for method in (NONE, *group)
                if len(values := collect(results[method], measure))
            }
            for measure, title in MEASURES.items()
        }
        save_plot(plot_layers(panels, label="%"), path)
        paths.append(path)
    return paths


if __name__ == "__main__":
    main()
