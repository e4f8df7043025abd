"""What a grown model started from: rows by rule and script, examples, shares of real text.

Growing a cross-lingual model's start out of a monolingual model and a new tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from calque.errors import InputError, first_line
from calque.growth.initialize import Initialize, Unmatched, grow_model, load_mono
from calque.growth.match import RULES, SPECIAL, UNMATCHED, Glossary, Preference, match_vocabularies
from calque.io.bitext import read_sentences
from calque.io.outputs import write_folder
from calque.io.segmentation import script_of
from calque.models.encoder import Encoder
from calque.models.loading import embedded_models
from calque.tokens.tokenizer import lift_limits, load_tokenizer
from calque.tokens.vocabularies import PieceIndex, Vocabulary, is_whole
from calque.tokens.words import make_sentence_encoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.growth.match import DictionaryUse, RuleArray, VocabularyMatch
    from calque.io.files import PathLike


N_EXAMPLES, N_AT_ONCE = 12, 10_000
BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Example:
    """A new piece, the old pieces it starts from, and the translations that led there."""

    piece: str
    sources: list[str]
    meanings: list[str]


@dataclass(frozen=True, slots=True)
class TextShare:
    """How much of a text starts matched, by token: in all, without dictionaries, and by rule.

    The unknown token and other special ones count as tokens, but not as matched.
    """

    name: str
    n_tokens: int
    matched: float
    matched_without: float
    rules: dict[str, float]


@dataclass(frozen=True, slots=True)
class MatchReport:
    """Rows by rule, with and without dictionaries, and by script; examples; shares of texts."""

    rules: dict[str, int]
    rules_without: dict[str, int]
    scripts: dict[str, dict[str, int]]
    examples: dict[str, list[Example]]
    dictionaries: list[DictionaryUse]
    n_unspelled: int
    texts: list[TextShare]

    @property
    def matched(self) -> float:
        """The share of rows that start matched."""
        n_rows = sum(self.rules.values())
        return 1 - self.rules[RULES[UNMATCHED]] / n_rows if n_rows else 0.0


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What was grown from what, and how; `match` is None where embeddings start anew."""

    mono: str
    tokenizer: str
    output: str
    language: str
    initialize: str
    unmatched: str
    prefer: str
    composes: bool
    seed: int
    n_rows: int
    n_mono_rows: int
    has_head: bool
    special: dict[str, tuple[str, str | None]]
    match: MatchReport | None

    def to_dict(self) -> dict[str, Any]:
        """Give what `growth.json` holds."""
        return asdict(self)


def report_match(
    new: Vocabulary,
    mono: Vocabulary,
    match: VocabularyMatch,
    texts: Iterable[PathLike],
    tokenizer: PreTrainedTokenizerFast,
) -> MatchReport:
    """Count rows, pick examples, and weigh both by the tokens of texts."""
    return MatchReport(
        _count_rules(match.rules),
        _count_rules(match.rules_without),
        _count_scripts(new, match.rules),
        {rule: _pick_examples(new, mono, match, k) for k, rule in enumerate(RULES)},
        match.dictionaries,
        match.n_unspelled,
        [_weigh_text(path, tokenizer, match) for path in texts],
    )


def weigh_others(texts: Sequence[TextShare], language: str) -> TextShare | None:
    """Put texts of other languages together, each with the weight of its tokens."""
    others = [text for text in texts if text.name != language]
    n_tokens = sum(text.n_tokens for text in others)
    if not n_tokens:
        return None

    def mean(values: Iterable[float]) -> float:
        shares = zip(others, values, strict=True)
        return sum(text.n_tokens * value for text, value in shares) / n_tokens

    return TextShare(
        "others",
        n_tokens,
        mean(text.matched for text in others),
        mean(text.matched_without for text in others),
        {rule: mean(text.rules[rule] for text in others) for rule in RULES},
    )


def pair_special(new: Vocabulary, mono: Vocabulary) -> dict[str, tuple[str, str | None]]:
    """Say which token takes which one's place, role by role."""
    return {
        role: (new.tokens[row], mono.tokens[mono.roles[role]] if role in mono.roles else None)
        for role, row in new.roles.items()
    }


