// Elements and texts.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** An element with attributes, listeners (`onclick`) and children. */
export const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Replaces the children of `node`. */
export function show(node, ...children) {
  node.replaceChildren();
  return fill(node, null, children);
}

/** Makes `node` like `fresh` in place: what has focus keeps it, and what is scrolled stays there. */
export function become(node, fresh) {
  for (const { name } of [...node.attributes])
    if (!fresh.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  const children = [...fresh.childNodes];
  children.forEach((child, at) => {
    const old = node.childNodes[at];
    if (!old) node.append(child);
    else if (old.nodeName !== child.nodeName) old.replaceWith(child);
    else if (child.nodeType === Node.ELEMENT_NODE) become(old, child);
    else if (old.data !== child.data) old.data = child.data;
  });
  while (node.childNodes.length > children.length) node.lastChild.remove();
}

const UNITS = [
  [1e9, "s"],
  [1e6, "ms"],
  [1e3, "µs"],
  [1, "ns"],
];

const unitOf = (size) => UNITS.find(([unit]) => size >= unit) || [1, "ns"];

/** A time in nanoseconds, with the digits that tell it from one `step` later. */
export function tick(ns, step) {
  const size = Math.abs(ns);
  const [unit, name] = unitOf(size + step / 2);
  const digits = Math.max(0, Math.ceil(Math.log10(unit / step) - 1e-9));
  return `${ns < 0 ? "−" : ""}${(size / unit).toFixed(digits)} ${name}`;
}

/** A time in nanoseconds, with three digits. */
export function time(ns) {
  if (ns === undefined || ns === null || Number.isNaN(ns)) return "–";
  const sign = ns < 0 ? "−" : "";
  const size = Math.abs(ns);
  const [unit, name] = unitOf(size);
  const value = size / unit;
  const digits = unit === 1 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${sign}${value.toFixed(digits)} ${name}`;
}

export function bytes(count) {
  if (count === undefined || count === null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** A number with at most three digits, or thousands. */
export function number(value) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value >= 10 ? 1 : 2);
}

export const percent = (share) =>
  share === undefined || Number.isNaN(share)
    ? "–"
    : `${(share * 100).toFixed(share > 0.9995 || share === 0 ? 0 : 1)} %`;

/** A label of a class. */
export const classTag = (name) =>
  el("span", { class: `tag ${name}` }, name === "rt" ? "real time" : "best effort");
