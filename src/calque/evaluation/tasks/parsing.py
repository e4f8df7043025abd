"""Attachment scores: how many words got their head, and how many their head and relation.

Sentences with trees as examples of a parser: words by their first subwords, arcs as numbers.

A dependency parser: an encoder, biaffine scores on top, and the best tree of them.

Treebanks found in a folder, read and encoded for a parser.

Dependency parsing: a biaffine parser learns from treebanks and is scored in every language.

The protocol of Wu and Dredze (2020) after Ahmad et al. (2019): labelled attachment on gold words,
punctuation and symbols not counted, relations without subtypes, the first 128 words of a sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import fine_tune, predict
from calque.evaluation.finetuning.head_model import (
    HeadModel,
    max_sequence_length,
    move_to_device_of,
)
from calque.evaluation.finetuning.optimizer_step import working_precision
from calque.evaluation.finetuning.transfer import (
    TransferRun,
    choose_tests,
    measure_runs,
    pick_languages,
    plan_runs,
)
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.settings import remember
from calque.io.conllu import ParsedSentence, read_trees, sample_evenly
from calque.models.biaffine import IMPOSSIBLE_SCORE, BiaffineFeatures, BiaffineHead, decode_trees
from calque.models.heads import NO_LABEL, mean_cross_entropy
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens, ranges, reorder
from calque.tokens.sampling import derive_seed
from calque.tokens.tokenizer import boundary_ids
from calque.tokens.windows import WordWindow, split_into_word_windows
from calque.tokens.words import EncodedWords, WordEncoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.transfer import OnProgress
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

# The gold parts of speech of words that are not scored (Ahmad et al., 2019).
IGNORED = frozenset({"PUNCT", "SYM"})
# Relations that version 2 of Universal Dependencies renamed; treebanks of version 1 are about.
RENAMED = {
    "dobj": "obj",
    "nsubjpass": "nsubj:pass",
    "csubjpass": "csubj:pass",
    "auxpass": "aux:pass",
    "mwe": "fixed",
    "name": "flat:name",
    "foreign": "flat:foreign",
}


@dataclass(frozen=True, slots=True)
class Attachments:
    """Of every sentence: words scored, with the right head, with the right head and relation."""

    n_words: IntArray
    n_heads: IntArray
    n_relations: IntArray

    @property
    def uas(self) -> float:
        """Give the share of right heads, in percent."""
        return 100 * int(self.n_heads.sum()) / max(1, int(self.n_words.sum()))

    @property
    def las(self) -> float:
        """Give the share of right heads with the right relation, in percent."""
        return 100 * int(self.n_relations.sum()) / max(1, int(self.n_words.sum()))

    @property
    def items(self) -> ItemScores:
        """Give the labelled score's items: the sentences."""
        return ItemScores(self.n_relations.astype(np.float64), self.n_words.astype(np.float64))


def name_relation(name: str, subtypes: bool = False) -> str:
    """Give a relation the name of version 2 and, unless asked for, drop its subtype.

    The first is what the CoNLL 2018 shared task and Wu and Dredze compare.

    >>> name_relation("nsubjpass"), name_relation("acl:relcl"), name_relation("dobj", subtypes=True)
    ('nsubj', 'acl', 'obj')
    """
    full = RENAMED.get(name, name)
    return full if subtypes else full.partition(":")[0]


def count_attachments(
    gold: Sequence[ParsedSentence],
    heads: Sequence[Sequence[int]],
    relations: Sequence[Sequence[str]],
    *,
    ignored: Collection[str] = IGNORED,
    subtypes: bool = False,
) -> Attachments:
    """Compare predicted arcs with gold ones; words beyond those predicted are not scored.

    With nothing ignored these are the CoNLL 2018 shared task's scores on gold words.
    """
    counts = np.zeros((len(gold), 3), dtype=np.int64)
    for row, (sentence, above, names) in enumerate(zip(gold, heads, relations, strict=True)):
        for tag, head, name, found, found_name in zip(
            sentence.upos, sentence.heads, sentence.deprels, above, names, strict=False
        ):
            if tag in ignored:
                continue
            has_head = head == found
            same = name_relation(name, subtypes) == name_relation(found_name, subtypes)
            counts[row] += (1, has_head, has_head and same)
    return Attachments(*counts.T)


