// Draws a step's token tree by the rules of the figure in how-it-works.md. A token stands at its position. The window's
// rows go down from the root's line, the guesses' paths go up. A ring marks the tokens whose logits are needed.

import { svg } from "./dom.js";

const [LEFT, PITCH, LANE, TOP, CHIP] = [70, 112, 48, 40, 28];
const LONGEST = 10; // characters of a token that are shown

/** What the drawing needs to know of each node: {token, parent, depth, lane, kind, row, needed, accepted, children}. */
export function nodesOf(tree) {
  const { columns, rows } = tree.window;
  const branch = columns * rows || 1; // the root and the window stand first
  const nodes = tree.tokens.map((token, number) => {
    const row = number < branch && columns ? Math.floor(number / columns) : 0;
    const kind = number === 0 ? "root" : number < branch ? "window" : "guess";
    const needed = kind !== "window" || row === rows - 1; // of the window, only the newest row
    const [parent, source] = [tree.parents[number], tree.sources[number]];
    return { number, token, parent, source, kind, row, needed, children: [] };
  });
  const path = new Set(tree.path);
  for (const node of nodes) {
    const parent = nodes[node.parent];
    node.depth = parent ? parent.depth + 1 : 0;
    node.accepted = path.has(node.number);
    parent?.children.push(node);
  }
  lanes(nodes);
  return nodes;
}

/** The last node of the accepted path, or the root if nothing was accepted. The model's own token comes after it. */
function endOf(nodes) {
  return nodes.findLast((node) => node.accepted) ?? nodes[0];
}

/**
 * A line per node: the window's rows from 0 down, the guesses' paths from -1 up, the accepted path first of all. The
 * model's own token goes on in the line of the accepted path; without one it has line -1.
 */
function lanes(nodes) {
  const end = endOf(nodes);
  let free = end === nodes[0] ? -2 : -1;
  const layOut = (node) => {
    const guesses = node.children.filter((child) => child.kind === "guess");
    guesses.sort((one, other) => other.accepted - one.accepted || one.number - other.number);
    guesses.forEach((guess, index) => {
      guess.lane = index === 0 && node.kind === "guess" && node !== end ? node.lane : free;
      free = Math.min(free, guess.lane - 1);
      layOut(guess);
    });
  };
  for (const node of nodes) if (node.kind !== "guess") node.lane = node.row;
  layOut(nodes[0]);
}

/** The nodes that a node sees: its ancestors and itself, the root first. */
export function seenBy(nodes, node) {
  const seen = [];
  for (let one = node; one; one = nodes[one.parent]) seen.unshift(one);
  return seen;
}

/** How a token is written where spaces and line breaks must be visible. */
export function spelled(token, most = Infinity) {
  const shown = token.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·");
  return shown.length > most ? `${shown.slice(0, most - 1)}…` : shown || "∅";
}

/**
 * The picture of a step's tree. `target` is the model's own token after the accepted path. `pointed(node)` is called
 * when a node is pointed at or reached with the arrow keys, and with null when none is.
 */
