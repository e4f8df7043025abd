"""Static vectors of many languages from real text: extracted, mapped into one space, and scored.

    python benchmarks/static_study.py text BITEXT -o TEXT [--languages de,fr,...]
    python benchmarks/static_study.py skipgram TEXT -o OUT [--device cuda]
    python benchmarks/static_study.py extract TEXT -o OUT [--kinds pooling] [--layer 8]
    python benchmarks/static_study.py map OUT --muse MUSE [--similarity FOLDER] [--device cuda]
    python benchmarks/static_study.py table OUT
    python benchmarks/static_study.py compare OUT --muse MUSE --json FILE
    python benchmarks/static_study.py --tiny

`text` separates the two sides of bitext and drops repetitions, so that the texts of all languages
are of the same kinds, half of them software. `skipgram` learns the vectors of word2vec, `extract`
those of X2Static and of pooling, on the same sentences and words. Vectors from elsewhere, such as
fastText's, can be put into OUT/NAME/de.vec and so on and chosen with `--kinds NAME`. `map` maps
each set of vectors by each method into one space around English and scores it on MUSE's tests in
both directions by CSLS. The last fifth of MUSE's training dictionary is used to choose methods, not
to train. `compare` tests translation from English by `calque evaluate` and stores the differences
of COMPARED with the 95 % intervals of `calque compare` over test words, known or not. Every step
skips the files that exist, so that it can be repeated. `--tiny` runs all steps on the sentences of
the demo with a made-up dictionary.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
from study_cells import compare_results, write_differences

from calque.vectors.corpus import CorpusFilter, CorpusReader

PIVOT = "en"
LANGUAGES = "de,es,fr,it,pt,nl,fi,cs,hu,pl,ru,tr"
MIN_TOKENS, MIN_COUNT = 4, 5
MOST_ENGLISH = 250_000
# Subsampling for a small text; see docs/studies/static-vectors.md.
SUBSAMPLE, EPOCHS = 1e-3, 5
LEARNING = ("semi-supervised", "identical", "unsupervised")
# Methods that leave English as it is: Procrustes with MUSE's refinement, and RCSLS.
TO_ENGLISH = ("refine", "rcsls")
UNALIGNED = "unaligned"
METHODS = (UNALIGNED, "supervised", *TO_ENGLISH, *LEARNING, "selected")
# Vectors and map, and those that they are compared with.
COMPARED = (
    ("x2static.unsupervised", "x2static.unaligned"),
    ("x2static.selected", "x2static.unaligned"),
    ("x2static.supervised", "x2static.unaligned"),
    ("x2static.unsupervised", "x2static.supervised"),
    ("x2static.unsupervised", "x2static.rcsls"),
    ("x2static.unaligned", "skipgram.unsupervised"),
    ("x2static.unaligned", "pooling.unaligned"),
    ("x2static.supervised", "pooling.supervised"),
)


def make_text(options: argparse.Namespace) -> None:
    """Write de.txt.xz and so on with one sentence per line, each once, in random order."""
    sides: dict[str, dict[str, None]] = {PIVOT: {}}
    for language in options.languages.split(","):
        sides[language] = {}
        with lzma.open(options.folder / f"en-{language}.tsv.xz", "rt", encoding="utf-8") as lines:
            for line in lines:
                english, other, _ = line.rstrip("\n").split("\t")
                sides[PIVOT][english] = sides[language][other] = None
    options.output.mkdir(parents=True, exist_ok=True)
    for language, found in sides.items():
        sentences = list(found)
        Random(1).shuffle(sentences)
        kept = sentences[:MOST_ENGLISH] if language == PIVOT else sentences
        with lzma.open(options.output / f"{language}.txt.xz", "wt", encoding="utf-8") as out:
            out.writelines(f"{sentence}\n" for sentence in kept)
        print(f"{language}: {len(kept):,} sentences")


def build_reader(language: str) -> CorpusReader:
    return CorpusReader(language, CorpusFilter(MIN_TOKENS, 1, None), sentence_lines=True)


def find_texts(folder: Path) -> dict[str, Path]:
    return {path.name.split(".")[0]: path for path in sorted(folder.glob("*.txt.xz"))}


def choose_seed(language: str) -> int:
    """Return a seed: with the same one, words of the same rank start alike in all languages."""
    return crc32(language.encode())


def train_all_skipgrams(options: argparse.Namespace) -> None:
    """Learn the skip-gram vectors of all languages."""
    from skipgram import SkipgramSettings, learn_skipgram

    folder = options.output / "skipgram"
    folder.mkdir(parents=True, exist_ok=True)
    for language, text in find_texts(options.folder).items():
        output = folder / f"{language}.vec"
        if output.exists():
            continue
        started = time.perf_counter()
        sentences = list(build_reader(language).read([str(text)]))
        seed = choose_seed(language)
        settings = SkipgramSettings(options.width, min_count=options.min_count, seed=seed)
        vectors = learn_skipgram(sentences, settings, options.device)
        vectors.save(output)
        seconds = time.perf_counter() - started
        print(f"skip-gram {language}: {len(vectors):,} words, {seconds:.0f} s", flush=True)


def extract_all(options: argparse.Namespace) -> None:
    """Extract the vectors of X2Static and of pooling."""
    from calque.models.inference import load_encoder
    from calque.vectors.extract import extract_vectors

    encoder = load_encoder(options.model, options.device)
    suffix = "" if options.layer is None else f"-{options.layer}"
    kinds = [kind for kind in options.kinds.split(",") if kind in ("x2static", "pooling")]
    for language, text in find_texts(options.folder).items():
        for kind in kinds:
            output = options.output / f"{kind}{suffix}" / f"{language}.vec"
            output.parent.mkdir(parents=True, exist_ok=True)
            if output.exists():
                continue
            started = time.perf_counter()
            result = extract_vectors(
                text,
                language=language,
                output=output,
                method=kind,
                model=encoder,
                layer=options.layer,
                seed=choose_seed(language),
                subsample=SUBSAMPLE,
                epochs=EPOCHS,
                min_count=options.min_count,
                min_tokens=MIN_TOKENS,
                min_sentences=1,
                max_sentences=0,
                sentence_lines=True,
            )
            seconds = time.perf_counter() - started
            print(
                f"{kind} {language}: {result.n_words:,} words of {result.n_running_words:,} "
                f"running, {result.corpus.n_sentences:,} sentences, {seconds:.1f} s",
                flush=True,
            )


def map_all(options: argparse.Namespace) -> None:
    """Map and score every set of vectors by every method; write one file of results each."""
    from calque.vectors.static import WordVectors

    for kind in options.kinds.split(","):
        folder = options.folder / kind
        spaces = {path.stem: WordVectors.load(path) for path in sorted(folder.glob("*.vec"))}
        spaces = {name: spaces[name] for name in (PIVOT, *options.languages.split(","))}
        for method in options.methods.split(","):
            result = options.folder / f"{kind}.{method}.json"
            if result.exists():
                continue
            started = time.perf_counter()
            mapped, choices = map_by(method, kind, spaces, options)
            row = {
                "kind": kind,
                "method": method,
                "seconds": time.perf_counter() - started,
                "choices": choices,
                **score(mapped, options),
            }
            result.write_text(json.dumps(row, indent=1) + "\n")
            print(f"{kind} {method}: {describe(row)}, {row['seconds']:.1f} s", flush=True)


def map_by(
    method: str, kind: str, spaces: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the vectors of all languages in one space, and the choice for each language.

    The mapped vectors are also written.
    """
    from calque.algorithms.self_learning import SelfLearningSettings
    from calque.vectors.mapping import map_spaces, write_mapped
    from calque.vectors.method_selection import MapSettings

    if method == UNALIGNED:
        return spaces, {}
    train, dev = split_dictionaries(options.muse, list(spaces))
    methods = LEARNING[1:] if method == "selected" else (method,)
    learning = SelfLearningSettings(patience=options.patience)
    space = "pivot" if method in TO_ENGLISH else "joint"
    settings = MapSettings(methods, space, learning=learning, device=options.device)
    judges = dev if method == "selected" else None
    mapped = map_spaces(spaces, PIVOT, settings, train=train, dev=judges)
    choices = {
        report.language: [report.chosen, report.reason, [trial.seconds for trial in report.trials]]
        for report in mapped.reports
    }
    write_mapped(mapped, spaces, find_vectors(options, kind, method), settings, binary=True)
    return {name: mapped.apply(name, vectors) for name, vectors in spaces.items()}, choices


