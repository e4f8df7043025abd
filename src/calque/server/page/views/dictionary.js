/** Dictionary: the nearest words to a word, in every language with mapped vectors. */

import { call, query } from "../api.js";
import { debounce, examples, field, h, select } from "../dom.js";
import { ENGLISH_WORDS } from "../examples.js";
import { rankedGroups } from "../ranked.js";
import { createRequests } from "../request.js";
import { languageName } from "../text.js";

const WAIT = 300; // milliseconds after the last change

/** Return the view. */
export function create(health) {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  const languages = health.vector_languages ?? health.languages ?? [];
  const attributes = { type: "text", dir: "auto", autocapitalize: "off", spellcheck: "false" };
  const word = h("input", { ...attributes, oninput: debounce(lookUp, WAIT) });
  const language = select(languages.map((code) => [code, languageName(code)]), languages[0], { onchange: lookUp });
  const count = select([5, 10, 20], 5, { onchange: lookUp });
  const words = examples(ENGLISH_WORDS, ({ name }) => {
    word.value = name;
    language.value = "en";
    lookUp();
  });
  const node = h(
    "div",
    {},
    h("h2", {}, "Dictionary"),
    h("p", { class: "lead" }, "The nearest words in every language whose vectors share one space."),
    h(
      "div",
      { class: "card" },
      h(
        "div",
        { class: "row" },
        field("Word", word, { className: "field grow" }),
        field("Language", language),
        field("Words per language", count),
      ),
      languages.includes("en") ? words : null,
    ),
    requests.node,
    output,
  );

  function lookUp() {
    const asked = { word: word.value.trim(), language: language.value, n: count.value };
    if (!asked.word) {
      requests.cancel();
      requests.fail("");
      output.replaceChildren(h("p", { class: "empty" }, "Enter a word to see its neighbors."));
      return;
    }
    requests.run((signal) => call(`lexicon${query(asked)}`, { signal }), draw);
  }

  function draw({ neighbors }) {
    const groups = new Map();
    for (const [code, words] of Object.entries(neighbors)) {
      if (words.length) groups.set(code, words.map((each) => ({ text: each.word, score: each.score })));
    }
    output.replaceChildren(rankedGroups(groups, "No neighbors were found."));
  }

  function enter() {
    if (!output.childElementCount) lookUp();
  }

  return { node, enter, refresh: lookUp };
}
