"""Word alignment scores as tables for a terminal.

Scores of word vectors as tables for a terminal.

What `calque map` chose for each language, and why, for a terminal.

Scores of tagging probes as tables for a terminal.

Scores as tables for a terminal.

What a grown model started from, for a terminal.

Sentence pairs in which linked words have the same color.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from calque.evaluation.tasks.lexicon_induction import AT
from calque.evaluation.tasks.tagging_probe import GAP, MAIN_METRICS, SOURCE
from calque.evaluation.tasks.tatoeba import MEAN
from calque.growth.grow import weigh_others
from calque.growth.match import RULES, UNMATCHED
from calque.report.plots import shorten_names

if TYPE_CHECKING:
    from rich.text import Text

    from calque.evaluation.metrics import LinkCounts
    from calque.evaluation.tasks.lexicon_induction import DictionaryScores
    from calque.growth.grow import Example, GrowReport, MatchReport, TextShare
    from calque.types import Score
    from calque.vectors.mapping import LanguageReport
    from calque.vectors.trials import Trial
    from calque.word_alignment.protocol import WordPair


COLUMNS = {"precision": "precision", "recall": "recall", "f1": "F1", "aer": "AER"}


def tabulate_counts(counts: LinkCounts, name: str, n_pairs: int) -> Table:
    """Show how links compare with the gold."""
    table = Table(title=f"{n_pairs:,} pairs (%)")
    table.add_column("aligner")
    for title in COLUMNS.values():
        table.add_column(title, justify="right")
    table.add_row(name, *(f"{100 * getattr(counts, metric):.2f}" for metric in COLUMNS))
    return table


def tabulate_sweep(sweep: Mapping[str, Mapping[int, LinkCounts]], n_pairs: int) -> Table:
    """Show the error rate of every method at every layer, the lowest in bold."""
    table = Table(title=f"alignment error rate of {n_pairs:,} pairs (%)")
    table.add_column("layer", justify="right")
    for method in sweep:
        table.add_column(method, justify="right")
    lowest = min(counts.aer for by_layer in sweep.values() for counts in by_layer.values())
    for layer in next(iter(sweep.values())):
        rates = [by_layer[layer].aer for by_layer in sweep.values()]
        cells = [_emphasize(f"{100 * rate:.2f}", rate == lowest) for rate in rates]
        table.add_row(str(layer), *cells)
    return table


def tabulate_pairs(scores: Sequence[Score]) -> Table:
    """Show every pair of languages at each model's best layer."""
    best = {model: find_best_layer(scores, model) for model in _models_of(scores)}
    table = Table(title=f"{scores[0].task} (%)")
    table.add_column("pair")
    for model, name in shorten_names(best).items():
        for title in COLUMNS.values():
            table.add_column(f"{name}\nlayer {best[model]}\n{title}", justify="right")
    values = {(s.model, s.language, s.metric): s.value for s in scores if s.layer == best[s.model]}
    for name in dict.fromkeys(score.language for score in scores):
        cells = [f"{100 * values[model, name, m]:.2f}" for model in best for m in COLUMNS]
        if name == MEAN:
            table.add_section()
        table.add_row(name, *cells, style="bold" if name == MEAN else None)
    return table


def tabulate_pair_layers(scores: Sequence[Score]) -> Table:
    """Show the mean error rate of each model at every layer, its lowest in bold."""
    models = _models_of(scores)
    best = {model: find_best_layer(scores, model) for model in models}
    means = {
        (s.model, s.layer): s.value for s in scores if s.language == MEAN and s.metric == "aer"
    }
    table = Table(title=f"{scores[0].task}: mean AER (%)")
    table.add_column("layer", justify="right")
    for name in shorten_names(models).values():
        table.add_column(name, justify="right")
    for layer in sorted({layer or 0 for _, layer in means}):
        found = [(means.get((model, layer)), layer == best[model]) for model in models]
        cells = ["–" if v is None else _emphasize(f"{100 * v:.2f}", b) for v, b in found]
        table.add_row(str(layer), *cells)
    return table


