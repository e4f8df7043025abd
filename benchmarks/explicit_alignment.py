"""What explicit alignment does to an encoder: retrieval and word alignment by layer, over seeds.

    calque prepare weak -o TEXT
    python benchmarks/explicit_alignment.py TEXT --tatoeba DIR --gold DIR -o OUT [--jobs 6]
    python benchmarks/explicit_alignment.py --report-only -o OUT

TEXT is a folder made by `calque prepare` from linked bitext. Every method is a recipe that comes
with Calque, from the same encoder on the same text for the same number of steps, their schedules
shortened in proportion. Each run is a process of its own, `--jobs` of them at a time, and leaves
OUT/NAME-SEED.json; a run whose file is there is not made again. OUT/study.md and the pictures are
made of these files, also elsewhere and later (`--report-only`), where matplotlib is.

Tatoeba is the accuracy in both directions, averaged, by cosine of mean-pooled states as they are.
AER is that of mutual argmax, of sentences read apart and read as pairs. With linear maps, states
that are not English are mapped; these maps are of sentences read apart.
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

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.training.recipe import Recipe

    Results = dict[str, list[dict[str, Any]]]
    Values = npt.NDArray[np.float64]

# A recipe and what is changed in it. Those of the first group are run unless others are asked for.
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
    "l2-hidden": ("l2", ("objectives.0.parameter_weight=0.0", "objectives.0.hidden_weight=1.0")),
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
    "mini-align": ("calque-mini-align", ()),  # needs text without links too
}
ALL = METHODS | VARIANTS
# Solved, not trained: the seed changes nothing.
CERTAIN = {NONE, "procrustes", "least-squares"}
LANGUAGES = "de,fr,es,ro,cs,hi,ja,sv,pt,ru,zh,ar,tr,vi,fi"
TATOEBA, APART, JOINT = "tatoeba", "aer_apart", "aer_joint"
MEASURES = {TATOEBA: "Tatoeba accuracy", APART: "AER, read apart", JOINT: "AER, read as pairs"}
TO_ENGLISH = "tatoeba_to_english"
# Whether more is better.
SIGNS = {TATOEBA: 1, APART: -1, JOINT: -1}


def main() -> None:
    """Read the options; do one run, or all that are missing and the report."""
    options = parse_options()
    if options.one is not None:
        method, seed = options.one
        return do_run(options, method, int(seed))
    if not options.report_only and None in (options.text, options.tatoeba, options.gold):
        return print("needs a prepared TEXT, --tatoeba and --gold: skipped")
    n_failed = 0 if options.report_only else do_all(options)
    write_report(options)
    if n_failed:
        sys.exit(f"{n_failed} runs failed: the same command does them again")
    return None


def parse_options() -> argparse.Namespace:
    """Say what there is to choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?", help="a prepared folder of linked bitext")
    parser.add_argument("--tatoeba", type=Path, help="the folder of tatoeba.xxx-eng.xxx")
    parser.add_argument("--gold", type=Path, help="the folder of NAME.text and NAME.gold")
    parser.add_argument("-o", "--out", type=Path, default=Path("study"), help="results go here")
    parser.add_argument("--start", default="calque-mini", help="the encoder to start from")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(ALL)}")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--languages", default=LANGUAGES, help="those of Tatoeba")
    parser.add_argument("--compile", action="store_true", help="worth its minute in long runs")
    parser.add_argument("--set", action="append", default=[], help="changes all recipes: KEY=VALUE")
    parser.add_argument("--keep", action="store_true", help="keep the models, in OUT/NAME.run")
    parser.add_argument("--report", type=Path, help="by default OUT/study.md")
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.methods = list(dict.fromkeys([NONE, *options.methods.split(",")]))
    unknown = [name for name in options.methods if name not in ALL]
    if unknown:
        parser.error(f"no method is called {unknown[0]}: choose from {', '.join(ALL)}")
    return options


# Running.


def do_all(options: argparse.Namespace) -> int:
    """Make the runs whose results are missing, some at a time; count those that fail."""
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        (method, seed)
        for method in options.methods
        for seed in range(1, 2 if method in CERTAIN else options.seeds + 1)
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
    """Tell whether a run's result is there, and is of the same recipe, text and tests."""
    path = result_path(options.out, method, seed)
    return path.exists() and json.loads(path.read_text())["key"] == run_key(options, method, seed)


def result_path(out: Path, method: str, seed: int, suffix: str = ".json") -> Path:
    return out / f"{method}-{seed}{suffix}"


