"""From a recipe's `data.sources` to a folder of tokenized text: files, tokenizer, preparation.

`calque prepare` writes this folder once for many runs; `calque train` writes RUN/text otherwise.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError
from calque.io.bitext import infer_languages
from calque.models.configuration import load_config
from calque.models.loading import check_vocabulary_size, find_model, find_tokenizer
from calque.objectives import build_objective
from calque.tokens.prepare import (
    TOKENIZER,
    PreparedCorpus,
    TextSource,
    is_trained_by,
    open_prepared,
    prepare_corpora,
    read_held_out_pairs,
    save_tokenizer,
    train_tokenizer_on_sources,
)
from calque.tokens.tokenizer import SpecialTokens, load_tokenizer
from calque.training.data import describe_text, is_suitable
from calque.training.distributed import lock_folder
from calque.training.recipe import is_file_name
from calque.training.recipe_io import resolve_recipe
from calque.training.start import check_freeze, check_start, check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from calque.training.recipe import DataSection, Recipe, SourceSection
    from calque.training.recipe_io import Settings
    from calque.types import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedText:
    """The folder that `prepare` has written, and its size."""

    folder: Path
    n_corpora: int
    n_examples: int
    n_tokens: int


def prepare(
    recipe: str | Path | Recipe,
    *,
    output: str | Path,
    settings: Settings = (),
    workers: int | None = None,
    progress: Progress | None = None,
) -> PreparedText:
    """Read, clean and tokenize the text of a recipe, once for many training runs.

    Corpora that the folder already contains are not prepared again.

    Args:
        recipe: Name of a bundled recipe, a YAML file or a `Recipe`.
        output: Folder for the tokens; pass it to `train` as `prepared`.
        settings: Changes of the recipe: `{"data.alpha": 0.5}` or `["data.alpha=0.5"]`.
        workers: Number of processes that tokenize. Default: one per core.
        progress: Called with the corpus and the number of its examples prepared so far.

    Examples:
        >>> calque.prepare("xlm-tlm", output="tokens").n_examples    # doctest: +SKIP
        120000
    """
    loaded, base = resolve_recipe(recipe, settings)
    corpora = prepare_text(loaded, base, Path(output), n_workers=workers, progress=progress)
    return PreparedText(
        Path(output),
        len(corpora),
        sum(corpus.n_examples for corpus in corpora),
        sum(sum(corpus.n_tokens) for corpus in corpora),
    )


def prepare_text(
    recipe: Recipe,
    base: Path,
    folder: Path,
    *,
    n_workers: int | None = None,
    progress: Progress | None = None,
) -> list[PreparedCorpus]:
    """Read, clean and tokenize the text of a recipe whose relative paths start from `base`.

    Everything that can be wrong with the recipe is checked before the folder is created.
    """
    with lock_folder(folder):
        return _prepare_text(recipe, base, folder, n_workers or os.cpu_count() or 1, progress)


def _prepare_text(
    recipe: Recipe, base: Path, folder: Path, n_workers: int, progress: Progress | None
) -> list[PreparedCorpus]:
    sources, rules = find_sources(recipe.data, base), recipe.data.cleaning_rules()
    check_start(recipe)
    check_freeze(recipe)
    hold_out = read_held_out_pairs(_find_hold_out(recipe.data, base))
    tokenizer = find_recipe_tokenizer(recipe, folder)
    if tokenizer is None:
        logger.info("training a tokenizer of %s entries", f"{recipe.tokenizer.vocab_size:,}")
        tokenizer = train_tokenizer_on_sources(
            sources,
            rules,
            hold_out,
            vocab_size=recipe.tokenizer.vocab_size,
            n_characters=recipe.tokenizer.sample_characters,
            alpha=recipe.tokenizer.alpha,
            character_coverage=recipe.tokenizer.character_coverage,
            seed=recipe.seed,
            progress=progress,
        )
        save_tokenizer(tokenizer, folder / TOKENIZER, describe_tokenizer(recipe))
    _check_tokenizer(recipe, tokenizer)
    corpora = prepare_corpora(
        sources,
        tokenizer,
        folder,
        rules=rules,
        held_out=hold_out,
        n_workers=n_workers,
        progress=progress,
    )
    for corpus in corpora:
        logger.info("%s: %s", corpus.name, describe_cleaning(corpus))
    return corpora


def open_text(folder: Path) -> tuple[list[PreparedCorpus], PreTrainedTokenizerFast]:
    """Open a prepared folder and return its corpora and its tokenizer."""
    return open_prepared(folder), load_tokenizer(folder / TOKENIZER)


def check_text(recipe: Recipe, base: Path) -> None:
    """Raise an InputError if an objective has no suitable source, before text is prepared."""
    sources = find_sources(recipe.data, base)
    for settings in recipe.objectives:
        objective = build_objective(settings)
        if not any(
            is_suitable(objective, source.languages, source.links is not None, source.vectors)
            for source in sources
        ):
            raise InputError(
                f"{settings.kind} needs {describe_text(objective)}, and data.sources has none",
                fix="add a source, or remove the objective",
            )


def describe_cleaning(corpus: PreparedCorpus) -> str:
    """Return a line about the examples that were kept and dropped, with the reasons."""
    dropped = ", ".join(f"{reason} {n}" for reason, n in corpus.cleaning["dropped"].items())
    n_read = corpus.cleaning["n_read"]
    return f"{corpus.n_examples} of {n_read} examples kept; dropped: {dropped or 'none'}"


def find_sources(data: DataSection, base: Path) -> list[TextSource]:
    """Find the files of a recipe's sources, in the recipe's folder or the working directory."""
    sources = [source for section in data.sources for source in _expand_source(section, base)]
    left_out = set(data.leave_out_languages)
    kept = [source for source in sources if not left_out & set(source.languages)]
    if not kept:
        raise InputError(
            "the recipe has no text", fix="add data.sources, or pass prepared text with --prepared"
        )
    return kept


def find_recipe_tokenizer(recipe: Recipe, folder: Path) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer of the recipe, of its model, or the one trained for it in a folder.

    None means that a tokenizer must be trained.
    """
    if recipe.tokenizer.path is not None:
        return load_tokenizer(find_tokenizer(recipe.tokenizer.path))
    if recipe.model.start is not None:
        return load_tokenizer(find_model(recipe.model.start))
    if is_trained_by(folder / TOKENIZER, describe_tokenizer(recipe)):
        return load_tokenizer(folder / TOKENIZER)
    return None


