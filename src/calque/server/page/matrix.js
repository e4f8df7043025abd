/** A matrix of scores between two lists of words, as a table with shaded cells. */

import { h } from "./dom.js";
import { roveGrid } from "./keyboard.js";
import { decimal, direction } from "./text.js";

/**
 * Return the table.
 * @param {string[]} src words of the rows
 * @param {string[]} tgt words of the columns
 * @param {number[][]} scores one row per source word
 * @param {{label: string, links?: {src: number, tgt: number}[], low?: number, digits?: number}} options
 *   `links` are outlined; `low` is the score of the lightest cell.
 */
export function scoreMatrix(src, tgt, scores, { label, links = [], low, digits = 2 }) {
  const all = scores.flat();
  const least = low ?? Math.min(...all);
  const range = Math.max(...all) - least || 1;
  const linked = new Set(links.map((link) => `${link.src}-${link.tgt}`));
  const tgtDirection = direction(tgt.join(" "));
  const srcDirection = direction(src.join(" "));
  const rows = src.map((word, i) =>
    tgt.map((other, j) => {
      const isLinked = linked.has(`${i}-${j}`);
      const text = `${word} – ${other}: ${decimal(scores[i][j], digits)}${isLinked ? ", linked" : ""}`;
      return h("td", {
        role: "gridcell",
        class: isLinked ? "linked" : null,
        "aria-label": text,
        "data-tip": text,
        "--shade": Math.max(0, Math.min(1, (scores[i][j] - least) / range)).toFixed(3),
      });
    }),
  );
  const head = h(
    "tr",
    { role: "row" },
    h("td", { role: "gridcell", class: "corner" }),
    tgt.map((word) =>
      h("th", { scope: "col", role: "columnheader" }, h("span", { dir: tgtDirection }, word)),
    ),
  );
  const body = rows.map((cells, i) => {
    const header = h("th", { scope: "row", role: "rowheader" }, h("span", { dir: srcDirection }, src[i]));
    return h("tr", { role: "row" }, header, cells);
  });
  const attributes = { class: "matrix", role: "grid", dir: tgtDirection };
  const table = h(
    "table",
    attributes,
    h("caption", {}, label),
    h("thead", { role: "rowgroup" }, head),
    h("tbody", { role: "rowgroup" }, body),
  );
  roveGrid(table, rows, { rtl: tgtDirection === "rtl" });
  return h("div", { class: "wide" }, table);
}
