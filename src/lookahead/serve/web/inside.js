// Inside a step: decode a prompt with its trees, pick a step, and see its tree, its accepted path and who sees whom.

import { streamChat } from "./api.js";
import { explain, paint } from "./blocks.js";
import { byId, count, say } from "./dom.js";
import { drawMask } from "./mask.js";
import { watchScroll } from "./scroll.js";
import { listSources, sourceSentence } from "./sources.js";
import { describeStep, Steps } from "./steps.js";
import { drawTree, nodesOf, seenBy, spelled } from "./tree.js";

const PROMPT = "Write the numbers from one to twenty as words, with commas between them.";
const CONFIGS = {
  window: { window: 5, ngram: 4, guesses: 4, budget: 40 },
  paper: { window: 5, ngram: 4, guesses: 4, budget: 40, sources: ["jacobi"] },
  server: {},
};
const HINT = "Point at a token, or move with the arrow keys, to see what it sees.";

let running = null;
let shown = null; // {raw, steps, text, chosen}

export function startInside() {
  byId("inside-prompt").value = PROMPT;
  byId("inside-form").addEventListener("submit", (event) => {
    event.preventDefault();
    decode();
  });
  byId("inside-stop").addEventListener("click", () => running?.abort());
  byId("inside-range").addEventListener("input", () => choose(Number(byId("inside-range").value)));
  byId("inside-before").addEventListener("click", () => choose(shown.chosen - 1));
  byId("inside-after").addEventListener("click", () => choose(shown.chosen + 1));
  byId("inside-text").addEventListener("click", (event) => {
    const block = event.target.closest("[data-step]");
    if (block) choose(Number(block.dataset.step));
  });
  byId("inside-mask-box").addEventListener("toggle", showMask);
  listSources(byId("inside-sources"));
  for (const id of ["inside-tree", "inside-mask"]) watchScroll(byId(id));
}

async function decode() {
  const prompt = byId("inside-prompt").value.trim();
  if (!prompt || running) return;
  running = new AbortController();
  showRunning(true);
  say("Decoding.");
  const lookahead = { ...CONFIGS[byId("inside-config").value], trace: true };
  const settings = { max_tokens: Math.max(1, Number(byId("inside-tokens").value) || 1), temperature: 0 };
  const request = { messages: [{ role: "user", content: prompt }], settings, lookahead, signal: running.signal };
  const found = { raw: [], steps: new Steps(), text: "", chosen: 1 };
  try {
    for await (const part of streamChat(request)) {
      for (const step of part.steps) {
        found.raw.push(step);
        found.steps.push(step);
        found.text += step.text;
      }
      state(`Decoding: ${count(found.raw.length, "step")} so far.`);
    }
    state("");
  } catch (error) {
    if (error.name === "AbortError") state("Stopped.");
    else if (error.code === "no_right") state(`This key may not look inside. ${error.message}`, true);
    else state(error.message, true);
  }
  running = null;
  showRunning(false);
  if (found.raw.some((step) => step.tree)) show(found);
}

/** Show an answer, and of its steps the one that accepted most. */
function show(found) {
  shown = found;
  const { text, steps } = found;
  byId("inside-shown").hidden = false;
  byId("inside-text").replaceChildren();
  paint(byId("inside-text"), text, steps, 0, text.length);
  explain(byId("inside-text"), steps);
  byId("inside-range").max = steps.list.length;
  const most = Math.max(...steps.list.map((step) => step.tokens));
  choose(steps.list.find((step) => step.tokens === most).number);
}

function choose(number) {
  const { raw, steps } = shown;
  shown.chosen = Math.min(Math.max(number, 1), raw.length);
  const step = raw[shown.chosen - 1];
  byId("inside-range").value = shown.chosen;
  byId("inside-number").textContent = `${shown.chosen} of ${raw.length}`;
  byId("inside-before").disabled = shown.chosen === 1;
  byId("inside-after").disabled = shown.chosen === raw.length;
  for (const block of byId("inside-text").querySelectorAll("[data-step]")) {
    block.classList.toggle("chosen", Number(block.dataset.step) === shown.chosen);
  }
  byId("inside-sees").textContent = HINT;
  byId("inside-about").textContent = about(step, steps.list[shown.chosen - 1]);
  shown.nodes = step.tree ? nodesOf(step.tree) : [];
  const none = "The server shows no tree for a step this late.";
  const picture = step.tree ? drawTree(shown.nodes, step.tree.target, point) : none;
  for (const node of shown.nodes) node.element.setAttribute("aria-label", described(node));
  byId("inside-tree").replaceChildren(picture);
  showMask();
}

function about(step, facts) {
  const text = `${describeStep(facts).join("; ")}.`;
  if (!step.tree) return text;
  const { tokens, left_out, window } = step.tree;
  const { columns, rows } = window;
  const all = `${count(tokens.length + left_out, "token")} went through the model at once`;
  const inWindow = `${columns * rows - 1} of them in a window of ${columns} columns and ${count(rows, "row")}`;
  const undrawn = left_out ? ` ${left_out} are not drawn.` : "";
  return `${text} ${all}, ${columns ? inWindow : "without a window"}.${undrawn}`;
}

/** Mark what a node sees, and say it. */
function point(node) {
  const seen = new Set(node ? seenBy(shown.nodes, node) : []);
  for (const other of shown.nodes) {
    for (const part of [other.element, other.edge]) part?.classList.toggle("unseen", Boolean(node) && !seen.has(other));
  }
  byId("inside-sees").textContent = node ? described(node) : HINT;
}

function described(node) {
  const proposes = sourceSentence(node.source).replace(/\.$/, "");
  const kinds = {
    root: "the last accepted token",
    window: `in row ${node.row + 1} of the window`,
    guess: `a draft token from ${node.source}${proposes ? ` (${proposes})` : ""}`,
  };
  const above = seenBy(shown.nodes, node).slice(0, -1).map((one) => `“${spelled(one.token)}”`);
  const sees = above.length ? `${above.join(", ")} and itself` : "itself";
  const verdict = node.kind === "guess" ? (node.accepted ? ", accepted" : ", not accepted") : "";
  const position = node.depth ? `p+${node.depth}` : "p";
  return `“${spelled(node.token)}” at ${position}: ${kinds[node.kind]}${verdict}. It sees the text so far, ${sees}.`;
}

/** The mask is drawn only while it is open. */
function showMask() {
  const open = byId("inside-mask-box").open && shown?.nodes.length;
  byId("inside-mask").replaceChildren(...(open ? [drawMask(shown.nodes)] : []));
}

function showRunning(on) {
  byId("inside-start").disabled = on;
  byId("inside-stop").hidden = !on;
}

function state(text, bad = false) {
  byId("inside-state").textContent = text;
  byId("inside-state").classList.toggle("bad", bad);
}
