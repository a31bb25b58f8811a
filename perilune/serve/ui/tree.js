// The cache: from the server's pictures to rows.

export const LEFT = 14,
  RIGHT = 20,
  AXIS = 26,
  FLASH = 1600,
  APPEAR = 450,
  OLD = 600;
export const map = {
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

export function takePicture(picture) {
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

export function pathOf(id) {
  const path = [];
  for (let node = map.nodes.get(id); node; node = node.above) path.unshift(node.id);
  return path;
}
