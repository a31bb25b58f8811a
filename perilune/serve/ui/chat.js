// The conversation: an answer while it comes, calls of tools, what may be sent back.

import { Refused, ask, events } from "./connection.js";
import { $, make, number } from "./page.js";
import { toolsOfSettings } from "./settings.js";

export const chat = { messages: [], model: null, abort: null };

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
  else if (note && messages === chat.messages && messages.at(-1)?.role === "user" && !$("prompt").value)
    takeBack(messages);
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

export function send() {
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

export function newChat() {
  chat.abort?.abort();
  chat.messages = [];
  for (const turn of [...$("log").querySelectorAll(".turn")]) turn.remove();
  $("empty").hidden = false;
  $("prompt").focus();
}

export function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

export function openSettings(field) {
  if (!$("settings").open) $("settings").showModal();
  field?.focus();
}

export async function findModel() {
  try {
    const answer = await (await ask("/v1/models")).json();
    chat.model = answer.data[0].id;
    $("model").textContent = chat.model;
  } catch (error) {
    $("model").textContent = error.status === 401 ? "needs a key" : "no answer";
    if (error.status === 401) openSettings($("key"));
  }
}
