"""Prepare the two trainings that made calque-mini 2: three more languages, then better links.

    python benchmarks/calque_mini_2.py DATA -o WORK --model VERSION_1
    cd WORK && calque train add-languages -o run --set engine.precision=bf16
    python benchmarks/calque_mini_2.py DATA -o NEXT --refine WORK/run/model
    cd NEXT && calque train calque-mini-refine -o run --set engine.precision=bf16
    python benchmarks/calque_mini_2.py -o NEXT --score NEXT/run/model
    python benchmarks/calque_mini_2.py --tiny               (all of its code in a few seconds)

VERSION_1 is the folder of calque-mini in release 0.2.0. DATA has bitext/en-XX.tsv.xz and
bitext/prose/en-XX.tsv.xz. Both folders get bitext/, dev/ (pairs whose English sentence is in no
training pair), linked/ (linked words) and start/, the model that is trained.

First, start/ gets more pieces: those of Korean, Thai and Urdu, and characters that are missing in
other languages. The old pieces keep their ids and scores, so that text of the old languages is cut
as before. The rows of new pieces start from the rows of the English pieces that eflomal links them
with. Then, the model and eflomal together link words of all languages, from which it learns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_data import write_data
from torch.nn import functional as F

import calque
from calque.io.bitext import read_bitext
from calque.io.segmentation import get_word_splitter
from calque.models.inference import has_fast_bf16
from calque.models.loading import find_model
from calque.tokens.tokenizer import FIRST_TOKENS, load_tokenizer, train_tokenizer
from calque.types import SentencePair
from calque.word_alignment.hybrid import build_hybrid_words
from calque.word_alignment.protocol import WordPair

NON_COMMERCIAL = ("xnli", "masakhane")
KINDS = {"debian": "software", "libreoffice": "software", "bible": "bible"}
# One English sentence in so many is for development, with all of its translations.
HELD_OUT = {"tico19": 12, "konews": 12, "prose": 40, "tatoeba": 60}
# Most training pairs per language: those of other kinds, and those for missing characters.
MOST = {"plain": 40_000, "software": 12_000, "bible": 8_000}
MOST_FOR_CHARACTERS, MOST_LINKED, DEV_PAIRS = 8_000, 12_000, 300
# The same in the second training, and how many pairs eflomal learns from.
MOST_REFINED, MOST_HYBRID = {"plain": 37_000, "software": 2_000, "bible": 0}, 5_500
MOST_FOR_EFLOMAL = 25_000
# Links that eflomal has in one direction only, and those that it has but not the hybrid.
ONE_DIRECTION, NOT_HYBRID = 0.4, 0.5
# Missing characters are added if they occur this often; Chinese and Japanese have the most.
MIN_COUNT, MIN_COUNT_UNSPACED, UNSPACED = 20, 3, ("ja", "zh")


@dataclass(frozen=True)
class NewLanguage:
    """A language without pieces of its own: its letters, and how many pieces it gets."""

    letters: str
    vocab_size: int
    n_pieces: int
    has_spaces: bool = True


NEW = {
    "ko": NewLanguage("[가-힣]", 6000, 4200),
    "th": NewLanguage("[\u0e00-\u0e7f]", 3000, 1600, has_spaces=False),
    "ur": NewLanguage("[ٹڈڑےںھہۓؤئ]", 4000, 1000),  # letters that are rare in Arabic and Persian
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--score", metavar="MODEL", help="measure retrieval in WORK/dev instead")
    parser.add_argument("--model", default="calque-mini", help="the model to extend")
    parser.add_argument("--refine", metavar="MODEL", help="prepare the second training instead")
    parser.add_argument("--tiny", action="store_true", help="a few pairs and a tiny model")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            data, work = Path(scratch) / "data", Path(scratch) / "work"
            model = write_data(data)
            new = {"fr": NewLanguage("[a-zéèà]{2}", 400, 200)}
            prepare(Text(data), work, model, "fast-align", new)
            refine(Text(data), Path(scratch) / "next", work / "start", "fast-align")
            score(work / "start", data / "bitext", ["fr"])
    elif options.score is not None and options.output is not None:
        found = sorted((options.output / "dev").glob("en-*.tsv"))
        score(options.score, options.output / "dev", [path.stem[3:] for path in found])
    elif options.data is None or options.output is None:
        print("skipped: this script needs a folder with bitext and -o, or --tiny")
    elif options.refine is not None:
        text = Text(options.data, read_demo())
        refine(text, options.output, find_model(options.refine), "eflomal")
    else:
        text = Text(options.data, read_demo())
        prepare(text, options.output, find_model(options.model), "eflomal", NEW)


@dataclass(frozen=True)
class Text:
    """A folder with bitext, and sentences that are not used."""

    folder: Path
    left_out: Collection[str] = ()

    def list_languages(self) -> list[str]:
        """Return the languages beside English."""
        return [path.name[3:5] for path in sorted((self.folder / "bitext").glob("en-*.tsv*"))]

    def split(self, language: str, dev: Path) -> list[SentencePair]:
        """Return the training pairs, tagged by kind, and write the development pairs.

        A pair is for development if the hash of its English sentence says so, in all languages
        alike.
        """
        training, held_out = [], []
        for folder in ("bitext", "bitext/prose"):
            for path in (self.folder / folder).glob(f"en-{language}.tsv*"):
                for pair in read_bitext(str(path), "tsv"):
                    tag = pair.tag or ""
                    every = HELD_OUT.get(tag) or HELD_OUT.get(Path(folder).name)
                    if tag in NON_COMMERCIAL or not 3 < len(pair.src) < 420:
                        continue
                    if pair.src in self.left_out or pair.tgt in self.left_out:
                        continue
                    if every is not None and hash_text(pair.src) % every == 0:
                        held_out.append(f"{pair.src}\t{pair.tgt}\t{tag}")
                    else:
                        training.append(SentencePair(pair.src, pair.tgt, KINDS.get(tag, "plain")))
        random.Random(7).shuffle(held_out)
        write_lines(dev / f"en-{language}.tsv", held_out[:DEV_PAIRS])
        random.Random(2).shuffle(training)
        return training


def read_demo() -> set[str]:
    """Return the sentences of `calque demo` in all languages."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return {side for line in table.splitlines()[1:] for side in line.split("\t")[1:]}


