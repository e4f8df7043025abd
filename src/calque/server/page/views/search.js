/** Search: the nearest sentences to a sentence, in all languages. */

import { call } from "../api.js";
import { debounce, examples, field, h, select } from "../dom.js";
import { QUERIES } from "../examples.js";
import { createRequests } from "../request.js";
import { rankedGroups } from "../ranked.js";
import { languageName } from "../text.js";

const WAIT = 300; // milliseconds after the last change

/** Return the view. */
export function create(health) {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  let entered = false;
  const text = h("textarea", { rows: 2, dir: "auto", oninput: debounce(search, WAIT) }, QUERIES[0].text);
  const count = select([1, 3, 5, 10], 3, { onchange: search });
  const node = h(
    "div",
    {},
    h("h2", {}, "Search sentences"),
    h("p", { class: "lead" }, `The sentences with the most similar meaning in ${health.languages.map(languageName).join(", ")}.`),
    h(
      "div",
      { class: "card" },
      h("div", { class: "row" }, field("Sentence", text, { className: "field grow" }), field("Per language", count)),
      examples(QUERIES, (query) => {
        text.value = query.text;
        search();
      }),
    ),
    requests.node,
    output,
  );

  function search() {
    const body = { text: text.value.trim(), n: Number(count.value) };
    if (!body.text) {
      requests.cancel();
      requests.fail("");
      output.replaceChildren(h("p", { class: "empty" }, "Enter a sentence in any language, or choose an example."));
      return;
    }
    requests.run((signal) => call("search", { body, signal }), draw);
  }

  function draw({ matches }) {
    const groups = new Map();
    for (const match of matches) {
      if (!groups.has(match.language)) groups.set(match.language, []);
      groups.get(match.language).push(match);
    }
    output.replaceChildren(rankedGroups(groups, "No sentence was found."));
  }

  function enter() {
    if (!entered) search();
    entered = true;
  }

  return { node, enter, refresh: search };
}
