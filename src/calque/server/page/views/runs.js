/** Runs: progress and loss curves of trainings, polled while the view is visible. */

import { call } from "../api.js";
import { lineChart } from "../chart.js";
import { field, h, select } from "../dom.js";
import { createRequests } from "../request.js";
import { compact, duration } from "../text.js";

const EVERY = 2000; // milliseconds
const COUNTERS = ["step", "tokens", "seconds"];

/** Return the view. */
export function create() {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  const body = h("tbody");
  const chart = lineChart({ label: "Curves of the run. Arrow keys read the values." });
  const metric = select([], null, { onchange: draw });
  const title = h("h3");
  const head = ["Run", "State", "Progress", "Tokens/s", "Time left", "Updated"];
  const table = h(
    "table",
    { class: "runs" },
    h("thead", {}, h("tr", {}, head.map((text, k) => h("th", { scope: "col", class: k < 3 ? "word" : null }, text)))),
    body,
  );
  const curves = h("section", { class: "card" }, title, field("Metric", metric), chart);
  const content = [
    h("div", { class: "card wide", tabindex: 0, role: "region", "aria-label": "Runs" }, table),
    curves,
  ];
  let chosen = null;
  let metrics = [];
  let timer = 0;
  let visible = false;
  const node = h(
    "div",
    {},
    h("h2", {}, "Runs"),
    h("p", { class: "lead" }, "Trainings in the folder of runs; running ones are updated every two seconds."),
    requests.node,
    output,
  );

  /** Ask for all runs and for the new steps of the chosen run, and show them. */
  async function poll() {
    clearTimeout(timer);
    if (!visible || document.hidden) return;
    await requests.run(async (signal) => {
      const runs = await call("runs", { signal });
      const name = runs.some((run) => run.name === chosen) ? chosen : (runs[0]?.name ?? null);
      if (name === null) return { runs, name, added: [] };
      // The last step again: its validation may have been recorded after its training loss.
      const after = name === chosen ? (metrics.at(-1)?.step ?? 0) - 1 : -1;
      const answer = await call(`runs/${encodeURIComponent(name)}?after=${after}`, { signal });
      return { runs, name, added: answer.metrics };
    }, update);
    clearTimeout(timer);
    if (visible && !document.hidden) timer = setTimeout(poll, EVERY);
  }

  function update({ runs, name, added }) {
    if (!runs.length) {
      output.replaceChildren(h("p", { class: "empty" }, "There are no runs yet. Start one with calque train."));
      return;
    }
    if (!curves.isConnected) output.replaceChildren(...content);
    metrics = name === chosen ? mergeRows(metrics, added) : added;
    chosen = name;
    title.textContent = name;
    listRuns(runs);
    fillMetrics();
    draw();
  }

  /** Update the rows in place, so that the focus stays where it is. */
  function listRuns(runs) {
    const rows = new Map([...body.children].map((row) => [row.dataset.name, row]));
    body.replaceChildren(
      ...runs.map((run) => {
        const row = rows.get(run.name) ?? newRow(run.name, choose);
        row.update(run, run.name === chosen);
        return row;
      }),
    );
  }

  function choose(name) {
    chosen = null;
    metrics = [];
    location.hash = `runs/${encodeURIComponent(name)}`;
  }

  function fillMetrics() {
    const names = groupNames(metrics);
    if (names.join() === [...metric.options].map((option) => option.value).join()) return;
    const before = metric.value;
    metric.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    metric.value = names.includes(before) ? before : (names[0] ?? "");
  }

  function draw() {
    chart.update(findSeries(metrics, metric.value));
  }

  function enter([name]) {
    if (name && name !== chosen) {
      chosen = name;
      metrics = [];
    }
    visible = true;
    poll();
  }

  function leave() {
    visible = false;
    clearTimeout(timer);
    requests.cancel();
  }

  document.addEventListener("visibilitychange", poll);
  return { node, enter, leave, refresh: poll };
}

/** Return a row of the table, with `update(run, isChosen)`. */
function newRow(name, onchoose) {
  const button = h("button", { type: "button", class: "link-button", onclick: () => onchoose(name) }, name);
  const bar = h("progress", { "aria-label": `Progress of ${name}` });
  const steps = h("span", { class: "soft" });
  const cells = [0, 1, 2, 3].map(() => h("td"));
  cells[0].className = "word";
  const row = h(
    "tr",
    { "data-name": name },
    h("th", { scope: "row", class: "word" }, button),
    cells[0],
    h("td", { class: "word" }, h("div", { class: "progress" }, bar, steps)),
    cells.slice(1),
  );
  row.update = (run, isChosen) => {
    row.classList.toggle("chosen", isChosen);
    button.setAttribute("aria-pressed", String(isChosen));
    bar.hidden = !run.steps;
    bar.max = run.steps || 1;
    bar.value = run.step ?? 0;
    steps.textContent = run.steps ? `${compact(run.step)} / ${compact(run.steps)}` : `step ${run.step ?? 0}`;
    cells[0].replaceChildren(h("span", { class: `badge ${run.state}` }, run.state));
    cells[1].textContent = compact(run.tokens_per_second ?? NaN);
    cells[2].textContent = run.state === "running" ? duration(run.eta_seconds ?? NaN) : "–";
    cells[3].textContent = ago(run.updated);
  };
  return row;
}

/** Return how long ago a time was: a number of seconds since 1970, or an ISO date. */
function ago(time) {
  const moment = typeof time === "number" ? time * 1000 : Date.parse(time);
  return Number.isFinite(moment) ? `${duration((Date.now() - moment) / 1000)} ago` : "–";
}

/** Return the rows with those that are new: a row is known by its step and kind. */
function mergeRows(rows, added) {
  const key = ({ step, kind }) => `${step} ${kind}`;
  return [...new Map([...rows, ...added].map((row) => [key(row), row])).values()];
}

function metricNames(rows) {
  const names = new Set(rows.flatMap((row) => Object.keys(row).filter((key) => Number.isFinite(row[key]))));
  for (const name of COUNTERS) names.delete(name);
  return [...names];
}

/** Return the group of a metric: what comes before the slash. */
function groupOf(name) {
  return name.split("/")[0];
}

/** Return the groups, losses first. */
function groupNames(rows) {
  const names = [...new Set(metricNames(rows).map(groupOf))];
  return names.sort((a, b) => Number(b === "loss") - Number(a === "loss"));
}

/** Return one series for each metric of a group, and for each kind of row that has it. */
function findSeries(rows, group) {
  const series = new Map();
  for (const name of metricNames(rows).filter((each) => groupOf(each) === group)) {
    for (const row of rows) {
      if (!Number.isFinite(row[name])) continue;
      const title = name.slice(group.length + 1) || name;
      const label = !row.kind || row.kind === "train" ? title : `${title}, ${row.kind}`;
      if (!series.has(label)) series.set(label, { name: label, points: [] });
      series.get(label).points.push([row.step, row[name]]);
    }
  }
  return [...series.values()];
}