@dataclass(frozen=True, slots=True)
class ParseBatch:
    """Tokens, and for the first one of every word what is known of it.

    `cells` are words' places among sentences × words, counted row by row; other tokens have the one
    beyond. `heads` count within the sentence, 0 being the root; `head_rows` are tokens, and the
    root is the one beyond. `places` are the tokens of the words, one sentence after the other.
    """

    tokens: TokenBatch
    cells: Int[Tensor, "tokens"]
    is_word: Bool[Tensor, "sentences longest"]
    heads: Int[Tensor, "sentences longest"]
    head_rows: Int[Tensor, "tokens"]
    relations: Int[Tensor, "tokens"]
    places: Int[Tensor, "tokens"]

    def to(self, device: torch.device | str) -> ParseBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        names = ("cells", "is_word", "heads", "head_rows", "relations", "places")
        moved = (getattr(self, name).to(device, non_blocking=True) for name in names)
        return ParseBatch(self.tokens.to(device), *moved)


@dataclass(frozen=True, slots=True)
class ParseExamples:
    """Encoded sentences: the windows of each, its words, and what is known of its tree.

    Word k stands at token `offsets[k]` of window `word_windows[k]`, marks counted. A head of −100
    is not learnt: it is none of the words that are read.
    """

    windows: Ragged
    n_windows: IntArray  # of every sentence
    n_words: IntArray  # of every sentence
    word_windows: IntArray
    offsets: IntArray
    heads: IntArray
    relations: IntArray
    pad_id: int
    n_cut: int  # words that were left out
    n_bare: int  # words without a subword, which are read as unknown

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every sentence, in all of its windows."""
        ends = np.concatenate([[0], np.cumsum(self.windows.lengths)])
        lengths: IntArray = np.diff(ends[np.concatenate([[0], np.cumsum(self.n_windows)])])
        return lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ParseBatch:
        """Lay out some sentences, without padding or up to a fixed shape."""
        n_windows, n_words = self.n_windows[rows], self.n_words[rows]
        first_windows = (np.cumsum(self.n_windows) - self.n_windows)[rows]
        chosen = reorder(self.windows, ranges(first_windows, n_windows))
        placed = build_packed_layout(chosen, pad_id=self.pad_id, shape=shape)
        words = ranges((np.cumsum(self.n_words) - self.n_words)[rows], n_words)
        owners = np.repeat(np.arange(len(rows)), n_words)
        shift = np.cumsum(n_windows) - n_windows - first_windows
        places = placed.starts[self.word_windows[words] + shift[owners]] + self.offsets[words]
        n_rows, n_tokens = len(rows), len(placed.tokens.ids)
        longest = int(n_words.max(initial=1))
        if shape is not None:
            n_rows, longest = max(shape.sequences, n_rows), shape.row
        first_words = np.cumsum(n_words) - n_words
        cells = owners * longest + np.arange(len(words)) - first_words[owners]
        heads, relations = self.heads[words], self.relations[words]
        table = np.full(n_rows * longest, NO_LABEL)
        table[cells] = heads
        is_word = np.zeros(n_rows * longest, dtype=bool)
        is_word[cells] = True
        above = np.where(heads > 0, first_words[owners] + heads - 1, 0)
        everywhere = np.arange(len(words))
        return ParseBatch(
            placed.tokens,
            _fill(cells, places, n_tokens, n_rows * longest),
            torch.from_numpy(is_word.reshape(n_rows, longest)),
            torch.from_numpy(table.reshape(n_rows, longest)),
            _fill(np.where(heads > 0, places[above], n_tokens), places, n_tokens, n_tokens),
            _fill(np.where(heads < 0, NO_LABEL, relations), places, n_tokens, NO_LABEL),
            _fill(places, everywhere, n_tokens, 0),
        )


def _fill(values: IntArray, places: IntArray, size: int, filler: int) -> Tensor:
    """Put values at their places, and something else everywhere else."""
    filled = np.full(size, filler)
    filled[places] = values
    return torch.from_numpy(filled)


def encode_trees(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[ParsedSentence],
    relations: Mapping[str, int],
    longest: int,
    *,
    max_words: int | None,
    overlap: float,
    one_window: bool,
) -> ParseExamples:
    """Encode sentences; one longer than `longest` tokens is read in windows, as a whole.

    With `one_window`, as a batch of fixed shape needs, it is cut to what the first of them holds.
    `relations` without a number are −100: they cannot be learnt, nor be right.
    """
    marks = boundary_ids(tokenizer)
    head_mark, room = int(marks[0] is not None), longest - sum(m is not None for m in marks)
    texts = [sentence.words[:max_words] for sentence in sentences]
    # Of a word only the first subword's state is used, so that no word need be cut in two.
    pieces, _ = WordEncoder(tokenizer).encode(texts).truncate_words(room)
    n_bare = int((pieces.n_pieces == 0).sum())
    pieces = _name_unknown(pieces, _unknown_id(tokenizer))
    first_words, first_pieces = pieces.first_words, pieces.first_pieces
    lists: list[list[IntArray]] = [[], [], [], []]  # ids, windows of words, offsets, words
    n_windows, n_words, total = [], [], 0
    for start, stop in zip(first_words[:-1].tolist(), first_words[1:].tolist(), strict=True):
        windows = split_into_word_windows(pieces.n_pieces[start:stop], room, overlap)
        if one_window:
            end = windows[0].stop
            windows = [WordWindow(0, end, 0, end)]
        for window in windows:
            begin = first_pieces[start + window.start]
            taken = np.arange(start + window.first, start + window.last)
            lists[0].append(pieces.ids[begin : first_pieces[start + window.stop]])
            lists[1].append(np.full(len(taken), total))
            lists[2].append(first_pieces[taken] - begin + head_mark)
            lists[3].append(taken)
            total += 1
        n_windows.append(len(windows))
        n_words.append(windows[-1].last)
    words = np.concatenate(lists[3])
    kept = np.array(n_words)
    heads, kinds = _number_arcs(sentences, kept, relations)
    return ParseExamples(
        windows=add_special_tokens(Ragged.of(lists[0]), *marks),
        n_windows=np.array(n_windows),
        n_words=kept,
        word_windows=np.concatenate(lists[1]),
        offsets=np.concatenate(lists[2]),
        heads=heads,
        relations=kinds,
        pad_id=tokenizer.pad_token_id or 0,
        n_cut=sum(len(sentence.words) for sentence in sentences) - len(words),
        n_bare=n_bare,
    )


def _name_unknown(pieces: EncodedWords, unknown: int) -> EncodedWords:
    """Give words that the tokenizer deletes whole the subword of unknown text."""
    bare = np.flatnonzero(pieces.n_pieces == 0)
    ids = np.insert(pieces.ids, pieces.first_pieces[bare], unknown)
    return EncodedWords(ids, np.maximum(pieces.n_pieces, 1), pieces.n_words)


def _unknown_id(tokenizer: PreTrainedTokenizerFast) -> int:
    known = (tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id)
    return next((int(number) for number in known if number is not None), 0)


def _number_arcs(
    sentences: Sequence[ParsedSentence], n_words: IntArray, relations: Mapping[str, int]
) -> tuple[IntArray, IntArray]:
    heads: list[int] = []
    kinds: list[int] = []
    for sentence, n in zip(sentences, n_words.tolist(), strict=True):
        heads += [head if head <= n else NO_LABEL for head in sentence.heads[:n]]
        kinds += [relations.get(name, NO_LABEL) for name in sentence.deprels[:n]]
    return np.array(heads, dtype=np.int64), np.array(kinds, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Parses:
    """Heads and relations of all words, sentence after sentence; heads count from 1, 0 is the root.

    In `n_searched` sentences the best heads of the words made no tree of one root.
    """

    heads: IntArray
    relations: IntArray
    n_searched: int


class Parser(HeadModel):
    """Learns heads, and relations given the right heads; predicts the best tree, then relations.

    `root` is the number of the relation that the root's word has, and no other.
    """

    def __init__(
        self,
        encoder: Encoder,
        n_relations: int,
        root: int,
        settings: TaskSettings,
        generator: torch.Generator,
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head, self.root = BiaffineHead(encoder.hidden_size, n_relations, generator), root
        move_to_device_of(self, encoder)

    def score(
        self, batch: ParseBatch
    ) -> tuple[BiaffineFeatures, Float[Tensor, "rows words heads"]]:
        """Give the parts that words can play, and the scores of all heads."""
        views: BiaffineFeatures = self.head.view(self.read(batch.tokens))
        return views, self.head.score_arcs(views, batch.cells, batch.is_word)

    def forward(self, batch: ParseBatch) -> Float[Tensor, ""]:
        """Give the mean loss of heads plus that of relations."""
        views, arcs = self.score(batch)
        relations = self.head.score_relations(views, batch.head_rows)
        on_heads = mean_cross_entropy(arcs.flatten(0, 1), batch.heads.flatten())
        return on_heads + mean_cross_entropy(relations, batch.relations)

    def parse(self, examples: ParseExamples, settings: TaskSettings) -> Parses:
        """Find the tree of every sentence."""
        first_words = np.cumsum(examples.n_words) - examples.n_words
        heads = np.zeros(len(examples.heads), dtype=np.int64)
        relations = np.zeros_like(heads)
        n_searched = 0
        # All is queued on the device before the first scores are waited for.
        for rows, batch, (views, arcs) in list(predict(self, examples, settings, self.score)):
            n_words = examples.n_words[rows]
            is_word = np.arange(arcs.shape[1]) < n_words[:, None]
            found, n_here = decode_trees(arcs.cpu().numpy(), n_words)
            n_searched += n_here
            words = (first_words[rows][:, None] + np.arange(arcs.shape[1]))[is_word]
            heads[words] = found[is_word]
            begins = np.repeat(np.cumsum(n_words) - n_words, n_words)
            above = torch.from_numpy(np.where(heads[words] > 0, begins + heads[words] - 1, -1))
            with torch.no_grad(), working_precision(self, settings):
                kinds = self._relate(views, batch.places[: len(words)], above)
            relations[words] = kinds.cpu().numpy()
        return Parses(heads, relations, n_searched)

    def _relate(self, views: BiaffineFeatures, places: Tensor, above: Tensor) -> Tensor:
        """Choose the relations of words to the words above them; the root's is for its word alone.

        `above` counts words, −1 being the root.
        """
        above = above.to(places.device)
        n_tokens = len(views.arc_heads) - 1
        head_rows = places.new_full((n_tokens,), n_tokens)
        head_rows[places] = torch.where(above < 0, n_tokens, places[above.clamp(min=0)])
        scores = self.head.score_relations(views, head_rows)[places].float()
        scores[:, self.root] = torch.where(above < 0, -IMPOSSIBLE_SCORE, IMPOSSIBLE_SCORE)
        return scores.argmax(dim=1)


ROOT = "root"
NAME = re.compile(
    r"(?P<language>[a-z]{2,3})(_[a-z0-9]+)?-ud-(?P<part>train|dev|test)[^/]*\.conllu(\.\w+)?"
)


@dataclass(frozen=True, slots=True)
class Treebanks:
    """The files of a folder by language: to learn from, to choose by, to test on."""

    train: Mapping[str, Path]
    dev: Mapping[str, Path]
    test: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Sentences with their gold trees, and what a parser reads of them."""

    sentences: Sequence[ParsedSentence]
    encoded: ParseExamples


