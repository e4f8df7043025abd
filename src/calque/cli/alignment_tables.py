"""Word alignments as tables for a terminal: scores, reports of linked bitext, colored links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from calque.errors import printable

if TYPE_CHECKING:
    from calque.types import Reliability
    from calque.word_alignment.linked_bitext import LinkReport
    from calque.word_alignment.protocol import WordPair
    from calque.word_alignment.scoring import LinkCounts
    from calque.word_alignment.sweep import Sweep

SCORES = {"precision": "precision", "recall": "recall", "f1": "F1", "aer": "AER"}
COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")
UNLINKED = "dim"
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def tabulate_counts(counts: LinkCounts, name: str, n_pairs: int) -> Table:
    """Return a table of precision, recall, F1 and AER."""
    table = Table(title=f"{n_pairs:,} pairs (%)")
    table.add_column("aligner")
    for title in SCORES.values():
        table.add_column(title, justify="right")
    table.add_row(
        Text(printable(name)), *(f"{100 * getattr(counts, metric):.2f}" for metric in SCORES)
    )
    return table


def tabulate_sweep(sweep: Sweep) -> Table:
    """Return a table of the AER of every layer, method and sharpness, with the best in bold."""
    table = Table(title=f"alignment error rate of {sweep.n_pairs:,} pairs (%)")
    table.add_column("layer", justify="right")
    columns: dict[str, dict[int | None, str]] = {}
    for choice, counts in sweep.counts.items():
        cell = f"{100 * counts.aer:.2f}"
        title = f"ot {choice.sharpness:g}" if choice.method == "ot" else choice.method
        columns.setdefault(title, {})[choice.layer] = (
            f"[bold]{cell}[/]" if choice == sweep.best else cell
        )
    for title in columns:
        table.add_column(title.replace("probability", "proba-\nbility"), justify="right")
    for layer in dict.fromkeys(choice.layer for choice in sweep.counts):
        table.add_row(str(layer), *(by_layer[layer] for by_layer in columns.values()))
    return table


def tabulate_choice(sweep: Sweep) -> Table:
    """Return the scores of the best settings, also on the pairs that did not choose them."""
    best = sweep.best
    name = f"{best.method} layer {best.layer}"
    if best.method == "ot":
        name += f" sharpness {best.sharpness:g}"
    if best.method == "probability":
        name += f" threshold {best.min_score:g}"
    table = Table(title=f"best: {name} (%)")
    table.add_column("pairs")
    for title in SCORES.values():
        table.add_column(title, justify="right")
    parts = [(f"{sweep.n_pairs:,} that chose it", sweep.counts[best])]
    if sweep.test is not None:
        parts.append((f"{sweep.n_test_pairs:,} others", sweep.test))
    for label, counts in parts:
        table.add_row(label, *(f"{100 * getattr(counts, metric):.2f}" for metric in SCORES))
    return table


def tabulate_reliability(found: Reliability) -> Table:
    """Return a table of the links by probability, with the expected calibration error."""
    title = f"{found.n_items.sum():,} links: expected calibration error {100 * found.error:.2f} %"
    table = Table(title=title)
    for name in ("score (%)", "links", "mean score (%)", "sure in the gold links (%)"):
        table.add_column(name, justify="right")
    rows = zip(found.n_items.tolist(), found.probability, found.right, strict=True)
    width = 100 / len(found.n_items)
    for number, (n_links, probability, right) in enumerate(rows):
        if n_links:
            bounds = f"{number * width:.0f}–{(number + 1) * width:.0f}"
            table.add_row(bounds, f"{n_links:,}", f"{100 * probability:.1f}", f"{100 * right:.1f}")
    return table


def tabulate_link_report(report: LinkReport, name: str) -> Table:
    """Return a table of what each step of linking dropped, of the pairs and of the links."""
    pairs = [
        ("pairs read", report.n_read),
        ("invalid lines", report.n_bad),
        ("other tags", report.n_other_tags),
        ("empty sides", report.n_empty),
        ("unusable words", report.n_unfit),
        ("without links", report.n_unlinked),
        ("pairs kept", report.n_kept),
    ]
    links = [
        ("links found", report.n_links),
        ("identical words", report.n_identical),
        ("not one-to-one", report.n_many),
        ("links kept", report.n_kept_links),
    ]
    table = Table("", title=Text(printable(name)))
    table.add_column("number", justify="right")
    table.add_column("%", justify="right")
    for rows in (pairs, links):
        for label, number in rows:
            if number or label not in ("invalid lines", "other tags", "unusable words"):
                table.add_row(label, f"{number:,}", _percent(number, rows[0][1]))
        table.add_section()
    return table


def tabulate_bitexts(reports: Mapping[str, LinkReport]) -> Table:
    """Return a table of what is left of every bitext."""
    table = Table(title="by bitext")
    table.add_column("bitext")
    for column in ("pairs\nread", "kept", "links\nfound", "identical\n%", "not 1-1\n%", "kept"):
        table.add_column(column, justify="right")
    for name, report in reports.items():
        table.add_row(
            Text(printable(name)),
            f"{report.n_read:,}",
            f"{report.n_kept:,}",
            f"{report.n_links:,}",
            _percent(report.n_identical, report.n_links),
            _percent(report.n_many, report.n_links),
            f"{report.n_kept_links:,}",
        )
    return table


def color_links(pair: WordPair, links: Sequence[tuple[int, int]]) -> tuple[Text, Text]:
    """Return both sentences, in which words that are linked, also indirectly, share a color.

    Each group of linked words also has a number, for terminals without color: das₁ Haus₂.
    """
    groups = group_words(len(pair[0]), len(pair[1]), links)
    sentences = []
    for words, numbers in zip(pair, groups, strict=True):
        text = Text()
        for k, (word, number) in enumerate(zip(words, numbers, strict=True)):
            style = UNLINKED if number is None else COLORS[number % len(COLORS)]
            text.append(" " if k else "").append(printable(word, None), style)
            if number is not None:
                text.append(str(number + 1).translate(SUBSCRIPTS), style)
        sentences.append(text)
    return sentences[0], sentences[1]


def group_words(
    n_src: int, n_tgt: int, links: Sequence[tuple[int, int]]
) -> tuple[list[int | None], list[int | None]]:
    """Return the group of linked words of each word, in source order; None without links.

    >>> group_words(3, 2, [(2, 0), (0, 1), (1, 1)])
    ([0, 0, 1], [1, 0])
    """
    groups: list[set[tuple[int, int]]] = []
    for i, j in sorted(links):
        members = {(0, i), (1, j)}
        joined = [group for group in groups if group & members]
        groups = [group for group in groups if not group & members]
        groups.append(members.union(*joined))
    groups.sort(key=min)
    owner = {word: number for number, group in enumerate(groups) for word in group}
    return [owner.get((0, i)) for i in range(n_src)], [owner.get((1, j)) for j in range(n_tgt)]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f}"
