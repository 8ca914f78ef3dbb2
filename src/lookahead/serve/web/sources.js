// The sources of draft tokens, each in one sentence, and a list of them.

import { el } from "./dom.js";

const SOURCES = new Map([
  ["jacobi", "n-grams that the window produced."],
  ["prompt", "n-grams of the prompt and of the output so far."],
  ["suffix", "what followed earlier matches of the text's last tokens."],
  ["recycle", "successors: the model's top tokens from earlier passes, kept and tried again."],
  ["prediction", "the text that the request expects its output to resemble."],
]);

/** What a source proposes, or nothing for a name that is not known here. */
export function sourceSentence(name) {
  return SOURCES.get(name) ?? "";
}

/** One line for each of these sources, the same one once. */
export function sourceLines(names) {
  return [...new Set(names)].filter((name) => SOURCES.has(name)).map((name) => `${name}: ${SOURCES.get(name)}`);
}

/** Fill a list with all sources and what they propose. */
export function listSources(list) {
  for (const [name, sentence] of SOURCES) {
    list.append(el("div", {}, el("dt", {}, name), el("dd", {}, sentence)));
  }
}
