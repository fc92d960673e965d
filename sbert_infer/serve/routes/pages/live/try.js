"use strict";
const MAX_SENTENCES = 24;
let chooser;  // of the model to try

async function compare(event) {
  event?.preventDefault();
  const texts = $("sentences").value.split("\n").map(line => line.trim()).filter(Boolean);
  if (texts.length < 2) return complain("Write at least two sentences, one per line.");
  if (texts.length > MAX_SENTENCES) {
    return complain(`This page compares ${MAX_SENTENCES} sentences at most; there are ${texts.length}.`);
  }
  const button = $("try").querySelector("button");
  button.disabled = true;
  try {
    await embed(texts);
  } finally {
    button.disabled = false;
  }
}
async function embed(texts) {
  const started = performance.now();
  const body = JSON.stringify({ model: chooser.value, input: texts, encoding_format: "float" });
  const headers = { "content-type": "application/json" };
  const options = { method: "POST", headers, body, signal: AbortSignal.timeout(60000) };
  const response = await ask("v1/embeddings", options).catch(() => null);
  const content = await response?.json().catch(() => null);
  if (!response?.ok || !content) return complain(explain(response, content));
  const took = seconds((performance.now() - started) / 1000);
  $("said").className = "said";
  say($("said"), `${texts.length} sentences, ${content.usage.total_tokens} tokens, ${took}`);
  showHeat(texts, similarities(content.data.map(item => item.embedding)));
}
function explain(response, content) {
  if (!response) return "Can't reach the server.";
  const reason = content?.error?.message ?? `the server responded with ${response.status}`;
  const counted = reason.replace(/\binput (\d+)/, (_, index) => `sentence ${Number(index) + 1}`);  // from 1, as shown
  const said = `${counted[0].toUpperCase()}${counted.slice(1)}.`;
  if (response.status === 401) return `${said} Reload the page and enter a key as the password.`;
  const wait_ms = response.headers.get("retry-after-ms");
  return wait_ms ? `${said} Try again in ${seconds(wait_ms / 1000)}.` : said;
}
function complain(text) {
  $("said").className = "said bad";
  say($("said"), text);
}
function similarities(vectors) {
  const dot = (a, b) => a.reduce((total, x, i) => total + x * b[i], 0);
  const lengths = vectors.map(vector => Math.sqrt(dot(vector, vector)) || 1);
  return vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (lengths[i] * lengths[j])));
}
function showHeat(texts, cosines) {
  const columns = texts.map((text, i) => make("th", { scope: "col", title: text }, String(i + 1)));
  const rows = texts.map((text, i) => make("tr", {}, make("th", { scope: "row", title: text }, `${i + 1}  ${text}`),
    ...cosines[i].map((value, j) => heatCell(texts, value, i, j))));
  $("heat").replaceChildren(make("thead", {}, make("tr", {}, make("th"), ...columns)), make("tbody", {}, ...rows));
  say($("reading"), "Point at a number, or move to it with the arrow keys, to read its two sentences.");
}
function heatCell(texts, value, i, j) {
  const shown = value.toFixed(2).replace("-0.00", "0.00");
  const cell = make("td", { tabindex: i || j ? -1 : 0, "aria-label": `${shown}, ${i + 1} and ${j + 1}` }, shown);
  cell.style.setProperty("--share", Math.min(1, Math.abs(value)));
  cell.classList.toggle("below", value < 0);
  const read = () => $("reading").replaceChildren(make("b", {}, shown), `“${texts[i]}” and “${texts[j]}”`);
  cell.addEventListener("pointerenter", read);
  cell.addEventListener("focus", read);
  return cell;
}
/** The arrow keys move among the cells; Tab enters and leaves the table. */
function walk(event) {
  const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
  const [down, right] = steps[event.key] ?? [0, 0];
  const cell = event.target.closest("tbody td");
  const next = cell && $("heat").rows[cell.parentElement.rowIndex + down]?.cells[cell.cellIndex + right];
  if (next === cell || !next?.matches("tbody td")) return;
  event.preventDefault();
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
