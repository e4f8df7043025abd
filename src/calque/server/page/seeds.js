/** The seeds behind one score of a study. */

import { h } from "./dom.js";
import { decimal, languageName, signed } from "./text.js";

/** Return a panel with one row per seed: score, score of the baseline and difference. */
export function showSeeds(cell, { task, baseline }) {
  const name = { mean: "mean", gap: "transfer gap" }[cell.language] ?? languageName(cell.language);
  const rows = cell.seeds.map(({ seed, score, baseline: other }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", class: "word" }, seed === null ? "no seed" : `seed ${seed}`),
      h("td", {}, decimal(other ?? NaN)),
      h("td", {}, decimal(score)),
      h("td", {}, other == null ? "–" : signed(score - other, 2)),
    ),
  );
  const head = ["", baseline, cell.model, "difference"];
  const p = cell.p == null ? "" : ` p = ${decimal(cell.p, 3)} after correction.`;
  const close = () => {
    location.hash = "study";
  };
  return h(
    "section",
    { class: "seeds", tabindex: -1, "aria-label": "Seeds" },
    h("h4", {}, `${task}, ${name}: ${cell.model}`),
    h("p", { class: "soft" }, `Verdict: ${cell.category}.${p}`),
    h(
      "div",
      { class: "wide" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, head.map((text) => (text ? h("th", { scope: "col" }, text) : h("td"))))),
        h("tbody", {}, rows),
      ),
    ),
    h("button", { type: "button", onclick: close }, "Close"),
  );
}
