"""Train and test the methods of all papers from an encoder that never saw a translation.

    python benchmarks/mono_pack.py DATA -o PACK
    python benchmarks/mono_study.py PACK -o OUT [--jobs 8] [--minutes 9] [--methods align,weak]
    python benchmarks/mono_study.py --tiny

The starts are `mono` (the recipe calque-base-mono), `small`, the same with a smaller shape, and
`english`, which knows English only. Every method is trained from one of them with several seeds,
those of one paper for equally many steps, and tested by `calque evaluate` right after training.
METHODS says what each of them is.

A run writes OUT/results/METHOD-SEED, a results folder for `calque compare`, and OUT/cells/
METHOD-SEED.json with its scores and seconds, and is skipped if this file exists. Worker processes
execute the runs in the order of their importance, all seeds of a method together. When the minutes
are over, unfinished runs are stopped; the same command continues them, on another machine if OUT
has mono/ and english/ with their models, cells/ and results/. benchmarks/mono_report.py makes
tables of the results. `--tiny` trains tiny models for a few steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mono_pack import pack_tiny
from run_queue import RunQueue, execute_runs

MONO, SMALL, ENGLISH = "mono", "small", "english"
TEXT, PAIRS = "text", "pairs"  # of the starts, and of the methods
VECTORS, SKIPGRAMS, VECTOR_SCORES = "vectors", "skipgrams", "vector-scores"
# The first start is trained with little competition for the GPU, since most runs wait for it.
EARLY_RUNS = 4
DIRECTIONS = ("en", "de", "fr", "ja")
DEMO = Path(__file__).parents[1] / "src" / "calque" / "data" / "demo.tsv"


@dataclass(frozen=True)
class Sizes:
    """Shapes and lengths of the study."""

    mono: tuple[int, int, int, int] = (8, 384, 6, 768)  # layers, width, heads, inner width
    small: tuple[int, int, int, int] = (4, 256, 4, 512)
    start_steps: int = 4000
    start_tokens: int = 131_072
    english_steps: int = 1500
    english_vocabulary: int = 16_000
    steps: int = 400
    batch_tokens: int = 16_384  # of one of two objectives
    linked_steps: int = 1000  # of 128 pairs
    grown_steps: int = 600
    pairs: int = 128
    words: int = 1024
    vector_languages: tuple[str, ...] = ("de", "es", "fr", "ru", "fi", "ro", "tr", "hi")
    vector_sentences: int = 30_000  # per language
    min_count: int = 5
    tests: int = 300
    examples: Mapping[str, int] = field(
        default_factory=lambda: {"pos": 8000, "ner": 8000, "parsing": 4000, "xquad": 1500}
    )


TINY = Sizes(
    mono=(2, 32, 2, 64),
    small=(1, 32, 2, 64),
    start_steps=2,
    start_tokens=512,
    english_steps=2,
    english_vocabulary=300,
    steps=5,
    batch_tokens=512,
    linked_steps=2,
    grown_steps=2,
    pairs=4,
    words=16,
    vector_languages=("de",),
    vector_sentences=20,
    min_count=1,
    tests=2,
    examples={"pos": 2, "ner": 2},
)
TINY_TASKS = ("pos", "tatoeba", "word_alignment")

# Methods.

TESTED = ("pos", "ner", "tatoeba", "word_alignment")
WITH_QUESTIONS = (*TESTED, "xquad")
WITH_TREES = (*TESTED, "parsing")
MLM = "{{kind: masked_lm, batch_tokens: {t}}}"
TLM = "{{kind: translation_lm, batch_tokens: {t}, positions: continue}}"
DWA = "{{kind: denoising_alignment, batch_tokens: {t}}}"
SENTENCES = "{{kind: sentence_contrastive, batch_tokens: {t}, temperature: 0.05}}"
DCCA = (
    "{{kind: static_target, loss: dcca, batch_examples: {words}, components: 10, ridge: 1.0, "
    "ridge_unit: variance}}"
)
MSE = "{{kind: static_target, loss: mse, batch_examples: {words}}}"
WEAK = "{{kind: word_contrastive, batch_examples: {pairs}, batch_tokens: 24576}}"
PLAIN = "{{kind: masked_lm, batch_tokens: {2t}}}"  # as many tokens as two objectives have
LAMBDA = "objectives.0.hidden_weight=0.0"
# Settings of fine-tuning by task. Rates are higher than the defaults, because the encoders know
# less than calque-mini, and batches larger, because several runs share a GPU.
TUNING: dict[str, dict[str, Any]] = {
    "pos": {"learning_rate": 2e-4, "batch_tokens": 4096, "epochs": 5},
    "ner": {"learning_rate": 2e-4, "batch_tokens": 4096, "epochs": 5},
    "parsing": {"learning_rate": 3e-4, "batch_tokens": 4096, "epochs": 6},
    "xnli": {"epochs": 10},
    "xquad": {},
}
GROWN_TUNING = TUNING | {"pos": {"learning_rate": 1e-4}, "ner": {"learning_rate": 1e-4}}


@dataclass(frozen=True)
class Method:
    """How a model is trained and tested.

    `text` is the prepared text, `start` what the training starts from: a start, or another method
    with the same seed. Without a recipe, the start itself is tested. `grow` are options of `calque
    grow`, for models that first get a multilingual vocabulary.
    """

    title: str
    recipe: str | None
    changes: tuple[str, ...] = ()
    start: str = MONO
    text: str = PAIRS
    tasks: tuple[str, ...] = TESTED
    tuning: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: TUNING)
    settings: Mapping[str, Any] = field(default_factory=dict)
    languages: Sequence[str] | None = None
    grow: Mapping[str, Any] | None = None
    priority: int = 5
    once: bool = False  # trained once, fine-tuned with all seeds


def from_objectives(title: str, objectives: str, **others: Any) -> Method:
    """Return a method that differs from XLM-Align in its objectives."""
    return Method(title, "xlm-align", (f"objectives=[{objectives}]",), **others)


def align(title: str, *changes: str, **others: Any) -> Method:
    """Return XLM-Align with changes of its second objective."""
    own = tuple(f"objectives.1.{change}" for change in changes)
    tokens = tuple(f"objectives.{number}.batch_tokens={{t}}" for number in (0, 1))
    return Method(title, "xlm-align", tokens + own, **others)


def linked(title: str, recipe: str, *changes: str, **others: Any) -> Method:
    """Return a method that learns from linked words."""
    options = {"text": "linked", "tasks": WITH_TREES} | others
    return Method(title, recipe, ("objectives.0.batch_examples={pairs}", *changes), **options)


def grown(
    title: str, initialize: str, *changes: str, recipe: str = "metaxlm", **others: Any
) -> Method:
    """Return a method that starts from the English model."""
    changes += ("objectives.0.batch_tokens={2t}", "objectives.0.batch_examples=null")
    changes += ("data.max_length=128",)
    grow = {"initialize": initialize} | others.pop("grow", {})
    options: dict[str, Any] = {"start": ENGLISH, "text": TEXT, "tasks": (*WITH_QUESTIONS, "xnli")}
    options |= {"priority": 1} | others
    return Method(title, recipe, changes, grow=grow, tuning=GROWN_TUNING, **options)


def directions(title: str, start: str) -> Method:
    """Return a grown model that learns named entities in four languages, each tested in all."""
    languages = tuple(f"{src}-{tgt}" for src in DIRECTIONS for tgt in DIRECTIONS)
    settings = {"setting": "directions"}
    options: dict[str, Any] = {"tuning": GROWN_TUNING, "settings": settings, "priority": 6}
    options |= {"tasks": ("ner",), "languages": languages}
    return Method(title, None, start=start, **options)


FROZEN = {"setting": "features"}
TEACHER = ("objectives.0.teacher={english}", "tokenizer.path=null", "engine.workers=2")
PLUG = {"setting": "translate-train-all", "epochs": 3}
METHODS: dict[str, Method] = {
    "none": Method("start", None, tasks=(*WITH_QUESTIONS, "parsing"), priority=2),
    # XLM-Align
    "mlm": from_objectives("MLM", PLAIN, tasks=WITH_QUESTIONS, priority=2),
    "tlm": from_objectives("MLM + TLM", f"{MLM}, {TLM}", priority=2),
    "dwa": align("MLM + DWA", "tlm_weight=0.0", priority=7),
    "align": align("MLM + TLM + DWA (XLM-Align)", tasks=WITH_QUESTIONS, priority=2),
    # The same from models that have seen pairs, where self-labels are better than chance.
    "tlm-tlm": from_objectives("MLM + TLM, continued", f"{MLM}, {TLM}", start="tlm", priority=8),
    "tlm-align": align("XLM-Align, from MLM + TLM", start="tlm", priority=4),
    "union": align("union of both directions", "filter=union", start="tlm", priority=4),
    "label-layer": align(
        "labels of a middle layer", "label_layer={middle}", start="tlm", priority=4
    ),
    "pointer-layer": align(
        "pointer at a middle layer", "pointer_layer={middle}", start="tlm", priority=4
    ),
    "unmasked": align("unmasked queries", "queries=unmasked", start="tlm", priority=4),
    "all-queries": align("all aligned queries", "queries=all", start="tlm", priority=4),
    "precise": align(
        "mutual argmax of cosines as labels",
        *("similarity=cosine", "sharpness=null", "labels=argmax", "filter=argmax"),
        start="tlm",
        priority=8,
    ),
    # Wu and Dredze
    "weak": linked("weak alignment", "weak", priority=3),
    "strong": linked("strong alignment", "strong", priority=7),
    "l2": linked("L2, λ = 1", "l2", "objectives.0.parameter_weight=1.0", LAMBDA, priority=7),
    "l2-hidden": linked("L2, English states kept", "l2", priority=7),
    "l2-1000": linked(
        "L2, λ = 1,000", "l2", "objectives.0.parameter_weight=1000.0", LAMBDA, priority=8
    ),
    "noisy": linked("weak alignment, strings of software", "weak", text="noisy", priority=3),
    "none-features": Method(
        "start, frozen", None, settings=FROZEN, tasks=("pos", "ner", "xnli", "parsing"), priority=3
    ),
    "linear": linked(
        "linear maps, frozen",
        "linear-map",
        "objectives.0.solver=procrustes",
        tasks=("pos", "ner", "xnli", "parsing"),
        settings=FROZEN,
        priority=3,
        once=True,
    ),
    "small-none": Method("smaller start", None, start=SMALL, tasks=WITH_TREES, priority=6),
    "small-weak": linked("smaller start, weak alignment", "weak", start=SMALL, priority=8),
    "small-strong": linked("smaller start, strong alignment", "strong", start=SMALL, priority=8),
    # X2S-MA
    "dcca": from_objectives(
        "MLM + DCCA", f"{PLAIN}, {DCCA}", text="taught", tasks=WITH_QUESTIONS, priority=3
    ),
    "mse": from_objectives(
        "MLM + MSE", f"{PLAIN}, {MSE}", text="taught", tasks=WITH_QUESTIONS, priority=3
    ),
    "dcca-skipgram": from_objectives(
        "MLM + DCCA, skip-gram vectors", f"{PLAIN}, {DCCA}", text="taught-skipgram", priority=6
    ),
    # VECO
    "veco": Method(
        "VECO",
        "veco",
        (
            "objectives=[{{kind: cross_attention_lm, pairs: translations, batch_tokens: {t}, "
            "probability: 0.25}}, {{kind: translation_lm, batch_tokens: {t}, probability: 0.25}}]",
            "freeze_steps={fifth}",
        ),
        tasks=WITH_QUESTIONS,
        priority=5,
    ),
    "mbart": Method(
        "mBART",
        "mbart",
        (
            "objectives=[{{kind: denoising_seq2seq, batch_tokens: {t}}}, {{kind: translation, "
            "direction: both, smoothing: 0.0, batch_tokens: {t}}}]",
            "model.decoder={{tie: all, languages: [{languages}]}}",
        ),
        priority=5,
    ),
    "plug-out": Method(
        "VECO, plug-out", None, start="veco", tasks=("xnli",), settings=PLUG, priority=6
    ),
    "plug-in": Method(
        "VECO, plug-in",
        None,
        start="veco",
        tasks=("xnli",),
        settings=PLUG | {"plug": "in"},
        priority=6,
    ),
    # MetaXLM
    "xlm": grown("XLM, from scratch", "none"),
    "metaxlm": grown("MetaXLM", "both"),
    "dict": grown(
        "MetaXLM + Dict, equal text first",
        "both",
        grow={"dictionary": "muse", "prefer": "surface", "average": "weighted"},
    ),
    "dict-paper": grown(
        "MetaXLM + Dict, matched as in the paper", "both", grow={"dictionary": "muse"}
    ),
    "body": grown("MetaXLM, body only", "body", priority=5),
    "embeddings": grown("MetaXLM, embeddings only", "embeddings", priority=5),
    "frozen": grown("MetaXLM, body frozen", "both", recipe="metaxlm-frozen", priority=5),
    "kd": grown("XLM, with a teacher", "none", *TEACHER, recipe="xlm-kd", priority=5),
    "xlm-matched": grown("XLM, compute of both phases", "none", priority=6),
    # Short trainings, for the transfer gap along training.
    "xlm-short": grown("XLM, a tenth of the steps", "none", tasks=("pos", "ner"), priority=6),
    "metaxlm-short": grown(
        "MetaXLM, a tenth of the steps", "both", tasks=("pos", "ner"), priority=6
    ),
    "xlm-directions": directions("XLM, 16 directions", "xlm"),
    "metaxlm-directions": directions("MetaXLM, 16 directions", "metaxlm"),
    # Combinations
    "sentences": from_objectives("MLM + sentence contrast", f"{MLM}, {SENTENCES}", priority=5),
    "align-sentences": from_objectives(
        "XLM-Align + sentence contrast", f"{MLM}, {DWA}, {SENTENCES}", priority=5
    ),
    "dcca-weak": from_objectives(
        "MLM + DCCA + weak alignment", f"{PLAIN}, {DCCA}, {WEAK}", text="taught", priority=5
    ),
    "weak-mlm": from_objectives(
        "MLM + weak alignment", f"{PLAIN}, {WEAK}", text="taught", priority=5
    ),
}
METHODS["veco-grown"] = Method(
    "VECO from MetaXLM", "veco", METHODS["veco"].changes, start="metaxlm", priority=5
)
METHODS["metaxlm-tlm"] = Method(
    "MLM + TLM from MetaXLM", "xlm-align", METHODS["tlm"].changes, start="metaxlm", priority=5
)
PREPARED = {  # the folders of prepared text, and what has to exist before they can be written
    PAIRS: (),
    TEXT: (),
    "linked": (),
    "noisy": (),
    ENGLISH: (),
    "taught": (VECTORS,),
    "taught-skipgram": (SKIPGRAMS,),
}


def main() -> None:
    """Do what is missing of the study, or a tiny one."""
    options = parse_options()
    if options.tiny:
        return run_tiny(options)
    if options.pack is None:
        return print("skipped: this study needs a PACK of benchmarks/mono_pack.py, or --tiny")
    n_missing = run_study(options)
    if n_missing:
        sys.exit(f"{n_missing} runs are missing: repeat the command to continue")
    return None


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, nargs="?", help="written by benchmarks/mono_pack.py")
    parser.add_argument("-o", "--out", type=Path, default=Path("mono"), help="folder of results")
    parser.add_argument("--methods", default=",".join(METHODS), help="separated by commas")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes; 1: no other process")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit")
    parser.add_argument("--eager", action="store_true", help="do not compile on a GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on sentences of the demo")
    options = parser.parse_args()
    options.start, options.methods = time.monotonic(), options.methods.split(",")
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"there is no method {min(unknown)}: choose from {', '.join(METHODS)}")
    options.sizes = Sizes()
    return options


def run_tiny(options: argparse.Namespace) -> None:
    """Execute some methods on the sentences of the demo."""
    every = options.methods == list(METHODS)
    with tempfile.TemporaryDirectory() as folder:
        methods = ["align", "dict", "dcca"] if every else options.methods
        run_tiny_study(Path(folder), methods, 1)


def run_tiny_study(folder: Path, methods: Sequence[str], seeds: int) -> Path:
    """Execute methods with tiny models; return the folder of the results."""
    options = argparse.Namespace(
        pack=pack_tiny(folder),
        out=folder / "out",
        methods=list(methods),
        seeds=seeds,
        sizes=TINY,
        jobs=1,
        minutes=60,
        start=time.monotonic(),
        eager=True,
        tiny=True,
    )
    n_missing = run_study(options)
    assert not n_missing, "a run failed"
    return Path(options.out)


# Runs.


@dataclass(frozen=True)
class StudyRun:
    """A start, a prepared text, the static vectors, or a method with a seed."""

    kind: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}" if self.seed else self.kind

    @cached_property
    def method(self) -> Method:
        return METHODS[self.kind]

    @property
    def family(self) -> str:
        """The seeds of a method can use the same compiled step."""
        return self.kind

    @property
    def priority(self) -> int:
        """Texts come first, then starts and vectors, because others wait for them."""
        if self.seed:
            return self.method.priority
        if self.kind in (SMALL, VECTOR_SCORES):
            return 5
        return list(PREPARED).index(self.kind.removesuffix(".text")) - 9 if self.is_text else -1

    @property
    def order(self) -> tuple[Any, ...]:
        return (self.kind, self.seed)

    @property
    def is_text(self) -> bool:
        return self.kind.endswith(".text")

    @property
    def needs(self) -> tuple[StudyRun, ...]:
        """The runs whose results this one reads."""
        if self.is_text:
            return tuple(map(StudyRun, PREPARED[self.kind.removesuffix(".text")]))
        if not self.seed:
            texts = (f"{TEXT}.text",)
            known = {ENGLISH: (*texts, f"{ENGLISH}.text"), VECTORS: (MONO,)}
            known |= {SKIPGRAMS: (VECTORS,), VECTOR_SCORES: (SKIPGRAMS,)}
            known[SMALL] = (*texts, MONO)  # which is trained faster alone
            return tuple(map(StudyRun, known.get(self.kind, texts)))
        method = self.method
        start = StudyRun(method.start, self.seed if method.start in METHODS else 0)
        if method.recipe is None:
            return (start,)
        if method.once and self.seed > 1:
            return (start, StudyRun(self.kind, 1))
        return (start, StudyRun(f"{method.text}.text"))


def find_missing(out: Path, runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Return the runs that are not done, and all that is missing for them, each once."""
    found: dict[StudyRun, None] = {}
    while runs := [run for run in runs if run not in found and not is_done(out, run)]:
        found |= dict.fromkeys(runs)
        runs = [need for run in runs for need in run.needs]
    return list(found)


