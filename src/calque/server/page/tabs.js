/** Tabs with one panel each: arrow keys move the focus, Enter opens. */

import { h } from "./dom.js";
import { rove } from "./keyboard.js";

/** Fill the tab list and the panels; return `select(name)`, which shows one panel. */
export function createTabs(names, list, panels) {
  const tabs = new Map();
  for (const [name, title] of names) {
    const attributes = { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` };
    const onclick = () => {
      location.hash = name;
    };
    const tab = h("button", { ...attributes, "aria-selected": "false", onclick }, title);
    const panel = h("section", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": tab.id, hidden: true });
    list.append(tab);
    panels.append(panel);
    tabs.set(name, { tab, panel });
  }
  rove(list, [...tabs.values()].map(({ tab }) => tab));

  function select(name) {
    for (const [each, { tab, panel }] of tabs) {
      const chosen = each === name;
      tab.setAttribute("aria-selected", String(chosen));
      tab.setAttribute("tabindex", chosen ? 0 : -1);
      panel.hidden = !chosen;
      if (chosen) list.scrollLeft = tab.offsetLeft - (list.clientWidth - tab.offsetWidth) / 2;
    }
  }
  return { select };
}