def find_best_layer(scores: Sequence[Score], model: str) -> int:
    """Find the layer with the lowest mean error rate; of equals, the lowest layer."""
    rates = {
        score.layer or 0: score.value
        for score in scores
        if (score.model, score.language, score.metric) == (model, MEAN, "aer")
    }
    return min(sorted(rates), key=lambda layer: rates[layer])


def _emphasize(text: str, is_best: bool) -> str:
    return f"[bold]{text}[/]" if is_best else text


def _models_of(scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(score.model for score in scores))


# Column titles, and the variant and metric below them.
PRECISIONS = {
    "nn\nP@1": ("nn", "precision_at_1"),
    "csls\nP@1": ("csls", "precision_at_1"),
    "csls\nP@5": ("csls", "precision_at_5"),
    "csls\nP@10": ("csls", "precision_at_10"),
    "known\nP@1": ("csls", "precision_at_1_known"),
    "coverage": ("csls", "coverage"),
}
CORRELATIONS = {
    "known\nPearson": "pearson_known",
    "known\nSpearman": "spearman_known",
    "known\nharmonic": "harmonic_mean_known",
    "all\nharmonic": "harmonic_mean",
    "coverage": "coverage",
}


def tabulate_dictionary(results: Mapping[str, DictionaryScores]) -> Table:
    """Show precision by direction and method, with unknown words as wrong and without them."""
    caption = "all: unknown words count as wrong; known: they are left out"
    table = Table(title="precision (%)", caption=caption)
    table.add_column("way")
    table.add_column("method")
    for words in ("all", "known"):
        for k in AT:
            table.add_column(f"{words}\nP@{k}", justify="right")
    for way, result in results.items():
        for method in result.ranks:
            values = [
                result.precision(method, k, known=known) for known in (False, True) for k in AT
            ]
            table.add_row(way, method, *(f"{100 * value:.2f}" for value in values))
        table.add_section()
    return table


def tabulate_precisions(scores: Sequence[Score]) -> Table:
    """Show every pair of languages: P@k, P@1 of known words alone, and how many are known."""
    models = shorten_names(dict.fromkeys(score.model for score in scores))
    table = Table(title=f"{scores[0].task} (%)", caption="P@k: unknown words count as wrong")
    table.add_column("pair")
    for name in models.values():
        for title in PRECISIONS:
            table.add_column(f"{name}\n{title}", justify="right")
    values = {(s.model, s.language, s.variant, s.metric): s.value for s in scores}
    for pair in _mean_last(score.language for score in scores):
        keys = [(model, pair, *key) for model in models for key in PRECISIONS.values()]
        _add_row(table, [pair], [values.get(key) for key in keys], is_mean=pair == MEAN)
    return table


def tabulate_correlations(scores: Sequence[Score]) -> Table:
    """Show every test of every set: correlations of known pairs, of all, and how many are known."""
    models = shorten_names(dict.fromkeys(score.model for score in scores))
    caption = "all: pairs with an unknown word count as of mean similarity"
    table = Table(title=f"{scores[0].task} (× 100)", caption=caption)
    table.add_column("set")
    table.add_column("test")
    for name in models.values():
        for title in CORRELATIONS:
            table.add_column(f"{name}\n{title}", justify="right")
    values = {(s.model, s.variant, s.language, s.metric): s.value for s in scores}
    for collection in dict.fromkeys(score.variant for score in scores):
        for test in _mean_last(s.language for s in scores if s.variant == collection):
            keys = [(m, collection, test, key) for m in models for key in CORRELATIONS.values()]
            cells = [values.get(key) for key in keys]
            _add_row(table, [collection or "", test], cells, is_mean=test == MEAN)
        table.add_section()
    return table


def _mean_last(languages: Iterable[str]) -> list[str]:
    """List languages once each, the mean at the end, and no mean of a single one."""
    names = [name for name in dict.fromkeys(languages) if name != MEAN]
    return [*names, MEAN] if len(names) > 1 else names


def _add_row(
    table: Table, names: Sequence[str], values: Sequence[float | None], is_mean: bool
) -> None:
    if is_mean and len(names) == 1:
        table.add_section()
    cells = ["–" if value is None else f"{100 * value:.1f}" for value in values]
    table.add_row(*names, *cells, style="bold" if is_mean else None)