def product_path(out: Path, run: StudyRun) -> Path:
    """Return the file or folder that exists when a run is done."""
    if run.is_text:
        return out / run.kind / "done"
    return out / "cells" / f"{run.name}.json" if run.seed else out / run.kind / "done"


def is_done(out: Path, run: StudyRun) -> bool:
    """Return whether there is a result and, where others start from it, the model."""
    is_start = run.kind in {method.start for method in METHODS.values()} & METHODS.keys()
    needs_model = bool(run.seed) and (is_start or (run.method.once and run.seed == 1))
    model = out / "runs" / run.name / "model"
    return product_path(out, run).exists() and (model.exists() or not needs_model)


def run_study(options: argparse.Namespace) -> int:
    """Execute the runs without results; return how many are missing afterwards."""
    options.pack, options.out = options.pack.resolve(), options.out.resolve()
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    seeds = range(1, options.seeds + 1)
    wanted = [StudyRun(name, seed) for name in options.methods for seed in seeds]
    wanted += [StudyRun(VECTOR_SCORES)] * ("dcca" in options.methods and not options.tiny)
    to_do = find_missing(options.out, wanted)
    print(f"{len(to_do)} runs to do, {options.jobs} at a time", flush=True)
    done = partial(is_done, options.out)

    def is_ready(run: StudyRun) -> bool:
        n_running = sum(other.seed > 0 for other in queue.running)
        is_early = StudyRun(MONO) in to_do and not done(StudyRun(MONO))
        may_start = not (is_early and run.seed and n_running >= EARLY_RUNS)
        return may_start and all(map(done, run.needs))

    queue = RunQueue(options, to_do, is_ready)
    execute_runs(options, queue, execute)
    return sum(not done(run) for run in wanted)


