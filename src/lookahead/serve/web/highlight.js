// Finds comments, strings, keywords and numbers in a line of code. It returns ranges of the line and makes no element:
// what it does not know stays plain, and no character is lost. Each line is read once, from left to right.

const QUOTES = ['"', "'"];
const C_LIKE = { line: ["//"], open: [["/*", "*/"]], quotes: QUOTES };
const HASH = { line: ["#"], open: [], quotes: QUOTES };

const CONTROL = "break case continue default do else for if return switch while";
const CLASSES =
  "catch class const enum extends false final finally import interface new null package private protected " +
  "public static super this throw true try void";
const SCRIPT =
  `${CONTROL} ${CLASSES} async await debugger delete export from function implements in instanceof let of type ` +
  "typeof undefined var with yield";
const C_WORDS =
  `${CONTROL} ${CLASSES} as async auto await base bool byte char chan consteval constexpr crate decltype defer ` +
  "delete double dyn explicit extern fallthrough float fn foreach friend fun func go goto impl inline int let " +
  "long loop map match mod move mut namespace nil noexcept nullptr object operator override pub range ref " +
  "select self short signed sizeof struct template trait type typedef typename union unsafe unsigned using val " +
  "var virtual volatile when where";
const PYTHON =
  "and as assert async await break case class continue def del elif else except False finally for from global " +
  "if import in is lambda match None nonlocal not or pass raise return True try while with yield";
const SHELL = "case do done elif else esac export fi for function if in local return select set then unset until while";
const RUBY =
  "alias and begin break case class def do else elsif end ensure false for if in module next nil not or redo " +
  "rescue retry return self super then true undef unless until when while yield";
const SQL =
  "add all alter and as asc between by case check column constraint create cross database default delete desc " +
  "distinct drop else end exists false foreign from full group having if in index inner insert into is join key " +
  "left like limit not null offset on or order outer primary references right select set table then true union " +
  "unique update values view when where with";
const LUA =
  "and break do else elseif end false for function goto if in local nil not or repeat return then true until " +
  "while";

const LANGUAGES = [
  ["python py python3", { ...HASH, words: PYTHON, open: [['"""', '"""'], ["'''", "'''"]] }],
  ["javascript js jsx mjs typescript ts tsx", { ...C_LIKE, words: SCRIPT, open: [...C_LIKE.open, ["`", "`"]] }],
  ["c h cpp c++ cc hpp cs csharp c# java kotlin kt swift scala dart php", { ...C_LIKE, words: C_WORDS }],
  ["rust rs zig", { ...C_LIKE, words: C_WORDS, short: true }],
  ["go golang", { ...C_LIKE, words: C_WORDS, open: [...C_LIKE.open, ["`", "`"]], short: true }],
  ["css scss less", { line: [], open: C_LIKE.open, quotes: QUOTES, words: "" }],
  ["bash sh shell zsh console dockerfile makefile", { ...HASH, words: SHELL, apart: true }],
  ["yaml yml toml ini conf", { ...HASH, words: "true false null yes no", apart: true }],
  ["ruby rb perl r elixir julia", { ...HASH, words: RUBY }],
  ["json jsonc json5", { ...C_LIKE, words: "true false null" }],
  ["sql mysql postgresql sqlite", { line: ["--"], open: C_LIKE.open, quotes: QUOTES, words: SQL, anyCase: true }],
  ["lua haskell hs", { line: ["--"], open: [["--[[", "]]"], ["{-", "-}"]], quotes: ['"'], words: LUA }],
  ["html xml svg xhtml vue", { markup: true }],
];
const RULES = new Map();
for (const [names, { words = "", ...rest }] of LANGUAGES) {
  const rules = { ...rest, words: new Set(words.split(" ")) };
  for (const name of names.split(" ")) RULES.set(name, rules);
}

const WORD = /[A-Za-z_$\u0080-\uffff][\w$\u0080-\uffff]*/y;
const NUMBER = /(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*/y;
const CHARACTER = /'(?:[^'\\]|\\[^\s']+|\\')'/y; // in languages where one quote may stand alone, as in Rust's lifetimes
const TAG = /<\/?[A-Za-z][\w:.-]*|<![A-Za-z]+/y;

