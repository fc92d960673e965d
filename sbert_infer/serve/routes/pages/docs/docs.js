"use strict";
const METHODS = ["get", "post", "put", "patch", "delete"];
const LIMITS = {
  minimum: n => `at least ${n}`,
  maximum: n => `at most ${n}`,
  minLength: n => n === 1 ? "not empty" : `at least ${n} characters`,
  maxLength: n => `at most ${n} characters`,
  minItems: n => n === 1 ? "one or more" : `${n} or more`,
  maxItems: n => `at most ${n}`,
  default: value => value === null ? "" : `${JSON.stringify(value)} by default`,
};
const here = address(".");
let spec;

/** Text in which `words` in backquotes become code. */
function prose(text = "") {
  return text.split("`").map((piece, i) => i % 2 ? make("code", {}, piece) : piece);
}
function resolve(node) {
  if (!node?.$ref) return node ?? {};
  return resolve(node.$ref.slice(2).split("/").reduce((at, key) => at[key], spec));
}
const named = schema => schema.$ref.split("/").at(-1);
const choicesOf = schema => schema.anyOf ?? schema.oneOf;

// Schemas in words ----------------------------------------------------------------------------------------------------

function kind(schema) {
  if (schema.$ref) return [make("a", { href: `#${named(schema)}` }, named(schema))];
  const choices = choicesOf(schema)?.filter(choice => choice.type !== "null");
  if (choices) return choices.flatMap((choice, i) => [...(i ? [" or "] : []), ...kind(choice)]);
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.filter(value => value !== null).map(value => `"${value}"`).join(" or ")];
  if (schema.type === "array") return ["list of ", ...kind(schema.items ?? {})];
  return [schema.type ?? "any"];
}
function limits(schema) {
  const own = Object.entries(LIMITS).filter(([key]) => key in schema).map(([key, word]) => word(schema[key]));
  return [...own, ...(choicesOf(schema) ?? []).flatMap(limits)].filter(Boolean);
}
function meaning(schema) {
  return [schema.description, ...(choicesOf(schema) ?? []).map(choice => choice.description)].filter(Boolean).join(" ");
}
function example(schema) {
  const real = resolve(schema);
  if (real.examples?.length) return real.examples[0];
  if (real.enum) return real.enum[0];
  if (choicesOf(real)) return example(choicesOf(real)[0]);
  if (real.type === "array") return [example(real.items)];
  const needed = Object.entries(real.properties ?? {}).filter(([key]) => real.required?.includes(key));
  if (real.type === "object") return Object.fromEntries(needed.map(([key, property]) => [key, example(property)]));
  return { string: "A cat sat.", integer: real.minimum ?? 1, number: 0.5, boolean: true }[real.type] ?? null;
}

// Parts of a route ----------------------------------------------------------------------------------------------------

function row(name, ...content) {
  return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, ...content));
}
function table(rows) {
  return make("table", {}, make("tbody", {}, ...rows));
}
function field(name, schema, required) {
  const rules = [required ? "required" : "", ...limits(schema)].filter(Boolean).map(rule => `, ${rule}`);
  return row(name, ...kind(schema), ...rules, make("div", { class: "dim" }, ...prose(meaning(schema))));
}
function properties(schema) {
  const { properties = {}, required = [] } = resolve(schema);
  return table(Object.entries(properties).map(([name, property]) => field(name, property, required.includes(name))));
}
function parameters(list) {
  return table(list.map(resolve).map(({ name, required, schema }) => field(name, schema, required)));
}
function responsesTable(responses) {
  return table(Object.entries(responses).map(([status, node]) => {
    const { description, content = {}, headers = {} } = resolve(node);
    const bodies = Object.entries(content).map(([type, { schema }]) => type.includes("json") ? kind(schema) : [type]);
    const sent = Object.keys(headers).length ? `; with ${Object.keys(headers).join(", ")}` : "";
    return row(status, ...prose(description + sent), " ", ...bodies.flat());
  }));
}
/** A path, from this page, with an example of each parameter. */
function filled(path, operation) {
  const values = Object.fromEntries((operation.parameters ?? []).map(resolve).map(({ name, example }) => [name, example]));
  return path.slice(1).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}
