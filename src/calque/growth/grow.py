"""Start a cross-lingual model from a monolingual model and a new tokenizer.

MetaXLM (Chi et al., 2021): the architecture and the Transformer body stay, and an embedding row of
the new vocabulary starts from the rows of the monolingual model that match it.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from calque.errors import InputError, first_line
from calque.growth.initialize import Initialize, Unmatched, grow_model, load_monolingual
from calque.growth.match import RULES, SPECIAL, UNMATCHED, Averaging, Preference, match_rows
from calque.io.bitext import read_sentences
from calque.io.outputs import write_folder
from calque.io.segmentation import find_script
from calque.models.encoder import Encoder
from calque.models.loading import find_tokenizer
from calque.tokens.tokenizer import disable_truncation_and_padding, load_tokenizer
from calque.tokens.vocabularies import PieceIndex, Vocabulary, has_whole_characters
from calque.tokens.words import build_sentence_encoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.growth.match import DictionaryUse, RuleArray, VocabularyMatch
    from calque.io.files import PathLike
    from calque.types import Progress

REPORT = "growth.json"
N_EXAMPLES, BLOCK_LINES = 12, 10_000
BYTES = "bytes"  # the "script" of pieces that are not whole characters
# Names of special tokens by role, for tokenizer files that do not name the roles.
SPECIAL_NAMES = {
    "cls": ("<s>", "[CLS]"),
    "sep": ("</s>", "[SEP]"),
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}


@dataclass(frozen=True, slots=True)
class MatchExample:
    """A new piece, the old pieces it starts from, and the translations that led to them."""

    piece: str
    sources: list[str]
    meanings: list[str]


@dataclass(frozen=True, slots=True)
class TextShare:
    """Fractions of the tokens of a text that start matched: in all, without dictionaries, by rule.

    Special tokens, such as the unknown token, count as tokens but not as matched.
    """

    name: str
    n_tokens: int
    matched: float
    matched_without: float
    rules: dict[str, float]


@dataclass(frozen=True, slots=True)
class MatchReport:
    """Numbers of rows by rule, with and without dictionaries, and by script; texts; examples."""

    rules: dict[str, int]
    rules_without: dict[str, int]
    scripts: dict[str, dict[str, int]]
    examples: dict[str, list[MatchExample]]
    dictionaries: list[DictionaryUse]
    n_unspelled: int
    texts: list[TextShare]

    @property
    def matched(self) -> float:
        """Return the fraction of rows that start matched."""
        n_rows = sum(self.rules.values())
        return 1 - self.rules[RULES[UNMATCHED]] / n_rows if n_rows else 0.0


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What was grown from what; `match` is None if all embeddings are new.

    `mono` is the monolingual model. `special` has the new and the old special token of each role.
    """

    mono: str
    tokenizer: str
    output: str
    language: str
    initialize: str
    unmatched: str
    prefer: str
    average: str
    composes: bool
    seed: int
    n_rows: int
    n_mono_rows: int
    has_head: bool
    special: dict[str, tuple[str, str | None]]
    match: MatchReport | None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `growth.json`."""
        return asdict(self)


def grow(
    model: str | Path,
    *,
    tokenizer: str | Path,
    output: str | Path,
    dictionary: PathLike | Sequence[PathLike] = (),
    language: str = "en",
    text: PathLike | Sequence[PathLike] = (),
    initialize: Initialize = "both",
    unmatched: Unmatched = "moments",
    prefer: Preference = "dictionary",
    average: Averaging = "plain",
    compose: bool = True,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> GrowReport:
    """Start a cross-lingual model from a monolingual one (MetaXLM; Chi et al., 2021).

    The output is a plain Hugging Face folder of the same architecture with the new vocabulary, to
    be used as `model.start` of a recipe, and a report in `growth.json`.

    Args:
        model: The monolingual model: a folder, a hub name or `calque-mini`.
        tokenizer: The new tokenizer: a folder, a file tokenizer.json, a hub name or `calque-mini`.
        output: Folder for the new model.
        dictionary: Dictionaries in the format of MUSE: files or patterns such as `muse/en-*.txt`.
            A name like en-de.txt or de-en.txt names the columns.
        language: Language of the monolingual model, as in the names of the dictionaries.
        text: Texts for which the report says how many tokens start matched: files or patterns.
        initialize: What to copy: "both", "body", "embeddings" or "none".
        unmatched: How to initialize unmatched rows: "moments" draws them with the mean and
            covariance of the matched rows, "normal" from N(0, 0.02²). "pieces" takes the mean of
            the pieces that the old tokenizer splits a piece into; this is for a new vocabulary of
            languages that the model knows.
        prefer: What to try first: the translation of a piece ("dictionary", as in the paper) or
            its text ("surface").
        average: Mean of several translations: "plain", as in the paper, or "weighted" by the
            number of dictionaries that have them and without the word itself.
        compose: Use translations that the monolingual tokenizer splits into several pieces.
        seed: Random seed.
        overwrite: Replace a model that was grown before.
        progress: Called with the current stage.

    Examples:
        >>> report = calque.grow("roberta-base", tokenizer="xlm-roberta-base", output="start",
        ...                      dictionary="muse/en-*.txt")    # doctest: +SKIP
        >>> report.match.rules["exact"]    # doctest: +SKIP
        31432
    """
    output = Path(output)
    for name, value, kind in (
        ("initialize", initialize, Initialize),
        ("unmatched", unmatched, Unmatched),
        ("prefer", prefer, Preference),
        ("average", average, Averaging),
    ):
        choices: tuple[str, ...] = get_args(kind)
        if value not in choices:
            raise InputError(f"{name} cannot be {value!r}", fix=f"use {', '.join(choices)}")
    dictionaries, texts = expand_patterns(dictionary), expand_patterns(text)
    matches = initialize in ("both", "embeddings")
    for name, files in (("dictionaries", dictionaries), ("texts", texts)):
        if files and not matches:
            raise InputError(
                f"{name} are not used with initialize={initialize}, which matches no embeddings",
                fix="remove them, or set initialize to both or embeddings",
            )
    check_output(output, overwrite, model, tokenizer)

    def report_stage(stage: str) -> None:
        if progress is not None:
            progress(stage, 0, None)

    report_stage("loading the model")
    mono, new_tokenizer = load_monolingual(model), open_tokenizer(tokenizer)
    new, index = Vocabulary.of(new_tokenizer), PieceIndex(mono.tokenizer)
    old = index.vocabulary
    match = match_report = None
    if matches:
        report_stage("matching the vocabularies")
        match = match_rows(
            new,
            index,
            dictionaries,
            language=language,
            prefer=prefer,
            average=average,
            compose=compose,
            split=unmatched == "pieces",
        )
        match_report = report_match(new, old, match, texts, new_tokenizer)
    report_stage("initializing the weights")
    grown = grow_model(
        mono,
        len(new),
        new.roles,
        match,
        copy_body=initialize in ("both", "body"),
        unmatched=unmatched,
        seed=seed,
    )
    report = GrowReport(
        mono=str(model),
        tokenizer=str(tokenizer),
        output=str(output),
        language=language,
        initialize=initialize,
        unmatched=unmatched,
        prefer=prefer,
        average=average,
        composes=compose,
        seed=seed,
        n_rows=len(new),
        n_mono_rows=len(old),
        has_head=mono.has_head,
        special={
            role: (new.tokens[row], old.tokens[old.roles[role]] if role in old.roles else None)
            for role, row in new.roles.items()
        },
        match=match_report,
    )
    report_stage("writing the model")
    _write(Encoder(grown, new_tokenizer), report, output)
    return report


def expand_patterns(patterns: PathLike | Sequence[PathLike]) -> list[str]:
    """Return the files of paths and glob patterns, each once; one without a file is an error."""
    if isinstance(patterns, str | os.PathLike):
        patterns = [patterns]
    found: dict[str, None] = {}
    for pattern in map(str, patterns):
        files = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern))
        if not files or not all(Path(file).is_file() for file in files):
            raise InputError("there is no such file", file=pattern, fix="check the path")
        found |= dict.fromkeys(files)
    return list(found)


def open_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder, a file tokenizer.json, a hub name or `calque-mini`."""
    path = Path(name)
    if not path.is_file():
        tokenizer = load_tokenizer(find_tokenizer(name))
    elif path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(path.parent)
    else:
        tokenizer = _read_tokenizer(path)
    known = tokenizer.get_vocab()
    for role, names in SPECIAL_NAMES.items():
        if getattr(tokenizer, f"{role}_token_id") is not None:
            continue
        token = next((token for token in names if token in known), None)
        if token is None:
            problem = f"the tokenizer has no {role} token, which a masked language model needs"
            raise InputError(problem, file=name, fix=f"add one, for example {names[0]}")
        tokenizer.add_special_tokens({f"{role}_token": token})
    return tokenizer


