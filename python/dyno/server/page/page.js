"use strict";
// Talks to the server that this page came from, by the public chat API. All text of the model and of the server goes
// into text nodes: none of it becomes markup.

const at = (id) => document.getElementById(id);
let talk = []; // each reset begins another one, so that an answer that was running then belongs to the old one
let running = null;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function add(kind, text) {
  const box = document.createElement("article");
  box.className = kind;
  const body = document.createElement("span");
  body.textContent = text;
  box.append(body);
  at("talk").append(box);
  at("talk").scrollTop = at("talk").scrollHeight;
  return { box, body };
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

function mib(bytes) {
  return (bytes / 2 ** 20).toLocaleString("en", { maximumSignificantDigits: 3 });
}

async function facts() {
  try {
    const response = await fetch("props", { headers: headers() });
    if (!response.ok) {
      at("facts").textContent = await failure(response);
      if (response.status === 401) document.querySelector("details").open = true;
      return;
    }
    const props = await response.json();
    at("model").textContent = props.model;
    document.title = `dyno · ${props.model}`;
    const profile = props.profile ? `profile ${props.profile}` : "no profile: engine defaults";
    at("facts").textContent =
      `${props.architecture} on ${props.device} · ${profile} · ${props.sequences} sequences of ${props.settings.ctx} tokens`;
    at("load").textContent = `${props.running} / ${props.waiting}`;
    at("cache").textContent = `${mib(props.cache_bytes)} of ${mib(props.cache_bytes_most)} MiB`;
  } catch (error) {
    at("facts").textContent = `the server does not answer: ${error.message}`;
  }
}

// Objects of a stream of server-sent events; events may be cut anywhere between two reads.
async function* objects(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const line = held.slice(0, end);
      held = held.slice(end + 2);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function thoughts(box) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  const body = document.createElement("span");
  summary.textContent = "Reasoning";
  details.append(summary, body);
  box.prepend(details);
  return body;
}

async function answer() {
  const mine = talk;
  const system = at("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...mine];
  const { box, body } = add("assistant", "");
  const begun = performance.now();
  let first = null;
  let reasoning = null;
  running = new AbortController();
  at("send").textContent = "Stop";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        messages,
        temperature: Number(at("temperature").value),
        max_tokens: Number(at("most").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const each of objects(response)) {
      if (each.error) throw new Error(each.error.message);
      if (each.usage) usage(each.usage, begun, first ?? performance.now());
      const delta = each.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) (reasoning ??= thoughts(box)).textContent += delta.reasoning_content;
      if (delta.content) body.textContent += delta.content;
      if (first === null && (delta.content || delta.reasoning_content)) {
        first = performance.now();
        at("first").textContent = `${Math.round(first - begun)} ms`;
      }
      at("talk").scrollTop = at("talk").scrollHeight;
    }
    mine.push({ role: "assistant", content: body.textContent });
  } catch (error) {
    const aborted = error.name === "AbortError";
    if (!aborted) add("error", error.message);
    if (aborted && body.textContent) {
      mine.push({ role: "assistant", content: body.textContent });
    } else {
      // A question without an answer goes back into its box: many templates refuse two of them in a row.
      const { content } = mine.pop();
      if (mine === talk) at("text").value ||= content;
    }
  } finally {
    running = null;
    at("send").textContent = "Send";
    facts();
  }
}

function usage(used, begun, first) {
  const seconds = (performance.now() - first) / 1000;
  const cached = used.prompt_tokens_details?.cached_tokens ?? 0;
  at("prompt").textContent = `${used.prompt_tokens}, ${cached}`;
  at("drawn").textContent = `${used.completion_tokens} tokens in ${((performance.now() - begun) / 1000).toFixed(1)} s`;
  // The first token came before the clock began.
  if (used.completion_tokens > 1 && seconds > 0) at("rate").textContent = ((used.completion_tokens - 1) / seconds).toFixed(1);
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  talk.push({ role: "user", content: text });
  add("user", text);
  answer();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) at("form").requestSubmit();
  }
});
at("reset").addEventListener("click", () => {
  running?.abort();
  talk = [];
  at("talk").replaceChildren();
});
at("key").addEventListener("change", facts);
facts();
setInterval(facts, 3000);
