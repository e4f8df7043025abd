/** Curves over steps, with axes, a legend and a guide that reads the values at one step. */

import { h, s } from "./dom.js";
import { legend, markPath, seriesClass } from "./marks.js";
import { compact, decimal } from "./text.js";

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [260, 52, 12, 12, 32];
const MAX_POINTS = 500; // per curve

/** Return a chart with `update(series)`; a series is `{name, points: [[step, value], …]}`. */
export function lineChart({ label, across = "step" }) {
  const drawing = s("svg", { class: "chart", role: "group", tabindex: 0, "aria-label": label });
  const reading = h("p", { class: "reading", "aria-live": "polite" });
  const key = h("div");
  const node = h("figure", { class: "chart-figure" }, key, drawing, reading);
  let series = [];
  let steps = [];
  let place = -1;
  let toX = (step) => step;

  function draw() {
    const width = node.clientWidth;
    if (!width) return;
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren();
    const all = series.flatMap(({ points }) => points).filter(([, value]) => Number.isFinite(value));
    if (!all.length) {
      drawing.append(s("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "No values yet"));
      return;
    }
    const xTicks = niceTicks(all.map(([step]) => step), Math.max(2, Math.floor(width / 110)));
    const yTicks = niceTicks(all.map(([, value]) => value), 5);
    toX = linear(xTicks, LEFT, width - RIGHT);
    const toY = linear(yTicks, HEIGHT - BOTTOM, TOP);
    drawAxes(drawing, { xTicks, yTicks, toX, toY, width, across });
    series.forEach(({ points }, number) => drawing.append(curve(points, number, toX, toY)));
    drawGuide();
  }

  function drawGuide() {
    drawing.querySelector(".guide")?.remove();
    if (place < 0 || place >= steps.length) return;
    const step = steps[place];
    const x = toX(step);
    drawing.append(s("line", { class: "guide", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    const values = series.flatMap(({ name, points }) => {
      const found = points.find(([each]) => each === step);
      return found ? [`${name} ${decimal(found[1], 4)}`] : [];
    });
    reading.textContent = `${across} ${step}: ${values.join(" · ")}`;
  }

  function moveTo(next) {
    place = Math.max(0, Math.min(steps.length - 1, next));
    drawGuide();
  }

  drawing.addEventListener("keydown", (event) => {
    const now = place < 0 ? steps.length : place;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    moveTo(next);
  });
  drawing.addEventListener("pointermove", (event) => {
    const x = event.clientX - drawing.getBoundingClientRect().left;
    let best = -1;
    steps.forEach((step, k) => {
      if (best < 0 || Math.abs(toX(step) - x) < Math.abs(toX(steps[best]) - x)) best = k;
    });
    if (best >= 0) moveTo(best);
  });
  new ResizeObserver(draw).observe(node);

  node.update = (next) => {
    series = next;
    steps = [...new Set(series.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => a - b);
    key.replaceChildren(legend(series.map(({ name }) => name)));
    draw();
  };
  return node;
}

function curve(points, number, toX, toY) {
  const every = Math.ceil(points.length / MAX_POINTS);
  const kept = points.filter(([, value], k) => Number.isFinite(value) && (k % every === 0 || k === points.length - 1));
  const group = s("g", { class: `curve ${seriesClass(number)}` });
  const path = kept.map(([step, value], k) => `${k ? "L" : "M"}${toX(step).toFixed(1)} ${toY(value).toFixed(1)}`);
  group.append(s("path", { class: "line", d: path.join("") }));
  const last = kept.at(-1);
  if (last) {
    const at = `translate(${toX(last[0]).toFixed(1)} ${toY(last[1]).toFixed(1)})`;
    group.append(s("path", { class: "end", d: markPath(number), transform: at }));
  }
  return group;
}

function drawAxes(drawing, { xTicks, yTicks, toX, toY, width, across }) {
  for (const tick of yTicks) {
    const y = toY(tick);
    drawing.append(s("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
    drawing.append(s("text", { x: LEFT - 8, y, dy: "0.32em", "text-anchor": "end" }, tickText(tick)));
  }
  for (const tick of xTicks) {
    const end = tick === xTicks.at(-1);
    const text = end ? across : tickText(tick);
    const anchor = end ? "end" : "middle";
    drawing.append(s("text", { x: end ? width - RIGHT : toX(tick), y: HEIGHT - 10, "text-anchor": anchor }, text));
  }
}

function tickText(value) {
  return Math.abs(value) >= 10_000 ? compact(value) : String(Number(value.toPrecision(6))).replace("-", "−");
}

function linear(ticks, start, end) {
  const [low, high] = [ticks[0], ticks.at(-1)];
  return (value) => start + ((value - low) / (high - low || 1)) * (end - start);
}

/** Return round numbers that enclose the values: multiples of 1, 2 or 5 times a power of ten. */
export function niceTicks(values, count) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  for (let k = Math.floor(low / step); k <= Math.ceil(high / step); k += 1) ticks.push(k * step);
  return ticks;
}
