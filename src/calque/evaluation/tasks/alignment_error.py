"""Word alignment: the error rate against annotated links, by pair of languages and by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.tasks.tatoeba import average_languages, check_languages, require_maps
from calque.io.bitext import read_bitext
from calque.io.links import GoldLinks, read_gold
from calque.io.segmentation import split_on_spaces
from calque.types import Score
from calque.word_alignment.protocol import WordPair
from calque.word_alignment.scoring import (
    LayeredAligner,
    check_gold,
    count_layers,
)

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.models.language_maps import LanguageMaps


TASK = "word_alignment"
METRICS = ("aer", "precision", "recall", "f1")
FOLDER = "gold_alignments"


def score_word_alignment(
    encoder: Encoder,
    data: Path,
    *,
    model: str,
    languages: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    make_aligner: Callable[[Encoder], LayeredAligner] | None = None,
    maps: bool = False,
    on_language: Callable[[str], None] | None = None,
) -> list[Score]:
    """Score the word links of an encoder, as the aligner's defaults make them, at every layer.

    `languages` are pairs such as de-en, or languages, which stand for all pairs they are in.
    With `maps`, the words of either language are mapped before they are compared. Rates are those
    of a whole test; rows of language "mean" average over the pairs.
    """
    known = require_maps(encoder) if maps else None
    numbers = layers
    if numbers is None:
        numbers = range(encoder.n_layers + 1) if known is None else known.layers
    asked = [encoder.check_layer(number) for number in numbers]
    names = find_pairs(data, languages)
    if known is None:
        aligners = dict.fromkeys(names, (make_aligner or _make_word_aligner)(encoder))
    else:
        _check_pairs(known, names, asked)
        aligners = {name: _make_mapping_aligner(encoder, name) for name in names}
    tests = {name: read_test(data, name) for name in names}
    scores: list[Score] = []
    for name, (pairs, gold) in tests.items():
        aligner = aligners[name]
        for layer, counts in count_layers(aligner, pairs, gold, asked).items():
            scores += [
                Score(
                    model=model,
                    task=TASK,
                    language=name,
                    metric=metric,
                    value=getattr(counts, metric),
                    n_items=len(pairs),
                    layer=layer,
                    variant=_name_variant(aligner, maps),
                )
                for metric in METRICS
            ]
        if on_language is not None:
            on_language(name)
    return [*scores, *average_languages(scores)]


def find_pairs(data: Path, languages: Sequence[str] | None = None) -> list[str]:
    """List the tests of a folder, `NAME.text` beside `NAME.gold`, or those asked for."""
    folder = _test_folder(data)
    known = [path.stem for path in sorted(folder.glob("*.gold"))]
    if not known:
        fix = f"give the folder with NAME.text and NAME.gold, or the one above a {FOLDER}/"
        raise InputError("no NAME.gold here", file=data, fix=fix)
    if languages is None:
        return known
    found = {asked: [n for n in known if asked in (n, *n.split("-"))] for asked in languages}
    for asked, names in found.items():
        if not names:
            fix = f"choose from: {' '.join(known)}"
            raise InputError(f"no test for {asked!r}", file=folder, fix=fix)
    return list(dict.fromkeys(name for names in found.values() for name in names))


def read_test(data: Path, name: str) -> tuple[list[WordPair], GoldLinks]:
    """Read the pairs of a test, whose words stand apart, and their gold links."""
    folder = _test_folder(data)
    text = folder / f"{name}.text"
    gold = read_gold(folder / f"{name}.gold")
    pairs: list[WordPair] = [
        (split_on_spaces(pair.src), split_on_spaces(pair.tgt))
        for pair in read_bitext(text, "pipes")
    ]
    check_gold(gold, len(pairs), text)
    gold.check_words(pairs)
    return pairs, gold


def _make_word_aligner(encoder: Encoder) -> LayeredAligner:
    from calque.word_alignment.neural import WordAligner

    return WordAligner(encoder)


def _make_mapping_aligner(encoder: Encoder, pair: str) -> LayeredAligner:
    from calque.word_alignment.neural import WordAligner

    src, _, tgt = pair.partition("-")
    return WordAligner(encoder, map_from=(src, tgt))


def _check_pairs(maps: LanguageMaps, pairs: Sequence[str], layers: Sequence[int]) -> None:
    """Refuse pairs of which a language has no map."""
    known = {maps.pivot, *maps.languages}
    missing = [pair for pair in pairs if not set(pair.split("-")) <= known]
    if missing:
        mapped = ",".join(pair for pair in pairs if pair not in missing)
        fix = f"choose languages: {mapped}" if mapped else "fit maps of these languages"
        raise InputError(f"no maps for {' '.join(missing)}", fix=fix)
    check_languages(maps, known, layers)


def _name_variant(aligner: LayeredAligner, maps: bool) -> str | None:
    method: str | None = getattr(aligner, "method", None)
    return f"mapped, {method}" if maps else method


def _test_folder(data: Path) -> Path:
    """Accept the folder itself or the one above it."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    inside = data / FOLDER
    return inside if inside.is_dir() else data
