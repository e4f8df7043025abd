/** One tooltip for the page: it shows the `data-tip` of what is under the pointer or focused. */

import { h } from "./dom.js";

const GAP = 8; // pixels between element and tooltip

/** Start showing tooltips. */
export function startTooltips() {
  const bubble = h("div", { class: "tooltip", "aria-hidden": "true", hidden: true });
  document.body.append(bubble);

  function show(event) {
    const target = event.target.closest?.("[data-tip]");
    bubble.hidden = !target;
    if (!target) return;
    bubble.textContent = target.dataset.tip;
    const box = target.getBoundingClientRect();
    const own = bubble.getBoundingClientRect();
    const left = box.left + box.width / 2 - own.width / 2;
    // Over the middle of something tall, such as a line; above anything else.
    const isTall = box.height > 2 * own.height;
    const above = isTall ? box.top + (box.height - own.height) / 2 : box.top - own.height - GAP;
    const right = document.documentElement.clientWidth - own.width - GAP;
    bubble.style.left = `${Math.max(GAP, Math.min(left, right))}px`;
    bubble.style.top = `${above > GAP ? above : box.bottom + GAP}px`;
  }

  function hide() {
    bubble.hidden = true;
  }

  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}