/**
 * The coloured ranges of a line: {ranges: [[from, to, kind]], state}. `state` is what the next line begins in: null, or
 * {kind, until} of a comment or string that goes on, or {tag: true} in a tag. A language unknown here has no ranges.
 */
export function highlightLine(line, language, state = null) {
  const rules = RULES.get(language.toLowerCase());
  if (!rules) return { ranges: [], state: null };
  return rules.markup ? readMarkup(line, state) : readCode(line, rules, state);
}

function readCode(line, rules, begin) {
  const ranges = [];
  let state = begin;
  let at = 0;
  while (at < line.length) {
    if (state) {
      [at, state] = goOn(line, at, at, state, ranges);
      continue;
    }
    const opens = rules.open.find(([mark]) => line.startsWith(mark, at));
    if (opens) {
      const kind = opens[0] === opens[1] ? "string" : "comment";
      [at, state] = goOn(line, at, at + opens[0].length, { kind, until: opens[1] }, ranges);
      continue;
    }
    if (rules.line.some((mark) => line.startsWith(mark, at)) && !(rules.apart && /\S/.test(line[at - 1] ?? " "))) {
      ranges.push([at, line.length, "comment"]);
      break;
    }
    const [end, kind] = readToken(line, at, rules);
    if (kind) ranges.push([at, end, kind]);
    at = end;
  }
  return { ranges, state };
}

/** The end of what begins here, and its kind or null. */
function readToken(line, at, rules) {
  const first = line[at];
  if (rules.short && first === "'") {
    const end = match(CHARACTER, line, at);
    return end ? [end, "string"] : [at + 1, null];
  }
  if (rules.quotes.includes(first)) return [stringEnd(line, at), "string"];
  const number = match(NUMBER, line, at);
  if (number) return [number, "number"];
  const word = match(WORD, line, at);
  if (!word) return [at + 1, null];
  const name = line.slice(at, word);
  const known = rules.words.has(rules.anyCase ? name.toLowerCase() : name);
  return [word, known && line[at - 1] !== "." ? "keyword" : null];
}

/** Read a comment or string of several lines, begun at `from`, from `at` on. Returns where it ends, and the state. */
function goOn(line, from, at, state, ranges) {
  let end = line.indexOf(state.until, at);
  while (end > 0 && state.kind === "string" && isEscaped(line, end)) end = line.indexOf(state.until, end + 1);
  const to = end < 0 ? line.length : end + state.until.length;
  ranges.push([from, to, state.kind]);
  return [to, end < 0 ? state : null];
}

function isEscaped(line, at) {
  let slashes = 0;
  while (slashes < 8 && line[at - 1 - slashes] === "\\") slashes += 1; // more than a few are never written
  return slashes % 2 === 1;
}

/** Where the string that begins here ends: after its quote, or with the line. */
function stringEnd(line, from) {
  for (let at = from + 1; at < line.length; at += 1) {
    if (line[at] === "\\") at += 1;
    else if (line[at] === line[from]) return at + 1;
  }
  return line.length;
}

function match(pattern, line, at) {
  pattern.lastIndex = at;
  return pattern.test(line) ? pattern.lastIndex : 0;
}

function readMarkup(line, begin) {
  const ranges = [];
  let state = begin;
  let at = 0;
  while (at < line.length) {
    const tag = state ? 0 : match(TAG, line, at);
    if (state?.until) {
      [at, state] = goOn(line, at, at, state, ranges);
    } else if (state?.tag) {
      if (line[at] === ">") {
        ranges.push([at, at + 1, "keyword"]);
        state = null;
        at += 1;
      } else if (QUOTES.includes(line[at])) {
        const end = stringEnd(line, at);
        ranges.push([at, end, "string"]);
        at = end;
      } else at += 1;
    } else if (line.startsWith("<!--", at)) {
      [at, state] = goOn(line, at, at + 4, { kind: "comment", until: "-->" }, ranges);
    } else if (tag) {
      ranges.push([at, tag, "keyword"]);
      state = { tag: true };
      at = tag;
    } else at += 1;
  }
  return { ranges, state };
}
