/** Two rows of words joined by lines; two columns where the rows do not fit. */

import { h, s } from "./dom.js";
import { rove } from "./keyboard.js";
import { decimal, direction } from "./text.js";

/** Return the figure of an aligned pair: `{src, tgt, links}`. */
export function linkFigure({ src, tgt, links }) {
  const sides = [wordList(src, "Source words"), wordList(tgt, "Target words")];
  const drawing = s("svg", { class: "lines", role: "group", "aria-label": "Links" });
  const node = h("div", { class: "links" }, sides[0], drawing, sides[1]);
  const shades = scale(links.map((link) => link.score));
  const lines = links.map((link, k) => {
    const text = `${src[link.src]} – ${tgt[link.tgt]}: ${decimal(link.score)}`;
    const line = s(
      "g",
      { class: "link", role: "img", "aria-label": text, "data-tip": text, "--shade": shades[k] },
      s("path", { class: "hit" }),
      s("path", { class: "line" }),
    );
    line.words = [sides[0].children[link.src], sides[1].children[link.tgt]];
    return line;
  });
  drawing.append(...lines);
  rove(drawing, lines);
  highlight(node, sides, lines);

  function draw() {
    if (!node.clientWidth) return;
    node.classList.remove("columns");
    const wide = sides.some((side) => side.scrollWidth > side.clientWidth);
    node.classList.toggle("columns", wide);
    const origin = drawing.getBoundingClientRect();
    drawing.setAttribute("viewBox", `0 0 ${origin.width} ${origin.height}`);
    for (const line of lines) {
      const ends = line.words.map((word, side) => endPoint(word, side, origin, wide));
      for (const path of line.children) path.setAttribute("d", curve(...ends, wide));
    }
  }
  new ResizeObserver(draw).observe(node);
  return node;
}

function wordList(words, label) {
  const items = words.map((word) => h("li", {}, word));
  return h("ol", { class: "words", dir: direction(words.join(" ")), "aria-label": label }, items);
}

/** Return where a line ends: at the middle of the side of the word that faces the drawing. */
function endPoint(word, side, origin, wide) {
  const box = word.getBoundingClientRect();
  if (wide) return [side ? origin.width : 0, box.top + box.height / 2 - origin.top];
  return [box.left + box.width / 2 - origin.left, side ? origin.height : 0];
}

function curve([x1, y1], [x2, y2], wide) {
  const [x, y] = [(x1 + x2) / 2, (y1 + y2) / 2];
  return wide
    ? `M${x1} ${y1} C${x} ${y1} ${x} ${y2} ${x2} ${y2}`
    : `M${x1} ${y1} C${x1} ${y} ${x2} ${y} ${x2} ${y2}`;
}

/** Return scores between 0 (lowest) and 1 (highest). */
function scale(scores) {
  const low = Math.min(...scores);
  const range = Math.max(...scores) - low;
  return scores.map((score) => (range > 0 ? (score - low) / range : 1));
}

/** Mark the words and lines that belong together while one of them is pointed at or focused. */
function highlight(node, sides, lines) {
  function mark(target) {
    const chosen = lines.filter((line) => line === target || line.words.includes(target));
    node.classList.toggle("marking", chosen.length > 0);
    for (const line of lines) line.classList.toggle("marked", chosen.includes(line));
    const words = new Set(chosen.flatMap((line) => line.words));
    for (const word of [...sides[0].children, ...sides[1].children]) {
      word.classList.toggle("marked", words.has(word));
    }
  }
  const find = (event) => mark(event.target.closest(".link, .words li"));
  node.addEventListener("pointerover", find);
  node.addEventListener("focusin", find);
  node.addEventListener("pointerleave", () => mark(null));
  node.addEventListener("focusout", () => mark(null));
}