def find_vectors(options: argparse.Namespace, kind: str, method: str) -> Path:
    """Return the folder of a set of vectors, mapped by a method."""
    name = kind if method == UNALIGNED else f"{kind}.{method}.mapped"
    return Path(options.folder / name)


def compare_all(options: argparse.Namespace) -> None:
    """Store the differences of COMPARED in lexicon induction, with intervals over test words."""
    import calque

    languages = [f"{PIVOT}-{language}" for language in options.languages.split(",")]
    rows = []
    for names in COMPARED:
        folders = [find_vectors(options, *name.split(".")) for name in names]
        if missing := [str(folder) for folder in folders if not folder.exists()]:
            print(f"not compared: {' and '.join(names)} ({', '.join(missing)} missing)")
            continue
        results = [options.folder / "results" / name for name in names]
        for name, vectors, output in zip(names, folders, results, strict=True):
            calque.evaluate(
                f"{name}={vectors}",
                data=options.muse.parent,
                tasks="lexicon_induction",
                languages=languages,
                output=output,
                device=options.device,
                jobs=0,
            )
        rows += compare_results(results, *names)
    write_differences(options.json, rows)


def split_dictionaries(muse: Path, languages: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split MUSE's training dictionaries: four fifths of the words to train, one to choose."""
    from calque.io.dictionaries import read_dictionary
    from calque.vectors.mapping import SeedDictionary

    train, dev = {}, {}
    for language in languages:
        if language == PIVOT:
            continue
        path = muse / f"{PIVOT}-{language}.0-5000.txt"
        entries = list(read_dictionary(path))
        words = list(dict.fromkeys(word for word, _ in entries))
        first = set(words[: len(words) * 4 // 5])
        train[language] = SeedDictionary([e for e in entries if e[0] in first], str(path))
        dev[language] = SeedDictionary([e for e in entries if e[0] not in first], str(path))
    return train, dev


def score(spaces: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Score on MUSE's tests from and to English and, optionally, on word similarity."""
    from calque.evaluation.tasks.lexicon_induction import SETTINGS, TEST_SUFFIX
    from calque.io.dictionaries import read_dictionary
    from calque.vectors.lexicon import WordTranslator, score_dictionary
    from calque.vectors.static import VectorSpace

    ready = {
        name: VectorSpace.from_vectors(each, name, options.device) for name, each in spaces.items()
    }
    found: dict[str, Any] = {}
    train, _ = split_dictionaries(options.muse, list(spaces))
    for language in ready:
        if language == PIVOT:
            continue
        translators = [
            WordTranslator.build(ready[PIVOT], ready[language], each) for each in SETTINGS
        ]
        for pair in (f"{PIVOT}-{language}", f"{language}-{PIVOT}"):
            entries = list(read_dictionary(options.muse / f"{pair}{TEST_SUFFIX}"))
            entries = drop_learned(entries, train[language].entries if pair[-2:] == PIVOT else [])
            result = score_dictionary(translators, entries)
            found[pair] = {
                "coverage": result.coverage,
                "n_known": result.n_known,
                **{
                    f"{how}@{k}": result.precision(how, k, known=True)
                    for how in ("nn", "csls")
                    for k in (1, 5, 10)
                },
            }
            translators = [translator.reverse() for translator in translators]
    row: dict[str, Any] = {"n_words": {name: len(each) for name, each in ready.items()}}
    if options.similarity is not None:
        row["similarity"] = score_similarity(ready, options.similarity)
    return {**row, "muse": found}


def drop_learned(entries: list[Any], learned: Sequence[Any]) -> list[Any]:
    """Drop test words whose translation is in the training dictionary, in the other direction.

    The training and test words of MUSE are disjoint in one direction only.
    """
    pairs = {(other, english) for english, other in learned}
    known = {entry[0] for entry in entries if tuple(entry) in pairs}
    return [entry for entry in entries if entry[0] not in known]


def score_similarity(spaces: dict[str, Any], folder: Path) -> dict[str, Any]:
    from calque.evaluation.tasks.word_similarity import (
        compare_words,
        correlate,
        find_tests,
        read_pairs,
    )

    found = {}
    for test in find_tests(folder, list(spaces)):
        pairs = read_pairs(test.path)
        cosines = compare_words(spaces[test.languages[0]], spaces[test.languages[-1]], pairs)
        known = ~np.isnan(cosines)
        monotone = correlate(cosines[known], pairs.gold[known])["spearman"]
        found[f"{test.collection} {test.name}"] = [monotone, int(known.sum()), len(known)]
    return found


def mean_of(row: dict[str, Any], metric: str, prefix: str = "") -> float:
    values = [each[metric] for pair, each in row["muse"].items() if pair.startswith(prefix)]
    return 100 * float(np.mean(values))


def describe(row: dict[str, Any]) -> str:
    return f"P@1 {mean_of(row, 'csls@1'):.1f} CSLS, {mean_of(row, 'nn@1'):.1f} NN"


def print_table(options: argparse.Namespace) -> None:
    """Print Markdown tables: the means of all sets and methods, then the languages."""
    rows = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.*.json"))]
    rows.sort(key=lambda row: (row["kind"], METHODS.index(row["method"])))
    languages = [pair[3:] for pair in rows[0]["muse"] if pair.startswith("en-")]
    print("| vectors | mapping | CSLS P@1 | NN P@1 | CSLS P@10 | of supervised | mono | cross |")
    print("|---|---|---|---|---|---|---|---|")
    full = {row["kind"]: mean_of(row, "csls@1") for row in rows if row["method"] == "supervised"}
    for row in rows:
        p = mean_of(row, "csls@1")
        share = f"{100 * p / full[row['kind']]:.0f} %" if full.get(row["kind"]) else ""
        tail = " | ".join(similarity_of(row))
        cells = f"{p:.1f} | {mean_of(row, 'nn@1'):.1f} | {mean_of(row, 'csls@10'):.1f} | {share}"
        print(f"| {row['kind']} | {row['method']} | {cells} | {tail} |")
    print("\n| vectors | mapping |", " | ".join(languages), "|")
    print("|---" * (2 + len(languages)) + "|")
    for row in rows:
        cells = []
        for language in languages:
            ways = (f"en-{language}", f"{language}-en")
            cells.append(f"{100 * np.mean([row['muse'][way]['csls@1'] for way in ways]):.1f}")
        print(f"| {row['kind']} | {row['method']} |", " | ".join(cells), "|")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        first = next(row for row in rows if row["kind"] == kind)
        n_known = [each["n_known"] for each in first["muse"].values()]
        sizes = list(first["n_words"].values())
        print(
            f"\n{kind}: {min(sizes):,} to {max(sizes):,} words; {min(n_known)} to {max(n_known)} "
            f"words of a test are known, {mean_of(first, 'coverage'):.0f} % on average"
        )


def similarity_of(row: dict[str, Any]) -> Iterator[str]:
    for collection in ("semeval17_mono", "semeval17_cross"):
        values = [v[0] for k, v in row.get("similarity", {}).items() if k.startswith(collection)]
        yield f"{np.mean(values):.3f}" if values else ""


def run_tiny() -> None:
    """Run all steps on the sentences of the demo; the dictionaries pair words of equal rank."""
    from calque.vectors.static import WordVectors

    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name in ("bitext", "muse", "similarity/rg65"):
            (root / name).mkdir(parents=True)
        for language in ("de",):
            lines = [f"{row[1]}\t{row[2]}\tdemo\n" for row in rows if row[0] == language]
            with lzma.open(root / "bitext" / f"en-{language}.tsv.xz", "wt") as stream:
                stream.writelines(lines)
        build_tiny_encoder(root / "model")
        shared = ["--languages", "de", "--min-count", "1", "--patience", "1"]
        shared += ["--model", str(root / "model")]
        run([*shared, "text", str(root / "bitext"), "-o", str(root / "text")])
        for step in ("extract", "skipgram"):
            run([*shared, step, str(root / "text"), "-o", str(root / "out"), "--width", "16"])
        words = {
            language: WordVectors.load(root / "out" / "pooling" / f"{language}.vec").words
            for language in ("en", "de")
        }
        for language in ("de",):
            pairs = list(zip(words["en"], words[language], strict=False))
            for name, part in ((".0-5000.txt", pairs[:40]), (".5000-6500.txt", pairs[40:60])):
                for src, tgt in ((0, 1), (1, 0)):
                    pair = ("en", language)[src], ("en", language)[tgt]
                    text = "".join(f"{entry[src]} {entry[tgt]}\n" for entry in part)
                    (root / "muse" / f"{pair[0]}-{pair[1]}{name}").write_text(text)
        lines = [f"{words['en'][k]}\t{words['en'][k + 1]}\t{k % 5}\n" for k in range(10)]
        (root / "similarity" / "rg65" / "en.txt").write_text("".join(lines))
        paths = ["--muse", str(root / "muse"), "--similarity", str(root / "similarity")]
        for kind, methods in (
            ("x2static", "unaligned,supervised,selected"),
            ("skipgram", "refine,rcsls"),
        ):
            chosen = ["--kinds", kind, "--methods", methods]
            run([*shared, *chosen, *paths, "map", str(root / "out")])
        run([*shared, "table", str(root / "out")])
        run([*shared, *paths, "compare", str(root / "out"), "--json", str(root / "found.json")])


def build_tiny_encoder(folder: Path) -> None:
    """Save a random encoder with few dimensions, since the text has few words to map."""
    from transformers import XLMRobertaConfig

    from calque.models.encoder import Encoder
    from calque.models.loading import build_model, find_model
    from calque.tokens.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(find_model("calque-mini"))
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=130,
        pad_token_id=tokenizer.pad_token_id,
    )
    Encoder(build_model(config), tokenizer).save(folder)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = {
        "text": make_text,
        "skipgram": train_all_skipgrams,
        "extract": extract_all,
        "map": map_all,
        "table": print_table,
        "compare": compare_all,
    }
    parser.add_argument("step", choices=[*steps], nargs="?")
    parser.add_argument("folder", type=Path, nargs="?", help="input folder of the step")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--languages", default=LANGUAGES)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=300, help="of skip-gram vectors")
    parser.add_argument("--layer", type=int, help="of extract; part of the folder names")
    parser.add_argument("--min-count", type=int, default=MIN_COUNT)
    parser.add_argument("--muse", type=Path)
    parser.add_argument("--similarity", type=Path)
    parser.add_argument("--kinds", default="x2static,pooling,skipgram")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--patience", type=int, default=50, help="of self-learning")
    parser.add_argument("--json", type=Path, help="file of the differences")
    parser.add_argument("--tiny", action="store_true", help="all steps on the demo")
    options = parser.parse_args(arguments)
    if options.tiny:
        run_tiny()
    elif options.step == "compare" and None in (options.muse, options.json):
        parser.error("compare needs --muse and --json")
    elif options.step is None or options.folder is None:
        print("skipped: this study needs a step and its folder (see --help), or --tiny")
    else:
        steps[options.step](options)


if __name__ == "__main__":
    run()