def _read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the tokenizers library raises nothing more precise
        problem = f"the tokenizer could not be loaded: {first_line(error)}"
        raise InputError(problem, file=path, fix="pass a tokenizer.json or a folder") from error


def check_output(output: Path, overwrite: bool, *inputs: str | Path) -> None:
    """Raise an error if the output would replace anything but a grown model, or an input."""
    if output.exists() and not output.is_dir():
        raise InputError("this is not a folder", file=output, fix="choose another name")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise InputError(
            "the folder is not empty", file=output, fix="choose a new folder, or use --overwrite"
        )
    if not (output / REPORT).is_file():
        raise InputError("the folder has no grown model", file=output, fix="choose a new folder")
    for each in inputs:
        if Path(each).exists() and Path(each).resolve().is_relative_to(output.resolve()):
            raise InputError("the input would be overwritten", file=each, fix="choose a new folder")


def report_match(
    new: Vocabulary,
    mono: Vocabulary,
    match: VocabularyMatch,
    texts: Iterable[PathLike],
    tokenizer: PreTrainedTokenizerFast,
) -> MatchReport:
    """Count the matched rows by rule and script, choose examples, and count tokens of texts."""
    return MatchReport(
        _count_rules(match.rules),
        _count_rules(match.rules_without),
        _count_scripts(new, match.rules),
        {rule: _choose_examples(new, mono, match, k) for k, rule in enumerate(RULES)},
        match.dictionaries,
        match.n_unspelled,
        [_measure_text(path, tokenizer, match) for path in texts],
    )


