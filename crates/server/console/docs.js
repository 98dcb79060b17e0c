// The description of the API as a page.

import { el, show } from "./dom.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
/** Schemas that contain others are shown to this depth. */
const MAX_DEPTH = 6;

let api = null;

function resolve(value) {
  if (!value?.$ref) return value;
  return value.$ref
    .slice(2)
    .split("/")
    .reduce((node, key) => node[key], api);
}

/** Texts with `code` in backquotes. */
function text(source) {
  return (source || "")
    .split("`")
    .map((part, index) => (index % 2 ? el("code", null, part) : part));
}

function typeName(schema) {
  const type = [schema.type].flat().filter(Boolean);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map((one) => typeName(resolve(one))).join(" or ");
  if (type.includes("array")) {
    const items = resolve(schema.items) || {};
    return `array of ${typeName(items)}${type.includes("null") ? " or null" : ""}`;
  }
  if (!type.length) return "any";
  return type.join(" or ");
}

function limits(schema) {
  const parts = [];
  if (schema.minimum !== undefined && schema.minimum !== 0) parts.push(`from ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) parts.push(`above ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined && schema.maximum < 2 ** 32) parts.push(`to ${schema.maximum}`);
  if (schema.default !== undefined) parts.push(`default ${schema.default}`);
  return parts.join(" ");
}

/** The object inside arrays and alternatives, if there is one. */
function inner(schema) {
  const resolved = resolve(schema);
  if (!resolved) return null;
  if (resolved.properties) return resolved;
  if (resolved.items) return inner(resolved.items);
  if (resolved.anyOf) return resolved.anyOf.map(inner).find(Boolean);
  return null;
}

function fields(schema, depth = 0) {
  const object = inner(schema);
  if (!object || depth > MAX_DEPTH) return null;
  const row = ([name, given]) => {
    const field = resolve(given);
    const optional = !(object.required || []).includes(name);
    return el(
      "li",
      null,
      el("code", null, name),
      " ",
      el("span", { class: "dim" }, typeName(field), optional ? ", optional" : "", " ", limits(field)),
      field.description ? [" – ", text(field.description)] : null,
      fields(field, depth + 1),
    );
  };
  return el("ul", { class: "schema" }, Object.entries(object.properties).map(row));
}

function media(content) {
  return Object.entries(content || {}).map(([kind, value]) => {
    const schema = value.schema && resolve(value.schema);
    const type = schema ? `: ${typeName(schema)}` : "";
    return [el("p", null, el("code", null, kind), type), schema ? fields(schema) : null];
  });
}

function parameters(operation) {
  const list = (operation.parameters || []).map(resolve);
  if (!list.length) return null;
  const row = (one) =>
    el(
      "li",
      null,
      el("code", null, one.name),
      " ",
      el("span", { class: "dim" }, `in ${one.in}, ${typeName(one.schema)} `, limits(one.schema)),
      " – ",
      text(one.description),
    );
  return [el("h4", null, "Parameters"), el("ul", { class: "schema" }, list.map(row))];
}

function replies(operation) {
  const row = ([status, reply]) =>
    el("li", null, el("code", null, status), " ", text(reply.description));
  const success = operation.responses["200"];
  const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
  return [
    el("h4", null, "Reply"),
    success.content ? media(success.content) : el("p", null, "200 without a body"),
    el("h4", null, "Errors"),
    el("ul", { class: "schema" }, errors.map(row)),
  ];
}

function scopes(operation) {
  const names = operation.security.flatMap((one) => one.token || []);
  if (!names.length) return el("p", { class: "dim" }, "Open to all");
  return el("p", { class: "dim" }, `Scope: ${[...names, "admin"].filter(unique).join(" or ")}`);
}

const unique = (value, index, all) => all.indexOf(value) === index;

function operationOf(path, method, operation) {
  const body = operation.requestBody;
  return el(
    "details",
    { class: "panel operation", id: operation.operationId },
    el(
      "summary",
      null,
      el("span", { class: `tag method ${method}` }, method.toUpperCase()),
      el("code", { class: "path" }, path),
      el("span", { class: "dim" }, text(operation.summary)),
    ),
    el(
      "div",
      { class: "operation-body" },
      scopes(operation),
      parameters(operation),
      body ? [el("h4", null, body.required ? "Body" : "Body, optional"), media(body.content)] : null,
      replies(operation),
    ),
  );
}

function area(tag, operations) {
  return el(
    "section",
    { "aria-labelledby": `area-${tag}`, class: "area" },
    el("h2", { id: `area-${tag}` }, tag),
    operations.map((one) => operationOf(one.path, one.method, one.operation)),
  );
}

/** Shows only operations whose path or summary has the text. */
function filter(main, wanted) {
  const needle = wanted.trim().toLowerCase();
  for (const section of main.querySelectorAll("section")) {
    let visible = 0;
    for (const one of section.querySelectorAll("details")) {
      const found = one.querySelector("summary").textContent.toLowerCase().includes(needle);
      one.hidden = !found;
      visible += Number(found);
    }
    section.hidden = !visible;
  }
}

/** Opens the operation that the address names. */
function openNamed() {
  const one = document.getElementById(location.hash.slice(1));
  if (one instanceof HTMLDetailsElement) {
    one.open = true;
    one.scrollIntoView();
  }
}

async function begin() {
  const main = document.getElementById("page");
  try {
    const response = await fetch("/openapi.json", { credentials: "omit" });
    if (!response.ok) throw new Error(`/openapi.json: ${response.status}`);
    api = await response.json();
  } catch (error) {
    show(main, el("h1", null, "API"), el("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  const all = Object.entries(api.paths).flatMap(([path, methods]) =>
    METHODS.filter((method) => methods[method]).map((method) => ({
      path,
      method,
      operation: methods[method],
    })),
  );
  const of = (tag) => all.filter((one) => one.operation.tags.includes(tag));
  const tags = api.tags.map((tag) => tag.name);
  show(
    document.querySelector("nav"),
    tags.map((tag) => el("a", { href: `#area-${tag}` }, tag)),
  );
  show(
    main,
    el("h1", null, "API"),
    el("p", { class: "about" }, `Version ${api.info.version}. `, text(api.info.description)),
    el("p", null, el("a", { href: "/openapi.json" }, "openapi.json"), ", OpenAPI ", api.openapi),
    el(
      "label",
      { class: "filter" },
      "Find",
      el("input", { type: "search", oninput: (event) => filter(main, event.target.value) }),
    ),
    tags.map((tag) => area(tag, of(tag))),
  );
  openNamed();
}

addEventListener("hashchange", openNamed);
begin();
