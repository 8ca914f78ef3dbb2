// Text in tinted blocks, one block per step, and a tooltip for the step under the pointer.

import { byId, el, say } from "./dom.js";
import { sourceLines } from "./sources.js";
import { describeStep, tint } from "./steps.js";

const known = new WeakMap(); // a container -> its Steps

/**
 * Append source[from:to] to a parent, as one span for each step that gave a part of it. `fresh` is the number of the
 * step from which on blocks are new, and may be animated.
 */
export function paint(parent, source, steps, from, to, fresh = Infinity) {
  let position = from;
  while (position < to) {
    const step = steps.at(position);
    if (!step) {
      parent.append(source.slice(position, to));
      return;
    }
    const end = Math.min(step.end, to);
    const classes = ["block", tint(step.tokens)];
    if (step.number >= fresh) classes.push("fresh");
    if (position > step.start) classes.push("goes-on");
    if (end < step.end) classes.push("cut");
    parent.append(el("span", { class: classes.join(" "), "data-step": step.number }, source.slice(position, end)));
    position = end;
  }
}

/**
 * Show the step of a container's blocks: under the pointer, and with the arrow keys when it has the focus.
 * `steps` may be another object every time, so it is passed with each call.
 */
export function explain(container, steps) {
  const first = !known.has(container);
  known.set(container, steps);
  if (!first) return;
  container.tabIndex = 0;
  container.addEventListener("pointerover", (event) => {
    const block = event.target.closest("[data-step]");
    if (block) point(container, Number(block.dataset.step), block);
  });
  container.addEventListener("pointerleave", () => leave(container));
  container.addEventListener("blur", () => leave(container));
  container.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || event.target !== container) return;
    event.preventDefault();
    const list = known.get(container).list;
    const last = Number(container.dataset.at ?? (move > 0 ? 0 : list.length + 1));
    const number = Math.min(Math.max(last + move, 1), list.length);
    const block = container.querySelector(`[data-step="${number}"]`);
    container.dataset.at = number;
    if (block) point(container, number, block, true);
  });
}

function point(container, number, block, aloud = false) {
  const step = known.get(container).list[number - 1];
  if (!step) return;
  unmark(container);
  for (const part of container.querySelectorAll(`[data-step="${number}"]`)) part.classList.add("pointed");
  showTip([...describeStep(step), ...sourceLines(step.sources)], block.getBoundingClientRect());
  if (aloud) {
    block.scrollIntoView({ block: "nearest" });
    say(`${describeStep(step).join(". ")}: ${block.textContent}`);
  }
}

function leave(container) {
  unmark(container);
  hideTip();
}

function unmark(container) {
  for (const part of container.querySelectorAll(".pointed")) part.classList.remove("pointed");
}

/** Show lines of text above a rectangle of the window, or below it where there is no room. */
export function showTip(lines, box) {
  const tip = byId("tip");
  const [head, ...rest] = lines;
  tip.replaceChildren(el("strong", {}, head), ...rest.map((line) => el("span", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left + box.width / 2 - width / 2), innerWidth - width - 8);
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
addEventListener("scroll", hideTip, { capture: true, passive: true });
