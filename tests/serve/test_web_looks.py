"""How the page looks on a desk and on a phone, light and dark: nothing overflows, what matters is in view, and what
can be pressed looks like it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium, visit
from chat_page import canned
from http_server import Running

SIZES = {"wide": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
LOOKS = [
    pytest.param(("wide", "light"), id="wide-light", marks=pytest.mark.slow),
    pytest.param(("phone", "dark"), id="phone-dark"),
    pytest.param(("wide", "dark"), id="wide-dark", marks=pytest.mark.slow),
    pytest.param(("phone", "light"), id="phone-light", marks=pytest.mark.slow),
]
VIEWS = ("chat", "race", "inside", "status")
ANSWER = "Here it is:\n\n```python\ndef f(x):  # one\n    return 'a' + str(1)\n```\n" + "More words follow. " * 30
DEEP = 16

COLOURS = """
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgba(colour).slice(0, 3).map((one) => {
      const share = one / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (rgba(colour)[3] > 250) return colour;
    }
    return "white";
  };
"""
FAINT_BUTTONS = (
    "() => {"
    + COLOURS
    + """
  const found = [];
  for (const button of document.querySelectorAll("button:not(:disabled)")) {
    if (!button.checkVisibility() || !button.getClientRects().length) continue;
    const style = getComputedStyle(button);
    const outside = behind(button.parentElement);
    const words = contrast(style.color, behind(button));
    const edge = parseFloat(style.borderTopWidth) >= 1 ? contrast(style.borderTopColor, outside) : 1;
    const shape = Math.max(edge, contrast(behind(button), outside));
    if (words < 4.5 || shape < 3) found.push([button.id || button.textContent, words, shape]);
  }
  return found;
}"""
)
FAINT_CODE = (
    "() => {"
    + COLOURS
    + """
  const found = [];
  const box = document.createElement("div");
  box.className = "code";
  document.body.append(box);
  for (const kind of ["comment", "string", "keyword", "number"]) {
    for (const tint of ["t1", "t2", "t3", "t5"]) {
      const part = document.createElement("span");
      part.className = `hl-${kind}`;
      part.append(document.createElement("span"));
      part.firstChild.className = `block ${tint}`;
      box.append(part);
      const measured = contrast(getComputedStyle(part.firstChild).color, behind(part.firstChild));
      if (measured < 4.5) found.push([kind, tint, measured]);
      if (getComputedStyle(part.firstChild).color === getComputedStyle(box).color) found.push([kind, "plain"]);
    }
  }
  return found;
}"""
)
IN_VIEW = """(selector) => {
  const box = document.querySelector(selector).getBoundingClientRect();
  return box.height > 0 && box.top >= 0 && box.left >= 0 && box.bottom <= innerHeight && box.right <= innerWidth;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(params=LOOKS)
def page(request: Any, browser: Any, server: Running) -> Iterator[Any]:
    size, scheme = request.param
    look = {"viewport": SIZES[size], "color_scheme": scheme, "reduced_motion": "reduce"}
    with visit(browser, server.url, **look) as one:
        one.size = size
        yield one


def is_in_view(page: Any, selector: str) -> bool:
    return bool(page.evaluate(IN_VIEW, selector))


def fits(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def tree_answer(page: Any) -> None:
    """Answer with one step whose tree is one deep chain of draft tokens."""
    tree = {
        "tokens": [f"word{depth}" for depth in range(DEEP)],
        "parents": list(range(-1, DEEP - 1)),
        "sources": ["root", *["recycle"] * (DEEP - 1)],
        "path": [1, 2],
        "target": "end",
        "window": {"columns": 0, "rows": 0},
        "left_out": 0,
    }
    facts = {"tried": DEEP - 1, "accepted": 2, "sources": ["recycle", "recycle"], "seconds": 0.1}
    step = {"step": 1, "text": "some text", "tokens": [1, 2, 3], "tree": tree, **facts}
    chunk = {"choices": [{"delta": {"content": "some text"}}], "lookahead": {"steps": [step]}}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def race_answers(page: Any) -> None:
    """Answer a race's three requests: with four steps of one token, or with two of two, which take twice as long."""

    def answer(route: Any) -> None:
        plain = "sources" in route.request.post_data_json["lookahead"]
        blocks = [[1], [2], [3], [4]] if plain else [[1, 2], [3, 4]]
        pace = 0.1 if plain else 0.2
        steps = [
            {"step": n, "text": "ab" * len(tokens), "tokens": tokens, "sources": [], "seconds": n * pace}
            for n, tokens in enumerate(blocks, start=1)
        ]
        chunk = {"choices": [], "lookahead": {"steps": [{**step, "tried": 0, "accepted": 0} for step in steps]}}
        route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)


def show(page: Any, view: str) -> None:
    """Go to a view, and fill it."""
    page.click(f"nav a[href='#{view}']")
    if view == "chat":
        canned(page, ANSWER)
        page.fill("#prompt", "Write a function.")
        page.click("#send")
        page.wait_for_selector(".facts:not(:empty)")
    elif view == "race":
        race_answers(page)
        page.click("#race-start")
        page.wait_for_selector("#race-result:not([hidden])")
    elif view == "inside":
        tree_answer(page)
        page.click("#inside-start")
        page.wait_for_selector("#inside-tree svg")
    else:
        page.wait_for_selector(".card dl")


def test_the_welcome_is_read_from_its_top(page: Any) -> None:
    assert page.evaluate("document.getElementById('scroll').scrollTop") == 0
    assert is_in_view(page, "#welcome h2")
    above = page.evaluate(
        """[document.querySelector("#welcome h2").getBoundingClientRect().top,
            document.getElementById("scroll").getBoundingClientRect().top]"""
    )
    assert above[0] >= above[1]
    assert is_in_view(page, "#prompt")
    assert is_in_view(page, "#examples button:last-child")
    assert fits(page)


@pytest.mark.slow
def test_the_conversation_has_most_of_the_screen(page: Any) -> None:
    show(page, "chat")
    top, height = page.evaluate(
        """[document.getElementById("scroll").getBoundingClientRect().top -
            document.querySelector(".top").getBoundingClientRect().bottom, innerHeight]"""
    )
    assert top < 0.12 * height  # strip, numbers and legend
    assert page.locator("#pulse-s").is_visible()
    assert page.locator("#pulse").inner_text().count("Tokens per step (S)") == 1
    if page.size == "phone":
        assert not page.locator("#pulse-words").is_visible()
        page.click("#pulse-help")
        assert page.locator("#pulse-help").get_attribute("aria-expanded") == "true"
    words = page.locator("#pulse-words").inner_text()
    assert "S is generated tokens divided by steps" in words
    assert "Each step tried 3.0 draft tokens on average, and 1.0 were right." in words
    assert "few on a CPU, where every row of a pass takes time" in words
    assert fits(page)


@pytest.mark.slow
def test_the_results_of_a_race_are_in_view(page: Any) -> None:
    show(page, "race")
    for part in ("ratio", "same"):
        assert is_in_view(page, f"#race-{part}"), part
    for lane in ("plain", "ahead"):
        assert is_in_view(page, f"#{lane}-numbers"), lane
        assert is_in_view(page, f"#{lane}-progress"), lane
    assert page.locator("#race-ratio").inner_text() == "1.00×"
    same = page.locator("#race-same").inner_text()
    assert same.endswith("Same tokens: all 4 are equal. 4 steps against 2, each 2.0 times as long.")
    assert fits(page)


def test_a_tree_that_is_too_wide_says_so_and_scrolls(page: Any) -> None:
    show(page, "inside")
    left, right = (page.get_by_label(f"Scroll to the {side}").first for side in ("left", "right"))
    assert page.locator(".scroll-note:visible").inner_text().startswith("It is wider than this box")
    assert (left.is_disabled(), right.is_disabled()) == (True, False)
    assert page.locator(".scroller.more-right").count() == 1
    position = "document.getElementById('inside-tree').scrollLeft"
    while right.is_enabled():
        before = page.evaluate(position)
        right.click()
        page.wait_for_function(f"{position} > {before}")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert left.is_enabled()
    page.focus("#inside-tree")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".scroller.more-right")
    page.focus(".node.root")
    for _ in range(DEEP):
        page.keyboard.press("ArrowRight")
    assert is_in_view(page, f"[data-node='{DEEP - 1}']")  # the box follows the keyboard
    assert "successors: the model's top tokens" in page.locator("#inside-sources").inner_text()
    assert "its logits are computed" in page.locator(".keys").inner_text()
    assert fits(page)


def test_buttons_look_like_buttons_and_nothing_overflows(page: Any) -> None:
    for view in VIEWS:
        show(page, view)
        page.mouse.move(0, 0)
        assert page.evaluate(FAINT_BUTTONS) == [], view
        assert fits(page), view
    if page.size == "phone":
        page.click("nav a[href='#chat']")
        page.click("#show-shelf")
        assert page.evaluate(FAINT_BUTTONS) == []
        assert page.locator("#export-json").is_visible()


@pytest.mark.slow
def test_the_colours_of_code_can_be_read_on_every_tint(page: Any) -> None:
    assert page.evaluate(FAINT_CODE) == []
