"""Comparisons of result folders: pairing, numbers and verdicts."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from calque.errors import InputError
from calque.report.comparison import Comparison, ComparisonSettings, compare_results
from calque.report.difference import Difference
from calque.report.results import Results, read_results

DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
make_row, write_rows, draw_results = (
    DRAWN[name] for name in ("make_row", "write_rows", "draw_results")
)
FEW = ComparisonSettings(n_resamples=200)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("results")
    draw_results(folder, {"base": 55, "better": 80, "same": 55})
    return read_results([folder])


def list_all(study: Comparison, model: str) -> list[Difference]:
    cells = [task.models[model] for task in study.tasks]
    return [c for cell in cells for c in (cell.overall, *cell.languages.values(), cell.gap) if c]


def test_means_tests_and_verdicts(drawn: Results) -> None:
    study = compare_results(drawn, "base", settings=FEW)
    assert study.notes == []
    assert study.models == ["better", "same"]
    for task in study.tasks:
        values = {
            model: np.array([list(by.values()) for by in task.scores[model].values()]).mean(0)
            for model in ("base", "better")
        }
        c = task.models["better"].overall
        assert c.category == "helps" and c.rule == "above"
        by_language = [np.std(list(by.values()), ddof=1) for by in task.scores["base"].values()]
        same = task.models["same"].overall
        is_within = abs(same.difference) <= np.mean(by_language)
        assert (same.rule == "within") == is_within
        assert (c.model.mean, c.model.deviation) == pytest.approx(
            (values["better"].mean(), values["better"].std(ddof=1))
        )
        assert c.p_seeds == pytest.approx(stats.ttest_rel(values["better"], values["base"]).pvalue)
        assert c.p_flips == 0.0625 and c.p is not None and c.p_seeds is not None
        assert c.p >= max(c.p_seeds, c.p_items or 0)
        assert c.low is not None and c.high is not None and c.item_low is not None
        assert c.low < c.item_low < c.difference < c.high
        assert c.n_items == 3 * DRAWN["N_ITEMS"] and c.n_seeds == 5 and c.paired
        assert task.models["same"].overall.category == "within noise"


def test_the_gap_is_the_source_minus_the_others(drawn: Results) -> None:
    (task, _) = compare_results(drawn, "base", models=["better"], settings=FEW).tasks
    gap = task.models["better"].gap
    assert gap is not None and task.source == "en"
    means = {name: np.mean(list(by.values())) for name, by in task.scores["better"].items()}
    assert gap.model.mean == pytest.approx(means["en"] - (means["de"] + means["ja"]) / 2)
    assert gap.gain == -gap.difference


def test_errors_are_better_when_lower(tmp_path: Path) -> None:
    draw_results(tmp_path, {"base": 55, "low": 30}, higher_is_better=False)
    (task, _) = compare_results(read_results([tmp_path]), "base", settings=FEW).tasks
    study = task.models["low"]
    assert study.overall.category == "helps" and study.overall.difference < 0
    assert study.gap is not None
    means = {name: np.mean(list(by.values())) for name, by in task.scores["base"].items()}
    # Where others have more errors than the source, the gap is above 0.
    assert study.gap.baseline.mean == pytest.approx((means["de"] + means["ja"]) / 2 - means["en"])


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_swapping_the_models_reverses_the_sign(draw: int, n_seeds: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        seeds = list(range(n_seeds))
        draw_results(Path(name), {"a": 60, "b": 50}, tasks=["pos"], seeds=seeds, draw=draw)
        results = read_results([Path(name)])
        ab, ba = (compare_results(results, base, settings=FEW) for base in ("b", "a"))
    for one, other in zip(list_all(ab, "a"), list_all(ba, "b"), strict=True):
        assert one.difference == pytest.approx(-other.difference)
        assert one.p == pytest.approx(other.p)
        bounds = [None if bound is None else -bound for bound in (other.high, other.low)]
        assert [one.low, one.high] == pytest.approx(bounds)  # two seeds may give no interval
        assert one.p_flips == other.p_flips
        opposite = {"helps": "hurts", "hurts": "helps"}
        assert one.category == opposite.get(other.category, other.category)


def test_the_order_of_rows_does_not_matter(drawn: Results) -> None:
    mixed = list(drawn.rows)
    np.random.default_rng(0).shuffle(mixed)  # type: ignore[arg-type]
    before = compare_results(drawn, "base", tasks=["pos"], settings=FEW)
    after = compare_results(Results(mixed, []), "base", tasks=["pos"], settings=FEW)
    for model in before.models:
        (one,), (other,) = ([t.models[model] for t in s.tasks] for s in (before, after))
        assert one.overall.difference == pytest.approx(other.overall.difference)
        assert one.overall.p == pytest.approx(other.overall.p)
        assert one.languages["de"].low == pytest.approx(other.languages["de"].low)


def test_it_is_deterministic(drawn: Results) -> None:
    assert compare_results(drawn, "base", settings=FEW) == compare_results(
        drawn, "base", settings=FEW
    )
    other = compare_results(drawn, "base", settings=replace(FEW, seed=1))
    one, two = (
        list_all(study, "same")[0]
        for study in (compare_results(drawn, "base", settings=FEW), other)
    )
    assert one.item_low != two.item_low
    assert one.p == two.p  # resampling decides no p


def change(results: Results, keep: Any) -> Results:
    return Results([row for row in results.rows if keep(row)], [])


def test_seeds_of_only_one_model_are_left_out(drawn: Results) -> None:
    few = change(drawn, lambda row: row.model != "base" or row.seed in (1, 2, 3))
    study = compare_results(few, "base", models=["same"], tasks=["pos"], settings=FEW)
    c = study.tasks[0].models["same"].overall
    assert c.paired and c.n_seeds == 3
    assert study.notes == [
        "2 cells missing: base, pos, seed 4; base, pos, seed 5",
        "pos, same: 2 seeds that only one model has are left out",
    ]


def test_other_seeds_are_unpaired(drawn: Results) -> None:
    rows = [replace(row, seed=(row.seed or 0) + 10 * (row.model == "same")) for row in drawn.rows]
    study = compare_results(Results(rows, []), "base", models=["same"], tasks=["pos"], settings=FEW)
    c = study.tasks[0].models["same"].overall
    sides = [
        np.array([list(by.values()) for by in study.tasks[0].scores[name].values()]).mean(0)
        for name in ("same", "base")
    ]
    assert not c.paired and c.p_flips is None
    assert c.p_seeds == pytest.approx(stats.ttest_ind(*sides, equal_var=False).pvalue)


def test_one_seed_cannot_tell(drawn: Results) -> None:
    one = change(drawn, lambda row: row.seed == 1)
    c = compare_results(one, "base", settings=FEW).tasks[0].models["better"].overall
    assert c.category == "cannot tell" and c.p is None and c.low is None
    assert c.item_low is not None and c.item_low > 0  # which would have said: helps


def test_without_items_seeds_decide_alone(tmp_path: Path) -> None:
    draw_results(tmp_path, {"base": 55, "better": 80}, with_items=False)
    c = (
        compare_results(read_results([tmp_path]), "base", settings=FEW)
        .tasks[0]
        .models["better"]
        .overall
    )
    assert c.category == "helps" and c.p == c.p_seeds and c.n_items == 0 and c.item_low is None


def test_without_seeds_items_decide_alone(tmp_path: Path) -> None:
    draw_results(tmp_path, {"base": 55, "better": 80, "same": 55}, seeds=[None])
    study = compare_results(read_results([tmp_path]), "base", settings=FEW)
    c = study.tasks[0].models["better"].overall
    assert c.category == "helps" and c.p == c.p_items and c.n_seeds == 0 and c.rule is None
    assert study.tasks[0].models["same"].overall.category == "within noise"
    draw_results(tmp_path, {"base": 55, "better": 80}, seeds=[None], with_items=False)
    study = compare_results(read_results([tmp_path]), "base", settings=FEW)
    assert study.tasks[0].models["better"].overall.category == "cannot tell"


def test_seeds_without_effect_do_not_count(drawn: Results) -> None:
    first = {(r.model, r.task, r.language): r for r in drawn.rows if r.seed == 1}
    rows = [replace(first[r.model, r.task, r.language], seed=r.seed) for r in drawn.rows]
    c = compare_results(Results(rows, []), "base", settings=FEW).tasks[0].models["better"].overall
    assert c.n_seeds == 0 and c.p == c.p_items and c.p is not None and c.p > 1e-20


def test_a_model_with_seeds_against_one_without(tmp_path: Path) -> None:
    draw_results(tmp_path / "1", {"base": 55}, seeds=[None])
    draw_results(tmp_path / "2", {"better": 80})
    study = compare_results(read_results([tmp_path / "1", tmp_path / "2"]), "base", settings=FEW)
    c = study.tasks[0].models["better"].overall
    assert c.category == "helps" and not c.paired and c.n_seeds == 5 and c.baseline.fixed


def test_scores_with_and_without_a_seed(drawn: Results) -> None:
    extra = [replace(row, seed=None, value=0.0) for row in drawn.rows if row.seed == 1]
    mixed = Results([*drawn.rows, *extra], [])
    study = compare_results(mixed, "base", models=["same"], tasks=["pos"], settings=FEW)
    note = "pos, same: scores without a seed are left out, because others have a seed"
    assert study.notes == [note]
    pure = compare_results(drawn, "base", models=["same"], tasks=["pos"], settings=FEW)
    assert study.tasks[0].models["same"].overall == pure.tasks[0].models["same"].overall


def test_languages_that_a_run_lacks_are_left_out(drawn: Results) -> None:
    rows = change(drawn, lambda r: not (r.model == "same" and r.seed == 3 and r.language == "ja"))
    study = compare_results(rows, "base", models=["same"], tasks=["pos"], settings=FEW)
    assert list(study.tasks[0].models["same"].languages) == ["en", "de"]
    assert study.notes == ["pos, same: languages that some runs lack are left out: ja"]


def test_other_items_are_not_resampled_together(tmp_path: Path) -> None:
    rows = draw_results(tmp_path, {"base": 55, "new": 60}, tasks=["pos"])
    for row in rows:
        if row["model"] == "new":
            with np.load(tmp_path / row["items"]) as file:
                arrays = {name: np.append(file[name], file[name]) for name in file.files}
            np.savez(tmp_path / f"{row['items']}.2.npz", **arrays)
            row["items"] = f"{row['items']}.2.npz"
    write_rows(tmp_path, rows)
    study = compare_results(read_results([tmp_path]), "base", settings=FEW)
    assert study.notes == [
        "pos, new: the models have different test items in en, de, ja, which are not resampled"
    ]
    assert study.tasks[0].models["new"].overall.p_items is None


def test_bad_requests(drawn: Results, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no results yet"):
        compare_results(Results([], []), "base")
    with pytest.raises(InputError, match=r"there is no model 'x'.*base, better, same"):
        compare_results(drawn, "x")
    with pytest.raises(InputError, match=r"there is no task 'x' in the results.*pos, ner"):
        compare_results(drawn, "base", tasks=["x"])
    with pytest.raises(InputError, match="no model to compare with base"):
        compare_results(drawn, "base", models=["base"])
    apart = [make_row(), make_row(model="b", language="fr"), make_row(model="b", task="ner")]
    with pytest.raises(InputError, match="base shares no task and language with b"):
        compare_results(read_results([write_rows(tmp_path, apart)]), "base")
    failed = {**make_row(model="b"), "language": None, "value": None, "error": "no memory"}
    with pytest.raises(
        InputError, match=r"no task and language with b; 1 cell failed: .*no memory"
    ):
        compare_results(read_results([write_rows(tmp_path, [make_row(), failed])]), "base")
    apart = [make_row(), make_row(model="b", metric="f1")]
    with pytest.raises(InputError, match="pos was measured with several metrics: accuracy, f1"):
        compare_results(read_results([write_rows(tmp_path, apart)]), "base")


def test_a_model_by_the_end_of_its_path(drawn: Results) -> None:
    rows = [replace(row, model=f"runs/{row.model}") for row in drawn.rows]
    study = compare_results(Results(rows, []), "base", models=["same"], tasks=["pos"], settings=FEW)
    assert (study.baseline, study.models) == ("runs/base", ["runs/same"])


def test_a_run_by_the_end_of_its_path(drawn: Results) -> None:
    rows = [replace(row, model=f"runs/{row.model}/model") for row in drawn.rows]
    study = compare_results(Results(rows, []), "base/model", tasks=["pos"], settings=FEW)
    assert study.baseline == "runs/base/model"
    with pytest.raises(InputError, match="there is no model 'model'"):
        compare_results(Results(rows, []), "model", tasks=["pos"], settings=FEW)


def test_the_rule_uses_the_mean_of_the_deviations_by_language(tmp_path: Path) -> None:
    """In two languages the effects of seeds cancel out: only their mean is constant."""
    scores = {1: {"de": 50.0, "fr": 54.0}, 2: {"de": 54.0, "fr": 50.0}}
    rows = [
        make_row(model=model, seed=seed, language=language, value=value + shift)
        for model, shift in (("base", 0.0), ("near", 2.0), ("far", 3.0))
        for seed, by_language in scores.items()
        for language, value in by_language.items()
    ]
    found = compare_results(read_results([write_rows(tmp_path, rows)]), "base", settings=FEW)
    near, far = (found.tasks[0].models[name].overall for name in ("near", "far"))
    assert near.baseline.deviation == 0  # of the mean; by language it is 4 / √2 = 2.83
    assert (near.rule, far.rule) == ("within", "above")