@dataclass(frozen=True, slots=True)
class ParseData:
    """All that one run learns from, chooses by and is tested on; `relations` by number."""

    relations: list[str]
    train: ParseExamples
    dev: Mapping[str, ParsedText]
    tests: Mapping[str, ParsedText]


def find_treebanks(data: Path) -> Treebanks:
    """Find the treebanks of a folder, or of `ud` in it, under their own names.

    They lie side by side or in folders of their own. Two treebanks of one language are an error:
    one would be passed over in silence.
    """
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    places = (data / "ud", data / "xtreme" / "ud")
    folder = next((place for place in places if place.is_dir()), data)
    found: dict[str, dict[str, Path]] = {"train": {}, "dev": {}, "test": {}}
    for path in sorted([*folder.glob("*.conllu*"), *folder.glob("UD_*/*.conllu*")]):
        matched = NAME.fullmatch(path.name)
        if matched is None:
            continue
        part, language = found[matched["part"]], matched["language"]
        if language in part:
            fix = "keep one treebank of a language and part in the folder"
            raise InputError(f"{part[language].name} is of {language!r} too", file=path, fix=fix)
        part[language] = path
    if not found["train"] or not found["test"]:
        fix = "give a folder with files like en_ewt-ud-train.conllu and de_gsd-ud-test.conllu"
        raise InputError("no treebanks to learn from and test on here", file=data, fix=fix)
    return Treebanks(**found)