def execute(options: argparse.Namespace, run: StudyRun) -> None:
    """Execute one run, and record that it is done."""
    begin = time.perf_counter()
    if run.is_text:
        prepare_text(options, run.kind.removesuffix(".text"))
    elif run.kind == VECTORS:
        extract_and_map(options)
    elif run.kind == SKIPGRAMS:
        learn_skipgrams(options)
    elif run.kind == VECTOR_SCORES:
        score_vectors(options)
    elif not run.seed:
        train_start(options, run.kind)
    else:
        model = train_method(options, run)
        if product_path(options.out, run).exists():  # only the model was missing
            return
        trained = time.perf_counter()
        records = test_method(options, run, model)
        seconds = {"train": trained - begin, "test": time.perf_counter() - trained}
        write_cell(options, run, records, seconds)
        return
    product = product_path(options.out, run)
    product.parent.mkdir(exist_ok=True)
    product.write_text(f"{time.perf_counter() - begin:.1f}\n")


# Texts, starts and vectors.


def prepare_text(options: argparse.Namespace, name: str) -> None:
    """Prepare the text of several methods once."""
    from calque import prepare

    pack, out = options.pack, options.out
    bitext = [
        f"{{path: {pack}/bitext/en-*.tsv, kind: bitext, include_tags: [{tags}], weight: {weight}}}"
        for tags, weight in (("tatoeba, bible, joshua", 2.0), ("debian, libreoffice", 1.0))
    ]
    if options.tiny:
        bitext = bitext[:1]
    pairs = f"{{path: {pack}/pairs/en-*.tsv, kind: bitext}}"
    words = f"{{path: {out}/{VECTORS}/KIND.mapped/*.bin, kind: vectors}}"
    links = f"{{path: {pack}/NAME/en-*.text, kind: bitext, links: {pack}/NAME/en-*.links}}"
    sources = {
        TEXT: bitext,
        PAIRS: [pairs],
        "linked": [links.replace("NAME", "linked")],
        "noisy": [links.replace("NAME", "linked" if options.tiny else "noisy")],
        "taught": [pairs, words.replace("KIND", "x2static"), links.replace("NAME", "linked")],
        "taught-skipgram": [pairs, words.replace("KIND", "skipgram")],
        ENGLISH: [f"{{path: {out}/{ENGLISH}.text/en.txt, kind: text}}"],
    }[name]
    settings = [
        f"data.sources=[{', '.join(sources)}]",
        f"data.hold_out={'null' if options.tiny else DEMO}",
        f"tokenizer.path={pack}/tokenizer",
        "objectives=[{kind: masked_lm}]",
    ]
    if name == ENGLISH:
        settings[2] = f"tokenizer.vocab_size={options.sizes.english_vocabulary}"
        settings += ["tokenizer.path=null", "tokenizer.sample_characters=5000000"]
        write_english(options, out / f"{ENGLISH}.text" / "en.txt")
    folder = out / f"{name}.text" / "prepared"
    workers = 1 if options.tiny else None
    prepare("calque-base-mono", output=folder, settings=settings, workers=workers)


