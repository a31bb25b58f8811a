// Requests to the server and its streams of events.

import { $ } from "./page.js";

export class Refused extends Error {}

export async function ask(path, options = {}) {
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
export async function* events(answer) {
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
