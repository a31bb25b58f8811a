// The page of a Perilune server: a conversation on one side, the prefix cache on the other.
// Nothing is loaded from elsewhere, and text of the model becomes text nodes only.
"use strict";

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** An element: make("p", {class: "x", onclick: f}, "text", child). */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const number = (value) => Math.round(value).toLocaleString("en");

function size(bytes) {
  for (const [unit, name] of [
    [1e12, "TB"],
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ]) {
    if (bytes >= unit) return `${(bytes / unit).toPrecision(3)} ${name}`;
  }
  return `${bytes} B`;
}

function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

// ---------------------------------------------------------------- settings

const FIELDS = ["system", "thinking", "effort", "temperature", "max-tokens", "tools"];

/** Storage that may be forbidden: then settings last as long as the page. */
function store(kind, name, value) {
  try {
    const place = kind === "tab" ? sessionStorage : localStorage;
    if (value === undefined) return place.getItem(`perilune.${name}`);
    place.setItem(`perilune.${name}`, value);
  } catch {
    /* private window */
  }
  return null;
}

function loadSettings() {
  for (const name of FIELDS) {
    const known = store("browser", name),
      field = $(name);
    if (known === null) continue;
    if (field.type === "checkbox") field.checked = known === "true";
    else field.value = known;
  }
  $("key").value = store("tab", "key") || "";
}

function saveSettings() {
  for (const name of FIELDS)
    store("browser", name, String($(name).type === "checkbox" ? $(name).checked : $(name).value));
  store("tab", "key", $("key").value);
}

/** The declared tools, or null after showing why they cannot be read. */
function toolsOfSettings() {
  const text = $("tools").value.trim();
  $("tools-error").textContent = "";
  if (!text) return [];
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) throw new Error("must be a list");
    return tools;
  } catch (error) {
    $("tools-error").textContent = `Tools: ${error.message}`;
    return null;
  }
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  store("browser", "theme", name);
  readColours();
  draw();
}

// ---------------------------------------------------------------- the server

class Refused extends Error {}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  if (options.body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let said = "";
  try {
    said = (await answer.json()).error?.message || "";
  } catch {
    /* no JSON */
  }
  const error = new Refused(said || `The server answered ${answer.status}.`);
  error.status = answer.status;
  throw error;
}

/** The data of the events of a text/event-stream answer. */
async function* events(answer) {
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const lines = text.slice(0, end).split("\n");
        const data = lines
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, ""))
          .join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---------------------------------------------------------------- conversation

const chat = { messages: [], model: null, abort: null };

