/** Colors and shapes of series: a series can be told from the others without its color. */

import { h, s } from "./dom.js";

const N_COLORS = 6;
const SHAPES = [
  "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z", // circle
  "M-3.5 -3.5H3.5V3.5H-3.5Z", // square
  "M0 -5L5 0L0 5L-5 0Z", // diamond
  "M0 -4.5L4.5 3.5H-4.5Z", // triangle
  "M0 4.5L4.5 -3.5H-4.5Z", // triangle, point down
  "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z", // plus
];

/** Return the class that gives a series its color. */
export function seriesClass(number) {
  return `series-${number % N_COLORS}`;
}

/** Return the outline of the mark of a series; 36 series differ in color or shape. */
export function markPath(number) {
  return SHAPES[(number + Math.floor(number / N_COLORS)) % SHAPES.length];
}

/** Return a legend; with `ontoggle` its entries are buttons that show and hide a series. */
export function legend(names, ontoggle) {
  const entries = names.map((name, number) => {
    const path = s("path", { d: markPath(number) });
    const mark = s("svg", { class: "mark", viewBox: "-6 -6 12 12", "aria-hidden": "true" }, path);
    const kind = seriesClass(number);
    if (!ontoggle) return h("li", { class: kind }, mark, name);
    const button = h("button", { type: "button", class: `${kind} key`, "aria-pressed": "true" });
    button.append(mark, name);
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      ontoggle(number, shown);
    });
    return h("li", {}, button);
  });
  return h("ul", { class: "legend", "aria-label": "Legend" }, entries);
}
