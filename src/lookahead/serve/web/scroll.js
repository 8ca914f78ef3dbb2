// Signs that a picture goes on beyond its box: a shade at the edge, and below it a line with two buttons.

import { el } from "./dom.js";

const SHARE = 0.7; // of the box's width that a button scrolls by

/** Watch a box that scrolls sideways. It stands in a `.scroller`, which gets the shades and the line. */
export function watchScroll(box) {
  const go = (way) => box.scrollBy({ left: way * SHARE * box.clientWidth });
  const [left, right] = [button("Scroll to the left", "‹", () => go(-1)), button("Scroll to the right", "›", () => go(1))];
  const note = el("p", { class: "small scroll-note" }, "It is wider than this box: scroll it sideways.", left, right);
  const frame = box.parentElement;
  frame.after(note);
  const mark = () => {
    const rest = box.scrollWidth - box.clientWidth;
    left.disabled = box.scrollLeft < 2;
    right.disabled = rest - box.scrollLeft < 2;
    frame.classList.toggle("more-left", !left.disabled);
    frame.classList.toggle("more-right", !right.disabled);
    note.hidden = rest < 2;
    if (note.hidden) box.removeAttribute("tabindex");
    else box.tabIndex = 0; // the arrow keys scroll it
  };
  box.setAttribute("role", "region");
  box.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(mark).observe(box);
  new MutationObserver(mark).observe(box, { childList: true });
  mark();
}

function button(label, sign, click) {
  return el("button", { type: "button", class: "quiet tiny", "aria-label": label, on: { click } }, sign);
}
