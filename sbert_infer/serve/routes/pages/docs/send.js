"use strict";
const MOST_SHOWN = 5000;  // characters of a response

/** A form that sends a request to a route, and shows what comes back. */
function sender(method, path, operation, body) {
  const target = make("input", { "aria-label": "Path", value: filled(path, operation), spellcheck: "false" });
  const text = make("textarea", { "aria-label": "Body", spellcheck: "false", rows: "8" });
  text.value = body ? JSON.stringify(body.value, null, 2) : "";
  const button = make("button", {}, "Send");
  const said = make("p", { class: "dim", role: "status" });
  const answer = make("pre", { hidden: "" });
  const form = make("form", {}, ...(path.includes("{") ? [target] : []), ...(body ? [text] : []), button, said, answer);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    button.disabled = true;
    answer.hidden = true;
    say(said, "Waiting.");
    try {
      const [status, content] = await send(method, target.value, body && text.value, body?.type);
      say(said, status);
      say(answer, content.length > MOST_SHOWN ? `${content.slice(0, MOST_SHOWN)} …` : content);
      answer.hidden = !content;
    } catch {
      say(said, "Can't reach the server.");
    } finally {
      button.disabled = false;
    }
  });
  return make("details", { class: "send" }, make("summary", {}, "Send a request"), form);
}
async function send(method, path, body, type) {
  const started = performance.now();
  const options = { method: method.toUpperCase(), signal: AbortSignal.timeout(60000) };
  const response = await ask(path, body ? { ...options, body, headers: { "content-type": type } } : options);
  const content = await response.text();
  const took = seconds((performance.now() - started) / 1000);
  return [`${response.status} ${response.statusText}, ${took}, ${bytes(new Blob([content]).size)}`, content];
}
