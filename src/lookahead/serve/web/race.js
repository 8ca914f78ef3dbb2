// The race: one prompt, decoded plain and with lookahead, one after the other, and replayed together at true speed.

import { streamChat } from "./api.js";
import { explain, paint } from "./blocks.js";
import { byId, count, say, wantsCalm } from "./dom.js";
import { fixed, seconds, Steps } from "./steps.js";

const PROMPT = "Write an HTML table with the planets of the solar system and their distance from the sun.";
const PLAIN = { sources: [] }; // no draft tokens: one token per step
const LONGER = 1.15; // how much longer a step must have taken to be worth a word
const SEED = 7; // for temperatures above 0: with the same seed both ways draw the same tokens

let running = null;
let lanes = null;
let frame = null;

export function startRace() {
  byId("race-prompt").value = PROMPT;
  byId("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  byId("race-stop").addEventListener("click", () => running?.abort());
  byId("race-replay").addEventListener("click", () => replay(true));
}

async function race() {
  const prompt = byId("race-prompt").value.trim();
  if (!prompt || running) return;
  running = new AbortController();
  const settings = {
    max_tokens: Math.max(1, Number(byId("race-tokens").value) || 1),
    temperature: Number(byId("race-temperature").value) || 0,
    seed: SEED,
  };
  const request = { messages: [{ role: "user", content: prompt }], settings, signal: running.signal };
  cancelAnimationFrame(frame);
  byId("race-result").hidden = true;
  showRunning(true);
  try {
    showStatus("Preparing: one token, so that both find the prompt in the same state.");
    await measure({ ...request, settings: { ...settings, max_tokens: 1 }, lookahead: PLAIN }, () => {});
    const plain = await measure({ ...request, lookahead: PLAIN }, (tokens) => {
      showStatus(`1 of 2: measuring plain decoding. ${count(tokens, "token")} so far.`);
    });
    const ahead = await measure(request, (tokens) => {
      showStatus(`2 of 2: measuring lookahead. ${count(tokens, "token")} so far.`);
    });
    showStatus("");
    lanes = [new Lane("plain", plain), new Lane("ahead", ahead)];
    byId("race-lanes").scrollIntoView({ block: "nearest" });
    replay();
  } catch (error) {
    if (error.name === "AbortError") showStatus("Stopped.");
    else showStatus(`The race could not be run. ${error.message}`, true);
  }
  running = null;
  showRunning(false);
}

/** Decode once. Returns the text, its steps and all token ids. */
async function measure(request, progress) {
  const found = { text: "", steps: new Steps(), tokens: [] };
  for await (const part of streamChat(request)) {
    for (const step of part.steps) {
      found.text += step.text;
      found.tokens.push(...step.tokens);
      found.steps.push(step);
    }
    progress(found.tokens.length);
  }
  return found;
}

/** One column of the replay. */
class Lane {
  constructor(name, run) {
    this.run = run;
    this.text = byId(`${name}-text`);
    this.numbers = byId(`${name}-numbers`);
    this.progress = byId(`${name}-progress`);
  }

  begin() {
    this.at = 0;
    this.tokens = 0;
    this.text.replaceChildren();
    explain(this.text, this.run.steps);
  }

  /** Show the steps that had ended this many seconds after the start. Returns whether all have. */
  advance(elapsed) {
    const { text, steps } = this.run;
    while (this.at < steps.list.length && steps.list[this.at].seconds <= elapsed) {
      const step = steps.list[this.at];
      paint(this.text, text, steps, step.start, step.end, step.number);
      this.tokens += step.tokens;
      this.at += 1;
    }
    this.text.scrollTop = this.text.scrollHeight;
    const total = steps.numbers();
    const done = this.at === steps.list.length;
    this.progress.value = total.tokens ? this.tokens / total.tokens : 1;
    const speed = done ? ` · ${fixed(total.speed, 1)} tok/s` : "";
    const time = seconds(done ? total.seconds : elapsed);
    this.numbers.textContent = `${count(this.tokens, "token")} · ${count(this.at, "step")} · ${time}${speed}`;
    return done;
  }
}

/** Replay both runs from their start. With reduced motion the end is shown at once, unless the visitor `insists`. */
function replay(insists = false) {
  cancelAnimationFrame(frame);
  byId("race-result").hidden = true;
  for (const lane of lanes) lane.begin();
  const start = performance.now();
  const advance = () => {
    const elapsed = wantsCalm() && !insists ? Infinity : (performance.now() - start) / 1000;
    const done = lanes.map((lane) => lane.advance(elapsed));
    if (done.every(Boolean)) finish();
    else frame = requestAnimationFrame(advance);
  };
  advance();
}

function finish() {
  const [plain, ahead] = lanes.map((lane) => lane.run);
  const ratio = plain.steps.numbers().seconds / ahead.steps.numbers().seconds;
  byId("race-ratio").textContent = `${ratio.toFixed(2)}×`;
  byId("race-ratio").dataset.wins = ratio > 1;
  const index = difference(plain.tokens, ahead.tokens);
  const [stepsPlain, stepsAhead] = [plain, ahead].map((run) => run.steps.list.length);
  const each = stepsPlain / stepsAhead / ratio; // how much longer a step took
  const longer = each >= LONGER ? `, each ${each.toFixed(1)} times as long` : "";
  const fewer = `${count(stepsPlain, "step")} against ${stepsAhead}${longer}.`;
  let same = `Same tokens: all ${plain.tokens.length} are equal. ${fewer}`;
  if (index >= 0) same = `The tokens differ from number ${index + 1} on, as near ties in half precision can make them.`;
  byId("race-same").textContent = same;
  byId("race-same").dataset.equal = index < 0;
  byId("race-result").hidden = false;
  byId("race-result").scrollIntoView({ block: "nearest" });
  say(`Lookahead took ${ratio.toFixed(2)} times less time. ${same}`);
}

/** The first index at which two lists differ, or -1. */
function difference(one, other) {
  const most = Math.max(one.length, other.length);
  for (let index = 0; index < most; index += 1) if (one[index] !== other[index]) return index;
  return -1;
}

function showRunning(on) {
  byId("race-start").disabled = on;
  byId("race-stop").hidden = !on;
}

function showStatus(text, bad = false) {
  byId("race-state").textContent = text;
  byId("race-state").classList.toggle("bad", bad);
}