def run_key(options: argparse.Namespace, method: str, seed: int) -> str:
    """Identify all that a result depends on."""
    from calque.tokens.prepare import open_prepared

    text = [[*corpus.languages, *corpus.n_tokens] for corpus in open_prepared(options.text)]
    recipe = make_recipe(options, method, seed)
    weights = hash_weights(options.start)
    content = [weights, options.languages, recipe and [recipe.fingerprint(), text]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@cache
def hash_weights(start: str) -> str:
    """Tell one encoder from another of the same name."""
    from calque.models.loading import find_model

    digest = hashlib.sha256()
    for path in sorted(find_model(start).glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make_recipe(options: argparse.Namespace, method: str, seed: int) -> Recipe | None:
    """Shorten a bundled recipe to the steps of the study."""
    from calque.training.recipe_io import load_recipe

    name, overrides = ALL[method]
    if name is None:
        return None
    usual = load_recipe(name)
    warmup = round(usual.schedule.warmup / usual.schedule.steps * options.steps)
    # Maps are kept by their validation loss: as often as in the whole run, but no more than that.
    validations = usual.schedule.steps // usual.checkpoints.validate_every
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
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=options.out) as place:
        folder = result_path(options.out, method, seed, ".run") if options.keep else Path(place)
        if options.keep:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed, or of another recipe
        started = time.perf_counter()
        model = train_method(options, method, seed, folder)
        trained = time.perf_counter()
        scores = score_model(options, model, device)
    result = {
        "method": method,
        "seed": seed,
        "key": run_key(options, method, seed),
        "steps": 0 if method in CERTAIN else options.steps,
        "text": describe_text(options.text),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "train_seconds": round(trained - started, 1),
        "score_seconds": round(time.perf_counter() - trained, 1),
        "scores": scores,
    }
    with write_atomically(path) as stream:
        json.dump(result, stream)


def describe_text(text: Path) -> dict[str, int]:
    """Count what the runs may read."""
    from calque.tokens.prepare import open_prepared

    linked = [corpus for corpus in open_prepared(text) if corpus.linked]
    languages = {language for corpus in linked for language in corpus.languages}
    return {"languages": len(languages - {"en"}), "pairs": sum(c.n_examples for c in linked)}


def train_method(options: argparse.Namespace, method: str, seed: int, folder: Path) -> Path:
    """Train or solve, and give the folder of the finished model; that of the start for none."""
    from calque.models.loading import find_model
    from calque.training.loop import train

    recipe = make_recipe(options, method, seed)
    if recipe is None:
        return find_model(options.start)
    return train(recipe, output=folder, prepared=options.text).model


# Scoring.


def score_model(
    options: argparse.Namespace, folder: Path, device: str
) -> dict[str, dict[str, list[float]]]:
    """Give the scores of a model in percent: by measure and language, layer after layer."""
    from calque.models.encoder import Encoder
    from calque.models.language_maps import ABOUT_FILE, load_maps

    # In single precision, so that the differences are those of training.
    encoder = Encoder.load(folder, device=device)
    if (folder / ABOUT_FILE).exists():
        maps = load_maps(folder, encoder.hidden_size, encoder.n_layers)
        encoder.maps = maps.to(device)
    scores = score_retrieval(encoder, options.tatoeba, options.languages.split(","))
    scores[APART] = score_alignment(encoder, options.gold, "separate")
    if encoder.maps is None:
        scores[JOINT] = score_alignment(encoder, options.gold, "joint")
    return scores


def score_retrieval(
    encoder: Encoder, data: Path, languages: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Score Tatoeba: the mean of both directions, and the one that is usually given."""
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
    """Score mutual argmax on every gold set."""
    from calque.evaluation.tasks.alignment_error import count_layers, read_test
    from calque.word_alignment.neural import WordAligner

    found = {}
    for name in list_languages(data):
        src, _, tgt = name.partition("-")
        sides = None if encoder.maps is None else (src, tgt)
        aligner = WordAligner(encoder, method="argmax", encode=encode, languages=sides)
        counts = count_layers(aligner, *read_test(data, name), range(encoder.n_layers + 1))
        found[name] = [100 * by_layer.aer for by_layer in counts.values()]
    return found


# Telling.


def write_report(options: argparse.Namespace) -> None:
    """Write tables and pictures of all results that there are."""
    results = read_results(options.out)
    path = options.report or options.out / "study.md"
    pictures = draw_pictures(results, path)
    parts = [
        describe_runs(results),
        tabulate_summary(results),
        *(f"![By layer]({picture.name})" for picture in pictures),
        *(f"## {title} by layer\n\n{tabulate_layers(results, m)}" for m, title in MEASURES.items()),
        *(
            f"## {title} by language, at the best layer\n\n{tabulate_languages(results, measure)}"
            for measure, title in MEASURES.items()
        ),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"{path}: {sum(map(len, results.values()))} runs of {len(results)} methods")


def read_results(out: Path) -> Results:
    """Read what runs have left, by method, in the order of their declaration."""
    found: Results = {name: [] for name in ALL}
    for path in sorted(out.glob("*-*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found[content["method"]].append(content)
    if not found[NONE]:
        sys.exit(f"{out}: no result of {NONE}, to compare others with")
    return {name: runs for name, runs in found.items() if runs}


def describe_runs(results: Results) -> str:
    """Say what was run, and how to read the tables."""
    steps = sorted({run["steps"] for runs in results.values() for run in runs} - {0})
    shown = " and ".join(f"{n:,}" for n in steps)
    text, n_layers = results[NONE][0]["text"], len(collect(results[NONE], TATOEBA)[0]) - 1
    languages = ", ".join(results[NONE][0]["scores"][TATOEBA])
    pairs = ", ".join(results[NONE][0]["scores"][APART])
    devices = ", ".join(sorted({run["device"] for runs in results.values() for run in runs}))
    return f"""# Explicit alignment by method and layer

{text["pairs"]:,} linked pairs of English and {text["languages"]} languages; {shown} steps; layers
0 (the embedding) to {n_layers}; {devices}. Tatoeba: {languages}. AER: {pairs}.

Means ± standard deviations over seeds (ddof 1). In brackets the difference from before; ↑ better
and ↓ worse by more than one standard deviation, which a single run does not have. The best layer is
the best on these tests, by the mean over the seeds. Linear maps are of sentences read apart."""


def collect(runs: Iterable[dict[str, Any]], measure: str, language: str | None = None) -> Values:
    """Give runs × layers: of a language, or the mean of all; nothing if it was not measured."""
    tables = [run["scores"][measure] for run in runs if measure in run["scores"]]
    if language is None:
        return np.array([np.mean(list(table.values()), axis=0) for table in tables])
    return np.array([table[language] for table in tables])


def find_best(values: Values, measure: str) -> int:
    """Give the layer that is best on average."""
    return int((SIGNS[measure] * values.mean(axis=0)).argmax())


def show_cell(values: Values, before: float | None, measure: str, note: str = "") -> str:
    """Write mean ± deviation, the difference, and whether the difference exceeds the deviation."""
    mean = values.mean()
    shown = f"{mean:.1f}{note}"
    spread = values.std(ddof=1) if len(values) > 1 else None
    if spread is not None:
        shown = f"{mean:.1f} ± {spread:.1f}{note}"
    if before is None:
        return shown
    change = round(mean - before, 1) + 0.0  # a difference that shows as none is none
    mark = ""
    if change and spread is not None and abs(mean - before) > spread:
        mark = " ↑" if SIGNS[measure] * change > 0 else " ↓"
    return f"{shown} ({change:+.1f}{mark})".replace("-", "−")


def tabulate_summary(results: Results) -> str:
    """Compare methods at their best layers and, for retrieval, at the last."""
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
        cells = [method, "–" if method in CERTAIN else str(len(runs))]
        for measure, layer in ((TATOEBA, None), (TATOEBA, -1), (APART, None), (JOINT, None)):
            values, old = collect(runs, measure), collect(results[NONE], measure)
            if not len(values):
                cells.append("–")
                continue
            here = find_best(values, measure) if layer is None else layer
            then = find_best(old, measure) if layer is None else layer
            note = f" at {here}" if layer is None else ""
            before = None if method == NONE else float(old[0, then])
            cells.append(show_cell(values[:, here], before, measure, note))
        rows.append([*cells, f"{seconds:.0f}" if method != NONE else "–"])
    return make_table(header, rows)


def tabulate_layers(results: Results, measure: str) -> str:
    """Compare methods layer by layer."""
    old = collect(results[NONE], measure)[0]
    rows = []
    for method, runs in results.items():
        values = collect(runs, measure)
        if len(values):
            before = [None] * len(old) if method == NONE else old.tolist()
            columns = zip(values.T, before, strict=True)
            rows.append([method, *(show_cell(column, then, measure) for column, then in columns)])
    return make_table(["layer", *map(str, range(len(old)))], rows)


def tabulate_languages(results: Results, measure: str) -> str:
    """Compare methods language by language, each method at the layer that is its best."""
    languages = list(results[NONE][0]["scores"][measure])
    rows = []
    for method, runs in results.items():
        values = collect(runs, measure)
        if len(values):
            layer = find_best(values, measure)
            cells = [
                show_cell(collect(runs, measure, name)[:, layer], None, measure)
                for name in languages
            ]
            rows.append([method, str(layer), *cells])
    return make_table(["", "layer", *languages], rows)


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown, figures to the right."""
    rule = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def draw_pictures(results: Results, report: Path) -> list[Path]:
    """Draw all measures by layer, a few methods a picture, if there is matplotlib."""
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
            print(f"no pictures: {error}")
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
