"""Static vectors of many languages from real text: made, mapped into one space, and judged.

    python benchmarks/static_study.py text BITEXT -o TEXT [--languages de,fr,…]
    python benchmarks/static_study.py skipgram TEXT -o OUT          # needs gensim
    python benchmarks/static_study.py extract TEXT -o OUT [--kinds pooling] [--layer 8] [--device …]
    python benchmarks/static_study.py map OUT --muse MUSE [--similarity FOLDER] [--device cuda]
    python benchmarks/static_study.py table OUT

`text` takes both sides of bitext apart, without repetitions: the languages' texts are of the same
kinds, half of them software. `skipgram` trains Gensim's vectors, `extract` X2Static's and pooled
ones out of an encoder, on the same sentences and words. `map` maps each set of vectors by each
method into one space around English and scores it on MUSE's tests, both ways, by CSLS. What a
method may choose by is the last fifth of MUSE's training dictionary, which is not learned from.
Every step keeps what is there and can be repeated.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from calque.vectors.corpus import CorpusFilter, CorpusReader

PIVOT = "en"
LANGUAGES = "de,es,fr,it,pt,nl,fi,cs,hu,pl,ru,tr"
MIN_TOKENS, MIN_COUNT = 4, 5
MOST_ENGLISH = 250_000
# Subsampling for a small text; see docs/static-vectors.md.
SUBSAMPLE, EPOCHS = 1e-3, 5
SKIPGRAM = {"vector_size": 300, "window": 5, "negative": 10, "sg": 1, "epochs": 10, "seed": 1}
LEARNING = ("semi-supervised", "identical", "unsupervised")
METHODS = ("unaligned", "supervised", *LEARNING, "selected")


def make_text(options: argparse.Namespace) -> None:
    """Write de.txt.xz and so on, a sentence a line, each once, in an order drawn by a seed."""
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


def reader_of(language: str) -> CorpusReader:
    return CorpusReader(language, CorpusFilter(MIN_TOKENS, 1, None), sentence_lines=True)


def texts_in(folder: Path) -> dict[str, Path]:
    return {path.name.split(".")[0]: path for path in sorted(folder.glob("*.txt.xz"))}


def train_skipgram(job: tuple[str, Path, Path]) -> str:
    """Train one language's vectors with Gensim, on one core."""
    from gensim.models import Word2Vec

    language, text, output = job
    started = time.process_time()
    if not output.exists():
        sentences = list(reader_of(language).read([str(text)]))
        model = Word2Vec(sentences, min_count=MIN_COUNT, workers=1, **SKIPGRAM)
        model.wv.save_word2vec_format(str(output.with_suffix(".part")))
        output.with_suffix(".part").rename(output)
    return f"skip-gram {language}: {time.process_time() - started:.0f} CPU s"


def train_all_skipgrams(options: argparse.Namespace) -> None:
    folder = options.output / "skipgram"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(name, path, folder / f"{name}.vec") for name, path in texts_in(options.folder).items()]
    with ProcessPoolExecutor(options.workers) as pool:
        for note in pool.map(train_skipgram, jobs):
            print(note, flush=True)


def extract_all(options: argparse.Namespace) -> None:
    """Extract X2Static's and pooled vectors."""
    from calque.api import load
    from calque.vectors.corpus import VocabularyLimits
    from calque.vectors.x2static import (
        ExtractJob,
        PoolingSettings,
        X2StaticSettings,
        extract_vectors,
    )

    encoder = load(options.model, options.device)
    methods = {
        "x2static": X2StaticSettings(subsample=SUBSAMPLE, n_epochs=EPOCHS),
        "pooling": PoolingSettings(),
    }
    suffix = "" if options.layer is None else f"-{options.layer}"
    asked = {kind: methods[kind] for kind in options.kinds.split(",") if kind in methods}
    for language, text in texts_in(options.folder).items():
        for kind, method in asked.items():
            output = options.output / f"{kind}{suffix}" / f"{language}.vec"
            output.parent.mkdir(parents=True, exist_ok=True)
            if output.exists():
                continue
            started = time.perf_counter()
            limits = VocabularyLimits(min_count=MIN_COUNT)
            job = ExtractJob(reader_of(language), method, limits, options.layer)
            report = extract_vectors(encoder, [str(text)], output, job)
            seconds = time.perf_counter() - started
            print(
                f"{kind} {language}: {report.n_words:,} words of {report.n_running_words:,} "
                f"running, {report.corpus.n_sentences:,} sentences, {seconds:.1f} s",
                flush=True,
            )


