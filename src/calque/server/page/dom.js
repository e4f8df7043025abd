/** Building elements. Text is always set as text and never parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return node;
}

/** Return an HTML element; attributes named `on…` are event listeners, `--…` style properties. */
export function h(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function s(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

let lastId = 0;

/** Return an id that no other element has. */
export function newId(start = "id") {
  lastId += 1;
  return `${start}-${lastId}`;
}

/** Return a labeled form control: a label above the control. */
export function field(label, control, { className = "field", after = null } = {}) {
  control.id ||= newId("control");
  return h("div", { class: className }, h("label", { for: control.id }, label, after), control);
}

/** Return a select element with options: strings or [value, text] pairs. */
export function select(options, value, attributes = {}) {
  const node = h("select", attributes);
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    node.append(h("option", { value: key, selected: String(key) === String(value) }, text));
  }
  return node;
}

/** Return a set of radio buttons shown as one control, with `value` and a change event. */
export function choice(label, options, value, onchange, { hideLabel = false } = {}) {
  const name = newId("choice");
  const buttons = h("div", { class: "choice" });
  const title = h("legend", { class: hideLabel ? "hidden" : null }, label);
  const node = h("fieldset", { class: "field" }, title, buttons);
  node.value = value;
  for (const [key, text] of options) {
    const radio = h("input", { type: "radio", name, value: key, checked: key === value });
    radio.addEventListener("change", () => {
      node.value = key;
      onchange(key);
    });
    buttons.append(h("label", {}, radio, h("span", {}, text)));
  }
  node.choose = (key) => {
    node.value = key;
    for (const radio of node.querySelectorAll("input")) radio.checked = radio.value === key;
  };
  return node;
}

/** Return a slider with its value shown in the label. */
export function slider(label, { min, max, step, value, format = String, oninput }) {
  const shown = h("output", {}, format(value));
  const input = h("input", { type: "range", min, max, step, value });
  input.value = value;
  input.addEventListener("input", () => {
    shown.textContent = format(Number(input.value));
    oninput();
  });
  const node = field(label, input, { className: "field slider", after: shown });
  node.input = input;
  node.set = (number, last = max) => {
    input.max = last;
    input.value = number;
    shown.textContent = format(number);
  };
  return node;
}

/** Return buttons that fill in an example. */
export function examples(items, onpick) {
  const buttons = items.map((item) =>
    h("button", { type: "button", class: "chip", onclick: () => onpick(item) }, item.name),
  );
  return h("div", { class: "examples" }, h("span", { class: "soft" }, "Examples"), ...buttons);
}

/** Call a function once, when there was no further call for some milliseconds. */
export function debounce(action, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

/** Offer a text as a file. */
export function download(name, text, type = "text/plain") {
  const url = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
