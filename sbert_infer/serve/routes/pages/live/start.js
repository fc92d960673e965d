"use strict";
filter = $("filter").querySelector("select");
chooser = $("chooser").querySelector("select");
buildPanels();
drawAll();
filter.addEventListener("change", drawAll);
$("span").addEventListener("change", () => {
  span_s = Number($("span").value);
  moveCursor(null);
});
for (const place of Object.keys(PANELS)) {
  $(place).addEventListener("keydown", event => {
    const step = { ArrowLeft: span_s / 36, ArrowRight: -span_s / 36, Escape: -Infinity }[event.key];
    if (step) moveCursor((cursor ?? 0) + step);
  });
}
$("heat").addEventListener("keydown", walk);
$("try").addEventListener("submit", compare);
$("sentences").addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try").querySelector("button").click();
});
poll();
showModels();
