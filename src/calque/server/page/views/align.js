/** Align: two sentences or a bitext become words joined by lines, and a matrix. */

import { call } from "../api.js";
import { choice, debounce, download, examples, field, h, select, slider } from "../dom.js";
import { BITEXT, PAIRS } from "../examples.js";
import { linkFigure } from "../links.js";
import { scoreMatrix } from "../matrix.js";
import { createRequests } from "../request.js";
import { decimal, formatPharaoh, parseBitext } from "../text.js";

const WAIT = 150; // milliseconds after the last change
const METHODS = { ot: "optimal transport", argmax: "mutual argmax", match: "matching" };

/** Return the view. */
export function create(health) {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  const later = debounce(align, WAIT);
  let answer = null;
  let entered = false;

  const area = (rows, value) => h("textarea", { rows, dir: "auto", spellcheck: "false", oninput: later }, value);
  const src = area(2, PAIRS[0].src);
  const tgt = area(2, PAIRS[0].tgt);
  const bitext = area(6, BITEXT);
  const pairFields = h("div", { class: "two" }, field("Sentence", src), field("Translation", tgt));
  const pairExamples = examples(PAIRS, (pair) => {
    src.value = pair.src;
    tgt.value = pair.tgt;
    align();
  });
  const bitextField = field("One pair per line, separated by a tab or |||", bitext);
  bitextField.hidden = true;
  const mode = choice("Input", [["pair", "Two sentences"], ["bitext", "Bitext"]], "pair", (chosen) => {
    pairFields.hidden = pairExamples.hidden = chosen !== "pair";
    bitextField.hidden = chosen === "pair";
    show.choose(chosen === "pair" ? "both" : "links");
    align();
  }, { hideLabel: true });

  const { models } = health;
  const model = select(models.map(({ name }) => name), models[0].name, { onchange: chooseModel });
  const method = select(
    health.methods.map((name) => [name, METHODS[name] ?? name]),
    models[0].default_method,
    { onchange: changeMethod },
  );
  const layer = slider("Layer", { min: 0, max: models[0].n_layers, step: 1, value: models[0].default_layer, oninput: changeLayer });
  const start = models[0].default_threshold;
  const threshold = slider("Threshold", { min: 0, max: 1, step: 0.01, value: start, format: decimal, oninput: later });
  const show = choice("Show", [["links", "Lines"], ["matrix", "Matrix"], ["both", "Both"]], "both", align);

  const buttons = [
    h("button", { type: "button", onclick: savePharaoh }, "Pharaoh"),
    h("button", { type: "button", onclick: saveJson }, "JSON"),
  ];
  const downloads = h("div", { class: "downloads" }, h("span", { class: "soft" }, "Download"), buttons);

  const node = h(
    "div",
    {},
    h("h2", {}, "Align words"),
    h("p", { class: "lead" }, "Which words translate each other? Links come from the hidden states of one layer of the encoder."),
    h("div", { class: "card" }, mode, pairFields, bitextField, pairExamples),
    h(
      "div",
      { class: "card controls" },
      models.length > 1 ? field("Model", model) : null,
      layer,
      field("Method", method),
      threshold,
      show,
    ),
    requests.node,
    output,
  );

  function readPairs() {
    if (mode.value === "bitext") return parseBitext(bitext.value);
    const pair = { src: src.value.trim(), tgt: tgt.value.trim() };
    return { pairs: pair.src && pair.tgt ? [pair] : [], bad: [] };
  }

  function align() {
    const { pairs, bad } = readPairs();
    if (bad.length) {
      requests.cancel();
      requests.fail(`Line ${bad[0]} of the bitext is not a pair: separate two sentences by one tab or one |||.`);
      return;
    }
    if (!pairs.length) {
      answer = null;
      requests.cancel();
      requests.fail("");
      output.replaceChildren(h("p", { class: "empty" }, "Enter a sentence and its translation, or choose an example."));
      return;
    }
    const body = {
      pairs,
      layer: Number(layer.input.value),
      method: method.value,
      threshold: Number(threshold.input.value),
      matrix: show.value !== "links",
      model: model.value,
    };
    requests.run((signal) => call("align", { body, signal }), draw);
  }

  /** Offer the layers of the chosen model, and start at its best. */
  function chooseModel() {
    const chosen = models[model.selectedIndex];
    layer.set(chosen.default_layer, chosen.n_layers);
    if (chosen.probability_threshold === null && method.value === "probability") {
      method.value = chosen.default_method;
    }
    changeMethod();
  }

  /** Start with the best threshold of a method: only probabilities have one. */
  function changeMethod() {
    const best = models[model.selectedIndex].probability_threshold;
    threshold.set((method.value === "probability" && best) || 0);
    align();
  }

  /** Only the scores of the best layer are calibrated. */
  function changeLayer() {
    const best = models[model.selectedIndex].default_layer;
    if (method.value === "probability" && Number(layer.input.value) !== best) {
      method.value = "argmax";
      threshold.set(0);
    }
    later();
  }

  function draw(result) {
    answer = result;
    const figures = result.pairs.map((pair, number) => {
      const parts = [];
      if (result.pairs.length > 1) parts.push(h("h3", {}, `Pair ${number + 1}`));
      if (show.value !== "matrix") parts.push(linkFigure(pair));
      if (!pair.links.length) parts.push(h("p", { class: "soft" }, "No links: lower the threshold."));
      if (pair.matrix && pair.matrix.length) {
        parts.push(scoreMatrix(pair.src, pair.tgt, pair.matrix, { label: "Cosine similarity; links are outlined", links: pair.links }));
      }
      return h("div", { class: "card pair" }, parts);
    });
    output.replaceChildren(...figures, downloads);
  }

  function savePharaoh() {
    download("links.pharaoh", formatPharaoh(answer.pairs));
  }

  function saveJson() {
    download("links.json", `${JSON.stringify(answer, null, 2)}\n`, "application/json");
  }

  function enter() {
    if (!entered) align();
    entered = true;
  }

  return { node, enter, refresh: align };
}