def prepare(
    encoder: Encoder, files: Treebanks, run: TransferRun, settings: TaskSettings
) -> ParseData:
    """Read and encode what a run needs, once for all seeds of a process."""
    dev = run.sources if settings.select == "best" else ()
    for name in dev:
        if name not in files.dev:
            fix = f"add {name}_*-ud-dev.conllu, or set select to last"
            raise InputError(f"no treebank of {name!r} to choose the best epoch by", fix=fix)
    paths = [files.train[name] for name in run.sources]
    paths += [files.dev[name] for name in dev] + [files.test[name] for name in run.tests]
    choices = (settings.max_words, settings.overlap, settings.subtypes)
    sizes = (
        settings.train_examples,
        settings.test_examples,
        max_sequence_length(encoder, settings),
    )
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
    key = ("parsing", run, stamps, choices, sizes, bool(dev))
    return remember(encoder.tokenizer, key, lambda: _read_all(encoder, files, run, dev, settings))


def count_words(text: ParsedText, relations: Sequence[str]) -> dict[str, int]:
    """Say what of a text was not read, is not scored, or cannot be right."""
    sentences, encoded = text.sentences, text.encoded
    tags = Counter(tag for sentence in sentences for tag in sentence.upos)
    kinds = Counter(name for sentence in sentences for name in sentence.deprels)
    n_words = np.array([len(sentence.words) for sentence in sentences])
    return {
        "words": int(n_words.sum()),
        "words_ignored": sum(tags[tag] for tag in IGNORED),
        "words_of_unknown_relations": sum(n for name, n in kinds.items() if name not in relations),
        "words_without_subword": encoded.n_bare,
        "words_cut": encoded.n_cut,
        "sentences_cut": int((n_words > encoded.n_words).sum()),
        "sentences_in_windows": int((encoded.n_windows > 1).sum()),
        "multiword_tokens": sum(sentence.n_ranges for sentence in sentences),
        "empty_nodes": sum(sentence.n_empty_nodes for sentence in sentences),
    }


