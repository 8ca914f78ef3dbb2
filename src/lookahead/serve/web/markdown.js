// Markdown as elements, for untrusted text: what a model writes can become emphasis, lists, tables, code
// and links, and never markup or script. HTML in the text is shown as it was written.
//
// Every piece of shown text is a range of the source, given to `emit(parent, from, to)`. So the caller knows where a
// piece came from, and can tint it by the step that gave it. A line is a range [from, to) of the source, too; what
// stands in a quote or a list has lines that begin further to the right.

import { drawCode, fillCode } from "./code.js";
import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /^\[([^[\]]*)\]\(\s*(https?:\/\/[^\s()<>]+|mailto:[^\s()<>]+)\s*\)/i;
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const DEEPEST = 12; // levels of lists and quotes

/**
 * The blocks of a text: [{from, to, render(emit)}]. A block that more text cannot change keeps its range. A block of
 * code also has `begin(emit)`, which draws it, and `grow(drawn, emit)`, which brings what was drawn up to this text.
 */
export function blocksOf(source) {
  const lines = [];
  for (let from = 0; from <= source.length; ) {
    const end = source.indexOf("\n", from);
    const to = end < 0 ? source.length : end;
    lines.push([from, to]);
    from = to + 1;
  }
  return parse(source, lines, 0);
}

function parse(source, lines, depth) {
  const text = ([from, to]) => source.slice(from, to);
  const blocks = [];
  let at = 0;
  const add = (end, render) => {
    blocks.push({ from: lines[at][0], to: lines[end - 1][1], render });
    at = end;
  };
  while (at < lines.length) {
    const line = text(lines[at]);
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      let end = at + 1;
      while (end < lines.length && !closes(text(lines[end]), fence[1])) end += 1;
      const inner = lines.slice(at + 1, end);
      const language = fence[2];
      add(Math.min(end + 1, lines.length), (emit) => drawCode(source, inner, language, emit).element);
      const top = blocks[blocks.length - 1];
      top.code = language; // at the top level a block of code can grow where it stands
      top.begin = (emit) => drawCode(source, inner, language, emit);
      top.grow = (drawn, emit) => fillCode(drawn, source, inner, emit);
    } else if (heading) {
      const [from, to] = lines[at];
      const level = Math.min(heading[1].length + 2, 6); // the page has h1 and h2 of its own
      add(at + 1, (emit) => inline(el(`h${level}`), source, [[from + heading[0].length, to]], emit));
    } else if (RULE.test(line)) {
      add(at + 1, () => el("hr"));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const end = run(lines, at, (one) => QUOTE.test(text(one)));
      const inner = lines.slice(at, end).map(([from, to]) => [from + QUOTE.exec(source.slice(from, to))[0].length, to]);
      add(end, (emit) => children(el("blockquote"), parse(source, inner, depth + 1), emit));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      const [end, items] = listItems(source, lines, at);
      const ordered = /\d/.test(ITEM.exec(line)[2]);
      const first = ordered ? Number.parseInt(ITEM.exec(line)[2], 10) : null;
      add(end, (emit) => {
        const list = el(ordered ? "ol" : "ul", first > 1 ? { start: first } : {});
        for (const item of items) list.append(children(el("li"), parse(source, item, depth + 1), emit, true));
        return list;
      });
    } else if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(text(lines[at + 1]))) {
      const end = run(lines, at + 2, (one) => text(one).includes("|"));
      const rows = [lines[at], ...lines.slice(at + 2, end)];
      add(end, (emit) => table(source, rows, emit));
    } else {
      const end = run(lines, at + 1, (one) => text(one).trim() && !begins(text(one)));
      const inner = lines.slice(at, end);
      add(end, (emit) => inline(el("p"), source, inner, emit));
    }
  }
  return blocks;
}

/** The first line from `at` on that does not belong. */
function run(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end])) end += 1;
  return end;
}

/** Whether a line ends the paragraph above it. */
function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || RULE.test(line);
}

function closes(line, fence) {
  const found = line.trim();
  return found.length >= fence.length && found === fence[0].repeat(found.length);
}

/** The items of the list that begins at a line, each as its own lines, and the first line after the list. */
function listItems(source, lines, start) {
  const items = [];
  const [, margin, mark] = ITEM.exec(source.slice(...lines[start]));
  const kind = /\d/.test(mark) ? "digit" : mark;
  let width = 0;
  let at = start;
  while (at < lines.length) {
    const [from, to] = lines[at];
    const line = source.slice(from, to);
    const found = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    if (found && found[1].length <= margin.length + 1 && (/\d/.test(found[2]) ? "digit" : found[2]) === kind) {
      width = found[0].length;
      items.push([[from + width, to]]);
    } else if (items.length && line.trim() && indent > margin.length) {
      items[items.length - 1].push([from + Math.min(indent, width), to]);
    } else if (!line.trim() && belongsLater(source, lines, at, margin.length, kind)) {
      items[items.length - 1].push([to, to]);
    } else {
      break;
    }
    at += 1;
  }
  return [at, items];
}

/** Whether the line after an empty one still belongs to the list. */
function belongsLater(source, lines, at, margin, kind) {
  const next = lines[at + 1] && source.slice(...lines[at + 1]);
  if (!next?.trim()) return false;
  const found = ITEM.exec(next);
  if (found && found[1].length <= margin + 1) return (/\d/.test(found[2]) ? "digit" : found[2]) === kind;
  return next.length - next.trimStart().length > margin;
}

