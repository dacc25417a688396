"use strict";
// Runs page.js of the server's page on a small imitation of a browser's document, which has what the script touches.
// Arguments: the script, and a list of steps as JSON. Prints, as JSON, the messages of each request that the page
// sends, and the text that is left in its box.

const fs = require("node:fs");
const vm = require("node:vm");

const [path, steps] = [process.argv[2], JSON.parse(process.argv[3])];
const elements = {};
const requests = [];
const errors = [];
let reply = null; // of the next request

class Element {
  constructor() {
    this.value = this.className = this.textContent = "";
    this.heard = {};
  }
  append() {}
  prepend() {}
  replaceChildren() {}
  addEventListener(kind, work) {
    this.heard[kind] = work;
  }
}

const at = (id) => (elements[id] ??= new Element());
const document = {
  title: "",
  getElementById: at,
  createElement: () => new Element(),
  querySelector: () => new Element(),
};

function streamed(pieces, ends, signal) {
  const encoder = new TextEncoder();
  return new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(encoder.encode(`data: ${JSON.stringify(piece)}\n\n`));
      if (ends) controller.close();
      else signal.addEventListener("abort", () => controller.error(signal.reason));
    },
  });
}

async function fetch(url, options) {
  if (url === "props") return new Response("{}", { status: 503 });
  requests.push(JSON.parse(options.body).messages);
  const { status = 200, texts = [], error = null, ends = true } = reply;
  if (status !== 200) return new Response(JSON.stringify({ error: { message: `status ${status}` } }), { status });
  const pieces = texts.map((content) => ({ choices: [{ delta: { content } }] }));
  if (error !== null) pieces.push({ error: { message: error } });
  return new Response(streamed(pieces, ends, options.signal));
}

const settled = () => new Promise((done) => setTimeout(done, 20));

async function until(condition) {
  for (let tries = 0; !condition(); tries++) {
    if (tries > 3000) throw new Error("the page does not come to rest");
    await settled();
  }
}

async function run() {
  const shown = [];
  document.createElement = () => {
    const made = new Element();
    shown.push(made);
    return made;
  };
  const browser = { document, fetch, performance, AbortController, TextDecoderStream, Error, setInterval: () => {} };
  vm.runInNewContext(fs.readFileSync(path, "utf8"), browser);
  for (const step of steps) {
    if (step.reset) {
      at("reset").heard.click();
    } else if (step.stop) {
      at("form").heard.submit({ preventDefault() {} });
    } else {
      reply = step.reply;
      at("text").value = step.say;
      at("form").heard.submit({ preventDefault() {} });
      if (reply.ends === false) {
        const text = (reply.texts ?? []).join("");
        await until(() => requests.length && shown.some((made) => made.textContent === text));
        await settled(); // the script waits for more now
        continue;
      }
    }
    await until(() => at("send").textContent === "Send");
  }
  for (const made of shown) if (made.className === "error") errors.push(true);
  console.log(JSON.stringify({ requests, errors: errors.length, box: at("text").value }));
}

run();
