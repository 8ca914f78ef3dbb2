// A block of code: its lines, coloured, with a button that copies them. While an answer streams, a block grows line by
// line: lines that are complete stay as they are, so that a long block costs no more per frame than a short one.

import { copyButton, el } from "./dom.js";
import { highlightLine } from "./highlight.js";

const LONGEST = 5000; // characters of a line that is coloured; a longer one is no code that somebody reads

/** The element of a block of code. `lines` are ranges of the source, `emit(parent, from, to)` appends their text. */
export function drawCode(source, lines, language, emit) {
  const inner = el("code", language ? { "data-language": language } : {});
  const element = el("div", { class: "code" });
  const block = { element, inner, language, lines: [], source, ends: [], states: [null] };
  const text = () => block.lines.map((line) => block.source.slice(...line)).join("\n");
  element.append(el("div", { class: "code-bar" }, language, copyButton(text)), el("pre", {}, inner));
  fillCode(block, source, lines, emit);
  return block;
}

/** Bring a block up to a source that begins as before. Only lines that have changed are drawn again. */
export function fillCode(block, source, lines, emit) {
  const { inner, language, ends, states } = block;
  const endOf = ([, to]) => Math.min(to + 1, source.length); // with the line break, where there is one
  let same = 0;
  while (same < ends.length && same < lines.length && ends[same] === endOf(lines[same])) same += 1;
  if (same && same === ends.length) same -= 1; // the last line may have got other steps in the same place
  while (inner.childNodes.length > same) inner.lastChild.remove();
  ends.length = same;
  states.length = same + 1;
  for (const line of lines.slice(same)) {
    const row = el("span", { class: "line" });
    states.push(drawLine(row, source, line[0], endOf(line), language, states.at(-1), emit));
    ends.push(endOf(line));
    inner.append(row);
  }
  Object.assign(block, { source, lines });
}

/** Append a line, and return the state in which the next one begins. */
function drawLine(row, source, from, to, language, begin, emit) {
  const text = source.slice(from, to);
  if (!language || text.length > LONGEST) {
    emit(row, from, to);
    return null;
  }
  const { ranges, state } = highlightLine(text.replace(/\n$/, ""), language, begin);
  let at = from;
  for (const [start, end, kind] of ranges) {
    if (from + start > at) emit(row, at, from + start);
    const part = el("span", { class: `hl-${kind}` });
    emit(part, from + start, from + end);
    row.append(part);
    at = from + end;
  }
  if (to > at) emit(row, at, to);
  return state;
}
