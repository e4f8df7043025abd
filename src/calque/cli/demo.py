"""`calque demo`: align words and find translations with the embedded model."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from calque.api import Model

CAPTION = """\
An illustration, not a benchmark: the embedded model was trained on sentences
of this kind, though not on these pairs."""
HINTS = """\
Next:
  calque align FILE                      word links of your own sentence pairs
  calque embed FILE -o vectors.npy       one vector a line of your own text
  calque models                          what is in the package
  calque evaluate MODEL --data DIR       accuracy on the Tatoeba test sets
  python -c 'import calque; print(calque.load().embed(["Guten Morgen!"]))'"""

SPACELESS = ("ja", "zh")  # to be split by libraries that may not be there
LEGIBLE = 40  # characters of an example that fits a terminal beside its translation


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence, its translation, and the one found among all the others."""

    language: str
    sentence: str
    english: str
    found: str

    @property
    def is_right(self) -> bool:
        """Tell whether the translation was found."""
        return self.found == self.english


def demo(
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many to show of each language.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Align words and find translations among 200 real sentences.

    Eight languages, the embedded model, no network, a few seconds.
    """
    from rich.console import Console

    from calque.api import load

    encoder, pairs, console = load(model, device), read_pairs(), Console()
    if examples:
        console.print(_tabulate_links(encoder, _choose(pairs, examples)))
    findings = find_translations(encoder, pairs)
    if examples:
        console.print(_tabulate_examples(findings, examples))
    console.print(_tabulate_accuracy(findings))
    console.print(CAPTION, "", HINTS, sep="\n", highlight=False, soft_wrap=True)


def read_pairs() -> list[list[str]]:
    """Read the bundled rows: language, English, sentence."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return [line.split("\t") for line in table.splitlines()[1:]]


def find_translations(model: Model, pairs: list[list[str]]) -> list[Finding]:
    """Look for each sentence among the English of all languages."""
    from calque.tasks.metrics import find_nearest

    languages, english, sentences = zip(*pairs, strict=True)
    queries, candidates = model.embed(sentences), model.embed(english)
    return [
        Finding(language, sentence, translation, english[index])
        for language, sentence, translation, index in zip(
            languages, sentences, english, find_nearest(queries, candidates), strict=True
        )
    ]


def _choose(pairs: list[list[str]], n_examples: int) -> list[list[str]]:
    """Choose some pairs of every language that can be split into words at its spaces."""
    chosen = []
    for language in dict.fromkeys(pair[0] for pair in pairs):
        mine = [pair for pair in pairs if pair[0] == language and language not in SPACELESS]
        chosen += sorted(mine, key=lambda pair: abs(len(pair[1]) - LEGIBLE))[:n_examples]
    return chosen


def _tabulate_links(model: Model, pairs: list[list[str]]) -> Table:
    from rich import box
    from rich.table import Table

    from calque.cli.colored_links import color_links
    from calque.text.segmentation import split_words
    from calque.tools.word_aligner import WordAligner

    words = [
        (split_words(sentence, language), split_words(english, "en"))
        for language, english, sentence in pairs
    ]
    table = Table("", box=box.SIMPLE_HEAD, title="linked words have one color and number")
    table.add_column("sentence", overflow="fold")
    table.add_column("English", overflow="fold")
    for pair, both, links in zip(pairs, words, WordAligner(model).align(words), strict=True):
        table.add_row(pair[0], *color_links(both, links))
    return table


def _tabulate_examples(findings: list[Finding], n_examples: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("sentence", overflow="fold")
    table.add_column(f"found among {len(findings)} English sentences", overflow="fold")
    table.add_column("")
    for language in dict.fromkeys(finding.language for finding in findings):
        mine = [finding for finding in findings if finding.language == language]
        for finding in mine[:: max(1, len(mine) // n_examples)][:n_examples]:
            mark = "[green]✓[/]" if finding.is_right else "[red]✗[/]"
            table.add_row(language, finding.sentence, finding.found, mark)
        table.add_section()
    return table


def _tabulate_accuracy(findings: list[Finding]) -> Table:
    from rich import box
    from rich.table import Table

    languages = list(dict.fromkeys(finding.language for finding in findings))
    table = Table(*languages, "all", box=box.SIMPLE_HEAD, title="translations found (%)")
    groups = [[f for f in findings if f.language == language] for language in languages]
    rates = [sum(f.is_right for f in group) / len(group) for group in [*groups, findings]]
    table.add_row(*(f"{100 * rate:.0f}" for rate in rates))
    return table
