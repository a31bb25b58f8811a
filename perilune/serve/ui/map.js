// The cache, drawn.

import { $, calm } from "./page.js";
import { APPEAR, AXIS, FLASH, LEFT, OLD, RIGHT, map } from "./tree.js";

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

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) map.colours[name] = style.getPropertyValue(`--${name}`).trim();
}

const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
const mix = (a, b, share) =>
  `rgb(${rgb(a)
    .map((x, i) => Math.round(x + (rgb(b)[i] - x) * share))
    .join(" ")})`;

export function draw() {
  map.frame ||= requestAnimationFrame(paintMap);
}

export function paintMap() {
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
