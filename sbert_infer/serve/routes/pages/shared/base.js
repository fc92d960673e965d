"use strict";
const $ = id => document.getElementById(id);

/** An element; strings among the children become text, never HTML. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Changes a text only if it differs, for the sake of screen readers and selections. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** The address of a path of this server. */
function address(path) {
  const url = new URL(path, location.href);
  url.username = url.password = "";  // fetch refuses a URL with credentials, and sends the browser's own
  return url;
}

function ask(path, options = {}) {
  return fetch(address(path), { cache: "no-store", signal: AbortSignal.timeout(5000), ...options });
}

// Numbers as people read them -----------------------------------------------------------------------------------------

function digits(x) {
  if (x === 0) return "0";
  return x < 1 ? x.toFixed(2) : x < 9.95 ? x.toFixed(1) : x.toFixed(0);
}
function count(x) {
  const [size, unit] = [[1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([size]) => x >= size * 0.9995) ?? [1, ""];
  if (unit) return (x / size).toFixed(x / size < 99.95 ? 1 : 0) + unit;
  return Number.isInteger(x) ? String(x) : digits(x);
}
function bytes(x) {
  return count(x) + (x < 999.5 ? " B" : "B");
}
function seconds(x) {
  return x < 0.9995 ? digits(x * 1000) + " ms" : digits(x) + " s";
}
function percent(x) {
  return digits(x * 100) + " %";
}
function duration(s) {
  const [days, hours, minutes] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(s % 60)} s` : `${Math.floor(s)} s`;
}
