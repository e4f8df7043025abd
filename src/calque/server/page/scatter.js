/** Points in two dimensions, grouped in series. */

import { s } from "./dom.js";
import { rove } from "./keyboard.js";
import { markPath, seriesClass } from "./marks.js";
import { languageName } from "./text.js";

const [WIDTH, HEIGHT, MARGIN] = [560, 420, 24];

/**
 * Return the plot.
 * @param {{x: number, y: number, text: string, language: string}[]} points
 * @param {string[]} languages decides color and mark of each point
 */
export function scatterPlot(points, languages, { label, withLabels }) {
  const across = axis(points.map((point) => point.x), MARGIN, WIDTH - MARGIN);
  const down = axis(points.map((point) => point.y), HEIGHT - MARGIN, MARGIN);
  const marks = points.map((point) => {
    const number = languages.indexOf(point.language);
    const text = `${point.text} (${languageName(point.language)})`;
    const x = across(point.x);
    const mark = s(
      "g",
      {
        class: `point ${seriesClass(number)}`,
        role: "img",
        "aria-label": text,
        "data-tip": text,
        transform: `translate(${x.toFixed(1)} ${down(point.y).toFixed(1)})`,
      },
      s("path", { d: markPath(number) }),
    );
    if (withLabels) {
      const left = x > WIDTH * 0.8;
      const anchor = left ? "end" : "start";
      mark.append(s("text", { x: left ? -8 : 8, dy: "0.32em", "text-anchor": anchor }, shorten(point.text)));
    }
    mark.language = point.language;
    return mark;
  });
  const node = s("svg", {
    class: "scatter",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "group",
    "aria-label": label,
  });
  node.append(...marks);
  rove(node, marks);
  node.show = (language, shown) => {
    for (const mark of marks) if (mark.language === language) mark.classList.toggle("off", !shown);
  };
  return node;
}

function shorten(text) {
  const letters = [...text];
  return letters.length > 24 ? `${letters.slice(0, 23).join("")}…` : text;
}

function axis(values, start, end) {
  const low = Math.min(...values);
  const range = Math.max(...values) - low || 1;
  return (value) => start + ((value - low) / range) * (end - start);
}
