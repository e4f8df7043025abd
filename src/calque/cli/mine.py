"""`calque mine`: translations out of two texts that are not parallel."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.align.margin import MinedPairs
    from calque.text.files import SkippedLines
    from calque.tools.miner import Side
    from calque.tools.sentence_store import SentenceStore

NPY = ".npy"


def mine(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A sentence, or id TAB sentence, a line; plain, .gz, .xz, .zst. Or .npy vectors.",
        ),
    ],
    tgt: Annotated[str, typer.Argument(metavar="TGT", help="The same of the other language.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the pairs go.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    vectors: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="SRC.npy TGT.npy", help="Vectors of the lines, as calque embed makes them."
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(metavar="T", help="Only pairs that score at least this.")
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(
            metavar="GOLD",
            help="Choose the threshold by true pairs of these texts: id TAB id, or sentences.",
        ),
    ] = None,
    margin: Annotated[str, typer.Option(help="ratio, distance, or absolute (the cosine).")] = (
        "ratio"
    ),
    retrieval: Annotated[
        str,
        typer.Option(help="max (each sentence once), intersect, forward or backward."),
    ] = "max",
    k: Annotated[
        int, typer.Option("--neighbors", "--k", help="Over how many a margin is taken.")
    ] = 4,
    index: Annotated[
        str, typer.Option(help="exact, or a FAISS index for millions: IVF1024,Flat …")
    ] = "exact",
    probes: Annotated[int, typer.Option(help="Lists of a FAISS index that are looked at.")] = 16,
    ids: Annotated[
        bool, typer.Option("--ids", help="Lines are id TAB sentence; BUCC's are known as such.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option(help="0 is the embedding, -1 the last; else the model's best.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the model's neutral space, if it has one, alone.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what was interrupted.")
    ] = False,
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Leave undecodable lines out and list them here."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Find sentences of two texts that translate each other.

    Writes score TAB source TAB target, best first; ids follow where there are any. The score
    compares a pair's cosine with those of its neighbors (Artetxe & Schwenk, 2019); about 1.05
    and more is good for the ratio, but choose it for your model, by --dev.

    \b
    calque mine news.de news.en -o de-en.tsv --threshold 1.06
    calque mine zh-en.dev.zh zh-en.dev.en --dev zh-en.dev.gold -o zh-en.tsv
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.progress import show_phases
    from calque.text.files import check_list, check_target, open_list, write_atomically
    from calque.tools.miner import MiningSettings, choose_threshold, locate_gold, write_pairs

    started = time.perf_counter()
    settings = MiningSettings(cast(Any, margin), cast(Any, retrieval), k, index, probes)
    inputs = [src, tgt, *(vectors or ()), *([dev] if dev else [])]
    _check(inputs, threshold, dev, vectors)
    check_target(output, inputs)
    check_list(skip_bad, inputs, output)
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        folder = stack.enter_context(_working_folder(output, resume))
        with show_phases("reading"):
            job = _Job((src, tgt), vectors, folder, ids or None, resume, device, skipped)
        stack.callback(job.close)
        given = job.open_vectors() if job.is_given else None
        gold = set[tuple[int, int]]()
        if dev is not None:
            gold = locate_gold(dev, job.stores or [len(s.vectors.array) for s in given or ()])
        sides = given or job.embed(model, layer, raw, settings.index)
        pairs = _search(sides, settings)
        if dev is not None:
            cut = choose_threshold(pairs, *sides, gold)
            if not cut.n_hits:
                problem = f"none of its {cut.n_gold:,} pairs is among the {len(pairs):,} found"
                raise InputError(problem, file=dev, fix="give a better model or another list")
            threshold = cut.threshold
            print(
                f"threshold {threshold:.6f} by {dev}: F1 {100 * cut.f1:.1f}, precision "
                f"{100 * cut.precision:.1f}, recall {100 * cut.recall:.1f} (of the same pairs)"
            )
        kept = pairs if threshold is None else pairs.above(threshold)
        with write_atomically(output) as stream:
            n_tabs = write_pairs(stream, kept, *sides)
        notes = _describe(sides, job, kept, pairs, n_tabs, threshold)
    print(f"{output}: {', '.join(notes)}; {time.perf_counter() - started:.1f} s", file=sys.stderr)


class _Job:
    """The two texts of a run, or their vectors, made ready for the search."""

    def __init__(
        self,
        files: tuple[str, str],
        vectors: tuple[str, str] | None,
        folder: Path,
        ids: bool | None,
        resume: bool,
        device: str,
        skipped: SkippedLines | None,
    ) -> None:
        from calque.tools.sentence_store import SentenceStore

        self.files, self.vectors, self.folder = files, vectors, folder
        self.skipped = skipped
        self.resume, self.device, self.n_long = resume, device, 0
        self.is_bare = files[0].endswith(NPY)
        self.is_given = vectors is not None or self.is_bare
        self.stores: list[SentenceStore] = []
        for name, file in zip(("src", "tgt"), () if self.is_bare else files, strict=False):
            skip_bad = None if skipped is None else skipped.of(file)
            store = SentenceStore(file, folder / f"{name}.txt", ids=ids, skip_bad=skip_bad)
            self.stores.append(store)
            if not len(self.stores[-1]):
                raise InputError("holds no sentence", file=file, fix="give another file")

    def open_vectors(self) -> tuple[Side, Side]:
        """Map the vectors that were given."""
        from calque.api import choose_device
        from calque.tools.miner import Side
        from calque.tools.mining_vectors import open_vectors, usable_rows

        place, sides = choose_device(self.device), []
        for number, file in enumerate(self.vectors or self.files):
            store = None if self.is_bare else self.stores[number]
            array = open_vectors(Path(file), None if store is None else store.n_lines)
            lines = None if store is None else store.lines
            sides.append(Side(*usable_rows(array, file, lines, place), store))
        return sides[0], sides[1]

    def embed(
        self, model: str | None, layer: int | None, raw: bool, index: str
    ) -> tuple[Side, Side]:
        """Embed both texts, for an index that can be made of them."""
        from calque.align.neighbors import check_index
        from calque.api import load
        from calque.cli.progress import show_progress
        from calque.tools.embedder import device_of
        from calque.tools.miner import Side
        from calque.tools.mining_vectors import embed_store, usable_rows

        encoder, sides = load(model, self.device), []
        check_index(index, encoder.hidden_size)
        with show_progress("embedding", sum(map(len, self.stores))) as advance:
            for store in self.stores:
                array, n_long = embed_store(
                    encoder,
                    store,
                    self.folder,
                    layer=layer,
                    raw=raw,
                    resume=self.resume,
                    on_block=advance,
                )
                self.n_long += n_long
                vectors, rows = usable_rows(array, store.file, None, device_of(encoder))
                sides.append(Side(vectors, rows, store))
        return sides[0], sides[1]

    def close(self) -> None:
        """Let go of the files."""
        for store in self.stores:
            store.close()


def _search(sides: tuple[Side, Side], settings: Any) -> MinedPairs:
    from calque.cli.progress import show_progress
    from calque.tools.miner import mine

    with show_progress("comparing", sum(len(side.vectors) for side in sides)) as advance:
        return mine(*sides, settings, advance)


def _check(
    inputs: list[str], threshold: float | None, dev: str | None, vectors: tuple[str, str] | None
) -> None:
    """Refuse options that contradict each other, and input that can be read only once."""
    if threshold is not None and dev is not None:
        raise InputError("--threshold and --dev", fix="give one of both")
    if threshold is not None and math.isnan(threshold):
        raise InputError("--threshold nan", fix="give a number")
    if "-" in inputs:
        raise InputError("standard input cannot be mined", fix="name a file")
    are_vectors = [name.endswith(NPY) for name in inputs[:2]]
    if any(are_vectors) and (vectors is not None or not all(are_vectors)):
        fix = "give two texts (and --vectors SRC.npy TGT.npy), or two .npy files"
        raise InputError("text and vectors mixed", fix=fix)


@contextmanager
def _working_folder(output: Path, resume: bool) -> Iterator[Path]:
    """Keep the sentences and vectors beside the output until it is there."""
    from calque.text.files import DISK_FULL

    folder = output.with_name(f"{output.name}.mining")
    if folder.exists() and not resume:
        fix = "go on with --resume, or remove this folder to begin anew"
        raise InputError("an unfinished run is here", file=folder, fix=fix)
    try:
        folder.mkdir(exist_ok=True)
        yield folder
    except BaseException as error:
        if not any(folder.glob("*.f32*")):  # no vectors yet: nothing is lost
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, PermissionError) or getattr(error, "errno", None) in DISK_FULL:
            raise InputError(str(error), fix="make room, or write elsewhere") from error
        raise
    shutil.rmtree(folder)


def _describe(
    sides: tuple[Side, Side],
    job: _Job,
    kept: MinedPairs,
    pairs: MinedPairs,
    n_tabs: int,
    threshold: float | None,
) -> list[str]:
    """Say what was written, and what was not."""
    stores: list[SentenceStore] = job.stores
    n_sentences = [len(side.vectors) for side in sides]
    notes = [f"{len(kept):,} pairs of {n_sentences[0]:,} × {n_sentences[1]:,} sentences"]
    if threshold is not None:
        notes.append(f"{len(pairs) - len(kept):,} below {threshold:.4f} left out")
    n_rows = sum(len(store) for store in stores) or sum(len(side.vectors.array) for side in sides)
    unusual = [
        (sum(store.n_duplicates for store in stores), "repeated lines left out"),
        (sum(store.n_empty for store in stores), "empty lines left out"),
        (0 if job.skipped is None else job.skipped.n_lines, "of them undecodable"),
        (n_rows - sum(n_sentences), "vectors of zeros left out"),
        (job.n_long, "long lines read in windows"),
        (n_tabs, "sentences with a tab, written as a space"),
    ]
    return notes + [f"{number:,} {what}" for number, what in unusual if number]
