// What a person sets, kept in the browser; the key for as long as the tab.

import { $ } from "./page.js";

const FIELDS = ["system", "thinking", "effort", "temperature", "max-tokens", "tools"];

/** Storage that may be forbidden: then settings last as long as the page. */
export function store(kind, name, value) {
  try {
    const place = kind === "tab" ? sessionStorage : localStorage;
    if (value === undefined) return place.getItem(`perilune.${name}`);
    place.setItem(`perilune.${name}`, value);
  } catch {
    /* private window */
  }
  return null;
}

export function loadSettings() {
  for (const name of FIELDS) {
    const known = store("browser", name),
      field = $(name);
    if (known === null) continue;
    if (field.type === "checkbox") field.checked = known === "true";
    else field.value = known;
  }
  $("key").value = store("tab", "key") || "";
}

export function saveSettings() {
  for (const name of FIELDS)
    store("browser", name, String($(name).type === "checkbox" ? $(name).checked : $(name).value));
  store("tab", "key", $("key").value);
}

/** The declared tools, or null after showing why they cannot be read. */
export function toolsOfSettings() {
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
