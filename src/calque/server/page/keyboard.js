/** Groups of elements that are one tab stop; arrow keys move inside the group. */

/** Let arrow keys, Home and End move the focus along a list of elements. */
export function rove(container, items) {
  if (!items.length) return;
  items.forEach((item, index) => item.setAttribute("tabindex", index ? -1 : 0));
  container.addEventListener("keydown", (event) => {
    const now = items.indexOf(document.activeElement);
    if (now < 0) return;
    const last = items.length - 1;
    const next = {
      ArrowRight: Math.min(now + 1, last),
      ArrowDown: Math.min(now + 1, last),
      ArrowLeft: Math.max(now - 1, 0),
      ArrowUp: Math.max(now - 1, 0),
      Home: 0,
      End: last,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    focusOnly(items[now], items[next]);
  });
}

/** Let arrow keys move the focus in a grid of elements; `rtl` if columns run to the left. */
export function roveGrid(container, rows, { rtl = false } = {}) {
  rows.flat().forEach((item, index) => item.setAttribute("tabindex", index ? -1 : 0));
  const forward = rtl ? -1 : 1;
  container.addEventListener("keydown", (event) => {
    const row = rows.findIndex((items) => items.includes(document.activeElement));
    if (row < 0) return;
    const column = rows[row].indexOf(document.activeElement);
    const move = {
      ArrowRight: [0, forward],
      ArrowLeft: [0, -forward],
      ArrowDown: [1, 0],
      ArrowUp: [-1, 0],
      Home: [0, -column],
      End: [0, rows[row].length - 1 - column],
    }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = rows[row + move[0]]?.[column + move[1]];
    if (next) focusOnly(rows[row][column], next);
  });
}

function focusOnly(before, next) {
  before.setAttribute("tabindex", -1);
  next.setAttribute("tabindex", 0);
  next.focus();
}