def prepare(text: Text, work: Path, model: Path, aligner: Any, new: dict[str, NewLanguage]) -> None:
    """Write everything that the recipe add-languages reads."""
    for folder in ("bitext", "dev", "linked", "start"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    texts = {name: text.split(name, work / "dev") for name in text.list_languages()}
    pieces = extend_vocabulary(model, work / "start", texts, new)
    for language in [*new, *(code for code in UNSPACED if code in texts)]:
        pairs = texts[language]
        if language not in new:
            pairs = [pair for pair in pairs if pieces & set(normalize(pair.tgt))]
        kept = balance(pairs, MOST if language in new else {"plain": MOST_FOR_CHARACTERS})
        rows = (f"{pair.src}\t{pair.tgt}\t{pair.tag}" for pair in kept)
        write_lines(work / "bitext" / f"en-{language}.tsv", rows)
        if language in new and new[language].has_spaces:
            link_words(work / "linked" / f"en-{language}", language, kept, aligner)
        print(f"{language}: {len(kept):,} pairs", flush=True)
    start_rows(model, work, aligner)


def refine(text: Text, work: Path, model: Path, aligner: Any) -> None:
    """Write everything that the recipe calque-mini-refine reads."""
    for folder in ("bitext", "dev", "linked"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, work / "start", dirs_exist_ok=True)
    encoder = calque.load(model, "cpu")
    for language in text.list_languages():
        kept = balance(text.split(language, work / "dev"), MOST_REFINED)
        rows = (f"{pair.src}\t{pair.tgt}\t{pair.tag}" for pair in kept)
        write_lines(work / "bitext" / f"en-{language}.tsv", rows)
        if language not in NEW or NEW[language].has_spaces:
            chosen = kept[:MOST_FOR_EFLOMAL]
            link_words(work / "linked" / f"en-{language}", language, chosen, aligner, encoder)
        print(f"{language}: {len(kept):,} pairs", flush=True)


def balance(pairs: Iterable[SentencePair], most: dict[str, int]) -> list[SentencePair]:
    """Return the first pairs of every kind; a kind without a limit counts as plain."""
    counts, kept = Counter[str](), []
    for pair in pairs:
        kind = pair.tag if pair.tag in most else "plain"
        counts[kind] += 1
        if counts[kind] <= most[kind]:
            kept.append(pair)
    return kept


def link_words(
    path: Path, language: str, pairs: list[SentencePair], aligner: Any, encoder: Any = None
) -> None:
    """Link the words of pairs by a statistical aligner, or by an encoder and it together.

    Without an encoder, links of one direction count less; with one, those that both directions of
    the statistical aligner have and the two together do not.
    """
    split = get_word_splitter("en"), get_word_splitter(language)
    words = [(split[0](pair.src), split[1](pair.tgt)) for pair in pairs]
    words = [pair for pair in words if all(2 <= len(side) <= 50 for side in pair)]
    statistical = calque.StatisticalAligner.train(words, aligner)
    head = words[: MOST_LINKED if encoder is None else MOST_HYBRID]
    found = statistical.training_directions(0, len(head))
    found = found or (statistical.training_block(0, len(head)).links,) * 2  # fast_align has one
    directions = [[set(links) for links in side.to_lists()] for side in found]
    certain = [first & second for first, second in zip(*directions, strict=True)]
    others = [first ^ second for first, second in zip(*directions, strict=True)]
    weight = ONE_DIRECTION
    if encoder is not None:
        hybrid_words = build_hybrid_words(encoder, statistical.kind, method="argmax")
        hybrid = calque.HybridAligner(hybrid_words, statistical, is_training_text=True)
        others, weight = certain, NOT_HYBRID
        with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bf16()):
            certain = [set(links) for links in hybrid.align(head)]
    lines = []
    for sure, less in zip(certain, others, strict=True):
        weights = {**dict.fromkeys(less, f":{weight}"), **dict.fromkeys(sure, "")}
        lines.append(" ".join(f"{i}-{j}{value}" for (i, j), value in sorted(weights.items())))
    sides = ((" ".join(src), " ".join(tgt)) for src, tgt in head)
    write_lines(path.with_suffix(".text"), map(" ||| ".join, sides))
    write_lines(path.with_suffix(".links"), lines)


