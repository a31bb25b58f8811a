// The page of a Perilune server: a conversation on one side, the prefix cache on the other.
// Nothing is loaded from elsewhere.

import { chat, findModel, grow, newChat, openSettings, send } from "./chat.js";
import { ask, events } from "./connection.js";
import { draw, readColours } from "./map.js";
import { $, make } from "./page.js";
import { loadSettings, saveSettings, store, toolsOfSettings } from "./settings.js";
import { map, takePicture } from "./tree.js";
import { point, showNumbers, showTable, tell, walk } from "./words.js";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  store("browser", "theme", name);
  readColours();
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
      for await (const data of events(stream)) {
        takePicture(JSON.parse(data));
        showNumbers();
        draw();
      }
    } catch (error) {
      linkIs("lost", error.status === 401 ? "needs a key" : "not reached");
      pause = 2000;
    }
    await new Promise((done) => setTimeout(done, pause));
  }
}

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
