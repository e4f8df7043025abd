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
  let readHead = ""; // the head of the readings; empty for the mean of all
  let entered = false;
  const ask = debounce(read, WAIT);
  const area = (value) => h("textarea", { rows: 2, dir: "auto", spellcheck: "false", oninput: ask }, value);
  const src = area(PAIRS[0].src);
  const tgt = area(PAIRS[0].tgt);
  const { models } = health;
  const model = select(models.map(({ name }) => name), models[0].name, { onchange: chooseModel });
  const kind = select([], null, { onchange: draw });
  const layer = slider("Layer", { min: 1, max: models[0].n_layers, step: 1, value: models[0].default_layer || 1, oninput: draw });
  const head = select([], null, { onchange: read });
  offerHeads();
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
      field("Head", head),
      way,
    ),
    requests.node,
    output,
  );

  function read() {
    const body = { src: src.value.trim(), tgt: tgt.value.trim(), model: model.value };
    const chosenHead = head.value;
    if (chosenHead) body.head = Number(chosenHead);
    if (!body.src || !body.tgt) {
      requests.cancel();
      requests.fail("");
      output.replaceChildren(h("p", { class: "empty" }, "Enter a sentence and its translation, or choose an example."));
      return;
    }
    requests.run((signal) => call("attention", { body, signal }), (answer) => {
      readings = answer.readings;
      readHead = chosenHead;
      const chosen = kind.selectedIndex;
      kind.replaceChildren(...readings.map((each, k) => h("option", { value: k }, each.kind)));
      kind.selectedIndex = Math.max(0, Math.min(chosen, readings.length - 1));
      draw();
    });
  }

  /** Offer the layers and heads of the chosen model. */
  function chooseModel() {
    const chosen = models[model.selectedIndex];
    layer.set(Math.min(Number(layer.input.value), chosen.n_layers), chosen.n_layers);
    offerHeads();
    read();
  }

  function offerHeads() {
    const numbers = Array.from({ length: models[model.selectedIndex].n_heads }, (_, k) => k + 1);
    head.replaceChildren(
      h("option", { value: "" }, "mean of all"),
      ...numbers.map((number) => h("option", { value: number }, number)),
    );
  }

  function draw() {
    const reading = readings[Number(kind.value)];
    if (!reading) return;
    const fromSrc = way.value === "src";
    const scores = (fromSrc ? reading.src_to_tgt : reading.tgt_to_src)[Number(layer.input.value) - 1];
    const [rows, columns] = fromSrc ? [reading.src, reading.tgt] : [reading.tgt, reading.src];
    const share = reading.shares[Number(layer.input.value) - 1];
    const place = `${readHead ? `In head ${readHead} of` : "At"} layer ${layer.input.value}`;
    const text = `${place}, ${decimal(100 * share, 0)} % of the attention goes to the other sentence; uniform attention would give ${decimal(100 * reading.uniform, 0)} %.`;
    const matrix = scoreMatrix(rows, columns, scores, { label: "Share of attention", low: 0, digits: 3 });
    output.replaceChildren(h("div", { class: "card" }, h("p", { class: "soft" }, text), matrix));
  }

  function enter() {
    if (!entered) read();
    entered = true;
  }

  return { node, enter, refresh: read };
}
