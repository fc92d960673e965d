"use strict";
const GAP_S = 8;  // no value for longer than this leaves a gap
const TICKS_S = { 180: 60, 900: 300 };  // how far back the plots may reach, and how far apart their ticks are

const quiet = s => s.calls ? "no traffic now" : "no traffic yet";
const idle = () => "nothing waiting";
const PANELS = {
  panels: [
    ["Throughput", { read: s => ({ "texts/s": s.texts }), show: count, none: quiet },
      { read: s => ({ "tokens/s": s.tokens }), show: count, none: quiet }],
    ["Latency", { read: s => ({ p50: s.p50, p95: s.p95, p99: s.p99 }), show: seconds, none: quiet, style: "lines" }],
    ["Lanes", { read: s => ({ "interactive p50": s.interactive?.[0], "interactive p99": s.interactive?.[1] }),
      show: seconds, none: quiet, style: "lines" },
      { read: s => ({ "bulk p50": s.bulk?.[0], "bulk p99": s.bulk?.[1] }), show: seconds,
        none: () => "no bulk now", style: "lines" }],
    ["Queue", { read: s => ({ "tokens waiting": s.waiting, ...s.waitingBy }), show: count, none: idle, style: "parts" },
      { read: s => ({ "oldest text": s.oldest, ...s.oldestBy }), show: seconds, none: idle, style: "parts" }],
    ["Batches", { read: s => ({ "tokens per batch": s.batch }), show: count, none: quiet, limit: s => s.room },
      { read: s => ({ padding: s.padding }), show: percent, none: () => "" }],
    ["Failed calls", { read: s => ({ "failed/s": s.failed, ...s.failedBy }), show: count,
      none: () => "no failed calls", style: "parts" }],
    ["Vector cache", { read: s => ({ "found there": s.cacheShare }), show: percent, none: quiet, limit: () => 1 },
      { read: s => ({ "size": s.cacheBytes }), show: bytes, none: () => "empty" }],
  ],
  server: [
    ["Responses", { read: s => ({ "responses/s": s.responded, ...s.respondedBy }), show: count,
      none: () => "no requests now", style: "parts",
      colours: { "responses/s": "c4", "2xx": "c0", "4xx": "c1", "429 busy": "c2", "499 left": "c3", "5xx": "c5" } }],
    ["Process", { read: s => ({ "CPU cores": s.cores }), show: digits, none: () => "" },
      { read: s => ({ "memory": s.memory }), show: bytes, none: () => "" }],
    ["Connections", { read: s => ({ "open": s.connections }), show: count, none: () => "" },
      { read: s => ({ "requests in progress": s.inProgress }), show: count, none: () => "" }],
  ],
};
const OPTIONAL = { "Vector cache": "sbert_cache_hits_total" };  // a panel, and the metric without which it is hidden
const strips = Object.values(PANELS).flat().flatMap(([, ...strips]) => strips);
const past = new Map();  // model, or "" for all -> samples, oldest first
let span_s = 180;  // how far back the plots reach
let cursor = null;  // the age in seconds at which the plots are read; null: now

