/** A plot that the server has drawn, in the text color of the page. */

import { callText } from "./api.js";
import { h } from "./dom.js";

/** Return a figure that loads its plot when it comes into view. */
export function svgFigure(path, title, caption) {
  const image = h("img", { alt: title, class: "plot" });
  const node = h("figure", {}, h("h4", {}, title), image, h("figcaption", {}, caption));
  let text = null;

  // As an image, a plot can neither run a script nor load anything.
  function show() {
    if (text === null) return;
    const colored = text.replaceAll("currentColor", getComputedStyle(node).color);
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(colored)}`;
  }

  async function load() {
    try {
      text = await callText(path);
      show();
    } catch (problem) {
      node.replaceChildren(h("p", { class: "error" }, problem.message));
    }
  }

  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    load();
  });
  observer.observe(node);
  document.addEventListener("theme-change", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  return node;
}
