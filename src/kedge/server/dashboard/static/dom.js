// Elements, numbers as text, and rendering only what has changed. Text is always set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** An HTML element; `attributes` with the value false or null are left out. */
export const h = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

const shown = new WeakMap();

/** Replaces what is in `place` by what `build` returns, unless `data` is what it was made of the last time. */
export function render(place, data, build) {
  const key = JSON.stringify(data) ?? "nothing";
  if (shown.get(place) === key) return;
  shown.set(place, key);
  place.replaceChildren(...[build()].flat().filter((child) => child !== null));
}

/** A table from its caption (for screen readers), its column names and rows of cells; the first cell heads its row. */
export function table(caption, columns, rows, kind = "") {
  const cell = (content, at) =>
    h(at ? "td" : "th", { scope: at ? null : "row", "data-label": columns[at].name, class: columns[at].kind ?? null }, content);
  return h(
    "table",
    { class: kind || null },
    h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, columns.map((one) => h("th", { scope: "col", class: one.kind ?? null }, one.name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))),
  );
}

/** A table whose rows are made by `row` from `groups`, pairs of a name and its items; each name heads its rows. */
export function grouped(caption, columns, groups, row, kind = "") {
  const made = table(caption, columns, [], kind);
  made.tBodies[0].remove();
  for (const [name, items] of groups) {
    const body = table("", columns, items.map(row)).tBodies[0];
    body.prepend(h("tr", { class: "group" }, h("th", { scope: "rowgroup", colspan: columns.length }, name)));
    made.append(body);
  }
  return made;
}

/** Columns of a table. */
export const right = (name) => ({ name, kind: "right" });
export const left = (name) => ({ name });

export const muted = (text) => h("span", { class: "muted" }, text);
export const hint = (text) => h("p", { class: "hint" }, text);

/** A bar of parts with widths by their amounts; decoration, the same numbers stand beside it. */
export function bar(parts, total = parts.reduce((sum, part) => sum + part.amount, 0)) {
  const made = h("span", { class: "bar", "aria-hidden": "true" });
  for (const { name, amount } of parts) {
    if (!amount) continue;
    const part = h("span", { class: `fill-${name}` });
    part.style.width = `${(100 * amount) / (total || 1)}%`;
    made.append(part);
  }
  return made;
}

export const number = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}\u202f%` : "\u2013");

export function milliseconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value >= 10_000) return `${(value / 1000).toFixed(0)}\u202fs`;
  if (value >= 1000) return `${(value / 1000).toFixed(1)}\u202fs`;
  return `${value.toFixed(value < 10 ? 1 : 0)}\u202fms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const at = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10));
  const scaled = value / 1024 ** at;
  return `${scaled.toFixed(at && scaled < 10 ? 1 : 0)}\u202f${units[at]}`;
}

export function seconds(value) {
  if (value < 60) return `${Math.round(value)}\u202fs`;
  return value < 3600 ? `${Math.round(value / 60)}\u202fmin` : `${Math.round(value / 3600)}\u202fh`;
}

/** How many requests were in flight, this one included. */
export const load = (count) => (Math.round(count) <= 1 ? "alone" : `${number(count)} at once`);

/** The time of day `age` seconds ago. */
export function clock(age) {
  const at = new Date(Date.now() - 1000 * age);
  return h("time", { datetime: at.toISOString() }, at.toLocaleTimeString("en-GB"));
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
