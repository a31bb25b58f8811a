// Drives the page in Chromium: node ui_browser.mjs PLAYWRIGHT_FOLDER CHROMIUM URL SCENARIO [KEY].
// Exits with 1 on a failure.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, chromiumPath, url, scenario, key] = process.argv.slice(2);
const { chromium } = createRequire(`${folder}/`)("playwright-core");
const browser = await chromium.launch({ executablePath: chromiumPath, args: ["--no-sandbox"] });
const problems = [];

async function open(options = {}) {
  const page = await browser.newPage({ viewport: { width: 1280, height: 820 }, colorScheme: "dark", ...options });
  page.setDefaultTimeout(30_000);
  page.on("console", (message) => {
    if (message.type() === "error") problems.push(message.text());
  });
  page.on("pageerror", (error) => problems.push(String(error)));
  await page.goto(`${url}/ui/`);
  return page;
}

async function settings(page, fields) {
  await page.keyboard.press("Alt+s");
  for (const [id, value] of Object.entries(fields)) {
    if (typeof value === "boolean") await page.setChecked(`#${id}`, value);
    else await page.fill(`#${id}`, value);
  }
  await page.click("#settings-form button[type=submit]");
  await page.waitForSelector("#settings:not([open])", { state: "attached" });
}

const idle = (page) => page.waitForSelector("#send:not([hidden])");
const live = (page) => page.waitForSelector("#link.live");

