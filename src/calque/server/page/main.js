/** Start of the page: which views the server has, tabs, addresses, token. */

import { call, saveToken } from "./api.js";
import { h } from "./dom.js";
import { createTabs } from "./tabs.js";
import { startTooltips } from "./tooltip.js";

const VIEWS = {
  align: "Align",
  search: "Search",
  space: "Space",
  dictionary: "Dictionary",
  attention: "Attention",
  translate: "Translate",
  study: "Study",
  runs: "Runs",
};

const panels = document.getElementById("panels");
const views = {}; // the views that were opened: name → view
let current = null;
let health = null;

/** Show a view; it is loaded when it is opened for the first time. */
async function open(name, rest) {
  if (current && current !== name) views[current]?.leave?.();
  current = name;
  document.title = `${VIEWS[name]} · Calque`;
  if (!views[name]) {
    const { create } = await import(`./views/${name}.js`);
    views[name] ??= create(health);
    document.getElementById(`panel-${name}`).replaceChildren(views[name].node);
  }
  if (current === name) views[name].enter?.(rest);
}

/** Return the view and the rest of the address: `#study/xnli/de` → ["study", ["xnli", "de"]]. */
function readAddress(shown) {
  const [name, ...rest] = location.hash.slice(1).split("/").map(decode);
  return shown.includes(name) ? [name, rest] : [shown[0], []];
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function fail(problem) {
  const line = document.getElementById("start-error");
  line.textContent = problem.message;
  line.hidden = false;
}

function startToken() {
  const form = document.getElementById("token");
  document.addEventListener("token-needed", () => {
    form.hidden = false;
    document.getElementById("token-text").focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    saveToken(document.getElementById("token-text").value);
    form.hidden = true;
    views[current]?.refresh?.();
  });
}

async function start() {
  startTooltips();
  startToken();
  try {
    health = await call("health");
  } catch (problem) {
    fail(problem);
    return;
  }
  document.getElementById("version").textContent = health.version;
  document.getElementById("model").textContent = health.models.map(({ name }) => name).join(", ");
  const shown = Object.keys(VIEWS).filter((name) => health.views.includes(name));
  if (!shown.length) {
    panels.append(h("p", { class: "empty" }, "This server has no views: start it with a model or a folder."));
    return;
  }
  const tabs = createTabs(shown.map((name) => [name, VIEWS[name]]), document.getElementById("tabs"), panels);
  const follow = () => {
    const [name, rest] = readAddress(shown);
    tabs.select(name);
    open(name, rest).catch(fail);
  };
  addEventListener("hashchange", () => location.hash !== "#main" && follow());
  follow();
}

start();