/** A little Markdown as elements: code blocks, `code`, **bold**; all else is text as it is. */
function rich(text) {
  const blocks = [];
  for (const [i, part] of text.split(/^```[^\n]*\n?/m).entries()) {
    if (i % 2) blocks.push(make("pre", { tabindex: "0" }, make("code", {}, part.replace(/\n$/, ""))));
    else
      for (const paragraph of part.split(/\n{2,}/))
        if (paragraph.trim()) blocks.push(make("p", {}, ...inline(paragraph.replace(/^\n+|\n+$/g, ""))));
  }
  return blocks;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return make("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return make("strong", {}, part.slice(2, -2));
    return part;
  });
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function follow(was) {
  if (was) $("log").scrollTop = $("log").scrollHeight;
}

function show(node) {
  $("empty").hidden = true;
  $("log").append(node);
  follow(true);
}

function showUser(text) {
  show(make("article", { class: "turn user", "aria-label": "You" }, make("div", { class: "body" }, text)));
}

/** The view of an answer on its way: `take` a delta, then `end`. */
function answerView() {
  const thoughts = make("div"),
    thinkLabel = make("b", {}, "Thinking");
  const think = make("details", { class: "fold think busy", hidden: true }, make("summary", {}, thinkLabel), thoughts);
  const calls = make("div"),
    body = make("div", { class: "body caret" }),
    facts = make("p", { class: "facts" });
  const turn = make(
    "article",
    { class: "turn assistant", "aria-label": "The model", "aria-busy": "true" },
    think,
    body,
    calls,
    facts,
  );
  const message = { role: "assistant", content: "" };
  const begun = performance.now();
  let first = null,
    thought = null,
    frame = 0;

  function paint() {
    frame = 0;
    const end = atEnd();
    thoughts.textContent = message.reasoning_content || "";
    body.replaceChildren(...rich(message.content));
    body.classList.toggle("caret", turn.getAttribute("aria-busy") === "true");
    if (message.tool_calls) calls.replaceChildren(...message.tool_calls.map(callView));
    follow(end);
  }

  function take(delta) {
    const said = delta.reasoning_content || delta.content || delta.tool_calls;
    if (said && first === null) first = performance.now();
    if (delta.reasoning_content) {
      message.reasoning_content = (message.reasoning_content || "") + delta.reasoning_content;
      think.hidden = false;
    }
    if ((delta.content || delta.tool_calls) && thought === null && message.reasoning_content) endThought();
    if (delta.content) message.content += delta.content;
    for (const call of delta.tool_calls || []) {
      message.tool_calls ||= [];
      const known = (message.tool_calls[call.index] ||= {
        id: "",
        type: "function",
        function: { name: "", arguments: "" },
      });
      if (call.id) known.id = call.id;
      if (call.function?.name) known.function.name += call.function.name;
      if (call.function?.arguments) known.function.arguments += call.function.arguments;
    }
    frame ||= requestAnimationFrame(paint);
  }

  function endThought() {
    thought = performance.now();
    think.classList.remove("busy");
    thinkLabel.textContent = "Thought";
    think.querySelector("summary").append(` for ${((thought - (first || begun)) / 1000).toFixed(1)} s`);
  }

  function end(usage, note) {
    turn.setAttribute("aria-busy", "false");
    if (thought === null && message.reasoning_content) endThought();
    cancelAnimationFrame(frame);
    paint();
    if (!message.content && !message.tool_calls) body.remove();
    const seconds = (performance.now() - (first || begun)) / 1000;
    const said = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens || 0;
      said.push(make("span", {}, `${number(usage.prompt_tokens)} read`));
      if (cached) said.push(make("span", { class: "gain" }, `${number(cached)} from the cache`));
      said.push(make("span", {}, `${number(usage.completion_tokens)} written`));
      if (seconds > 0.05) said.push(make("span", {}, `${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`));
    }
    if (first !== null) said.push(make("span", {}, `first after ${((first - begun) / 1000).toFixed(2)} s`));
    if (note) said.push(make("span", { class: "error" }, note));
    facts.replaceChildren(...said);
  }

  show(turn);
  return { message, take, end, facts, turn };
}

function callView(call) {
  let shown = call.function.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    /* still coming */
  }
  return make(
    "details",
    { class: "fold call" },
    make("summary", {}, make("b", {}, call.function.name), make("span", { class: "mono" }, call.function.arguments)),
    make("div", {}, make("pre", { tabindex: "0" }, make("code", {}, shown))),
  );
}

/** Boxes for the results of an answer's calls: this page runs no tools, the person plays them. */
function askResults(view) {
  const fields = view.message.tool_calls.map((call) => {
    const field = make("textarea", { rows: "2", spellcheck: "false" });
    return {
      call,
      field,
      label: make(
        "label",
        { class: "result" },
        make("span", { class: "unseen" }, `Result of ${call.function.name}`),
        field,
      ),
    };
  });
  for (const { call, field } of fields) field.placeholder = `what ${call.function.name} returns`;
  const form = make(
    "form",
    {
      class: "results",
      onsubmit: (event) => {
        event.preventDefault();
        if (chat.abort) return;
        for (const { call, field } of fields) {
          chat.messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
          form.before(
            make(
              "details",
              { class: "fold" },
              make("summary", {}, make("b", {}, "Result"), make("span", { class: "mono" }, field.value)),
              make("div", {}, field.value),
            ),
          );
        }
        form.remove();
        answer();
      },
    },
    ...fields.map((f) => f.label),
    make("button", { type: "submit", class: "send" }, "Send results"),
  );
  view.turn.insertBefore(form, view.facts);
  follow(true);
  fields[0].field.focus();
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
}

async function answer() {
  const { messages } = chat; // of this conversation, whatever is begun meanwhile
  const tools = toolsOfSettings() || [];
  const view = answerView();
  const thinking = $("thinking").checked;
  const system = $("system").value.trim();
  const request = {
    model: chat.model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    thinking,
    thinking_effort: (thinking && $("effort").value) || null,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (tools.length) request.tools = tools;
  let usage = null,
    finish = null,
    note = "";
  chat.abort = new AbortController();
  busy(true);
  try {
    const stream = await ask("/v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(request),
      signal: chat.abort.signal,
    });
    for await (const data of events(stream)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(chunk.error.message);
      usage = chunk.usage || usage;
      const choice = chunk.choices?.[0];
      if (choice?.delta) view.take(choice.delta);
      finish = choice?.finish_reason || finish;
    }
    if (finish === "length") note = "cut off: most tokens reached";
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : error.message;
    if (error.status === 401) openSettings($("key"));
  } finally {
    chat.abort = null;
    busy(false);
  }
  const { message } = view;
  const whole = message.content || message.tool_calls || message.reasoning_content;
  // A call that was cut off cannot be answered, nor sent back.
  if (note && message.tool_calls) delete message.tool_calls;
  if (whole) messages.push(message);
  else if (note && messages.at(-1)?.role === "user" && !$("prompt").value) takeBack(messages);
  view.end(usage, note);
  $("said").textContent = note ? `The answer ended: ${note}` : "The answer is complete.";
  if (messages !== chat.messages) return;
  if (message.tool_calls) askResults(view);
  else if (!$("settings").open) $("prompt").focus();
}

/** A message that got no answer goes back into the box. */
function takeBack(messages) {
  $("prompt").value = messages.pop().content;
  [...document.querySelectorAll(".turn.user")].at(-1)?.remove();
  grow();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || chat.abort) return;
  if (toolsOfSettings() === null) return openSettings($("tools"));
  document.querySelectorAll("form.results").forEach((form) => form.remove());
  // Calls nobody answered would be refused: the conversation goes on without them.
  const last = chat.messages.at(-1);
  if (last?.tool_calls) delete last.tool_calls;
  chat.messages.push({ role: "user", content: text });
  showUser(text);
  $("prompt").value = "";
  grow();
  answer();
}

function newChat() {
  chat.abort?.abort();
  chat.messages = [];
  for (const turn of [...$("log").querySelectorAll(".turn")]) turn.remove();
  $("empty").hidden = false;
  $("prompt").focus();
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function openSettings(field) {
  if (!$("settings").open) $("settings").showModal();
  field?.focus();
}

async function findModel() {
  try {
    const answer = await (await ask("/v1/models")).json();
    chat.model = answer.data[0].id;
    $("model").textContent = chat.model;
  } catch (error) {
    $("model").textContent = error.status === 401 ? "needs a key" : "no answer";
    if (error.status === 401) openSettings($("key"));
  }
}

// ---------------------------------------------------------------- the cache: from pictures to rows

const LEFT = 14,
  RIGHT = 20,
  AXIS = 26,
  FLASH = 1600,
  APPEAR = 450,
  OLD = 600;
const map = {
  picture: null,
  at: 0,
  nodes: new Map(),
  rows: 0,
  height: 18,
  scale: null,
  born: new Map(),
  order: new Map(),
  flashes: [],
  seen: -1,
  chosen: null,
  hover: null,
  frame: 0,
  colours: {},
};

function takePicture(picture) {
  const first = map.picture === null;
  if (picture.now < (map.picture?.now ?? 0)) {
    map.seen = -1;
    map.born.clear();
    map.order.clear();
  } // another server
  map.picture = picture;
  map.at = performance.now();
  layOut(first);
  for (const start of picture.starts) {
    if (start.seq <= map.seen) continue;
    map.seen = start.seq;
    if (first || start.node === null) continue;
    const path = pathOf(start.node);
    if (path.length) map.flashes.push({ begin: performance.now(), path, depth: start.cached });
  }
  if (map.flashes.length > 48) map.flashes.splice(0, map.flashes.length - 48);
  showNumbers();
  draw();
}

/** Every path of the tree gets a row; a node continues its parent's row or begins one below it. */
function layOut(first) {
  const nodes = new Map();
  for (const node of map.picture.nodes) nodes.set(node.id, { ...node, children: [], row: 0 });
  const tops = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.parent);
    (parent ? parent.children : tops).push(node);
    node.above = parent || null;
    if (!map.order.has(node.id)) map.order.set(node.id, map.order.size);
    if (!map.born.has(node.id)) map.born.set(node.id, first ? -APPEAR : performance.now());
  }
  for (const known of [map.order, map.born]) {
    if (known.size > 4096) for (const id of known.keys()) if (!nodes.has(id)) known.delete(id);
  }
  // A path keeps the place of its oldest node, the newest paths on top.
  const age = new Map();
  for (const node of [...nodes.values()].reverse())
    age.set(node, Math.min(map.order.get(node.id), ...node.children.map((child) => age.get(child))));
  const newest = (a, b) => age.get(b) - age.get(a),
    oldest = (a, b) => age.get(a) - age.get(b);
  let row = 0;
  const waiting = tops
    .sort(newest)
    .map((node) => [node, true])
    .reverse();
  let begun = false;
  while (waiting.length) {
    const [node, fresh] = waiting.pop();
    if (fresh && begun) row += 1;
    begun = true;
    node.row = row;
    const children = node.children.sort(oldest);
    children.forEach((child, i) => {
      child.elder = children[i - 1] || node;
    });
    for (let i = children.length - 1; i >= 0; i -= 1) waiting.push([children[i], i > 0]);
  }
  map.nodes = nodes;
  map.rows = nodes.size ? row + 1 : 0;
  map.height = map.rows <= 14 ? 26 : map.rows <= 40 ? 18 : 12;
  map.scale = scaleOf([...nodes.values()], map.picture.page_tokens);
  if (map.chosen !== null && !nodes.has(map.chosen)) map.chosen = null;
}

/** Tokens to a share of the width: in proportion, or by the square root where one path is much longer than most. */
function scaleOf(nodes, page) {
  const ends = nodes
    .filter((node) => !node.children.length)
    .map((node) => node.end)
    .sort((a, b) => a - b);
  const longest = Math.max(ends.at(-1) || 0, page * 8),
    middle = ends[ends.length >> 1] || longest;
  const power = longest > 12 * middle ? 0.5 : 1;
  return { longest, power, at: (tokens) => (tokens / longest) ** power };
}

function pathOf(id) {
  const path = [];
  for (let node = map.nodes.get(id); node; node = node.above) path.unshift(node.id);
  return path;
}

// ---------------------------------------------------------------- the cache: drawing

const NAMES = [
  "panel",
  "line",
  "text",
  "soft",
  "accent",
  "device",
  "device-old",
  "host",
  "host-old",
  "hit",
  "dot",
  "run",
];

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) map.colours[name] = style.getPropertyValue(`--${name}`).trim();
}

const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
const mix = (a, b, share) =>
  `rgb(${rgb(a)
    .map((x, i) => Math.round(x + (rgb(b)[i] - x) * share))
    .join(" ")})`;

function draw() {
  map.frame ||= requestAnimationFrame(paintMap);
}

function paintMap() {
  map.frame = 0;
  const canvas = $("map"),
    scroll = $("scroll"),
    colours = map.colours;
  const width = scroll.clientWidth,
    height = scroll.clientHeight,
    dots = Math.min(devicePixelRatio || 1, 2);
  $("spacer").style.height = `${Math.max(height, AXIS + map.rows * map.height + 14)}px`;
  if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.clearRect(0, 0, width, height);
  if (!map.picture) return;
  const x = (tokens) => LEFT + map.scale.at(tokens) * (width - LEFT - RIGHT);
  const y = (row) => AXIS + row * map.height + map.height / 2 - scroll.scrollTop;
  const now = performance.now(),
    serverNow = map.picture.now + (now - map.at) / 1000;
  const visible = (node) => y(node.row) > -map.height && y(node.row) < height + map.height;

  pen.save();
  pen.beginPath();
  pen.rect(0, AXIS - 4, width, height);
  pen.clip();
  if (!map.nodes.size) {
    pen.fillStyle = colours.soft;
    pen.font = "14px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillText(
      `Nothing is cached yet: a prefix counts from ${map.picture.shortest_hit} tokens on.`,
      width / 2,
      height / 2,
    );
  }
  for (const node of map.nodes.values()) if (node.above && node.row !== node.above.row) branch(pen, node, x, y, height);
  for (const node of map.nodes.values()) {
    if (!visible(node)) continue;
    const young = Math.min(1, (now - map.born.get(node.id)) / APPEAR);
    const share = Math.min(1, Math.max(0, serverNow - node.used) / OLD) ** 0.45;
    strip(
      pen,
      node,
      x,
      y(node.row),
      mix(colours[node.tier], colours[`${node.tier}-old`], share),
      calm.matches ? 1 : young,
    );
  }
  flashes(pen, x, y, now);
  for (const node of map.nodes.values()) if (visible(node)) mark(pen, node, x, y(node.row));
  pen.restore();
  axis(pen, x, width);
  const moving = map.flashes.length || [...map.born.values()].some((at) => now - at < APPEAR);
  if (moving) draw();
}

/** A line down from where the elder sibling's left its parent, so that no part of it is drawn twice. */
function branch(pen, node, x, y, height) {
  const from = y(node.elder.row),
    to = y(node.row),
    at = x(node.start);
  if (to < -20 || from > height + 20) return;
  pen.strokeStyle = map.colours.soft;
  pen.globalAlpha = 0.55;
  pen.lineWidth = 1.2;
  pen.beginPath();
  pen.moveTo(at - 3, from + (node.elder.row === node.above.row ? map.height * 0.28 : -5));
  pen.lineTo(at - 3, to - 5);
  pen.quadraticCurveTo(at - 3, to, at + 1, to);
  pen.stroke();
  pen.globalAlpha = 1;
}

/** A node's pages, one cell each while they are wide enough to be told apart. The host's are hollow. */
function strip(pen, node, x, y, colour, alpha) {
  const tall = map.height * 0.52,
    page = map.picture.page_tokens;
  pen.globalAlpha = alpha;
  pen.fillStyle = pen.strokeStyle = colour;
  pen.lineWidth = 1;
  const cell = (from, to) => {
    const left = x(from) + 0.5,
      wide = Math.max(1, x(to) - x(from) - 1.5);
    pen.beginPath();
    pen.roundRect(left, y - tall / 2, wide, tall, Math.min(2.5, wide / 2));
    if (node.tier === "host") pen.stroke();
    else pen.fill();
  };
  if ((x(node.end) - x(node.start)) / Math.max(1, (node.end - node.start) / page) < 4) cell(node.start, node.end);
  else
    for (let at = node.start; at < node.end; at = Math.min(node.end, (Math.floor(at / page) + 1) * page))
      cell(at, Math.min(node.end, (Math.floor(at / page) + 1) * page));
  pen.globalAlpha = 1;
}

function mark(pen, node, x, y) {
  const at = x(node.end) - 1,
    wide = Math.min(4.6, map.height * 0.24);
  if (node.checkpoint) {
    pen.fillStyle = map.colours.dot;
    pen.strokeStyle = map.colours.panel;
    pen.lineWidth = 1.6;
    pen.beginPath();
    pen.arc(at, y, wide, 0, 7);
    pen.fill();
    pen.stroke();
  }
  if (node.pins) {
    pen.strokeStyle = map.colours.run;
    pen.lineWidth = 1.8;
    pen.beginPath();
    pen.arc(at, y, wide + 2.4, 0, 7);
    pen.stroke();
  }
  if (node.id === map.chosen || node.id === map.hover) {
    pen.strokeStyle = map.colours.accent;
    pen.lineWidth = 1.6;
    pen.beginPath();
    pen.roundRect(x(node.start) - 1.5, y - map.height * 0.4, x(node.end) - x(node.start) + 3, map.height * 0.8, 4);
    pen.stroke();
  }
}

/** A hit runs along its path as a light and fades: over the tokens that came from the cache. */
function flashes(pen, x, y, now) {
  map.flashes = map.flashes.filter((flash) => now - flash.begin < FLASH);
  pen.fillStyle = map.colours.hit;
  for (const flash of map.flashes) {
    const life = (now - flash.begin) / FLASH,
      front = calm.matches ? flash.depth : flash.depth * Math.min(1, life * 3);
    pen.globalAlpha = 0.95 * (1 - life) ** 1.4;
    pen.shadowColor = map.colours.hit;
    pen.shadowBlur = 14;
    for (const id of flash.path) {
      const node = map.nodes.get(id);
      if (!node || node.start >= front) continue;
      const to = Math.min(node.end, front),
        tall = map.height * 0.6;
      pen.beginPath();
      pen.roundRect(x(node.start), y(node.row) - tall / 2, Math.max(2, x(to) - x(node.start)), tall, 3);
      pen.fill();
    }
  }
  pen.globalAlpha = 1;
  pen.shadowBlur = 0;
}

function axis(pen, x, width) {
  const { longest, power } = map.scale,
    colours = map.colours;
  pen.fillStyle = colours.panel;
  pen.globalAlpha = 0.94;
  pen.fillRect(0, 0, width, AXIS - 4);
  pen.globalAlpha = 1;
  pen.fillStyle = colours.soft;
  pen.strokeStyle = colours.line;
  pen.font = "11px system-ui, sans-serif";
  const raw = longest / 6,
    unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * unit).find((k) => k >= raw);
  let last = -100;
  for (let tokens = 0; tokens <= longest; tokens += step) {
    const at = x(tokens);
    if (at - last < 52 || at > width - 34) continue;
    last = at;
    pen.textAlign = tokens ? "center" : "left";
    pen.fillText(tokens >= 1000 ? `${tokens / 1000}k` : String(tokens), tokens ? at : at - 4, 15);
  }
  pen.textAlign = "right";
  pen.fillText(power === 1 ? "tokens" : "tokens (√)", width - 8, 15);
  pen.beginPath();
  pen.moveTo(0, AXIS - 4.5);
  pen.lineTo(width, AXIS - 4.5);
  pen.stroke();
}

// ---------------------------------------------------------------- the cache: in words

const RESTS = ["waiting", "parked", "remote"];

function showNumbers() {
  const { picture } = map,
    { sums } = picture;
  $("t-rate").textContent = sums.prompt ? `${((100 * sums.cached) / sums.prompt).toFixed(1)} %` : "–";
  $("t-saved").textContent = number(sums.cached);
  const waiting = picture.requests.filter((r) => RESTS.includes(r.state)).length;
  $("t-running").textContent = `${picture.requests.length - waiting} / ${waiting}`;
  $("t-short").textContent = `${picture.shortest_hit}`;
  $("tiers").replaceChildren(...picture.tiers.filter((tier) => tier.capacity).map(tierView));
  const live = picture.requests.filter((r) => !RESTS.includes(r.state));
  const more = live.length - 3;
  const rest =
    more > 0
      ? [make("li", { class: "rest" }, `and ${more} more`)]
      : live.length
        ? []
        : [make("li", { class: "rest" }, "no request on its way")];
  $("running").replaceChildren(...live.slice(0, 3).map(requestView), ...rest);
  const paths = [...map.nodes.values()].filter((node) => !node.children.length).length;
  const hidden = picture.more_nodes ? ` ${number(picture.more_nodes)} older ones are not drawn.` : "";
  $("map").setAttribute(
    "aria-label",
    `${paths} cached paths, ${[...map.nodes.values()].filter((n) => n.checkpoint).length} checkpoints.${hidden}`,
  );
  if ($("table-fold").open) showTable();
  tell();
}

function tierView(tier) {
  const classes = [
    ["kv", "KV", "kv"],
    ["checkpoints", "checkpoints", "checkpoints"],
    ["running-bytes", "requests", "running"],
  ];
  const parts = classes.filter(([, , key]) => key !== "running" || tier.name === "device");
  const inWords = parts.map(([, name, key]) => `${name} ${size(tier[key])}`).join(", ");
  const label = `${tier.name}: ${inWords}, free ${size(tier.free)}`;
  const meter = make("div", { class: "meter", role: "img", "aria-label": label });
  for (const [css, , key] of parts) {
    const bar = make("i", { class: css });
    bar.style.width = `${(100 * tier[key]) / tier.capacity}%`;
    meter.append(bar);
  }
  const bytes = make(
    "div",
    { class: "bytes", "aria-hidden": "true" },
    ...parts.map(([css, name, key]) =>
      make("span", {}, make("i", { class: css }), `${name} `, make("b", {}, size(tier[key]))),
    ),
    make(
      "span",
      {},
      make("i", { class: "none" }),
      "free ",
      make("b", {}, size(tier.free)),
      ` of ${size(tier.capacity)}`,
    ),
  );
  return make("div", { class: `tier ${tier.name}` }, make("span", {}, tier.name), meter, bytes);
}

function requestView(request) {
  const way = make("span", { class: "way", "aria-hidden": "true" });
  const parts = [
    ["had", request.cached],
    ["read", Math.max(0, Math.min(request.computed, request.prompt) - request.cached)],
    ["wrote", request.tokens - request.prompt],
  ];
  for (const [css, tokens] of parts) {
    const bar = make("i", { class: css });
    bar.style.width = `${(100 * tokens) / Math.max(request.longest, 1)}%`;
    way.append(bar);
  }
  const [read, wrote] = [request.prompt - request.cached, request.tokens - request.prompt];
  const inWords = `${number(request.cached)} + ${number(read)} read, ${number(wrote)} written`;
  return make("li", {}, request.state, way, inWords);
}

function describe(node) {
  const pages = Math.ceil(node.end / map.picture.page_tokens) - Math.floor(node.start / map.picture.page_tokens);
  const point = node.checkpoint ? `, checkpoint (${node.checkpoint}) at ${number(node.end)}` : ", no checkpoint";
  const forks = node.children.length > 1 ? `, ${node.children.length} ways on` : "";
  const held = node.pins ? ", in use" : "";
  const age = ago(map.picture.now + (performance.now() - map.at) / 1000 - node.used);
  const where = `Row ${node.row + 1}: tokens ${number(node.start)} to ${number(node.end)}`;
  return `${where}, ${pages} pages on the ${node.tier}${point}${forks}${held}, last used ${age}.`;
}

function tell() {
  const node = map.nodes.get(map.hover ?? map.chosen);
  const newest = map.picture.starts.at(-1);
  const text = node
    ? describe(node)
    : newest
      ? `Newest request: ${number(newest.cached)} of ${number(newest.prompt)} prompt tokens came from the cache.`
      : "Arrow keys or the pointer tell more about a prefix.";
  if ($("readout").textContent !== text) $("readout").textContent = text;
}

function showTable() {
  const rows = [...map.nodes.values()].sort((a, b) => a.row - b.row || a.start - b.start).slice(0, 200);
  $("rows").replaceChildren(
    ...rows.map((node) =>
      make(
        "tr",
        {},
        make("td", {}, String(node.row + 1)),
        make("td", {}, `${number(node.start)}–${number(node.end)}`),
        make("td", {}, node.tier),
        make("td", {}, node.checkpoint || "none"),
        make("td", {}, ago(map.picture.now - node.used)),
      ),
    ),
  );
}

function choose(id) {
  map.chosen = id;
  const node = map.nodes.get(id);
  if (node) {
    const top = AXIS + node.row * map.height,
      scroll = $("scroll");
    if (top - AXIS < scroll.scrollTop) scroll.scrollTop = top - AXIS;
    if (top + map.height > scroll.scrollTop + scroll.clientHeight)
      scroll.scrollTop = top + map.height - scroll.clientHeight;
  }
  tell();
  draw();
}

function walk(event) {
  const all = [...map.nodes.values()],
    here = map.nodes.get(map.chosen);
  if (!all.length || !["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key))
    return;
  event.preventDefault();
  event.stopPropagation();
  if (event.key === "Escape") return choose(null);
  const inRow = (row) => all.filter((node) => node.row === row).sort((a, b) => a.start - b.start);
  if (event.key === "End") return choose(inRow(map.rows - 1)[0].id);
  if (!here || event.key === "Home") return choose(inRow(0)[0].id);
  if (event.key === "ArrowLeft") return choose(here.above?.id ?? here.id);
  if (event.key === "ArrowRight") return choose(here.children[0]?.id ?? here.id);
  const row = Math.max(0, Math.min(map.rows - 1, here.row + (event.key === "ArrowUp" ? -1 : 1)));
  const near = inRow(row).sort((a, b) => Math.abs(a.end - here.end) - Math.abs(b.end - here.end));
  choose(near[0].id);
}

function point(event) {
  const box = $("map").getBoundingClientRect(),
    width = $("scroll").clientWidth;
  const row = Math.floor((event.clientY - box.top + $("scroll").scrollTop - AXIS) / map.height);
  const share = (event.clientX - box.left - LEFT) / (width - LEFT - RIGHT);
  const found = [...map.nodes.values()].find(
    (node) => node.row === row && share >= map.scale.at(node.start) && share <= map.scale.at(node.end) + 0.008,
  );
  if ((found?.id ?? null) === map.hover) return;
  map.hover = found?.id ?? null;
  tell();
  draw();
}

function linkIs(state, text) {
  $("link").className = `link ${state}`;
  if ($("link").textContent !== text) $("link").textContent = text;
}

/** Follow the server's pictures for ever; a stream that ends is asked for again. */
async function watch() {
  for (;;) {
    let pause = 200;
    try {
      const stream = await ask("/ui/events");
      linkIs("live", "live");
      for await (const data of events(stream)) takePicture(JSON.parse(data));
    } catch (error) {
      linkIs("lost", error.status === 401 ? "needs a key" : "not reached");
      pause = 2000;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

// ---------------------------------------------------------------- start

const IDEAS = ["What is a prefix cache?", "Why are there so few dots?", "Write a function that adds two numbers."];

function start() {
  loadSettings();
  const light = matchMedia("(prefers-color-scheme: light)");
  const known = store("browser", "theme");
  document.documentElement.dataset.theme = known || (light.matches ? "light" : "dark");
  light.addEventListener("change", () => {
    if (!store("browser", "theme")) {
      document.documentElement.dataset.theme = light.matches ? "light" : "dark";
      readColours();
      draw();
    }
  });
  readColours();
  for (const idea of IDEAS)
    $("ideas").append(
      make(
        "button",
        {
          type: "button",
          onclick: () => {
            $("prompt").value = idea;
            send();
          },
        },
        idea,
      ),
    );

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("input", grow);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("stop").addEventListener("click", () => chat.abort?.abort());
  $("new").addEventListener("click", newChat);
  $("open-settings").addEventListener("click", () => openSettings());
  $("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "light" ? "dark" : "light"),
  );
  $("settings-form").addEventListener("submit", (event) => {
    if (toolsOfSettings() === null) event.preventDefault();
  });
  $("settings").addEventListener("close", () => {
    saveSettings();
    findModel();
  });
  $("map").addEventListener("keydown", walk);
  $("map").addEventListener("pointermove", point);
  $("map").addEventListener("pointerleave", () => {
    map.hover = null;
    if (map.picture) tell();
    draw();
  });
  $("scroll").addEventListener("scroll", draw, { passive: true });
  $("table-fold").addEventListener("toggle", () => {
    if (map.picture) showTable();
  });
  new ResizeObserver(draw).observe($("scroll"));
  document.addEventListener("keydown", (event) => {
    const writes = ["TEXTAREA", "INPUT", "SELECT"].includes(document.activeElement?.tagName);
    if (event.key === "Escape" && chat.abort && !$("settings").open) chat.abort.abort();
    else if (event.key === "/" && !writes && !$("settings").open) {
      event.preventDefault();
      $("prompt").focus();
    } else if (event.altKey && event.code === "KeyN") {
      event.preventDefault();
      newChat();
    } else if (event.altKey && event.code === "KeyS") {
      event.preventDefault();
      openSettings();
    }
  });
  setInterval(() => {
    if (map.picture && !document.hidden) {
      tell();
      draw();
    }
  }, 1000);
  findModel();
  watch();
  draw();
}

start();