def map_all(options: argparse.Namespace) -> None:
    """Map and score every set of vectors by every method; a file of results each."""
    from calque.vectors.static import read_vectors

    for kind in options.kinds.split(","):
        folder = options.folder / kind
        spaces = {path.stem: read_vectors(path) for path in sorted(folder.glob("*.vec"))}
        spaces = {name: spaces[name] for name in (PIVOT, *options.languages.split(","))}
        for method in options.methods.split(","):
            result = options.folder / f"{kind}.{method}.json"
            if result.exists():
                continue
            started = time.perf_counter()
            mapped, choices = map_by(method, spaces, options)
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
    method: str, spaces: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give the vectors of all languages in one space, and what was chosen for each language."""
    from calque.vectors.mapping import map_spaces, write_mapped
    from calque.vectors.trials import MapSettings

    if method == "unaligned":
        return spaces, {}
    train, dev = split_dictionaries(options.muse, list(spaces))
    methods = LEARNING[1:] if method == "selected" else (method,)
    settings = MapSettings(methods=methods, device=options.device)
    judges = dev if method == "selected" else None
    mapped = map_spaces(spaces, PIVOT, settings, train=train, dev=judges)
    choices = {
        report.language: [report.chosen, report.reason, [trial.seconds for trial in report.trials]]
        for report in mapped.reports
    }
    if method == options.keep:
        name = options.folder / f"{options.kinds}.{method}.mapped"
        write_mapped(mapped, spaces, name, settings, binary=True)
    return {name: mapped.apply(name, vectors) for name, vectors in spaces.items()}, choices


def split_dictionaries(muse: Path, languages: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Learn from four fifths of the words of MUSE's training dictionaries, choose by the last."""
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
    """Score on MUSE's tests from and to English and, if asked for, on word similarity."""
    from calque.evaluation.tasks.lexicon_induction import SETTINGS, TEST_SUFFIX, score_dictionary
    from calque.io.dictionaries import read_dictionary
    from calque.vectors.lexicon import WordTranslator
    from calque.vectors.static import VectorSpace

    ready = {name: VectorSpace.of(each, name, options.device) for name, each in spaces.items()}
    found: dict[str, Any] = {}
    train, _ = split_dictionaries(options.muse, list(spaces))
    for language in ready:
        if language == PIVOT:
            continue
        translators = [WordTranslator.make(ready[PIVOT], ready[language], each) for each in SETTINGS]
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
    """Leave out words of a test whose translation the training dictionary, turned round, has.

    MUSE's words to learn from and to test are apart in one direction only.
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
    """Print Markdown: means of all sets and methods, then the languages."""
    rows = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.*.json"))]
    rows.sort(key=lambda row: (row["kind"], METHODS.index(row["method"])))
    languages = [pair[3:] for pair in rows[0]["muse"] if pair.startswith("en-")]
    print("| vectors | mapping | CSLS P@1 | NN P@1 | CSLS P@10 | of supervised | mono | cross |")
    print("|---|---|---|---|---|---|---|---|")
    full = {row["kind"]: mean_of(row, "csls@1") for row in rows if row["method"] == "supervised"}
    for row in rows:
        p = mean_of(row, "csls@1")
        share = f"{100 * p / full[row['kind']]:.0f} %" if row["kind"] in full else ""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(required=True)
    for name, work in (
        ("text", make_text),
        ("skipgram", train_all_skipgrams),
        ("extract", extract_all),
        ("map", map_all),
        ("table", print_table),
    ):
        step = steps.add_parser(name)
        step.set_defaults(work=work)
        step.add_argument("folder", type=Path)
        step.add_argument("-o", "--output", type=Path)
        step.add_argument("--languages", default=LANGUAGES)
        step.add_argument("--workers", type=int, default=1)
        step.add_argument("--model", default=None)
        step.add_argument("--device", default="cpu")
        step.add_argument("--layer", type=int, help="of extract; its folders are named after it")
        step.add_argument("--muse", type=Path)
        step.add_argument("--similarity", type=Path)
        step.add_argument("--kinds", default="x2static,pooling,skipgram")
        step.add_argument("--methods", default=",".join(METHODS))
        step.add_argument("--keep", help="the method whose mapped vectors are written")
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    main()