def _find_hold_out(data: DataSection, base: Path) -> Path | None:
    if data.hold_out is None:
        return None
    beside = base / Path(data.hold_out).expanduser()
    path = beside.resolve() if beside.exists() else Path(data.hold_out)
    if not path.is_file():
        raise InputError(
            "the file of held-out pairs does not exist",
            file=path,
            fix="correct data.hold_out, or use --set data.hold_out=null",
        )
    return path


def _check_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise an InputError if the model cannot be trained with this tokenizer."""
    SpecialTokens.of(tokenizer)
    start = recipe.model.start
    if start is None or recipe.model.decoder is not None:
        return
    folder = find_model(start)
    check_vocabulary_size(folder, tokenizer, load_config(folder).vocab_size)
    if recipe.tokenizer.path is not None:
        check_vocabulary(load_tokenizer(folder).get_vocab(), tokenizer.get_vocab(), start)


def describe_tokenizer(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that a trained tokenizer depends on."""
    return {
        "seed": recipe.seed,
        "tokenizer": recipe.tokenizer.model_dump(),
        "sources": [
            source.model_dump(exclude={"weight"})
            for source in recipe.data.sources
            if source.kind != "vectors"
        ],
        "data": recipe.data.model_dump(include={"leave_out_languages", "hold_out", "cleaning"}),
    }


def _expand_source(section: SourceSection, base: Path) -> list[TextSource]:
    """Return one source per file, or per pair of files where they are the sides of a bitext."""
    patterns = [section.path] if isinstance(section.path, str) else section.path
    found = [_glob_files(pattern, base) for pattern in patterns]
    if section.kind == "bitext" and len(found) == 2 and _are_sides(section, found):
        groups = list(zip(*found, strict=True))
    else:
        groups = [(path,) for paths in found for path in paths]
    return [
        TextSource(
            group,
            _find_languages(section, group),
            None if section.include_tags is None else tuple(section.include_tags),
            tuple(section.exclude_tags),
            section.weight,
            links,
            section.kind == "vectors",
            section.max_words,
        )
        for group, links in zip(groups, _find_links(section, base, len(groups)), strict=True)
    ]


def _are_sides(section: SourceSection, found: Sequence[Sequence[Path]]) -> bool:
    """Return whether two paths are the sides of one bitext (news.en, news.de), not two bitexts."""
    if section.languages is None and infer_languages([paths[0] for paths in found]) is None:
        return False
    if len(found[0]) != len(found[1]):
        raise InputError(
            f"there are {len(found[0])} files on one side and {len(found[1])} on the other",
            file=section.path,
            fix="correct the paths in data.sources",
        )
    return True


def _find_links(section: SourceSection, base: Path, n_bitexts: int) -> Sequence[Path | None]:
    """Return the file of word links of each bitext, or None where the source has no links."""
    if section.links is None:
        return [None] * n_bitexts
    patterns = [section.links] if isinstance(section.links, str) else section.links
    found = [path for pattern in patterns for path in _glob_files(pattern, base)]
    if len(found) != n_bitexts:
        raise InputError(
            f"there are {len(found)} files of links for {n_bitexts} bitexts",
            file=section.links,
            fix="correct the paths in data.sources",
        )
    return found


def _glob_files(pattern: str, base: Path) -> list[Path]:
    for root in (base, Path()):
        found = sorted(glob.glob(str(root / Path(pattern).expanduser())))
        if found:
            return [Path(path) for path in found]
    raise InputError("no such file", file=pattern, fix="correct the path in data.sources")


def _find_languages(section: SourceSection, paths: Sequence[Path]) -> tuple[str, ...]:
    if section.languages is not None:
        languages: tuple[str, ...] = tuple(section.languages.split("-"))
    elif section.kind == "bitext":
        languages = infer_languages(paths) or ()
    else:
        languages = (paths[0].name.split(".")[0],)
    if len(languages) != (2 if section.kind == "bitext" else 1):
        raise InputError(
            "the languages cannot be inferred from the file name",
            file=paths[0],
            fix="add `languages: en-de` (bitext) or `languages: de` (others) to the source",
        )
    for language in languages:
        if not is_file_name(language):
            raise InputError(
                f"{language!r} cannot be the code of a language",
                file=paths[0],
                fix="correct `languages` of the source, for example to de or en-de",
            )
    return languages
