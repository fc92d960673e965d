"use strict";

// Scrapes: {name: [{labels, value}]} ----------------------------------------------------------------------------------

/** Reads Prometheus' text format. */
function parse(text) {
  const scrape = {};
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^(\w+)(?:\{(.*)\})? (\S+)/.exec(line) ?? [];
    if (!name) continue;
    const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)];
    const unquoted = Object.fromEntries(pairs.map(([, key, quoted]) => [key, unquote(quoted)]));
    (scrape[name] ??= []).push({ labels: unquoted, value: Number(value) });
  }
  return scrape;
}
function unquote(quoted) {
  return quoted.replace(/\\(.)/g, (_, character) => character === "n" ? "\n" : character);
}
/** Reads one sample of the server's history. */
function recall(series, numbers) {
  const scrape = {};
  numbers.forEach((value, i) => {
    if (value !== null) (scrape[series[i].name] ??= []).push({ labels: series[i].labels, value });
  });
  return scrape;
}
function values(scrape, name, where = {}) {
  const fits = ({ labels }) => Object.entries(where).every(([key, value]) => labels[key] === value);
  return (scrape[name] ?? []).filter(fits).map(entry => entry.value);
}
function sum(scrape, name, where) {
  return values(scrape, name, where).reduce((total, value) => total + value, 0);
}
function labelled(scrape, name, label) {
  return [...new Set((scrape[name] ?? []).map(entry => entry.labels[label]))].filter(value => value !== undefined);
}

/** Percentile `q` of what a histogram counted between two scrapes, linear within its bucket. */
function quantile(q, before, after, name, where) {
  const grown = le => sum(after, name, { ...where, le }) - sum(before, name, { ...where, le });
  const bound = le => le === "+Inf" ? Infinity : Number(le);
  const steps = labelled(after, name, "le").map(le => [bound(le), grown(le)]).sort((a, b) => a[0] - b[0]);
  const wanted = q * (steps.at(-1)?.[1] ?? 0);
  let [low, below] = [0, 0];
  for (const [high, upTo] of wanted ? steps : []) {
    if (upTo >= wanted) return high === Infinity ? low : low + (high - low) * (wanted - below) / (upTo - below);
    [low, below] = [high, upTo];
  }
  return null;
}

// Responses -----------------------------------------------------------------------------------------------------------

// Asked for again and again, by this page and by whoever watches the server.
const WATCHED = new Set(["/metrics", "/metrics/history", "/info", "/docs", "/openapi.json",
  "/health", "/health/live", "/health/ready", "/ping"]);

/** The kind of a response in the plot, or null for those that only watch the server. */
function kindOfResponse({ route, status }) {
  if (status < 400) return WATCHED.has(route) ? null : "2xx";
  return { 429: "429 busy", 499: "499 left" }[status] ?? `${status[0]}xx`;
}
/** How many responses of each kind there were until a scrape. */
function responses(scrape) {
  const counts = {};
  for (const { labels, value } of scrape.sbert_http_requests_total ?? []) {
    const kind = kindOfResponse(labels);
    if (kind) counts[kind] = (counts[kind] ?? 0) + value;
  }
  return counts;
}

// Samples: what is plotted --------------------------------------------------------------------------------------------

/** The values of all plots at one moment, for one model or, if `model` is "", for all. */
function sample(before, after, model) {
  const where = model ? { model } : {};
  const now = (name, more) => sum(after.scrape, name, { ...where, ...more });
  const grown = (name, more) => now(name, more) - sum(before.scrape, name, { ...where, ...more });
  const rate = (name, more) => grown(name, more) / (after.t - before.t);
  const highest = (name, more) => Math.max(0, ...values(after.scrape, name, { ...where, ...more }));
  const total = { ...where, stage: "total" };
  const latency = q => quantile(q, before.scrape, after.scrape, "sbert_stage_seconds_bucket", total);
  /** Median and p99 of the calls of one class. */
  const lane = name => [0.5, 0.99].map(q =>
    quantile(q, before.scrape, after.scrape, "sbert_class_seconds_bucket", { ...where, class: name }));
  /** Values for each label that a metric has, if it has that label at all. */
  const by = (name, label, read) => Object.fromEntries(labelled(after.scrape, name, label)
    .map(value => [value.replaceAll("_", " "), read(name, { [label]: value })]));
  const seen = (name, label, read) => Object.fromEntries(Object.entries(by(name, label, now)).filter(([, n]) => n)
    .map(([shown]) => [shown, by(name, label, read)[shown]]));
  // Classes of requests may be counted beside their total, or instead of it.
  const whole = values(after.scrape, "sbert_queue_tokens", { class: undefined }).length ? { class: undefined } : {};
  const batches = grown("sbert_batch_size_tokens_count");
  const padded = grown("sbert_padded_tokens_total");
  const hits = grown("sbert_cache_hits_total");
  const found = hits + grown("sbert_cache_misses_total");
  const [past, done] = [responses(before.scrape), responses(after.scrape)];
  const responded = Object.entries(done).map(([kind, n]) => [kind, (n - (past[kind] ?? 0)) / (after.t - before.t)]);
  const ofProcess = name => sum(after.scrape, name) - sum(before.scrape, name);
  return {
    t: after.t,
    calls: now("sbert_requests_total"),
    texts: rate("sbert_texts_total"),
    tokens: rate("sbert_tokens_total"),
    p50: latency(0.5),
    p95: latency(0.95),
    p99: latency(0.99),
    interactive: lane("interactive"),
    bulk: lane("bulk"),
    waiting: now("sbert_queue_tokens", whole),
    waitingBy: by("sbert_queue_tokens", "class", now),
    oldest: highest("sbert_queue_oldest_seconds"),
    oldestBy: by("sbert_queue_oldest_seconds", "class", highest),
    batch: batches ? grown("sbert_batch_size_tokens_sum") / batches : null,
    room: highest("sbert_max_batch_tokens"),
    padding: padded ? 1 - grown("sbert_batch_tokens_total") / padded : null,
    failed: rate("sbert_errors_total"),
    failedBy: seen("sbert_errors_total", "kind", rate),
    cacheShare: found ? hits / found : null,
    cacheBytes: now("sbert_cache_bytes"),
    responded: responded.reduce((all, [, each]) => all + each, 0),
    respondedBy: Object.fromEntries(responded),
    cores: ofProcess("process_cpu_seconds_total") / (after.t - before.t),
    memory: sum(after.scrape, "process_resident_memory_bytes"),
    connections: sum(after.scrape, "sbert_http_connections"),
    inProgress: sum(after.scrape, "sbert_http_requests_in_progress"),
  };
}
