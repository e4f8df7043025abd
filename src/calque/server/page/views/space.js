/** Space: sentences or words of several languages as points, one plot per model. */

import { call } from "../api.js";
import { choice, debounce, examples, field, h, select } from "../dom.js";
import { SPACES } from "../examples.js";
import { legend } from "../marks.js";
import { createRequests } from "../request.js";
import { scatterPlot } from "../scatter.js";
import { languageName } from "../text.js";

const WAIT = 500; // milliseconds after the last change
const MAX_LABELS = 60;
// What is shown while a projection is computed that takes long.
const WAITING = { umap: "Computing… The first UMAP compiles its code, which can take minutes." };
const METHODS = [["pca", "PCA"], ["umap", "UMAP"], ["tsne", "t-SNE"]];

/** Return the view. */
export function create(health) {
  const output = h("div", { class: "output" });
  const requests = createRequests(output);
  const plotted = health.models.slice(0, 2).map((_, number) => createModelChoice(health.models, number, project));
  let entered = false;
  let answers = null;
  const text = h("textarea", { rows: 6, dir: "auto", spellcheck: "false", oninput: debounce(project, WAIT) }, SPACES[0].text);
  const unit = select([["sentence", "Sentences"], ["word", "Words"]], SPACES[0].unit, { onchange: project });
  const method = choice("Projection", METHODS, "pca", project);
  const labels = h("input", { type: "checkbox", checked: true, onchange: () => answers && draw(answers) });
  const node = h(
    "div",
    {},
    h("h2", {}, "Embedding space"),
    h("p", { class: "lead" }, "In a well-aligned space, translations lie close together whatever their language."),
    h(
      "div",
      { class: "card" },
      field("One text per line: language, tab, text", text),
      h(
        "div",
        { class: "row" },
        field("Unit", unit),
        method,
        h("label", { class: "check" }, labels, "Labels"),
        plotted.map(({ fields }) => fields),
      ),
      examples(SPACES, (example) => {
        text.value = example.text;
        unit.value = example.unit;
        project();
      }),
    ),
    requests.node,
    output,
  );

  function readTexts() {
    const lines = text.value.split(/\r?\n/).filter((line) => line.trim());
    const texts = lines.map((line) => {
      const [language, rest] = line.split(/\t|\s{2,}|:\s+/, 2);
      return { language: language.trim(), text: (rest ?? "").trim() };
    });
    return { texts, bad: texts.findIndex((each) => !each.language || !each.text) + 1 };
  }

  function project() {
    const { texts, bad } = readTexts();
    if (bad || texts.length < 3) {
      requests.cancel();
      requests.fail(bad ? `Line ${bad} has no language and text: separate them by a tab.` : "Enter at least three lines.");
      return;
    }
    const body = { texts, unit: unit.value, method: method.value };
    requests.run(async (signal) => {
      const results = [];
      for (const { read } of plotted) {
        results.push(await call("projection", { body: { ...body, ...read() }, signal }));
      }
      return results;
    }, draw, WAITING[method.value]);
  }

  function draw(results) {
    answers = results;
    const languages = [...new Set(results[0].points.map((point) => point.language))];
    const withLabels = labels.checked && results[0].points.length <= MAX_LABELS;
    const plots = results.map(({ model, points }) => {
      const label = `${points.length} points of ${model}`;
      return scatterPlot(points, languages, { label, withLabels });
    });
    const figures = plots.map((plot, k) => h("figure", { class: "card" }, h("figcaption", {}, results[k].model), plot));
    const key = legend(languages.map(languageName), (number, shown) => {
      for (const plot of plots) plot.show(languages[number], shown);
    });
    output.replaceChildren(key, h("div", { class: plots.length > 1 ? "two" : "one" }, figures));
  }

  function enter() {
    if (!entered) project();
    entered = true;
  }

  return { node, enter, refresh: project };
}

/** Return the choice of a model, if there are several, and of one of its layers. */
function createModelChoice(models, number, onchange) {
  const layer = select([], null, { onchange });
  const model = select(models.map(({ name }) => name), models[number].name, {
    onchange: () => {
      offerLayers();
      onchange();
    },
  });
  offerLayers();

  function offerLayers() {
    const layers = Array.from({ length: models[model.selectedIndex].n_layers + 1 }, (_, k) => k);
    layer.replaceChildren(
      h("option", { value: "" }, "best"),
      ...layers.map((each) => h("option", { value: each }, each)),
    );
  }

  function read() {
    return { model: model.value, layer: layer.value === "" ? null : Number(layer.value) };
  }

  const isOne = models.length === 1;
  const layerField = field(isOne ? "Layer" : `Layer of model ${number + 1}`, layer);
  return { fields: isOne ? [layerField] : [field(`Model ${number + 1}`, model), layerField], read };
}