/** Append blocks to an element. In a list, a paragraph alone is shown without its own margins. */
function children(parent, blocks, emit, tight = false) {
  for (const block of blocks) {
    const made = block.render(emit);
    if (tight && blocks[0] === block && made.tagName === "P") parent.append(...made.childNodes);
    else parent.append(made);
  }
  return parent;
}

function table(source, lines, emit) {
  const rows = lines.map((line) => cells(source, line));
  const width = rows[0].length;
  const cell = (range, tag) => inline(el(tag), source, [range], emit);
  const row = (ranges, tag) => el("tr", {}, ...ranges.slice(0, width).map((one) => cell(one, tag)));
  const body = rows.slice(1).map((one) => row(one, "td"));
  const made = el("table", {}, el("thead", {}, row(rows[0], "th")), el("tbody", {}, ...body));
  return el("div", { class: "table" }, made);
}

function cells(source, [from, to]) {
  const found = [];
  let start = from;
  for (let at = from; at <= to; at += 1) {
    if (at === to || (source[at] === "|" && source[at - 1] !== "\\")) {
      found.push(trimmed(source, start, at));
      start = at + 1;
    }
  }
  if (found.length && found[0][0] === found[0][1]) found.shift(); // the line begins with |
  if (found.length && found[found.length - 1][0] === found[found.length - 1][1]) found.pop();
  return found;
}

function trimmed(source, from, to) {
  while (from < to && source[from] === " ") from += 1;
  while (to > from && source[to - 1] === " ") to -= 1;
  return [from, to];
}

/** Append the text of some lines, with emphasis, code and links. Returns the parent. */
function inline(parent, source, lines, emit) {
  const starts = []; // where each line begins in the joined text, and in the source
  let joined = "";
  for (const [from, to] of lines) {
    const line = source.slice(from, to);
    const skip = line.length - line.trimStart().length;
    starts.push([joined.length, from + skip]);
    joined += `${line.slice(skip)}\n`;
  }
  joined = joined.slice(0, -1);
  const show = (into, from, to) => {
    for (let at = from; at < to; ) {
      const line = starts.findLastIndex(([start]) => start <= at);
      const end = Math.min(to, starts[line + 1]?.[0] ?? joined.length);
      const shift = starts[line][1] - starts[line][0];
      emit(into, at + shift, end + shift);
      at = end;
    }
  };
  spans(parent, joined, 0, joined.length, show);
  return parent;
}

/** The spans of text[from:to]. `show(parent, from, to)` appends plain text. */
function spans(parent, text, from, to, show) {
  let plain = from;
  let at = from;
  const put = (element, fill, end) => {
    show(parent, plain, at);
    fill(element);
    parent.append(element);
    at = plain = end;
  };
  while (at < to) {
    if (text[at] === "\\" && at + 1 < to && /[\\`*_~[\](){}#+\-.!|<>]/.test(text[at + 1])) {
      show(parent, plain, at);
      plain = at + 1;
      at += 2;
      continue;
    }
    if (text[at] === "`") {
      const ticks = /^`+/.exec(text.slice(at, to))[0];
      const end = closing(text, at + ticks.length, to, ticks);
      if (end > 0) {
        const begin = at + ticks.length;
        put(el("code"), (made) => show(made, begin, end), end + ticks.length);
        continue;
      }
      at += ticks.length;
      continue;
    }
    const link = text[at] === "[" ? LINK.exec(text.slice(at, to)) : null;
    if (link) {
      const begin = at + 1;
      const made = el("a", { href: link[2], target: "_blank", rel: "noopener noreferrer" });
      put(made, (into) => spans(into, text, begin, begin + link[1].length, show), at + link[0].length);
      continue;
    }
    const found = MARKS.find(([mark]) => text.startsWith(mark, at) && at + mark.length < to);
    const end = found ? emphasisEnd(text, at, to, found[0]) : -1;
    if (end > 0) {
      const begin = at + found[0].length;
      put(el(found[1]), (made) => spans(made, text, begin, end, show), end + found[0].length);
      continue;
    }
    at += found ? found[0].length : 1;
  }
  show(parent, plain, Math.min(at, to));
}

/** Where exactly these backticks come again, or -1. */
function closing(text, from, to, ticks) {
  for (let at = text.indexOf(ticks, from); at >= 0 && at + ticks.length <= to; at = text.indexOf(ticks, at + 1)) {
    if (text[at - 1] !== "`" && text[at + ticks.length] !== "`") return at;
  }
  return -1;
}

/** Where the emphasis that a mark begins ends, or -1 if it begins none. */
function emphasisEnd(text, at, to, mark) {
  const begin = at + mark.length;
  const inWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? " ");
  if (inWord || /\s/.test(text[begin] ?? " ")) return -1;
  const find = (from) => text.indexOf(mark, from);
  for (let end = find(begin + 1); end >= 0 && end + mark.length <= to; end = find(end + 1)) {
    const after = text[end + mark.length] ?? " ";
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    if (mark[0] === "_" && /\w/.test(after)) continue;
    if (mark.length === 1 && (after === mark || text[end - 1] === mark)) continue;
    return end;
  }
  return -1;
}