def tabulate_choices(reports: Sequence[LanguageReport]) -> Table:
    """Show what each method gave, what was chosen, and P@1 in the space of all."""
    methods = list(dict.fromkeys(trial.method for each in reports for trial in each.trials))
    caption = "P@1 (%): CSLS among the words of the development dictionary, mean of both ways"
    table = Table(title="maps into one space", caption=caption)
    for name in ("language", "words"):
        table.add_column(name, justify="right" if name == "words" else "left")
    for method in methods:
        table.add_column(f"{method}\nP@1", justify="right")
    table.add_column("chosen")
    table.add_column("in all\nP@1", justify="right")
    for report in reports:
        trials = {trial.method: trial for trial in report.trials}
        cells = [_percent(trials[method]) if method in trials else "" for method in methods]
        final = "" if report.precision is None else f"{100 * report.precision:.1f}"
        table.add_row(report.language, f"{report.n_words:,}", *cells, report.chosen, final)
    return table


def explain_choices(reports: Sequence[LanguageReport]) -> list[str]:
    """Say in a line for each language why it was mapped so, and from what."""
    return [
        f"{report.language}: {'; '.join([f'{report.chosen}, {report.reason}', *_notes(report)])}"
        for report in reports
    ]


def _percent(trial: Trial) -> str:
    return "–" if trial.precision is None else f"{100 * trial.precision:.1f}"


def _notes(report: LanguageReport) -> list[str]:
    """Say what was found of the dictionaries, how long learning took, and what was odd."""
    notes = []
    if report.n_train_entries:
        notes.append(f"{report.n_train:,} of {report.n_train_entries:,} entries to learn from")
    if report.n_dev_entries:
        notes.append(f"judged by {report.n_dev:,} of {report.n_dev_entries:,}")
    notes += [
        f"{trial.n_rounds} rounds of {trial.method}" for trial in report.trials if trial.n_rounds
    ]
    if report.n_zero:
        notes.append(f"{report.n_zero:,} vectors of zeros stay")
    if report.n_duplicates:
        notes.append(f"{report.n_duplicates:,} repeated words left out")
    return notes


OTHERS = "mean of others"


def tabulate_probe(scores: Sequence[Score]) -> Table:
    """Show every language at each model's best layer, English and the gap included."""
    metric = MAIN_METRICS[scores[0].task]
    models = list(dict.fromkeys(score.model for score in scores))
    best = {model: find_probe_layer(scores, model) for model in models}
    table = Table(title=f"{scores[0].task}: {metric} (%)")
    table.add_column("language")
    for model, name in shorten_names(models).items():
        table.add_column(f"{name}\nlayer {best[model]}", justify="right")
    values = {(s.model, s.language, s.metric): s.value for s in scores if s.layer == best[s.model]}
    for name in dict.fromkeys(score.language for score in scores if score.language != MEAN):
        table.add_row(name, *(_show(values.get((model, name, metric))) for model in models))
    table.add_section()
    for title, key in ((OTHERS, metric), (GAP, GAP)):
        cells = [_show(values[model, MEAN, key]) for model in models]
        table.add_row(title, *cells, style="bold")
    return table


def tabulate_probe_layers(scores: Sequence[Score]) -> Table:
    """Show English, the mean of the others and the gap of each model at every layer."""
    metric = MAIN_METRICS[scores[0].task]
    models = list(dict.fromkeys(score.model for score in scores))
    columns = {SOURCE: (SOURCE, metric), OTHERS: (MEAN, metric), GAP: (MEAN, GAP)}
    table = Table(title=f"{scores[0].task}: by layer (%)")
    table.add_column("layer", justify="right")
    for name in shorten_names(models).values():
        for title in columns:
            table.add_column(f"{name}\n{title}", justify="right")
    values = {(s.layer, s.model, s.language, s.metric): s.value for s in scores}
    for layer in sorted({score.layer or 0 for score in scores}):
        keys = [(layer, model, *column) for model in models for column in columns.values()]
        table.add_row(str(layer), *(_show(values.get(key)) for key in keys))
    return table


