"use strict";
const RATE_S = 5;  // rates and percentiles are taken over this long
const LONGEST_S = Math.max(...Object.keys(TICKS_S).map(Number));

let recent = [];  // scrapes of the last RATE_S seconds, oldest first
let filter;  // the chooser of the model that the plots show

async function poll() {
  const started = performance.now();
  try {
    if (!document.hidden) await look();
  } finally {
    setTimeout(poll, Math.max(100, 1000 - (performance.now() - started)));
  }
}
async function look() {
  const missed = performance.now() / 1000 - (recent.at(-1)?.t ?? -Infinity);
  if (missed > GAP_S) await remember();  // the page was opened, or shown again
  const response = await ask("metrics").catch(() => null);
  const text = response?.ok ? await response.text().catch(() => null) : null;
  if (text === null) showStatus(response ? refusal(response.status) : "can't reach the server", "bad");
  else take(parse(text), response.headers.get("date"));
  drawAll();
}
function refusal(status) {
  if (status === 401) return "no access: reload the page and enter a key as the password";
  return `no metrics: the server responded with ${status}`;
}
/** Fills the plots with what the server has kept. */
async function remember() {
  const response = await ask("metrics/history").catch(() => null);
  const kept = response?.ok ? await response.json().catch(() => null) : null;
  if (!kept) return;
  const now = performance.now() / 1000;
  const scrapes = kept.samples.map(({ age_s, values }) => timed(recall(kept.series, values), now - age_s));
  past.clear();
  scrapes.slice(1).forEach((scrape, i) => add(scrapes[i], scrape));
  recent = scrapes;
}
function timed(scrape, t) {
  return { t, scrape, start: sum(scrape, "process_start_time_seconds") };
}
/** Adds what happened between two scrapes to the plots. */
function add(before, after) {
  for (const model of ["", ...labelled(after.scrape, "sbert_ready", "model")]) {
    const samples = (past.get(model) ?? []).filter(s => after.t - s.t <= LONGEST_S);
    past.set(model, [...samples, sample(before, after, model)]);
  }
}
function take(scrape, date) {
  const now = timed(scrape, performance.now() / 1000);
  recent = recent.filter(before => now.t - before.t < RATE_S + 0.5 && before.start === now.start);
  if (recent.length) add(recent[0], now);
  recent.push(now);
  const models = labelled(scrape, "sbert_ready", "model");
  offer(filter, models, [["", "all models"]]);
  showHeader(scrape, models, (date ? Date.parse(date) : Date.now()) / 1000 - now.start);
  showTotals(scrape);
  showRoutes(scrape);
  for (const card of document.querySelectorAll(".panel")) {
    const needed = OPTIONAL[card.querySelector("h3").textContent];
    card.hidden = needed !== undefined && !(needed in scrape);
  }
}
function showStatus(text, kind) {
  say($("status"), text);
  $("status").className = `status ${kind}`;
}
function showHeader(scrape, models, uptime_s) {
  const waiting = models.filter(model => !sum(scrape, "sbert_ready", { model }));
  if (!waiting.length && models.length) showStatus("ready", "ready");
  else showStatus("not ready" + (models.length > 1 ? `: ${waiting.join(", ")}` : ""), "bad");
  say($("uptime"), `up ${duration(Math.max(0, uptime_s))}`);
  say($("version"), labelled(scrape, "sbert_server_info", "version").map(version => `version ${version}`).join());
}
function showTotals(scrape) {
  const where = filter.value ? { model: filter.value } : {};
  const total = name => count(sum(scrape, name, where));
  fill($("totals"), {
    "Calls": total("sbert_requests_total"),
    "Texts": total("sbert_texts_total"),
    "Tokens": total("sbert_tokens_total"),
    "Texts over the limit": total("sbert_truncated_texts_total"),
    "Failed calls": total("sbert_errors_total"),
    "Workers replaced": total("sbert_worker_restarts_total"),
    "Log lines lost": count(sum(scrape, "sbert_log_lines_lost_total")),
  });
}
/** Fills a list of names and values, which is made once and then changed only where it differs. */
function fill(list, rows) {
  if (list.children.length !== 2 * Object.keys(rows).length) {
    list.replaceChildren(...Object.keys(rows).flatMap(name => [make("dt", {}, name), make("dd")]));
  }
  Object.values(rows).forEach((value, index) => say(list.children[2 * index + 1], value));
}
/** How many responses each route gave, by status. Routes that only watch the server come last. */
function showRoutes(scrape) {
  const entries = (scrape.sbert_http_requests_total ?? []).map(({ labels, value }) => ({ ...labels, value }));
  const places = [...new Set(entries.map(entry => entry.route))]
    .sort((a, b) => WATCHED.has(a) - WATCHED.has(b) || a.localeCompare(b));
  const key = entries.map(({ route, status }) => `${route} ${status}`).sort().join();
  if ($("routes").dataset.key !== key) {
    $("routes").dataset.key = key;
    $("routes").replaceChildren(...places.map(route => make("tr", WATCHED.has(route) ? { class: "dim" } : {},
      make("th", { scope: "row" }, route),
      make("td", {}, ...entries.filter(entry => entry.route === route).sort((a, b) => a.status - b.status)
        .map(entry => make("span", { class: `chip s${entry.status[0]}`, "data-of": `${route} ${entry.status}` }))))));
  }
  const numbers = new Map(entries.map(({ route, status, value }) => [`${route} ${status}`, `${status} × ${count(value)}`]));
  for (const chip of $("routes").querySelectorAll(".chip")) say(chip, numbers.get(chip.dataset.of));
}
/** Fills a chooser, which is shown only if there is a choice. */
function offer(select, models, first = []) {
  const options = [...first, ...models.map(model => [model, model])];
  if (select.options.length !== options.length || options.some(([value], i) => select.options[i].value !== value)) {
    const chosen = select.value;
    select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    select.value = options.some(([value]) => value === chosen) ? chosen : options[0]?.[0] ?? "";
  }
  select.parentElement.hidden = models.length < 2;
}
