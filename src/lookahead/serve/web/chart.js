// A small chart over time: steps from look to look, one line per series, with its scale in words.

import { el, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [600, 120];

/**
 * A card with a chart. `series` are {name, spans: [[from, to, value or null]]}. `range` is the time from left to right in
 * seconds, `format` writes a value.
 */
export function chart(title, series, range, format) {
  const values = series.flatMap((one) => one.spans.map((span) => span[2])).filter((value) => value > 0);
  const top = niceAbove(Math.max(0, ...values));
  const x = (time) => (WIDTH * (time - range[0])) / (range[1] - range[0] || 1);
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 8) * value) / top;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  picture.setAttribute("aria-label", `${title}: ${series.map((one) => spoken(one, format)).join("; ")}`);
  for (const share of [0, 0.5, 1]) {
    picture.append(svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: y(top * share), y2: y(top * share) }));
  }
  series.forEach((one, index) => {
    const inRange = one.spans.filter((span) => span[1] > range[0]);
    picture.append(svg("path", { class: `curve c${index}`, d: outline(inRange, x, y) }));
  });
  const keys = series.map((one, index) =>
    el("li", {}, el("i", { class: `key c${index}` }), ` ${one.name} `, el("b", {}, format(lastOf(one)))),
  );
  const scale = el("div", { class: "scale", "aria-hidden": "true" }, el("span", {}, format(top)), el("span", {}, "0"));
  const ago = `${Math.round((range[1] - range[0]) / 60)} min ago`;
  const times = el("div", { class: "times", "aria-hidden": "true" }, el("span", {}, ago), el("span", {}, "now"));
  const head = [el("h2", {}, title), el("ul", { class: "chart-keys" }, ...keys)];
  return el("article", { class: "card chart" }, ...head, el("div", { class: "plot" }, scale, picture), times);
}

/** A path of level lines, joined where one follows the other. */
function outline(spans, x, y) {
  let path = "";
  let end = null;
  for (const [from, to, value] of spans) {
    if (value === null) {
      end = null;
      continue;
    }
    const left = Math.max(0, x(from)).toFixed(1);
    path += `${end === from ? "L" : "M"}${left} ${y(value).toFixed(1)}H${x(to).toFixed(1)}`;
    end = to;
  }
  return path;
}

function lastOf({ spans }) {
  return spans.at(-1)?.[2] ?? null;
}

function spoken(one, format) {
  const values = one.spans.map((span) => span[2]).filter((value) => value !== null);
  if (!values.length) return `${one.name}, none yet`;
  const now = lastOf(one);
  return `${one.name}, ${now === null ? "none now" : `now ${format(now)}`}, highest ${format(Math.max(...values))}`;
}

/** 1, 2 or 5 times a power of ten, not below a number. */
export function niceAbove(number) {
  if (!(number > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(number));
  return power * [1, 2, 5, 10].find((step) => step * power >= number * 0.9999);
}
