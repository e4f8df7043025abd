/** Attention: how much the words of two sentences attend to each other, by layer and head. */

import { call } from "../api.js";
import { choice, debounce, examples, field, h, select, slider } from "../dom.js";
import { PAIRS } from "../examples.js";
import { scoreMatrix } from "../matrix.js";
import { createRequests } from "../request.js";
import { decimal } from "../text.js";

const WAIT = 300; // milliseconds after the last change

/** Return the view. */
export function create(health) {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  let readings = [];
  let entered = false;
  const ask = debounce(read, WAIT);
  const area = (value) => h("textarea", { rows: 2, dir: "auto", spellcheck: "false", oninput: ask }, value);
  const src = area(PAIRS[0].src);
  const tgt = area(PAIRS[0].tgt);
  const models = health.models ?? [health.model];
  const model = select(models, health.model, { onchange: read });
  const kind = select([], null, { onchange: chooseReading });
  const layer = slider("Layer", { min: 1, max: health.n_layers, step: 1, value: health.default_layer || 1, oninput: draw });
  const head = select([], null, { onchange: draw });
  const headField = field("Head", head);
  const way = choice("Direction", [["src", "Source to target"], ["tgt", "Target to source"]], "src", draw);
  const node = h(
    "div",
    {},
    h("h2", {}, "Attention between sentences"),
    h("p", { class: "lead" }, "Each row shows how the attention of one token is spread over the other sentence. Darker cells mean more attention."),
    h(
      "div",
      { class: "card" },
      h("div", { class: "two" }, field("Sentence", src), field("Translation", tgt)),
      examples(PAIRS, (pair) => {
        src.value = pair.src;
        tgt.value = pair.tgt;
        read();
      }),
    ),
    h(
      "div",
      { class: "card controls" },
      models.length > 1 ? field("Model", model) : null,
      field("Attention", kind),
      layer,
      headField,
      way,
    ),
    requests.node,
    output,
  );

  function read() {
    const body = { src: src.value.trim(), tgt: tgt.value.trim(), model: model.value };
    if (!body.src || !body.tgt) {
      requests.cancel();
      requests.fail("");
      output.replaceChildren(h("p", { class: "empty" }, "Enter a sentence and its translation, or choose an example."));
      return;
    }
    requests.run((signal) => call("attention", { body, signal }), (answer) => {
      readings = answer.readings;
      const chosen = kind.selectedIndex;
      kind.replaceChildren(...readings.map((each, k) => h("option", { value: k }, each.kind)));
      kind.selectedIndex = Math.max(0, Math.min(chosen, readings.length - 1));
      chooseReading();
    });
  }

  /** Offer the layers and heads of the chosen reading. */
  function chooseReading() {
    const layers = readings[Number(kind.value)].src_to_tgt;
    layer.input.max = layers.length;
    layer.set(Math.min(Number(layer.input.value), layers.length));
    const count = layers[0].length;
    const chosen = head.value || "mean";
    const heads = count > 1 ? [...Array(count).keys()] : [];
    head.replaceChildren(
      h("option", { value: "mean" }, "mean"),
      ...heads.map((k) => h("option", { value: k }, String(k + 1))),
    );
    head.value = Number(chosen) < count || chosen === "mean" ? chosen : "mean";
    headField.hidden = !heads.length;
    draw();
  }

  function draw() {
    const reading = readings[Number(kind.value)];
    if (!reading) return;
    const fromSrc = way.value === "src";
    const heads = (fromSrc ? reading.src_to_tgt : reading.tgt_to_src)[Number(layer.input.value) - 1];
    const scores = head.value === "mean" ? average(heads) : heads[Number(head.value)];
    const [rows, columns] = fromSrc ? [reading.src, reading.tgt] : [reading.tgt, reading.src];
    const share = reading.shares[Number(layer.input.value) - 1];
    const text = `At layer ${layer.input.value}, ${decimal(100 * share, 0)} % of the attention goes to the other sentence; uniform attention would give ${decimal(100 * reading.uniform, 0)} %.`;
    const matrix = scoreMatrix(rows, columns, scores, { label: "Share of attention", low: 0, digits: 3 });
    output.replaceChildren(h("div", { class: "card" }, h("p", { class: "soft" }, text), matrix));
  }

  function enter() {
    if (!entered) read();
    entered = true;
  }

  return { node, enter, refresh: read };
}

/** Return the mean of matrices of equal size. */
function average(matrices) {
  return matrices[0].map((row, i) =>
    row.map((_, j) => matrices.reduce((sum, matrix) => sum + matrix[i][j], 0) / matrices.length),
  );
}
