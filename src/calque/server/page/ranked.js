/** Results in groups by language, best first, with their scores as numbers and bars. */

import { h } from "./dom.js";
import { decimal, direction, langAttribute, languageName } from "./text.js";

/** Return the groups; `groups` maps a language to its entries `{text, score}`, best first. */
export function rankedGroups(groups, whenEmpty) {
  if (!groups.size) return h("p", { class: "empty" }, whenEmpty);
  const cards = [...groups].map(([language, entries]) =>
    h(
      "section",
      { class: "card group" },
      h("h3", {}, languageName(language), " ", h("span", { class: "soft code" }, language)),
      h("ol", { class: "ranked" }, entries.map((entry) => rankedEntry(entry, language))),
    ),
  );
  return h("div", { class: "groups" }, cards);
}

function rankedEntry({ text, score, line }, language) {
  const shown = { lang: langAttribute(language), dir: direction(text), class: "text" };
  const place = line === undefined || line === null ? null : `line ${line}`;
  return h(
    "li",
    {},
    h("span", shown, text),
    h("span", { class: "score", title: place }, decimal(score)),
    h("span", { class: "meter", "aria-hidden": "true", "--shade": Math.max(0, Math.min(1, score)) }),
  );
}
