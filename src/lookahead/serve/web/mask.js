// The attention mask of a step: row = the token that looks, column = what it may see, the text so far among it.

import { svg } from "./dom.js";
import { seenBy, spelled } from "./tree.js";

const [PITCH, LEFT, TOP, PREFIX] = [16, 96, 84, 3];

/** The picture of who sees whom among a step's nodes. */
export function drawMask(nodes) {
  const size = nodes.length;
  const width = LEFT + PITCH * (PREFIX + size) + 24;
  const height = TOP + PITCH * size + 16;
  const picture = svg("svg", { class: "mask", viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
  picture.setAttribute("aria-label", "Who sees whom: every token sees the text so far, its ancestors and itself.");
  const squares = new Map(); // a colour's class -> the outline of its squares: one element each, not thousands
  const put = (name, column, row) => {
    const from = `M${LEFT + PITCH * column + 1} ${TOP + PITCH * row + 1}`;
    squares.set(name, `${squares.get(name) ?? ""}${from}h${PITCH - 2}v${PITCH - 2}h${2 - PITCH}z`);
  };
  nodes.forEach((node, row) => {
    const seen = new Set(seenBy(nodes, node));
    for (let column = 0; column < PREFIX; column += 1) put("prefix", column, row);
    nodes.forEach((other, column) => put(seen.has(other) ? colour(other) : "unseen", PREFIX + column, row));
    const y = TOP + PITCH * row + 12;
    const x = LEFT + PITCH * (PREFIX + row) + 8;
    const [word, look] = [spelled(node.token, 9), { class: `label ${colour(node)}` }];
    const turned = { transform: `rotate(-60 ${x} ${TOP - 6})` };
    picture.append(svg("text", { ...look, x: LEFT - 8, y, "text-anchor": "end" }, word));
    picture.append(svg("text", { ...look, x, y: TOP - 6, ...turned }, word));
  });
  picture.append(svg("text", { class: "label prefix", x: LEFT, y: TOP - 8 }, "text"));
  for (const [name, outline] of squares) picture.append(svg("path", { class: name, d: outline }));
  return picture;
}

function colour(node) {
  return node.kind === "window" ? `row${Math.min(node.row, 2)}` : node.kind;
}
