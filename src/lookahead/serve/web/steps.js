// The steps of a stream: the text of each, and statistics over all of them.

import { count } from "./dom.js";

/** What S is, in a sentence. */
export const S_MEANS = "S is generated tokens divided by steps. Plain decoding has S = 1: one token in each pass.";

/** The steps of one answer. Step i gave the text from `start` to `end`. */
export class Steps {
  constructor(kept = []) {
    this.list = [];
    for (const step of kept) this.push(step);
  }

  /** Add a step: from the server, or from `compact`. */
  push(step) {
    const start = this.length;
    const tokens = Array.isArray(step.tokens) ? step.tokens.length : step.tokens;
    const characters = step.text === undefined ? step.characters : step.text.length;
    const { tried, accepted, sources, seconds } = step;
    this.list.push({
      number: this.list.length + 1,
      start,
      end: start + characters,
      tokens,
      tried,
      accepted,
      sources,
      seconds,
    });
  }

  /** How many characters the steps gave together. */
  get length() {
    return this.list.length ? this.list[this.list.length - 1].end : 0;
  }

  /** The step that gave this character of the text, or undefined. */
  at(position) {
    let low = 0;
    let high = this.list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.list[middle].end <= position) low = middle + 1;
      else high = middle;
    }
    return this.list[low];
  }

  /** S, tokens per second and time to first token, as the server defines them. */
  numbers() {
    const steps = this.list.length;
    const tokens = this.list.reduce((sum, step) => sum + step.tokens, 0);
    const seconds = steps ? this.list[steps - 1].seconds : 0;
    return {
      steps,
      tokens,
      seconds,
      compression: steps ? tokens / steps : 0,
      speed: seconds ? tokens / seconds : 0,
      first: steps ? this.list[0].seconds : 0,
      tried: this.list.reduce((sum, step) => sum + step.tried, 0),
      accepted: this.list.reduce((sum, step) => sum + step.accepted, 0),
    };
  }

  /** The steps without their text, for the browser's storage. */
  compact() {
    return this.list.map(({ start, end, tokens, tried, accepted, sources, seconds }) => ({
      characters: end - start,
      tokens,
      tried,
      accepted,
      sources,
      seconds,
    }));
  }
}

/** The class of a block by its number of tokens, as the terminal colours it: 1, 2, 3 to 4, 5 or more. */
export function tint(tokens) {
  if (tokens >= 5) return "t5";
  if (tokens >= 3) return "t3";
  return tokens === 2 ? "t2" : "t1";
}

/** The lines that describe a step. */
export function describeStep(step) {
  const lines = [`Step ${step.number}: ${count(step.tokens, "token")}${step.tokens > 1 ? " at once" : ""}`];
  if (step.tried) lines.push(`${count(step.tried, "draft token")} tried, ${step.accepted} accepted`);
  else lines.push("no draft tokens tried");
  if (step.sources.length) lines.push(`drafted by ${tally(step.sources)}`);
  return lines;
}

function tally(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].map(([name, times]) => (times > 1 ? `${name} ×${times}` : name)).join(", ");
}

export function fixed(number, digits = 1) {
  return number ? number.toFixed(digits) : "–";
}

export function seconds(value) {
  if (!value) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}