/** An answer of our own making instead of the server's. */
async function scripted(page, deltas) {
  const chunks = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta }] })}\n\n`);
  await page.route(
    "**/v1/chat/completions",
    (route) => {
      scripted.asked = route.request().postDataJSON();
      route.fulfill({ contentType: "text/event-stream", body: `${chunks.join("")}data: [DONE]\n\n` });
    },
    { times: 1 },
  );
}

const scenarios = {
  async conversation() {
    const page = await open();
    await live(page);
    assert.equal(await page.textContent("#model"), "tiny");
    await settings(page, { "max-tokens": "24", temperature: "0" });
    await page.keyboard.press("/");
    assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
    await page.keyboard.type("A first message that is long enough to be kept in the cache, said twice: ".repeat(2));
    await page.keyboard.press("Enter");
    await page.waitForSelector(".turn.assistant[aria-busy=false]");
    const thought = page.locator(".turn.assistant .fold.think");
    assert.equal(await thought.getAttribute("open"), null, "thinking is folded");
    await thought.locator("summary").focus();
    await page.keyboard.press("Enter");
    assert.equal(await thought.getAttribute("open"), "", "and unfolds by key");
    assert.match(await page.textContent(".turn.assistant .facts"), /read.*written/);
    await page.fill("#prompt", "And a second one.");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".facts .gain");
    assert.match(await page.textContent(".facts .gain"), /\d+ from the cache/);
    await page.waitForFunction(() =>
      /[1-9]\d* cached path/.test(document.getElementById("map").getAttribute("aria-label")),
    );
    await page.waitForFunction(() => Number(document.getElementById("t-saved").textContent.replace(/\D/g, "")) >= 64);
    // The map tells by key what it shows by colour.
    await page.focus("#map");
    await page.keyboard.press("Home");
    await page.waitForFunction(() =>
      /Row 1: tokens 0 to \d+.*device/.test(document.getElementById("readout").textContent),
    );
    await page.keyboard.press("ArrowRight");
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("Escape");
    await page.click("#table-fold summary");
    await page.waitForSelector("#rows tr");
    await page.keyboard.press("Alt+n");
    assert.equal(await page.locator(".turn").count(), 0);
  },

  async stop() {
    const page = await open();
    await settings(page, { "max-tokens": "20000" });
    await page.fill("#prompt", "Never end.");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".turn.assistant .fold:not([hidden])");
    await page.waitForSelector("#running .way");
    await page.keyboard.press("Escape");
    await idle(page);
    assert.match(await page.textContent(".turn.assistant .facts"), /stopped/);
    await page.waitForFunction(() => document.getElementById("t-running").textContent === "0 / 0", null, {
      timeout: 10_000,
    });
    await page.fill("#prompt", "Again.");
    await page.click("#send");
    await page.waitForSelector(".turn.assistant[aria-busy=true] .fold:not([hidden])");
    await page.click("#stop");
    await idle(page);
    // A new conversation begun in the middle of an answer has nothing of the old one.
    await page.fill("#prompt", "Once more.");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".turn.assistant[aria-busy=true] .fold:not([hidden])");
    await page.keyboard.press("Alt+n");
    await idle(page);
    await scripted(page, [{ content: "Hello." }]);
    await page.fill("#prompt", "First.");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".turn.assistant[aria-busy=false]");
    assert.deepEqual(scripted.asked.messages, [{ role: "user", content: "First." }]);
  },

  async refused() {
    const page = await open();
    await settings(page, { "max-tokens": "900000000" });
    await page.fill("#prompt", "Too much.");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".facts .error");
    assert.match(await page.textContent(".facts .error"), /max_tokens is 900000000; allowed/);
    assert.equal(await page.inputValue("#prompt"), "Too much.", "the message is not lost");
    assert.equal(await page.locator(".turn.user").count(), 0);
    problems.splice(0, problems.length, ...problems.filter((text) => !text.includes("400")));
  },

  async tools() {
    const page = await open();
    const tool = {
      type: "function",
      function: { name: "look", parameters: { type: "object", properties: { at: { type: "string" } } } },
    };
    await settings(page, { tools: JSON.stringify([tool]) });
    await scripted(page, [
      { reasoning_content: "I must look." },
      { tool_calls: [{ index: 0, id: "a", function: { name: "look", arguments: "" } }] },
      { tool_calls: [{ index: 0, function: { arguments: '{"at": "the ' } }] },
      { tool_calls: [{ index: 0, function: { arguments: 'moon"}' } }] },
    ]);
    await page.fill("#prompt", "Look.");
    await page.keyboard.press("Enter");
    await page.waitForSelector("form.results textarea");
    assert.deepEqual(scripted.asked.tools, [tool]);
    const call = page.locator(".fold.call");
    assert.equal(await call.getAttribute("open"), null);
    assert.match(await call.locator("summary").textContent(), /look.*moon/);
    const evil = '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>';
    await scripted(page, [{ content: `${evil} **bold** \`code\`\n\n\`\`\`html\n${evil}\n\`\`\`` }]);
    await page.fill("form.results textarea", "bright");
    await page.click("form.results button");
    await page.waitForSelector(".turn.assistant strong");
    const sent = scripted.asked.messages;
    assert.deepEqual(
      sent.map((m) => m.role),
      ["user", "assistant", "tool"],
    );
    assert.equal(sent[1].reasoning_content, "I must look.");
    assert.equal(sent[1].tool_calls[0].function.arguments, '{"at": "the moon"}');
    assert.deepEqual(sent[2], { role: "tool", tool_call_id: "a", content: "bright" });
    // Text of the model stays text.
    assert.equal(await page.evaluate(() => window.broken), undefined);
    assert.equal(await page.locator(".body img, .body script").count(), 0);
    assert.match(await page.textContent(".body pre code"), /^<img src=x/);
    await page.keyboard.press("Alt+s");
    await page.fill("#tools", "{");
    await page.click("#settings-form button[type=submit]");
    assert.match(await page.textContent("#tools-error"), /Tools/);
    assert.equal(await page.getAttribute("#settings", "open"), "");
  },

  async themes() {
    for (const [scheme, other] of [
      ["dark", "light"],
      ["light", "dark"],
    ]) {
      const page = await open({ colorScheme: scheme });
      const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
      assert.equal(await theme(), scheme);
      const ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      await page.click("#theme");
      assert.equal(await theme(), other);
      assert.notEqual(await page.evaluate(() => getComputedStyle(document.body).backgroundColor), ground);
      await page.reload();
      assert.equal(await theme(), other, "the choice stays");
      await page.close();
    }
  },

  async labels() {
    const page = await open();
    await live(page);
    const nameless = await page.evaluate(() =>
      [...document.querySelectorAll("button, input, select, textarea, canvas, [role]")]
        .filter(
          (e) =>
            !(
              e.textContent.trim() ||
              e.getAttribute("aria-label") ||
              e.getAttribute("aria-labelledby") ||
              e.labels?.length ||
              e.getAttribute("aria-live") ||
              e.getAttribute("role") === "alert"
            ),
        )
        .map((e) => e.outerHTML.slice(0, 80)),
    );
    assert.deepEqual(nameless, []);
    // Everything that can be used is reached by Tab, in the order of the page.
    const reached = [];
    for (let i = 0; i < 20; i += 1) {
      await page.keyboard.press("Tab");
      reached.push(
        await page.evaluate(
          () => document.activeElement.id || document.activeElement.className || document.activeElement.tagName,
        ),
      );
    }
    for (const id of ["skip", "new", "open-settings", "theme", "prompt", "send", "map"])
      assert.ok(reached.includes(id), `${id} in ${reached}`);
    for (const width of [1280, 700, 380]) {
      await page.setViewportSize({ width, height: 800 });
      const wide = await page.evaluate(
        () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
      );
      assert.ok(wide <= 0, `nothing sticks out at ${width}: ${wide}`);
    }
  },

  async many() {
    const page = await open();
    await live(page);
    await page.waitForFunction(
      () => Number(document.getElementById("map").getAttribute("aria-label").match(/^\d+/)?.[0]) >= 200,
    );
    const shape = await page.evaluate(() => ({
      rows: document.getElementById("spacer").offsetHeight,
      drawn: document.getElementById("map").height / (window.devicePixelRatio || 1),
      shown: document.getElementById("scroll").clientHeight,
    }));
    assert.ok(shape.rows > shape.shown, "the map scrolls");
    assert.ok(shape.drawn <= shape.shown + 1, "only what is seen is drawn");
    // Scrolling through all of it, with flashes on every path: a frame must be drawn in a fraction of a second.
    const worst = await page.evaluate(async () => {
      const { map, pathOf } = await import("/ui/tree.js");
      const { paintMap } = await import("/ui/map.js");
      for (const id of map.nodes.keys()) map.flashes.push({ begin: performance.now(), path: pathOf(id), depth: 1e9 });
      let slowest = 0;
      for (let at = 0; at < document.getElementById("spacer").offsetHeight; at += 200) {
        document.getElementById("scroll").scrollTop = at;
        const begin = performance.now();
        paintMap();
        slowest = Math.max(slowest, performance.now() - begin);
        await new Promise((done) => setTimeout(done, 5));
      }
      return slowest;
    });
    assert.ok(worst < 500, `slowest frame ${worst} ms`);
    await page.focus("#map");
    await page.keyboard.press("End");
    assert.ok(
      (await page.evaluate(() => document.getElementById("scroll").scrollTop)) > 0,
      "the selection is scrolled to",
    );
  },

  async key() {
    const page = await open();
    await page.waitForSelector("#settings[open]");
    assert.equal(await page.evaluate(() => document.activeElement.id), "key");
    await page.fill("#key", "wrong");
    await page.click("#settings-form button[type=submit]");
    await page.waitForSelector("#settings[open]");
    await page.fill("#key", key);
    await page.click("#settings-form button[type=submit]");
    await live(page);
    await page.waitForFunction(() => document.getElementById("model").textContent === "tiny");
    await page.reload();
    await live(page);
    assert.equal(
      await page.evaluate(() => JSON.stringify(localStorage).includes("right")),
      false,
      "the key stays in the tab",
    );
    // The refusals that were meant.
    problems.splice(0, problems.length, ...problems.filter((text) => !text.includes("401")));
  },
};

try {
  await scenarios[scenario]();
  assert.deepEqual(problems, [], "nothing in the console, no violation of the content security policy");
} catch (error) {
  console.error(error.message, error.stack);
  process.exitCode = 1;
} finally {
  await browser.close();
}
