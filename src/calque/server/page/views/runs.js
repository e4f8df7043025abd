/** Runs: progress and loss curves of trainings, polled while the view is visible. */

import { call } from "../api.js";
import { lineChart } from "../chart.js";
import { field, h, select } from "../dom.js";
import { createRequests } from "../request.js";
import { compact, duration } from "../text.js";

const EVERY = 2000; // milliseconds

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
      const after = name === chosen ? (metrics.at(-1)?.step ?? -1) : -1;
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
    metrics = name === chosen ? [...metrics, ...added] : added;
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
    const names = curveNames(metrics).filter((name) => groupOf(name) === metric.value);
    const series = names.map((name) => ({
      name: name.slice(metric.value.length + 1) || name,
      points: metrics.filter((each) => Number.isFinite(each[name])).map((each) => [each.step, each[name]]),
    }));
    chart.update(series);
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

function curveNames(metrics) {
  const names = new Set(metrics.flatMap((each) => Object.keys(each).filter((key) => Number.isFinite(each[key]))));
  names.delete("step");
  return [...names];
}

/** Return the group of a metric: what comes before the slash. */
function groupOf(name) {
  return name.split("/")[0];
}

function groupNames(metrics) {
  const names = [...new Set(curveNames(metrics).map(groupOf))];
  return names.sort((a, b) => Number(b.startsWith("loss")) - Number(a.startsWith("loss")));
}