def extend_vocabulary(
    old: Path, start: Path, texts: dict[str, list[SentencePair]], new: dict[str, NewLanguage]
) -> set[str]:
    """Add pieces of new languages and missing characters to a tokenizer, and return them.

    Typographic quotes and dashes are read as plain ones from now on, as in all new tokenizers.
    """
    spec = json.loads((old / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = [(piece, score) for piece, score in spec["model"]["vocab"]]
    known = {piece for piece, _ in vocabulary}
    lowest = min(score for _, score in vocabulary[len(FIRST_TOKENS) :])
    added: dict[str, float] = {}
    for language, plan in new.items():
        sentences = [pair.tgt for pair in texts[language]]
        trained = train_tokenizer(sentences, plan.vocab_size, character_coverage=0.9998)
        own = json.loads(trained.backend_tokenizer.to_str())
        spec["normalizer"] = own["normalizer"]
        letters, n_added = re.compile(plan.letters), 0
        for piece, score in own["model"]["vocab"][len(FIRST_TOKENS) :]:
            is_wanted = n_added < plan.n_pieces or len(piece.strip("▁")) == 1
            if is_wanted and piece not in known and piece not in added and letters.search(piece):
                added[piece] = score
                n_added += 1
    for language, pairs in texts.items():
        counts = Counter(character for pair in pairs for character in normalize(pair.tgt))
        least = MIN_COUNT_UNSPACED if language in UNSPACED else MIN_COUNT
        for character, count in counts.most_common():
            is_text = unicodedata.category(character)[0] in "LMNP"
            if count >= least and is_text and character not in known and character not in added:
                added[character] = lowest - 0.5
    # A multiple of 64 rows, with <mask> as the last one: the least likely pieces are left out.
    n_extra = (len(vocabulary) + len(added) + 1) % 64
    for piece in sorted((p for p in added if len(p) > 2), key=added.__getitem__)[:n_extra]:
        del added[piece]
    by_score = sorted(added.items(), key=lambda item: (-item[1], item[0]))
    write_tokenizer(old, start, spec, vocabulary + by_score)
    return set(added)


def write_tokenizer(old: Path, start: Path, spec: Any, pieces: Sequence[Any]) -> None:
    """Write a tokenizer with other pieces, and <mask> after them."""
    n_before = spec["added_tokens"][-1]["id"] + 1
    spec["model"]["vocab"] = pieces
    spec["added_tokens"][-1]["id"] = len(pieces)
    text = json.dumps(spec, ensure_ascii=False, indent=1)
    (start / "tokenizer.json").write_text(text, encoding="utf-8")
    shutil.copy(old / "tokenizer_config.json", start)
    print(f"{n_before:,} pieces before, {len(pieces) + 1:,} now", flush=True)


def write_weights(old: Path, start: Path, n_old: int, make_rows: Callable[[Any], Any]) -> None:
    """Write a model with rows for new pieces before that of <mask>, which is row `n_old`.

    `make_rows` returns the new rows of the word embeddings, or the new elements of a bias.
    """
    extended, n_rows = {}, 0
    for key, value in load_file(old / "model.safetensors").items():
        value = value.float()
        if value.shape[:1] == (n_old + 1,):
            value = torch.cat([value[:n_old], make_rows(value), value[n_old:]])
            n_rows = len(value)
        extended[key] = value.contiguous()
    save_file(extended, start / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((old / "config.json").read_text(encoding="utf-8"))
    config |= {"vocab_size": n_rows, "dtype": "float32"}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (start / "config.json").write_text(text, encoding="utf-8")


def start_rows(old: Path, work: Path, aligner: Any) -> None:
    """Write the model with rows for the new pieces.

    A new row is the mean of the rows of the English pieces that its piece is linked with, weighted
    by count · p(new | English), with the usual distance from the mean of all rows and some noise.
    """
    tokenizer = load_tokenizer(work / "start")
    n_old, n_rows = len(load_tokenizer(old)) - 1, len(tokenizer)
    weights = load_file(old / "model.safetensors")
    name = next(key for key in weights if key.endswith("word_embeddings.weight"))
    rows = weights[name].float()
    mean = rows[len(FIRST_TOKENS) : n_old].mean(dim=0)
    usual = (rows[len(FIRST_TOKENS) : n_old] - mean).norm(dim=1).median()
    sums, totals = torch.zeros(n_rows, rows.shape[1]), torch.zeros(n_rows)
    for path in sorted((work / "bitext").glob("en-*.tsv")):
        pairs = list(read_pieces(path, tokenizer, n_old))
        if not pairs:
            continue
        lexicon = calque.StatisticalAligner.train(pairs, aligner, lowercase=False, stem=0).lexicon
        src, tgt = (
            torch.tensor([int(word) for word in side.words]) for side in (lexicon.src, lexicon.tgt)
        )
        keys, counts = torch.from_numpy(lexicon.keys), torch.from_numpy(lexicon.counts)
        english, piece = keys // len(tgt), keys % len(tgt)
        share = counts * counts / torch.from_numpy(lexicon.src_totals)[english]
        used = (tgt[piece] >= n_old) & (src[english] >= len(FIRST_TOKENS)) & (src[english] < n_old)
        share, ids = share[used], tgt[piece][used]
        sums.index_add_(0, ids, rows[src[english][used]] * share[:, None])
        totals.index_add_(0, ids, share)
    noise = torch.randn(n_rows, rows.shape[1], generator=torch.Generator().manual_seed(0))
    noise = F.normalize(noise, dim=1)
    linked = F.normalize(sums / totals[:, None].clamp(min=1e-9) - mean, dim=1)
    is_linked = (totals > 0)[:, None]
    started = mean + usual * torch.where(is_linked, 0.9 * linked + 0.25 * noise, 0.6 * noise)

    def make_rows(value: Any) -> Any:
        usual_bias = value[len(FIRST_TOKENS) : n_old].median()
        return started[n_old:-1] if value.ndim == 2 else usual_bias.repeat(n_rows - n_old - 1)

    write_weights(old, work / "start", n_old, make_rows)
    print(f"{int((totals[n_old:-1] > 0).sum()):,} of {n_rows - n_old - 1:,} new rows are linked")


def read_pieces(path: Path, tokenizer: Any, n_old: int) -> Iterator[WordPair]:
    """Yield pairs as ids of pieces, written as words; only those with new pieces."""
    pairs = [pair for pair in read_bitext(str(path), "tsv") if len(pair.src) < 200]
    sides = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
    encoded = (tokenizer(side, add_special_tokens=False)["input_ids"] for side in sides)
    for src, tgt in zip(*encoded, strict=True):
        if 0 < len(src) < 60 and 0 < len(tgt) < 60 and max(tgt) >= n_old:
            yield list(map(str, src)), list(map(str, tgt))


def score(model: str | Path, folder: Path, languages: Iterable[str]) -> None:
    """Print how often the nearest sentence is the translation, the mean of both directions."""
    encoder = calque.load(model, "cpu")
    for language in languages:
        pairs = list(read_bitext(str(folder / f"en-{language}.tsv"), "tsv"))
        sides = [pair.src for pair in pairs], [pair.tgt for pair in pairs]
        src, tgt = (F.normalize(torch.as_tensor(encoder.embed(side)), dim=1) for side in sides)
        similarity, own = src @ tgt.T, torch.arange(len(pairs))
        hits = torch.cat([similarity.argmax(1) == own, similarity.argmax(0) == own])
        print(f"{language}: {100 * hits.float().mean():.1f} % of {len(pairs)} pairs")


def normalize(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def hash_text(text: str) -> int:
    digest = hashlib.blake2b(text.strip().casefold().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