def write_english(options: argparse.Namespace, path: Path) -> None:
    """Write the English sentences of all bitexts, each once."""
    from calque.io.bitext import read_bitext

    sentences: dict[str, None] = {}
    for bitext in sorted((options.pack / "bitext").glob("en-*.tsv")):
        sentences |= dict.fromkeys(pair.src for pair in read_bitext(bitext))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")


def train_start(options: argparse.Namespace, name: str) -> None:
    """Train a start by masked language modeling alone, and store it in half precision."""
    sizes = options.sizes
    names = ("layers", "hidden", "heads", "intermediate")
    shape = sizes.small if name == SMALL else sizes.mono
    steps, tokens = sizes.start_steps, sizes.start_tokens
    if name == SMALL:
        tokens //= 2
    elif name == ENGLISH:
        steps, tokens = sizes.english_steps, 2 * sizes.batch_tokens
    settings = [
        *(f"model.{key}={value}" for key, value in zip(names, shape, strict=True)),
        *common_settings(options, steps, 8e-4 if name != ENGLISH else 1e-3),
        f"objectives.0.batch_tokens={tokens}",
        f"schedule.warmup={round(0.075 * steps)}",
        f"engine.compile={'false' if options.eager else 'auto'}",
    ]
    text = ENGLISH if name == ENGLISH else TEXT
    halve(train("calque-base-mono", options, name, settings, text))


