"use strict";
let described = "";  // the last response of /info

async function showModels() {
  const response = document.hidden ? null : await ask("info").catch(() => null);
  const text = response?.ok ? await response.text().catch(() => "") : "";
  if (text && text !== described) {
    const isFirst = !described;
    described = text;
    const { models } = JSON.parse(text);
    const encoders = models.filter(model => model.kind === "encoder").map(model => model.name);
    offer(chooser, encoders);
    $("try-section").hidden = !encoders.length;
    $("try").querySelector("button").disabled = false;
    $("models").replaceChildren(...models.map(modelCard));
    if (isFirst && encoders.length) compare();  // once, so that there is something to see
  }
  setTimeout(showModels, text ? 10000 : 1000);  // a reload may change what runs
}
function modelCard(model) {
  const { parity } = model;
  const title = make("h3", {}, model.name, make("span", { class: "tag" }, model.precision));
  const runs = {
    "File": model.file,
    "Backend": model.backend,
    "Device": model.device,
    "Vectors": `${model.dim} numbers` + (model.normalized ? ", length 1" : ""),
    "Longest text": `${model.max_length} tokens`,
    "Architecture": `${model.architecture}, ${model.pooling.join(" + ")} pooling`,
    "Prompts": model.prompts.join(", ") || "none",
    "Weights": `sha256 ${model.weights_sha256.slice(0, 12)}`,
  };
  const certificate = {
    "Lowest cosine": parity.min_cosine?.toFixed(6) ?? "–",
    "Mean cosine": parity.mean_cosine?.toFixed(6) ?? "–",
    "Largest difference": parity.max_abs?.toPrecision(2) ?? "–",
    "Measured on": `${parity.texts ?? "–"} texts`,
  };
  const versions = Object.entries(model.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  return make("article", { class: "card" }, title, facts(runs),
    make("h4", {}, "Parity certificate, against the eager FP32 model"), facts(certificate),
    make("p", { class: "dim" }, `Exported with ${versions}`));
}
function facts(rows) {
  const pair = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  return make("dl", { class: "facts" }, ...Object.entries(rows).map(pair));
}
