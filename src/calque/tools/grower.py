"""Growing a cross-lingual model's start out of a monolingual model and a new tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from calque.models.encoder import Encoder
from calque.models.growth import Initialize, Unmatched, grow_model, load_mono
from calque.models.loading import embedded_models
from calque.models.vocabulary import Glossary, Preference, match_vocabularies
from calque.text.piece_index import PieceIndex
from calque.text.pieces import Vocabulary
from calque.text.tokenization import load_tokenizer
from calque.tools.growth_report import GrowReport, pair_special, report_match
from calque.training.checkpoints import write_folder
from calque.types import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from calque.text.files import PathLike

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
