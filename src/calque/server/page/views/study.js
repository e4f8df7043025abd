/** Study: verdicts, tables and plots of `calque compare`. */

import { call, query } from "../api.js";
import { field, h, select } from "../dom.js";
import { legend } from "../marks.js";
import { createRequests } from "../request.js";
import { showSeeds } from "../seeds.js";
import { svgFigure } from "../svg_figure.js";
import { decimal, languageName, signed } from "../text.js";

const MARKS = { helps: " ▲", hurts: " ▼" };
const PLOTS = {
  differences: ["By language", "Differences with their intervals. Filled marks are significant after correction."],
  seeds: ["By seed", "Mean over the languages of each run; lines join runs with the same seed."],
  layers: ["By layer", "Mean over languages and seeds."],
};
const SCOPES = { mean: "Mean", gap: "Transfer gap" };

/** Return the view. */
export function create() {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  let study = null;
  let address = [];
  const task = select([["", "All tasks"]], "", { onchange: draw });
  const language = select([["", "All languages"]], "", { onchange: draw });
  const baseline = select([["", "First model"]], "", { onchange: load });
  const node = h(
    "div",
    {},
    h("h2", {}, "Study"),
    h("p", { class: "lead" }, "Does a model help? A verdict needs a difference that is significant over seeds and over test items."),
    h("div", { class: "card row" }, field("Task", task), field("Language", language), field("Baseline", baseline)),
    requests.node,
    output,
  );

  function load() {
    requests.run((signal) => call(`results${query({ baseline: baseline.value })}`, { signal }), (answer) => {
      study = answer;
      const languages = new Set(study.tasks.flatMap((each) => each.languages));
      fill(task, study.tasks.map((each) => [each.task, each.task]));
      fill(language, [...languages].sort().map((code) => [code, `${languageName(code)} (${code})`]));
      fill(baseline, [study.baseline, ...study.models].sort().map((name) => [name, name]));
      baseline.value = study.baseline;
      draw();
    });
  }

  function draw() {
    if (!study) return;
    const shown = study.tasks.filter((each) => !task.value || each.task === task.value);
    const parts = shown.map((each) => taskCard(study, each, language.value));
    if (study.notes?.length) {
      parts.push(h("section", { class: "card notes" }, h("h3", {}, "Notes"), h("ul", {}, study.notes.map((note) => h("li", {}, note)))));
    }
    output.replaceChildren(...parts);
    openSeeds();
  }

  /** Show the seeds of the cell in the address: `#study/TASK/MODEL/LANGUAGE`. */
  function openSeeds() {
    output.querySelector(".seeds")?.remove();
    const [taskName, model, name] = address;
    const found = study?.tasks.find((each) => each.task === taskName);
    const cell = found?.cells.find((each) => each.model === model && each.language === name);
    const card = [...output.querySelectorAll("[data-task]")].find((each) => each.dataset.task === taskName);
    if (!cell || !card) return;
    const panel = showSeeds(cell, { ...found, baseline: study.baseline });
    card.querySelector(".table").after(panel);
    panel.focus();
  }

  function enter(rest) {
    address = rest;
    if (study) openSeeds();
    else load();
  }

  return { node, enter, refresh: load };
}

/** Replace the options of a filter after the first, and keep the choice. */
function fill(filter, options) {
  const chosen = filter.value;
  filter.replaceChildren(filter.options[0], ...options.map(([value, text]) => h("option", { value }, text)));
  filter.value = options.some(([value]) => value === chosen) ? chosen : "";
}

function taskCard(study, task, language) {
  const verdicts = task.verdicts.map(verdictLine);
  const plots = task.plots.map((name) => {
    const path = `results/plots/${encodeURIComponent(name)}.svg${query({ baseline: study.baseline })}`;
    const [title, text] = PLOTS[name.slice(task.task.length + 1)] ?? [name, ""];
    return svgFigure(path, title, text);
  });
  const key = legend([study.baseline, ...study.models]);
  return h(
    "section",
    { class: "card", "data-task": task.task },
    h("h3", {}, task.task),
    h("ul", { class: "verdicts" }, verdicts),
    scoreTable(study, task, language),
    plots.length ? h("details", {}, h("summary", {}, "Plots"), key, plots) : null,
  );
}

/** Return a verdict with its category in bold. */
function verdictLine({ category, text }) {
  const at = text.lastIndexOf(`: ${category}`) + 2;
  const parts = at > 1 ? [text.slice(0, at), h("b", {}, category), text.slice(at + category.length)] : [text];
  return h("li", { class: category.replace(" ", "-") }, parts);
}

function scoreTable(study, task, language) {
  const models = [...new Set(task.cells.map((cell) => cell.model))];
  const cells = new Map(task.cells.map((cell) => [`${cell.language}\n${cell.model}`, cell]));
  const head = ["Language", study.baseline, ...models.flatMap((model) => [model, "difference"])];
  const names = [...task.languages.filter((code) => !language || code === language), "mean", "gap"];
  const rows = names.flatMap((name) => {
    const found = models.map((model) => cells.get(`${name}\n${model}`));
    const first = found.find(Boolean);
    if (!first) return [];
    const title = SCOPES[name] ?? `${languageName(name)} (${name})`;
    return h(
      "tr",
      { class: name in SCOPES ? "below" : null },
      h("th", { scope: "row", class: "word" }, title),
      h("td", {}, spread(first.baseline_mean, first.baseline_deviation)),
      found.flatMap((cell) => cellPair(cell, task)),
    );
  });
  const better = task.higher_is_better ? "higher is better" : "lower is better";
  return h(
    "div",
    { class: "wide table", tabindex: 0, role: "region", "aria-label": `Scores of ${task.task}` },
    h(
      "table",
      {},
      h("caption", {}, `${task.metric} (%), ${better}. A score links to its seeds.`),
      h("thead", {}, h("tr", {}, head.map((text, k) => h("th", { scope: "col", class: k ? null : "word" }, text)))),
      h("tbody", {}, rows),
    ),
  );
}

function cellPair(cell, task) {
  if (!cell) return [h("td", {}, "–"), h("td", {}, "–")];
  const address = ["study", task.task, cell.model, cell.language].map(encodeURIComponent).join("/");
  const interval = cell.low == null ? "" : ` [${signed(cell.low)}, ${signed(cell.high)}]`;
  const difference = `${signed(cell.difference)}${interval}${MARKS[cell.category] ?? ""}`;
  return [
    h("td", {}, h("a", { href: `#${address}` }, spread(cell.mean, cell.deviation))),
    h("td", { class: cell.category.replace(" ", "-") }, difference),
  ];
}

function spread(mean, deviation) {
  return deviation == null ? decimal(mean, 1) : `${decimal(mean, 1)} ± ${decimal(deviation, 1)}`;
}