def _read_all(
    encoder: Encoder, files: Treebanks, run: TransferRun, dev: Sequence[str], settings: TaskSettings
) -> ParseData:
    train: list[ParsedSentence] = []
    for name in run.sources:
        train += _read(files.train[name], settings.train_examples, settings)
    names = sorted({name for sentence in train for name in sentence.deprels} | {ROOT})
    numbers = {name: number for number, name in enumerate(names)}

    def encode(sentences: Sequence[ParsedSentence], one_window: bool = False) -> ParseExamples:
        return encode_trees(
            encoder.tokenizer,
            sentences,
            numbers,
            max_sequence_length(encoder, settings),
            max_words=settings.max_words,
            overlap=settings.overlap,
            one_window=one_window,
        )

    def read(path: Path) -> ParsedText:
        sentences = _read(path, settings.test_examples, settings)
        return ParsedText(sentences, encode(sentences))

    return ParseData(
        names,
        encode(train, one_window=True),
        {name: read(files.dev[name]) for name in dev},
        {name: read(files.test[name]) for name in run.tests},
    )


def _read(path: Path, most: int | None, settings: TaskSettings) -> list[ParsedSentence]:
    """Read a treebank, or so many of its sentences, its relations as they are compared."""
    return [
        replace(
            sentence,
            deprels=tuple(name_relation(name, settings.subtypes) for name in sentence.deprels),
        )
        for sentence in sample_evenly(read_trees(path), most)
    ]