def halve(model: Path) -> None:
    """Store the weights in bf16: half as much to copy, and the same start everywhere."""
    import torch
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    weights = {name: weight.to(torch.bfloat16) for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})


def extract_and_map(options: argparse.Namespace) -> None:
    """Extract static vectors from the start, and map them into one space."""
    out = options.out / VECTORS
    write_sides(options, out / "text")
    study_vectors(options, "x2static", "extract", out / "text", "-o", out)
    map_kind(options, "x2static")


def learn_skipgrams(options: argparse.Namespace) -> None:
    """Learn skip-gram vectors from the same text, and map them into one space."""
    out = options.out / VECTORS
    width = options.sizes.mono[1]
    study_vectors(options, "skipgram", "skipgram", out / "text", "-o", out, "--width", width)
    map_kind(options, "skipgram")


def map_kind(options: argparse.Namespace, kind: str) -> None:
    """Map vectors into one space without a dictionary."""
    from calque import map_vectors

    out = options.out / VECTORS
    map_vectors(
        sorted((out / kind).glob("*.vec")),
        output=out / f"{kind}.mapped",
        pivot="en",
        method="identical" if options.tiny else "unsupervised",
        space="joint",
        binary=True,
    )


def score_vectors(options: argparse.Namespace) -> None:
    """Compare other vectors and other maps, for the table of `static_study.py table`."""
    out = options.out / VECTORS
    study_vectors(options, "pooling", "extract", out / "text", "-o", out)
    for kind in ("x2static", "pooling", "skipgram"):
        methods = "unaligned,supervised,unsupervised,refine,rcsls,selected"
        study_vectors(options, kind, "map", out, "--methods", methods)