def find_probe_layer(scores: Sequence[Score], model: str) -> int:
    """Find the layer with the best mean of the other languages; of equals, the lowest."""
    metric = MAIN_METRICS[scores[0].task]
    means = {
        score.layer or 0: score.value
        for score in scores
        if (score.model, score.language, score.metric) == (model, MEAN, metric)
    }
    return max(sorted(means), key=lambda layer: means[layer])


def _show(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


ARROWS = {"accuracy_to_english": "→ en", "accuracy_from_english": "en →"}


def tabulate_languages(scores: Sequence[Score]) -> Table:
    """Show every language at each model's best layer, both ways."""
    best = {model: choose_layer(scores, model) for model in _models_of(scores)}
    table = Table(title=f"{scores[0].task}: accuracy (%)")
    table.add_column("language")
    for model, name in shorten_names(best).items():
        for arrow in ARROWS.values():
            table.add_column(f"{name}\nlayer {best[model]}\n{arrow}", justify="right")
    values = {(s.model, s.language, s.metric): s.value for s in scores if s.layer == best[s.model]}
    languages = dict.fromkeys(score.language for score in scores)
    for language in [name for name in languages if name != MEAN]:
        table.add_row(language, *_cells(values, best, language))
    table.add_section()
    table.add_row(MEAN, *_cells(values, best, MEAN), style="bold")
    return table


def tabulate_layers(scores: Sequence[Score]) -> Table:
    """Show the mean over languages at every layer, both ways."""
    models = _models_of(scores)
    means = [score for score in scores if score.language == MEAN]
    table = Table(title=f"{scores[0].task}: mean (%)")
    table.add_column("layer", justify="right")
    for name in shorten_names(models).values():
        for arrow in ARROWS.values():
            table.add_column(f"{name}\n{arrow}", justify="right")
    for layer in sorted({score.layer or 0 for score in means}):
        values = {(s.model, MEAN, s.metric): s.value for s in means if s.layer == layer}
        table.add_row(str(layer), *_cells(values, models, MEAN))
    return table


def choose_layer(scores: Sequence[Score], model: str) -> int:
    """Find the layer with the best mean over languages and directions; of equals, the lowest."""
    totals: dict[int, float] = {}
    for score in scores:
        if score.model == model and score.language == MEAN:
            totals[score.layer or 0] = totals.get(score.layer or 0, 0.0) + score.value
    return max(sorted(totals), key=lambda layer: totals[layer])


def _cells(
    values: dict[tuple[str, str, str], float], models: Sequence[str] | dict[str, int], language: str
) -> list[str]:
    found = [values.get((model, language, metric)) for model in models for metric in ARROWS]
    return ["–" if value is None else f"{100 * value:.1f}" for value in found]


N_EXAMPLES, N_SCRIPTS = 4, 20
MATCHED = RULES[2:]
SHORT = {"normalized": "norm.", "dictionary": "dict.", "composed": "comp."}
WITHOUT = "without: if there were no dictionaries"


def tabulate_rules(match: MatchReport) -> Table:
    """Show the rows of each rule, and what they would be without dictionaries."""
    table = Table(title="rows by rule", caption=WITHOUT)
    for name in ("rule", "rows", "%", "without", "for example"):
        table.add_column(name, justify="left" if name in ("rule", "for example") else "right")
    n_rows = sum(match.rules.values()) or 1
    for rule in (*RULES[1:], RULES[UNMATCHED]):
        n, without = match.rules[rule], match.rules_without[rule]
        examples = ", ".join(map(_show_example, match.examples[rule][:N_EXAMPLES]))
        table.add_row(rule, f"{n:,}", f"{100 * n / n_rows:.1f}", f"{without:,}", escape(examples))
    return table


def tabulate_scripts(match: MatchReport) -> Table:
    """Show how much of each script's rows was matched, and by which rule."""
    table = Table(title="rows by script (%)")
    table.add_column("script")
    for name in ("rows", "matched", *map(_shorten, MATCHED)):
        table.add_column(name, justify="right")
    for script, rules in list(match.scripts.items())[:N_SCRIPTS]:
        n_rows = sum(rules.values())
        shares = [100 * rules[rule] / n_rows for rule in MATCHED]
        cells = [f"{share:.1f}" for share in (sum(shares), *shares)]
        table.add_row(script, f"{n_rows:,}", *cells)
    if len(match.scripts) > N_SCRIPTS:
        table.caption = f"and {len(match.scripts) - N_SCRIPTS} scripts with fewer rows"
    return table


def tabulate_texts(match: MatchReport, language: str) -> Table:
    """Show how much of each text starts matched, by token."""
    # Nine columns: with the usual padding, 80 characters would not hold the numbers.
    title = "tokens of texts whose row starts matched (%)"
    table = Table(title=title, caption=WITHOUT, padding=(0, 1, 0, 0))
    table.add_column("text")
    for name in ("tokens", "matched", "without", *map(_shorten, MATCHED)):
        table.add_column(name, justify="right")
    for text in match.texts:
        table.add_row(*_text_cells(text))
    if len(match.texts) > 1 and (others := weigh_others(match.texts, language)) is not None:
        table.add_section()
        table.add_row(*_text_cells(others), style="bold")
    return table


def describe_growth(report: GrowReport) -> list[str]:
    """Say in a few words what was made of what."""
    notes = [f"{report.n_rows:,} rows for {report.n_mono_rows:,}"]
    if report.match is None:
        notes.append("embeddings new")
    else:
        notes.append(f"{100 * report.match.matched:.1f} % matched")
        n_entries = sum(use.n_entries for use in report.match.dictionaries)
        n_used = sum(use.n_used for use in report.match.dictionaries)
        if n_entries:
            notes.append(f"{n_used:,} of {n_entries:,} dictionary entries have a piece")
        idle = [Path(use.path).name for use in report.match.dictionaries if not use.n_used]
        if idle:
            notes.append(f"none of {', '.join(idle)}")
        if report.match.n_unspelled:
            notes.append(f"{report.match.n_unspelled:,} translations unknown to the model")
    notes.append("body copied" if report.initialize in ("both", "body") else "body new")
    if not report.has_head:
        notes.append("no language-modelling head in the checkpoint: it is new")
    lost = [new for new, old in report.special.values() if old is None]
    if lost:
        notes.append(f"special tokens without a counterpart: {' '.join(dict.fromkeys(lost))}")
    return notes


def _shorten(rule: str) -> str:
    return SHORT.get(rule, rule)


def _show_example(example: Example) -> str:
    origin = "/".join(example.meanings[:3]) or " ".join(example.sources[:3])
    return f"{example.piece} → {origin}" if origin else example.piece


def _text_cells(text: TextShare) -> list[str]:
    shares = [text.matched, text.matched_without, *(text.rules[rule] for rule in MATCHED)]
    return [text.name, f"{text.n_tokens:,}", *(f"{100 * share:.1f}" for share in shares)]


COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")
UNLINKED = "dim"


def color_links(pair: WordPair, links: Sequence[tuple[int, int]]) -> tuple[Text, Text]:
    """Give both sentences; words that links join, directly or through others, share a color.

    Where there is no color, a number says the same: das₁ Haus₂ – the₁ house₂.
    """
    from rich.text import Text

    groups = group_words(len(pair[0]), len(pair[1]), links)
    sentences = []
    for words, numbers in zip(pair, groups, strict=True):
        text = Text()
        for k, (word, number) in enumerate(zip(words, numbers, strict=True)):
            style = UNLINKED if number is None else COLORS[number % len(COLORS)]
            text.append(" " if k else "").append(word, style)
            if number is not None:
                text.append(_lower(number + 1), style)
        sentences.append(text)
    return sentences[0], sentences[1]


def group_words(
    n_src: int, n_tgt: int, links: Sequence[tuple[int, int]]
) -> tuple[list[int | None], list[int | None]]:
    """Number the groups of linked words in the order of the source; None for a word without links.

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


def _lower(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