def measure_parsing(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Fine-tune a parser and give LAS (the main metric) and UAS of every test language."""
    files = find_treebanks(data)
    tests = pick_languages(list_languages(data, settings), languages, data)
    runs = plan_runs(settings, list(files.train), tests)

    def measure(run: TransferRun, on_progress: OnProgress) -> list[LanguageScores]:
        prepared = prepare(encoder, files, run, settings)
        return _measure_run(encoder, prepared, settings, seed, on_progress)

    return measure_runs(encoder, runs, measure, on_progress)


def list_languages(data: Path, settings: TaskSettings) -> list[str]:
    """List the languages that can be tested, the source first."""
    files = find_treebanks(data)
    return choose_tests(settings, list(files.train), sorted(files.test))


def _measure_run(
    encoder: Encoder,
    data: ParseData,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress,
) -> list[LanguageScores]:
    root = data.relations.index(ROOT)
    generator = torch.Generator().manual_seed(derive_seed(seed, 1))
    parser = Parser(encoder, len(data.relations), root, settings, generator)

    def judge() -> float:
        return float(
            np.mean([_score(text, data, _parse(text), settings).las for text in data.dev.values()])
        )

    def _parse(text: ParsedText) -> Parses:
        return parser.parse(text.encoded, settings)

    tuned = fine_tune(
        parser,
        data.train,
        settings,
        seed=seed,
        score_dev=judge if data.dev else None,
        on_progress=lambda done, total: on_progress(done, total + len(data.tests)),
    )
    learnt = {"train_sentences": len(data.train.n_words), "train_words_cut": data.train.n_cut}
    outcomes = []
    for number, (language, text) in enumerate(data.tests.items(), start=1):
        parses = _parse(text)
        scores = _score(text, data, parses, settings)
        counts = learnt | count_words(text, data.relations)
        counts["sentences_searched_for_a_tree"] = parses.n_searched
        metrics = {"las": scores.las, "uas": scores.uas}
        n_items = len(text.sentences)
        outcomes.append(LanguageScores(language, metrics, n_items, scores.items, counts=counts))
        on_progress(tuned.n_updates + number, tuned.n_updates + len(data.tests))
    return outcomes


def _score(
    text: ParsedText, data: ParseData, parses: Parses, settings: TaskSettings
) -> Attachments:
    ends = np.cumsum(text.encoded.n_words)[:-1]
    heads = [part.tolist() for part in np.split(parses.heads, ends)]
    kinds = [[data.relations[k] for k in part] for part in np.split(parses.relations, ends)]
    return count_attachments(text.sentences, heads, kinds, subtypes=settings.subtypes)