def _count_rules(rules: RuleArray) -> dict[str, int]:
    counts = np.bincount(rules, minlength=len(RULES))
    return dict(zip(RULES, counts.tolist(), strict=True))


def _count_scripts(vocabulary: Vocabulary, rules: RuleArray) -> dict[str, dict[str, int]]:
    """Count the rules of each script's rows, the largest script first; special rows aside."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(vocabulary.texts):
        if text is not None:
            rows.setdefault(script_of(text) if is_whole(text) else BYTES, []).append(row)
    ordered = sorted(rows.items(), key=lambda item: (-len(item[1]), item[0]))
    return {script: _count_rules(rules[each]) for script, each in ordered}


def _pick_examples(
    new: Vocabulary, mono: Vocabulary, match: VocabularyMatch, rule: int
) -> list[Example]:
    """Give the first rows of a rule: in most vocabularies the most frequent pieces."""
    rows = np.flatnonzero(match.rules == rule)[:N_EXAMPLES].tolist()
    starts = np.searchsorted(match.sources.rows, rows, side="left").tolist()
    ends = np.searchsorted(match.sources.rows, rows, side="right").tolist()
    return [
        Example(
            new.tokens[row],
            [mono.tokens[k] for k in match.sources.sources[start:end].tolist()],
            match.meanings.get(row, []),
        )
        for row, start, end in zip(rows, starts, ends, strict=True)
    ]


def _weigh_text(
    path: PathLike, tokenizer: PreTrainedTokenizerFast, match: VocabularyMatch
) -> TextShare:
    counts = _count_tokens(path, tokenizer, len(match.rules))
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


def _count_tokens(
    path: PathLike, tokenizer: PreTrainedTokenizerFast, n_rows: int
) -> npt.NDArray[np.int64]:
    encode = make_sentence_encoder(lift_limits(tokenizer.backend_tokenizer))
    counts = np.zeros(n_rows, dtype=np.int64)
    stream = read_sentences(path)
    while sentences := list(islice(stream, N_AT_ONCE)):
        counts += np.bincount(encode(sentences).ids, minlength=n_rows)
    return counts


REPORT = "growth.json"
MATCHING = ("both", "embeddings")
# Which tokens do what, where a tokenizer's file does not say it.
USUAL = {
    "cls": ("<s>", "[CLS]"),
    "sep": ("</s>", "[SEP]"),
    "pad": ("<pad>", "[PAD]"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}


def grow(
    mono: str | Path,
    tokenizer: str | Path,
    output: Path,
    *,
    dictionaries: Sequence[PathLike] = (),
    language: str = "en",
    texts: Sequence[PathLike] = (),
    initialize: Initialize = "both",
    unmatched: Unmatched = "moments",
    prefer: Preference = "surface",
    composes: bool = True,
    seed: int = 0,
    overwrite: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> GrowReport:
    """Write a model of the same architecture over a new vocabulary, as a plain folder.

    `dictionaries` lead to the monolingual model's `language`: en-de.txt or de-en.txt. `texts` are
    only counted: the report says how much of each starts matched.
    """
    output = Path(output)
    _check_choices(initialize=initialize, unmatched=unmatched, prefer=prefer)
    _check_used(initialize, dictionaries, texts)
    check_output(output, overwrite, mono, tokenizer)
    on_phase("loading")
    old, new_tokenizer = load_mono(mono), open_tokenizer(tokenizer)
    new, index = Vocabulary.of(new_tokenizer), PieceIndex(old.tokenizer)
    match = match_report = None
    if initialize in MATCHING:
        on_phase("matching")
        glossary = Glossary(dictionaries, language, prefer, composes) if dictionaries else None
        match = match_vocabularies(new, index, glossary)
        match_report = report_match(new, index.vocabulary, match, texts, new_tokenizer)
    on_phase("filling")
    model = grow_model(
        old,
        len(new),
        new.roles,
        match,
        copies_body=initialize in ("both", "body"),
        unmatched=unmatched,
        seed=seed,
    )
    report = GrowReport(
        mono=str(mono),
        tokenizer=str(tokenizer),
        output=str(output),
        language=language,
        initialize=initialize,
        unmatched=unmatched,
        prefer=prefer,
        composes=composes,
        seed=seed,
        n_rows=len(new),
        n_mono_rows=len(index.vocabulary),
        has_head=old.has_head,
        special=pair_special(new, index.vocabulary),
        match=match_report,
    )
    on_phase("writing")
    _write(Encoder(model, new_tokenizer), report, output)
    return report


def open_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """Open the tokenizer of a folder, a file tokenizer.json, a hub name or an embedded model."""
    path = embedded_models().get(str(name), Path(name))
    if not path.is_file():
        tokenizer = load_tokenizer(path if path.is_dir() else name)
    elif path.name == "tokenizer.json" and path.with_name("tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(path.parent)
    else:
        tokenizer = _read_tokenizer(path)
    known = tokenizer.get_vocab()
    for role, names in USUAL.items():
        usual = next((token for token in names if token in known), None)
        if getattr(tokenizer, f"{role}_token_id") is not None:
            continue
        if usual is None:
            problem = f"the tokenizer has no {role} token, which a masked language model needs"
            raise InputError(problem, file=name, fix=f"add one, for example {names[0]}")
        tokenizer.add_special_tokens({f"{role}_token": usual})
    return tokenizer


def check_output(output: Path, overwrite: bool, *inputs: str | Path) -> None:
    """Refuse to write over what is not a grown model, or over what it grows from."""
    if output.exists() and not output.is_dir():
        raise InputError("is not a folder", file=output, fix="give another name")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not overwrite:
        raise InputError(
            "this folder is not empty", file=output, fix="give a new one, or --overwrite"
        )
    if not (output / REPORT).is_file():
        raise InputError("holds no grown model", file=output, fix="give a new folder")
    for each in inputs:
        if Path(each).exists() and Path(each).resolve().is_relative_to(output.resolve()):
            raise InputError("would be overwritten", file=each, fix="give a new folder")


def _check_choices(**choices: str) -> None:
    kinds = {"initialize": Initialize, "unmatched": Unmatched, "prefer": Preference}
    for name, value in choices.items():
        known: tuple[str, ...] = get_args(kinds[name])
        if value not in known:
            problem = f"{name} {value} does not exist"
            raise InputError(problem, fix=f"choose from: {', '.join(known)}")


def _check_used(
    initialize: str, dictionaries: Sequence[PathLike], texts: Sequence[PathLike]
) -> None:
    """Refuse files that nothing would come of, and missing ones before the work."""
    for what, paths in (("dictionaries", dictionaries), ("texts", texts)):
        if paths and initialize not in MATCHING:
            problem = f"{what} with initialize {initialize}: no embedding is matched"
            raise InputError(problem, fix="leave them out, or initialize both or embeddings")
        for path in paths:
            if not Path(path).is_file():
                raise InputError("no such file", file=path, fix="check the path")


def _read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the tokenizers library raises nothing more precise
        problem = f"no tokenizer could be loaded: {first_line(error)}"
        raise InputError(problem, file=path, fix="give a tokenizer.json, or a folder") from error


def _write(encoder: Encoder, report: GrowReport, output: Path) -> None:
    """Write model, tokenizer and report; all of them or nothing."""
    _fit_tokenizer(encoder)
    text = json.dumps(report.to_dict(), ensure_ascii=False, indent=1) + "\n"

    def fill(draft: Path) -> None:
        encoder.save(draft)
        (draft / REPORT).write_text(text, encoding="utf-8")

    write_folder(output.absolute(), fill)


def _fit_tokenizer(encoder: Encoder) -> None:
    """Make the tokenizer give what the model takes: so many tokens, and types where it has two.

    BERT's numbers the second text of a pair 1, which RoBERTa has no row for.
    """
    tokenizer: Any = encoder.tokenizer
    tokenizer.model_max_length = encoder.max_tokens
    if getattr(encoder.config, "type_vocab_size", 1) < 2:
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