function curl(method, path, operation, body) {
  const verb = { get: "", post: body ? "" : "-X POST " }[method] ?? `-X ${method.toUpperCase()} `;
  const lines = [`curl ${verb}${here}${filled(path, operation)}`];
  if ((operation.security ?? spec.security ?? []).length) lines.push("-H 'Authorization: Bearer YOUR_KEY'");
  if (body) lines.push(`-H 'Content-Type: ${body.type}'`, `-d ${quoted(JSON.stringify(body.value))}`);
  const code = make("pre", {}, lines.join(" \\\n  "));
  const button = make("button", { "aria-label": `Copy the command for ${method.toUpperCase()} ${path}` }, "Copy");
  button.addEventListener("click", () => copy(code, button));
  return make("div", { class: "curl" }, code, button);
}
/** For a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
/** The clipboard needs HTTPS or localhost; elsewhere the text is only selected. */
async function copy(code, button) {
  getSelection().selectAllChildren(code);
  const done = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
  button.textContent = done ? "Copied" : "Ctrl + C";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}
function bodyOf(operation) {
  const [type, found] = Object.entries(resolve(operation.requestBody).content ?? {})[0] ?? [];
  return type && { type, schema: found.schema, value: found.example ?? example(found.schema) };
}
function route(path, method, operation) {
  const body = bodyOf(operation);
  const left = make("div", {}, curl(method, path, operation, body));
  // An admin key has no business in a page.
  if (!path.startsWith("/admin/")) left.append(sender(method, path, operation, body));
  if (operation.parameters) left.append(make("h4", {}, "Parameters"), parameters(operation.parameters));
  for (const schema of body ? choicesOf(body.schema) ?? [body.schema] : []) {
    left.append(make("h4", {}, "Body: ", ...kind(schema)), properties(schema));
  }
  const right = make("div", {}, make("h4", {}, "Responses"), responsesTable(operation.responses));
  const title = make("h3", {}, make("span", { class: "method" }, method.toUpperCase()), path);
  const head = make("div", { class: "head" }, title, make("span", {}, operation.summary ?? ""));
  const about = operation.description ? [make("p", { class: "dim" }, ...prose(operation.description))] : [];
  return make("article", { id: `${method}${path}` }, head, ...about, make("div", { class: "columns" }, left, right));
}

// The page ------------------------------------------------------------------------------------------------------------

function render() {
  $("title").textContent = spec.info.title;
  $("version").textContent = `version ${spec.info.version}`;
  $("description").replaceChildren(...prose(spec.info.description));
  const groups = {};
  for (const [path, item] of Object.entries(spec.paths)) {
    for (const method of METHODS.filter(method => item[method])) {
      $("contents").append(make("a", { href: `#${method}${path}` }, `${method.toUpperCase()} ${path}`));
      (groups[item[method].tags?.[0] ?? "Routes"] ??= []).push(route(path, method, item[method]));
    }
  }
  for (const [group, routes] of Object.entries(groups)) $("routes").append(make("h2", {}, group), ...routes);
  const schemas = Object.entries(spec.components.schemas).map(([name, schema]) => make("article", { id: name },
    make("h3", {}, name), make("p", { class: "dim" }, ...prose(schema.description)), properties(schema)));
  $("routes").append(make("h2", {}, "Bodies"), ...schemas);
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}
async function load() {
  const response = await ask("openapi.json");
  if (!response.ok) throw new Error(`the server responded with ${response.status}`);
  spec = await response.json();
  render();
}

load().catch(error => {
  $("description").className = "bad";
  $("description").textContent = `Can't show the description: ${error.message}.`;
});