def study_vectors(options: argparse.Namespace, kind: str, *arguments: object) -> None:
    """Run a step of benchmarks/static_study.py for one kind of vectors."""
    import static_study
    import torch

    pack, device = options.pack, "cuda" if torch.cuda.is_available() else "cpu"
    languages = ",".join(options.sizes.vector_languages)
    common = ["--kinds", kind, "--languages", languages, "--device", device]
    common += ["--model", options.out / MONO / "model", "--min-count", options.sizes.min_count]
    common += ["--muse", pack / "muse", "--similarity", pack / "word_similarity"]
    static_study.run([str(argument) for argument in (*common, *arguments)])


def write_sides(options: argparse.Namespace, folder: Path) -> None:
    """Write sentences of every language, each once and as long as the study needs."""
    import lzma

    from calque.io.bitext import read_bitext

    folder.mkdir(parents=True, exist_ok=True)
    sides: dict[str, dict[str, None]] = {"en": {}}
    for language in options.sizes.vector_languages:
        sides[language] = {}
        for pair in read_bitext(options.pack / PAIRS / f"en-{language}.tsv"):
            sides["en"][pair.src] = sides[language][pair.tgt] = None
    for language, found in sides.items():
        step = max(1, len(found) // options.sizes.vector_sentences)
        kept = list(found)[::step]
        with lzma.open(folder / f"{language}.txt.xz", "wt", encoding="utf-8", preset=0) as stream:
            stream.writelines(f"{sentence}\n" for sentence in kept)


# Methods.


def common_settings(options: argparse.Namespace, steps: int, rate: float) -> list[str]:
    """Return the changes of all recipes."""
    return [
        "model.dropout=0.0",  # a short run underfits rather than overfits
        f"data.validation_examples={2 if options.tiny else 20}",
        f"optimizer.learning_rate={rate}",
        f"schedule.steps={steps}",
        f"schedule.warmup={steps // 10}",
        f"telemetry.every={max(1, steps // 10)}",
        "checkpoints.every=1000000000",
        "checkpoints.validate_every=1000000000",
    ]


def train(
    recipe: str, options: argparse.Namespace, folder: str, settings: list[str], text: str
) -> Path:
    """Train by a recipe on prepared text, and return the folder of the model."""
    import calque

    run = options.out / folder
    model = run / "model"
    if not model.exists():
        prepared = options.out / f"{text}.text" / "prepared"
        model = calque.train(recipe, output=run, settings=settings, prepared=prepared).model
        for checkpoint in run.glob("step-*"):  # all runs together would fill a disk
            shutil.rmtree(checkpoint)
    return model


def train_method(options: argparse.Namespace, run: StudyRun) -> Path:
    """Train a method, unless it has no recipe, and return the folder of the model."""
    method, sizes = run.method, options.sizes
    seed = 1 if method.once else run.seed
    start = Path(method.start if method.start not in METHODS else f"runs/{method.start}-{seed}")
    model: Path = options.out / start / "model"
    if method.recipe is None:
        return model
    if method.grow is not None:
        model = grow_start(options, run)
    values = {
        "t": sizes.batch_tokens,
        "2t": 2 * sizes.batch_tokens,
        "pairs": sizes.pairs,
        "words": sizes.words,
        "fifth": sizes.steps // 5,
        "middle": sizes.mono[0] * 2 // 3,
        "english": options.out / ENGLISH / "model",
        "languages": ", ".join(["en", *list_languages(options)]),
    }
    is_linked = method.text in ("linked", "noisy")
    steps = sizes.linked_steps if is_linked else sizes.steps
    if method.grow is not None:
        steps = sizes.grown_steps + sizes.english_steps * (run.kind == "xlm-matched")
        if run.kind.endswith("-short"):
            steps = max(1, sizes.grown_steps // 10)
    rate = 1e-4 if is_linked else 5e-4
    is_compiled = not options.eager and not is_linked  # whose steps are small
    settings = [
        f"model.start={model}",
        f"seed={run.seed}",
        *common_settings(options, steps, rate),
        f"engine.compile={'auto' if is_compiled else 'false'}",
        "engine.accumulation=1",
        *(fill(change, values) for change in method.changes),
    ]
    trained = train(method.recipe, options, f"runs/{run.kind}-{seed}", settings, method.text)
    encoder = trained / "encoder"  # of an encoder–decoder
    return encoder if encoder.is_dir() else trained


def list_languages(options: argparse.Namespace) -> list[str]:
    """Return the languages of the pairs besides English."""
    return sorted(path.stem.removeprefix("en-") for path in (options.pack / PAIRS).glob("en-*.tsv"))


def fill(text: str, values: Mapping[str, object]) -> str:
    """Replace {t} and so on by their values, and double braces by single ones.

    >>> fill("[{{kind: masked_lm, batch_tokens: {2t}}}]", {"2t": 8})
    '[{kind: masked_lm, batch_tokens: 8}]'
    """
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text.replace("{{", "{").replace("}}", "}")


def grow_start(options: argparse.Namespace, run: StudyRun) -> Path:
    """Give the English model a multilingual vocabulary; return its folder."""
    from calque import grow

    folder: Path = options.out / "grown" / run.name
    if not folder.exists():
        choices = dict(run.method.grow or {})
        if choices.get("dictionary"):
            choices["dictionary"] = sorted((options.pack / choices["dictionary"]).glob("en-*.txt"))
        tokenizer = options.out / f"{TEXT}.text" / "prepared" / "tokenizer"
        english = options.out / ENGLISH / "model"
        grow(english, tokenizer=tokenizer, output=folder, seed=run.seed, **choices)
    return folder


# Tests.


def test_method(options: argparse.Namespace, run: StudyRun, model: Path) -> list[dict[str, Any]]:
    """Measure a model on all tasks of its method, and return the records."""
    import calque

    method, tests = run.method, options.pack / "tests"
    own = options.out / "models" / run.kind
    link = own / str(run.seed)
    if not link.exists():
        own.mkdir(parents=True, exist_ok=True)
        link.symlink_to(model)
    folder = options.out / "results" / run.name
    records: list[dict[str, Any]] = []
    for task in method.tasks:
        if options.tiny and task not in TINY_TASKS:  # the demo has no data for the others
            continue
        settings: dict[str, Any] = {}
        if task in method.tuning:
            settings = {**method.tuning[task], "test_examples": options.sizes.tests}
            if task in options.sizes.examples:
                settings["train_examples"] = options.sizes.examples[task]
            settings |= method.settings
        result = calque.evaluate(
            f"{run.kind}={own}/{{seed}}",
            data=tests,
            tasks=task,
            seeds=[run.seed],
            languages=method.languages,
            settings=settings,
            output=folder,
            jobs=0,
        )
        if result.n_failed:
            raise RuntimeError(str([row["error"] for row in result.records]))
        records += result.records
    return records


def write_cell(
    options: argparse.Namespace,
    run: StudyRun,
    records: list[dict[str, Any]],
    seconds: dict[str, float],
) -> None:
    """Write the scores of a run: by task and language a list of layers, or one number."""
    import torch

    from calque.io.files import write_atomically

    scores: dict[str, dict[str, list[float]]] = {}
    for row in records:
        by_layer = [row["layers"][str(number)] for number in range(len(row["layers"]))]
        values = [round(value, 2) for value in by_layer or [row["value"]]]
        scores.setdefault(row["task"], {})[row["language"]] = values
    cell = {
        "start": run.method.start,
        "method": run.kind,
        "seed": run.seed,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "scores": scores,
    }
    with write_atomically(product_path(options.out, run)) as stream:
        json.dump(cell, stream)


if __name__ == "__main__":
    main()
