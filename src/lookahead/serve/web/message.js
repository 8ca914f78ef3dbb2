// One message of a conversation as elements: its text in blocks, its buttons, and what went wrong, if something did.

import { explain, paint } from "./blocks.js";
import { copyButton, count, el } from "./dom.js";
import { blocksOf } from "./markdown.js";
import { fixed, S_MEANS, seconds, Steps } from "./steps.js";

const NAMES = { user: "You", assistant: "Model" };

/** Shows one message. It calls `actions`, {edit(text), regenerate()}, which the conversation carries out. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.steps = new Steps(message.steps);
    this.body = el("div", { class: "body" });
    this.foot = el("div", { class: "foot" });
    const name = el("h2", { class: "who" }, NAMES[message.role]);
    this.element = el("li", { class: `message ${message.role}` }, name, this.body, this.foot);
    this.shown = []; // the blocks that stand in the body: {from, to, code, drawn, element}
    this.drawn = ""; // the text that stands in the body
    this.fresh = this.steps.list.length + 1; // steps from this one on have not been shown
    this.render();
  }

  /** Take new text and the steps that gave it. They are shown with the next frame. */
  add(text, steps) {
    this.message.text += text;
    for (const step of steps) this.steps.push(step);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.renderText();
    });
  }

  /** Show the message as it is now. */
  render() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.renderText();
    this.renderFoot();
  }

  renderText() {
    const { role, text, state } = this.message;
    this.body.setAttribute("aria-busy", state === "streaming");
    if (role === "user") {
      this.body.textContent = text;
      return;
    }
    this.body.classList.toggle("waiting", state === "streaming" && !text);
    this.renderBlocks(text);
    if (this.steps.list.length) explain(this.body, this.steps);
    this.fresh = this.steps.list.length + 1;
  }

  /** Draw the Markdown blocks. Those that are as before stay, so that a selection in them stays, too. */
  renderBlocks(text) {
    const emit = (parent, from, to) => paint(parent, text, this.steps, from, to, this.fresh);
    const blocks = blocksOf(text);
    let same = 0;
    const longer = text.startsWith(this.drawn);
    this.drawn = text;
    while (longer && same < this.shown.length && same < blocks.length && isSame(this.shown[same], blocks[same])) same += 1;
    if (same === this.shown.length && same) same -= 1; // the last one may have got other text in the same place
    if (longer) same = this.grow(blocks, same, emit);
    for (const old of this.shown.splice(same)) old.element.remove();
    for (const block of blocks.slice(same)) {
      const drawn = block.begin?.(emit) ?? { element: block.render(emit) };
      this.body.append(drawn.element);
      this.shown.push({ from: block.from, to: block.to, code: block.code, drawn, element: drawn.element });
    }
  }

  /** Let a block of code that has become longer grow where it stands. Returns how many blocks are drawn. */
  grow(blocks, same, emit) {
    const [old, block] = [this.shown[same], blocks[same]];
    if (!old || !block?.grow || old.from !== block.from || old.code !== block.code) return same;
    block.grow(old.drawn, emit);
    old.to = block.to;
    return same + 1;
  }

  renderFoot() {
    const { role, text, state, error } = this.message;
    const parts = [];
    if (state === "failed") {
      const retry = this.button("Try again", () => this.actions.regenerate());
      const kept = text ? " The text so far is kept." : "";
      parts.push(el("div", { class: "problem", role: "alert" }, el("span", {}, `${error}${kept}`), retry));
    }
    if (state !== "streaming") {
      if (state === "stopped") parts.push(el("span", { class: "small" }, "Stopped."));
      if (role === "assistant") parts.push(el("span", { class: "small facts", title: S_MEANS }, this.facts()));
      if (text) parts.push(copyButton(() => this.message.text));
      if (role === "user") parts.push(this.button("Edit", () => this.edit()));
      else if (this.last && state !== "failed") {
        parts.push(this.button("Regenerate", () => this.actions.regenerate()));
      }
    }
    this.foot.replaceChildren(...parts);
  }

  facts() {
    const { tokens, steps, compression, speed, first } = this.steps.numbers();
    if (!steps) return "";
    const parts = [`${count(tokens, "token")} in ${count(steps, "step")}`, `S = ${fixed(compression, 2)}`];
    return [...parts, `${fixed(speed, 1)} tok/s`, `first token after ${seconds(first)}`].join(" · ");
  }

  /** Turn the text into a form. Sending it restarts the conversation from here. */
  edit() {
    const area = el("textarea", { rows: 3, "aria-label": "Edit your message" });
    area.value = this.message.text;
    const form = el("form", { class: "edit" }, area);
    const cancel = this.button("Cancel", () => this.render());
    const send = el("button", { type: "submit", class: "strong" }, "Send again");
    form.append(el("div", { class: "row" }, cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.render();
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceChildren(form);
    this.foot.replaceChildren();
    area.focus();
  }

  button(label, action) {
    return el("button", { type: "button", class: "quiet tiny", on: { click: action } }, label);
  }
}

function isSame(shown, block) {
  return shown.from === block.from && shown.to === block.to;
}