def average_other_texts(texts: Sequence[TextShare], language: str) -> TextShare | None:
    """Return the average over the texts of other languages, weighted by their tokens."""
    others = [text for text in texts if text.name != language]
    n_tokens = sum(text.n_tokens for text in others)
    if not n_tokens:
        return None

    def average(values: Iterable[float]) -> float:
        pairs = zip(others, values, strict=True)
        return sum(text.n_tokens * value for text, value in pairs) / n_tokens

    return TextShare(
        "others",
        n_tokens,
        average(text.matched for text in others),
        average(text.matched_without for text in others),
        {rule: average(text.rules[rule] for text in others) for rule in RULES},
    )


def _count_rules(rules: RuleArray) -> dict[str, int]:
    counts = np.bincount(rules, minlength=len(RULES))
    return dict(zip(RULES, counts.tolist(), strict=True))


def _count_scripts(vocabulary: Vocabulary, rules: RuleArray) -> dict[str, dict[str, int]]:
    """Count rows by script and rule, the most frequent script first; without special tokens."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(vocabulary.texts):
        if text is not None:
            script = find_script(text) if has_whole_characters(text) else BYTES
            rows.setdefault(script, []).append(row)
    ordered = sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))
    return {script: _count_rules(rules[each]) for script, each in ordered}


def _choose_examples(
    new: Vocabulary, mono: Vocabulary, match: VocabularyMatch, rule: int
) -> list[MatchExample]:
    """Return the first rows of a rule: in most vocabularies the most frequent pieces."""
    rows = np.flatnonzero(match.rules == rule)[:N_EXAMPLES].tolist()
    starts = np.searchsorted(match.sources.rows, rows, side="left").tolist()
    ends = np.searchsorted(match.sources.rows, rows, side="right").tolist()
    return [
        MatchExample(
            new.tokens[row],
            [mono.tokens[k] for k in match.sources.sources[start:end].tolist()],
            match.meanings.get(row, []),
        )
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]


def _measure_text(
    path: PathLike, tokenizer: PreTrainedTokenizerFast, match: VocabularyMatch
) -> TextShare:
    encode = build_sentence_encoder(disable_truncation_and_padding(tokenizer.backend_tokenizer))
    counts = np.zeros(len(match.rules), dtype=np.int64)
    stream = read_sentences(path)
    while sentences := list(islice(stream, BLOCK_LINES)):
        counts += np.bincount(encode(sentences).ids, minlength=len(counts))
    n_tokens = int(counts.sum())
    shares = np.bincount(match.rules, counts, len(RULES)) / max(n_tokens, 1)
    without = np.bincount(match.rules_without, counts, len(RULES)) / max(n_tokens, 1)
    return TextShare(
        Path(path).name.split(".")[0],
        n_tokens,
        _matched_share(shares),
        _matched_share(without),
        dict(zip(RULES, shares.tolist(), strict=True)),
    )


def _matched_share(shares: npt.NDArray[np.float64]) -> float:
    return float(shares.sum() - shares[UNMATCHED] - shares[SPECIAL])


def _write(encoder: Encoder, report: GrowReport, output: Path) -> None:
    """Write model, tokenizer and report, all of them or nothing."""
    tokenizer: Any = encoder.tokenizer
    tokenizer.model_max_length = encoder.max_tokens
    # BERT's tokenizer gives the second text of a pair type 1, which RoBERTa has no embedding for.
    if getattr(encoder.config, "type_vocab_size", 1) < 2:
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    text = json.dumps(report.to_dict(), ensure_ascii=False, indent=1) + "\n"

    def fill(draft: Path) -> None:
        encoder.save(draft)
        (draft / REPORT).write_text(text, encoding="utf-8")

    write_folder(output.absolute(), fill)
