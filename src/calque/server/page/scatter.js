/** Points in two dimensions, grouped in series; the plot can be zoomed and moved. */

import { h, s } from "./dom.js";
import { rove } from "./keyboard.js";
import { markPath, seriesClass } from "./marks.js";
import { languageName } from "./text.js";

const [MARGIN, LABEL_GAP, MARK_SIZE, LINE_HEIGHT] = [20, 8, 5, 13]; // pixels
const NARROW = 420; // pixels; plots below this width have no labels
const [STEP, MAX_SCALE] = [1.5, 40]; // of zooming

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
  const drawing = s("svg", { class: "scatter", role: "group", "aria-label": label });
  drawing.append(...marks);
  rove(drawing, marks);
  // What is shown of the whole plot: its left and top edge, from 0 to 1, and how much it is enlarged.
  const view = { left: 0, top: 0, scale: 1 };

  function draw() {
    const width = drawing.clientWidth;
    if (!width) return;
    const height = Math.round(width * 0.75);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const toX = axis(points.map((point) => point.x), MARGIN, width - MARGIN);
    const toY = axis(points.map((point) => point.y), height - MARGIN, MARGIN);
    marks.forEach((mark, k) => {
      const x = (toX(points[k].x) - view.left * width) * view.scale;
      const y = (toY(points[k].y) - view.top * height) * view.scale;
      mark.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    });
    drawing.classList.toggle("zoomed", view.scale > 1);
    if (withLabels) placeLabels(marks.filter((mark) => !mark.classList.contains("off")), width);
  }
  new ResizeObserver(draw).observe(drawing);

  /** Move the left and top edge; the plot always fills its frame. */
  function moveTo(left, top) {
    const last = 1 - 1 / view.scale;
    view.left = Math.max(0, Math.min(last, left));
    view.top = Math.max(0, Math.min(last, top));
    draw();
  }

  /** Zoom; the point at (x, y), from 0 to 1 of the frame, stays where it is. */
  function zoom(factor, x = 0.5, y = 0.5) {
    const before = view.scale;
    view.scale = Math.max(1, Math.min(MAX_SCALE, before * factor));
    const moved = 1 / before - 1 / view.scale;
    moveTo(view.left + x * moved, view.top + y * moved);
    return view.scale !== before;
  }

  drawing.addEventListener("wheel", (event) => {
    const box = drawing.getBoundingClientRect();
    const place = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    // At either end of the range, the wheel scrolls the page.
    if (zoom(event.deltaY < 0 ? STEP : 1 / STEP, ...place)) event.preventDefault();
  }, { passive: false });
  drawing.addEventListener("pointerdown", (event) => {
    if (view.scale > 1 && event.button === 0) drawing.setPointerCapture(event.pointerId);
  });
  drawing.addEventListener("pointermove", (event) => {
    if (!drawing.hasPointerCapture(event.pointerId)) return;
    const { width, height } = drawing.getBoundingClientRect();
    moveTo(view.left - event.movementX / width / view.scale, view.top - event.movementY / height / view.scale);
  });
  // A point that the keyboard has reached comes into view.
  drawing.addEventListener("focusin", (event) => {
    if (!event.target.matches(":focus-visible")) return;
    const { width, height } = drawing.getBoundingClientRect();
    const { e: x, f: y } = event.target.transform.baseVal.getItem(0).matrix;
    if (x >= 0 && x <= width && y >= 0 && y <= height) return;
    moveTo(view.left + (x / width - 0.5) / view.scale, view.top + (y / height - 0.5) / view.scale);
    // The browser has scrolled to where the point was.
    event.target.scrollIntoView({ block: "nearest", inline: "nearest" });
  });

  const button = (text, name, onclick) => h("button", { type: "button", "aria-label": name, "data-tip": name, onclick }, text);
  const buttons = h(
    "div",
    { class: "zoom" },
    button("+", "Zoom in", () => zoom(STEP)),
    button("−", "Zoom out", () => zoom(1 / STEP)),
    button("All", "Show all points", () => zoom(0)),
  );
  const node = h("div", {}, drawing, buttons);
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
