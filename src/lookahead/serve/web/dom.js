// Small helpers for the page's elements. Text always goes in as text nodes: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An HTML element. `on` in the attributes holds event handlers; other attributes are set as they are. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const [name, handler] of Object.entries(on)) element.addEventListener(name, handler);
  element.append(...children);
  return element;
}

/** Tell a screen reader something, once. */
export function say(text) {
  byId("said").textContent = text;
}

/** Whether the visitor asked for less motion. */
export function wantsCalm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** Copy a text, also where the clipboard's own interface is closed because the address is not https. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** A button that copies what `text()` gives. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "quiet tiny" }, label);
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    say("Copied");
    setTimeout(() => {
      button.textContent = label;
    }, 1500);
  });
  return button;
}

/** 1 token, 2 tokens. */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
