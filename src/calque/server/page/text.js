/** Writing direction, names of languages and numbers. */

const RTL = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/gu;
const LETTER = /\p{L}/gu;

/** Return "rtl" if most letters belong to a script written from right to left. */
export function direction(text) {
  const letters = text.match(LETTER)?.length ?? 0;
  return 2 * (text.match(RTL)?.length ?? 0) > letters ? "rtl" : "ltr";
}

const names = new Intl.DisplayNames(["en"], { type: "language" });

/** Return the English name of a language code, or the code if it has none. */
export function languageName(code) {
  try {
    return names.of(code) ?? code;
  } catch {
    return code;
  }
}

/** Return the code if it is a valid `lang` attribute. */
export function langAttribute(code) {
  return /^[a-z]{2,3}(-[A-Za-z0-9]{2,8})*$/.test(code ?? "") ? code : undefined;
}

/** Return a number with a fixed number of decimals and a real minus sign. */
export function decimal(value, digits = 2) {
  if (!Number.isFinite(value)) return "–";
  return value.toFixed(digits).replace(/^-(?=.*[1-9])/, "−").replace("-", "");
}

/** Return a number with its sign. */
export function signed(value, digits = 1) {
  return value > 0 ? `+${decimal(value, digits)}` : decimal(value, digits);
}

/** Return a large number in a short form, such as 12.3k. */
export function compact(value) {
  if (!Number.isFinite(value)) return "–";
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);
}

/** Return seconds as days, hours, minutes and seconds: the two largest units. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const parts = [];
  let left = Math.max(0, Math.round(seconds));
  for (const [name, size] of units) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count || (name === "s" && !parts.length)) parts.push(`${count} ${name}`);
  }
  return parts.slice(0, 2).join(" ");
}

/** Return the pairs of a pasted bitext: one pair per line, separated by a tab or `|||`. */
export function parseBitext(text) {
  const pairs = [];
  const bad = [];
  text.split(/\r?\n/).forEach((line, index) => {
    if (!line.trim()) return;
    const parts = line.includes("|||") ? line.split("|||") : line.split("\t");
    const [src, tgt] = parts.map((part) => part.trim());
    if (parts.length === 2 && src && tgt) pairs.push({ src, tgt });
    else bad.push(index + 1);
  });
  return { pairs, bad };
}

/** Return the links of each pair in the Pharaoh format: `0-0 1-2`, one line per pair. */
export function formatPharaoh(pairs) {
  return pairs
    .map(({ links }) => `${links.map(({ src, tgt }) => `${src}-${tgt}`).join(" ")}\n`)
    .join("");
}