/** The next larger 1, 2 or 5 times a power of ten, so that a plot's scale seldom changes. */
function ceiling(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return power * [1, 2, 5, 10].find(step => step * power >= x * 0.999);
}
function buildPanels() {
  for (const [place, panels] of Object.entries(PANELS)) {
    $(place).prepend(...panels.map(([title, ...strips]) => {
      const axis = make("div", { class: "axis", "aria-hidden": "true" });
      const card = make("article", { class: "card panel" }, make("h3", {}, title), ...strips.map(buildStrip), axis);
      card.hidden = title in OPTIONAL;
      return card;
    }));
  }
}
function buildStrip(strip) {
  const across = { x1: 0, x2: 100 };
  strip.cursorLine = make("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
  strip.ticks = make("path", { class: "ticks" });
  strip.svg = make("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" },
    make("line", { ...across, y1: 0, y2: 0 }), make("line", { ...across, y1: 50, y2: 50 }), strip.ticks,
    strip.cursorLine);
  strip.top = make("span", { class: "top", "aria-hidden": "true" });
  strip.said = make("span", { class: "none" });
  strip.values = make("dl", { class: "values" });
  strip.lines = new Map();  // label -> its line in the plot and its value beside it
  const plot = make("div", { class: "plot" }, strip.svg, strip.top, strip.said);
  plot.addEventListener("pointermove", event => {
    const box = plot.getBoundingClientRect();
    moveCursor(span_s * (1 - (event.clientX - box.left) / box.width));
  });
  plot.addEventListener("pointerleave", () => moveCursor(null));
  return make("div", { class: `strip ${strip.style ?? ""}` }, strip.values, plot);
}
function lineOf(strip, label) {
  if (!strip.lines.has(label)) {
    const line = { path: make("path"), area: make("path", { class: "area" }), value: make("dd", {}, "–") };
    const colour = strip.colours?.[label] ?? `c${strip.lines.size % 5}`;
    const role = strip.lines.size ? "part" : "first";
    line.row = make("div", { class: `${colour} ${role}` }, make("dt", {}, label), line.value);
    for (const path of [line.area, line.path]) path.classList.add(colour, role);
    strip.svg.append(line.area, line.path);
    strip.values.append(line.row);
    strip.lines.set(label, line);
  }
  return strip.lines.get(label);
}
function moveCursor(age) {
  cursor = age === null || age <= 0 ? null : Math.min(age, span_s);
  drawAll();
}
function drawAll() {
  const now = performance.now() / 1000;
  const samples = (past.get(filter.value) ?? []).filter(s => now - s.t <= span_s);
  const distance = s => Math.abs(now - (cursor ?? 0) - s.t);
  const nearest = samples.reduce((best, s) => distance(s) < distance(best) ? s : best, samples[0]);
  const moment = new Date(Date.now() - 1000 * cursor).toLocaleTimeString();
  say($("moment"), cursor === null ? "" : `${duration(cursor)} ago, at ${moment}`);
  const ticks = ticksOf(Date.now() / 1000);
  for (const axis of document.querySelectorAll(".axis")) drawAxis(axis, ticks);
  for (const strip of strips) {
    strip.ticks.setAttribute("d", ticks.map(([x]) => `M${x},0V100`).join(""));
    drawStrip(strip, samples, nearest && distance(nearest) <= GAP_S ? nearest : {}, now);
  }
}
/** Round times of the day within the span: [where, from 0 to 100, and what to write there]. */
function ticksOf(clock_s) {
  const step = TICKS_S[span_s];
  const ticks = [];
  for (let t = Math.floor(clock_s / step) * step; t > clock_s - span_s; t -= step) {
    const text = new Date(1000 * t).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
    ticks.push([(100 * (1 - (clock_s - t) / span_s)).toFixed(2), text]);
  }
  return ticks;
}
function drawAxis(axis, ticks) {
  while (axis.children.length > ticks.length) axis.lastChild.remove();
  while (axis.children.length < ticks.length) axis.append(make("span"));
  ticks.forEach(([x, text], i) => {
    axis.children[i].style.left = `${x}%`;
    say(axis.children[i], text);
  });
}
function drawStrip(strip, samples, shown, now) {
  const limit = strip.limit && samples.length ? strip.limit(samples.at(-1)) : 0;
  const highest = Math.max(0, ...samples.flatMap(s => Object.values(strip.read(s))));
  const scale = limit ? Math.max(limit, highest) : ceiling(highest || 1);
  const y = value => 100 * (1 - value / scale);
  const labels = [{}, ...samples].flatMap(s => Object.keys(strip.read(s)));
  for (const label of new Set([...strip.lines.keys(), ...labels])) {
    const line = lineOf(strip, label);
    const value = strip.read(shown)[label];
    const pieces = highest ? cut(samples.map(s => [s.t - now, strip.read(s)[label]])) : [];
    const points = pieces.map(piece =>
      piece.map(([age, value]) => `${(100 * (1 + age / span_s)).toFixed(2)},${y(value).toFixed(1)}`));
    line.path.setAttribute("d", points.map(piece => "M" + piece.join("L")).join(""));
    line.area.setAttribute("d", points.map(piece => `M${piece.join("L")}V100H${piece[0].split(",")[0]}Z`).join(""));
    say(line.value, value == null ? "–" : strip.show(value));
  }
  strip.cursorLine.setAttribute("visibility", cursor ? "visible" : "hidden");
  for (const end of ["x1", "x2"]) strip.cursorLine.setAttribute(end, 100 * (1 - cursor / span_s));
  say(strip.top, limit ? `at most ${strip.show(limit)}` : highest ? strip.show(scale).replace(/\.0(?= |$)/, "") : "");
  say(strip.said, highest || !samples.length ? "" : strip.none(samples.at(-1)));
}
/** Points in pieces: a missing value or a missed scrape leaves a gap. */
function cut(points) {
  const pieces = [];
  let last = -Infinity;
  for (const [at, value] of points) {
    if (value == null) continue;
    if (at - last > GAP_S) pieces.push([]);
    pieces.at(-1).push([at, value]);
    last = at;
  }
  return pieces;
}
