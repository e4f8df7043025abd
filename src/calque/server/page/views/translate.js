/** Translate: one sentence per line. */

import { call } from "../api.js";
import { examples, field, h, select } from "../dom.js";
import { TRANSLATIONS } from "../examples.js";
import { createRequests } from "../request.js";
import { direction, languageName } from "../text.js";

/** Return the view. */
export function create(health) {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  const text = h("textarea", { rows: 5, dir: "auto" });
  const code = () => h("input", { type: "text", size: 8, autocapitalize: "off", spellcheck: "false", placeholder: "optional" });
  const from = code();
  const targets = health.target_languages.map((language) => [language, languageName(language)]);
  const to = targets.length ? select(targets, targets[0][0]) : code();
  const beams = select([1, 2, 4, 8], 4);
  const form = h(
    "form",
    { class: "card" },
    field("One sentence per line", text),
    h(
      "div",
      { class: "row" },
      field("From language", from),
      field("To language", to),
      field("Beams", beams),
      h("button", { type: "submit", class: "primary" }, "Translate"),
    ),
    examples(TRANSLATIONS, (example) => {
      text.value = example.text;
      translate();
    }),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    translate();
  });
  const node = h(
    "div",
    {},
    h("h2", {}, "Translate"),
    h("p", { class: "lead" }, "Translations of the model that was loaded as translator."),
    form,
    requests.node,
    output,
  );

  function translate() {
    const texts = text.value.split(/\r?\n/).map((line) => line.trim()).filter(Boolean);
    if (!texts.length) {
      output.replaceChildren(h("p", { class: "empty" }, "Enter a sentence to translate."));
      return;
    }
    const body = { texts, beams: Number(beams.value) };
    if (from.value.trim()) body.src_lang = from.value.trim();
    if (to.value.trim()) body.tgt_lang = to.value.trim();
    requests.run((signal) => call("translate", { body, signal }), ({ translations }) => {
      const rows = translations.map((line, k) =>
        h(
          "div",
          { class: "translation" },
          h("p", { class: "soft", dir: direction(texts[k]) }, texts[k]),
          h("p", { dir: direction(line) }, line),
        ),
      );
      output.replaceChildren(h("div", { class: "card" }, rows));
    });
  }

  return { node, refresh: translate };
}
