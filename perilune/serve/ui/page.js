// Elements and words of the page. Text of the model becomes text nodes only.

export const $ = (id) => document.getElementById(id);
export const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** An element: make("p", {class: "x", onclick: f}, "text", child). */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const number = (value) => Math.round(value).toLocaleString("en");

export function size(bytes) {
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

export function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}
