// The live strip: one bar for each of the last 60 steps, as high as the step gave tokens, and the numbers beside it.

import { hideTip, showTip } from "./blocks.js";
import { byId, svg } from "./dom.js";
import { fixed, seconds, describeStep, tint } from "./steps.js";

const MOST = 60;
const LEAST_SCALE = 6; // tokens that fill the strip's height; more, if a step gave more
const [WIDTH, HEIGHT, PITCH] = [600, 96, 10];

/** Draws the last steps of an answer into a container. */
export function drawStrip(container, steps) {
  const last = steps.list.slice(-MOST);
  const scale = Math.max(LEAST_SCALE, ...last.map((step) => step.tokens));
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `Tokens of the last steps: ${last.map((step) => step.tokens).join(", ") || "none yet"}`,
  });
  last.forEach((step, index) => {
    const height = Math.max(4, (step.tokens / scale) * (HEIGHT - 4));
    const bar = svg("rect", {
      class: `bar ${tint(step.tokens)}`,
      x: index * PITCH + 1,
      y: HEIGHT - height,
      width: PITCH - 2,
      height,
      rx: 1.5,
    });
    bar.addEventListener("pointerenter", () => showTip(describeStep(step), bar.getBoundingClientRect()));
    bar.addEventListener("pointerleave", hideTip);
    picture.append(bar);
  });
  container.replaceChildren(picture);
}

/** Shows an answer's strip and its numbers in the chat's side panel. Before the first step it is marked as empty. */
export function showPulse(steps) {
  const numbers = steps.numbers();
  byId("pulse").classList.toggle("empty", !numbers.steps);
  drawStrip(byId("strip"), steps);
  byId("pulse-s").textContent = fixed(numbers.compression, 2);
  byId("pulse-speed").textContent = fixed(numbers.speed, 1);
  byId("pulse-first").textContent = seconds(numbers.first);
  byId("pulse-steps").textContent = numbers.steps ? `${numbers.tokens} / ${numbers.steps}` : "–";
  byId("pulse-why").textContent = numbers.steps ? why(numbers) : "";
}

/** Why S is what it is, by the draft tokens that were tried. */
function why({ steps, tried, accepted }) {
  if (!tried) return "This answer's steps tried no draft tokens.";
  const each = (number) => (number / steps).toFixed(1);
  return `Each step tried ${each(tried)} draft tokens on average, and ${each(accepted)} were right.`;
}

/** On a narrow screen the words about the numbers are folded away behind a button. */
export function startPulse() {
  const button = byId("pulse-help");
  button.addEventListener("click", () => {
    const open = byId("pulse").classList.toggle("explained");
    button.setAttribute("aria-expanded", open);
  });
}
