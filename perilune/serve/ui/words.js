// The cache in words: numbers, requests, what the pointer or the arrow keys choose.

import { draw } from "./map.js";
import { $, ago, make, number, size } from "./page.js";
import { AXIS, LEFT, RIGHT, map } from "./tree.js";

const RESTS = ["waiting", "parked", "remote"];

export function showNumbers() {
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

export function tell() {
  const node = map.nodes.get(map.hover ?? map.chosen);
  const newest = map.picture.starts.at(-1);
  const text = node
    ? describe(node)
    : newest
      ? `Newest request: ${number(newest.cached)} of ${number(newest.prompt)} prompt tokens came from the cache.`
      : "Arrow keys or the pointer tell more about a prefix.";
  if ($("readout").textContent !== text) $("readout").textContent = text;
}

export function showTable() {
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

export function walk(event) {
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

export function point(event) {
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
