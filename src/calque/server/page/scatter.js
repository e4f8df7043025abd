/** Points in two dimensions, grouped in series. */

import { s } from "./dom.js";
import { rove } from "./keyboard.js";
import { markPath, seriesClass } from "./marks.js";
import { languageName } from "./text.js";

const [MARGIN, LABEL_GAP, MARK_SIZE, LINE_HEIGHT] = [20, 8, 5, 13]; // pixels
const NARROW = 420; // pixels; plots below this width have no labels

/**
 * Return the plot.
 * @param {{x: number, y: number, text: string, language: string}[]} points
 * @param {string[]} languages decides color and mark of each point
 */
export function scatterPlot(points, languages, { label, withLabels }) {
  const marks = points.map((point) => {
    const number = languages.indexOf(point.language);
    const text = `${point.text} (${languageName(point.language)})`;
    const attributes = { class: `point ${seriesClass(number)}`, role: "img", "aria-label": text, "data-tip": text };
    const mark = s("g", attributes, s("path", { d: markPath(number) }));
    if (withLabels) mark.append(s("text", { dy: "0.32em" }, shorten(point.text)));
    mark.language = point.language;
    return mark;
  });
  const node = s("svg", { class: "scatter", role: "group", "aria-label": label });
  node.append(...marks);
  rove(node, marks);

  function draw() {
    const width = node.clientWidth;
    if (!width) return;
    const height = Math.round(width * 0.75);
    node.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const toX = axis(points.map((point) => point.x), MARGIN, width - MARGIN);
    const toY = axis(points.map((point) => point.y), height - MARGIN, MARGIN);
    const places = points.map((point) => [toX(point.x), toY(point.y)]);
    marks.forEach((mark, k) => {
      mark.setAttribute("transform", `translate(${places[k][0].toFixed(1)} ${places[k][1].toFixed(1)})`);
    });
    if (withLabels) placeLabels(marks.filter((mark) => !mark.classList.contains("off")), width);
  }
  new ResizeObserver(draw).observe(node);

  node.show = (language, shown) => {
    for (const mark of marks) if (mark.language === language) mark.classList.toggle("off", !shown);
    draw();
  };
  return node;
}

/** Place labels beside their marks, and hide those that would cover a mark or another label. */
function placeLabels(marks, width) {
  const places = marks.map((mark) => mark.transform.baseVal.getItem(0).matrix);
  const taken = places.map(({ e: x, f: y }) => ({ start: x - MARK_SIZE, end: x + MARK_SIZE, y }));
  const isFree = ({ start, end, y }) =>
    start >= 0 &&
    end <= width &&
    !taken.some((other) => Math.abs(other.y - y) < LINE_HEIGHT && start < other.end && other.start < end);
  for (const [k, mark] of marks.entries()) {
    const text = mark.querySelector("text");
    const { e: x, f: y } = places[k];
    text.classList.remove("off"); // what is hidden has no length
    const length = text.getComputedTextLength();
    const sides = [LABEL_GAP, -LABEL_GAP - length];
    const side = sides.find((left) => isFree({ start: x + left, end: x + left + length, y }));
    text.classList.toggle("off", side === undefined || width < NARROW);
    if (side === undefined) continue;
    text.setAttribute("x", side);
    taken.push({ start: x + side, end: x + side + length, y });
  }
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