export function drawTree(nodes, target, pointed) {
  const end = endOf(nodes);
  const own = { depth: end.depth + 1, lane: end === nodes[0] ? -1 : end.lane };
  const highest = Math.min(own.lane, ...nodes.map((node) => node.lane));
  const lowest = Math.max(...nodes.map((node) => node.lane));
  const deepest = Math.max(own.depth, ...nodes.map((node) => node.depth));
  const spot = (depth, lane) => [LEFT + PITCH * depth, TOP + LANE * (lane - highest)];
  const [width, bottom] = [LEFT + PITCH * deepest + 70, TOP + LANE * (lowest - highest) + 34];
  const height = bottom + 40;
  const picture = svg("svg", { class: "tree", viewBox: `0 0 ${width} ${height}`, width, height, role: "group" });
  picture.setAttribute("aria-label", `The step's tree of ${nodes.length} tokens. Move with the arrow keys.`);
  for (let depth = 0; depth <= deepest; depth += 1) {
    const [x] = spot(depth, 0);
    picture.append(svg("line", { class: "grid", x1: x, y1: TOP - 20, x2: x, y2: bottom }));
    picture.append(svg("text", { class: "axis", x, y: bottom + 22 }, depth ? `p+${depth}` : "p"));
  }
  const edge = (from, to, classes) => {
    const [[x1, y1], [x2, y2]] = [spot(from.depth, from.lane), spot(to.depth, to.lane)];
    return svg("line", { class: `edge ${classes}`, x1, y1, x2, y2 });
  };
  for (const node of nodes) {
    if (node.parent >= 0) {
      node.edge = edge(nodes[node.parent], node, `${classOf(node)}${node.accepted ? " accepted" : ""}`);
      picture.append(node.edge);
    }
  }
  picture.append(edge(end, own, "target accepted"));
  for (const node of nodes) picture.append(chip(node, spot(node.depth, node.lane)));
  picture.append(targetChip(target, spot(own.depth, own.lane)));
  listen(picture, nodes, pointed);
  return picture;
}

function classOf(node) {
  return node.kind === "window" ? `row${Math.min(node.row, 2)}` : node.kind;
}

function chip(node, [x, y]) {
  const label = spelled(node.token, LONGEST);
  const wide = widthOf(label);
  const group = svg("g", { class: `node ${classOf(node)}${node.accepted ? " accepted" : ""}`, role: "img" });
  group.dataset.node = node.number;
  group.setAttribute("tabindex", node.number === 0 ? "0" : "-1");
  if (node.needed) group.append(box("ring", x, y, wide + 8, CHIP + 8, 9));
  group.append(box("face", x, y, wide, CHIP, 6));
  group.append(svg("text", { class: "word", x, y: y + 5 }, label));
  node.element = group;
  return group;
}

function targetChip(target, [x, y]) {
  const label = spelled(target, LONGEST);
  const face = box("face", x, y, widthOf(label), CHIP, 6);
  const word = svg("text", { class: "word", x, y: y + 5 }, label);
  const group = svg("g", { class: "node target", role: "img" }, face, word);
  group.setAttribute("aria-label", `The model's own token: ${target}`);
  return group;
}

/** A rounded box around a point. */
function box(name, x, y, width, height, rx) {
  return svg("rect", { class: name, x: x - width / 2, y: y - height / 2, width, height, rx });
}

function widthOf(label) {
  return Math.max(36, label.length * 8.6 + 18);
}

/** Pointer and arrow keys: left to the parent, right to the first child, up and down along a position. */
function listen(picture, nodes, pointed) {
  const nodeOf = (target) => {
    const group = target.closest("[data-node]");
    return group ? nodes[Number(group.dataset.node)] : null;
  };
  picture.addEventListener("pointerover", (event) => {
    const node = nodeOf(event.target);
    if (node) pointed(node);
  });
  picture.addEventListener("pointerleave", () => pointed(null));
  picture.addEventListener("focusin", (event) => pointed(nodeOf(event.target)));
  picture.addEventListener("keydown", (event) => {
    const node = nodeOf(event.target);
    const next = node && neighbour(nodes, node, event.key);
    if (!next) return;
    event.preventDefault();
    node.element.setAttribute("tabindex", "-1");
    next.element.setAttribute("tabindex", "0");
    next.element.focus();
  });
}

function neighbour(nodes, node, key) {
  if (key === "ArrowLeft") return nodes[node.parent];
  if (key === "ArrowRight") return node.children.find((child) => child.accepted) ?? node.children[0];
  const side = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!side) return null;
  const column = nodes.filter((one) => one.depth === node.depth && (one.lane - node.lane) * side > 0);
  return column.sort((one, other) => Math.abs(one.lane - node.lane) - Math.abs(other.lane - node.lane))[0];
}
