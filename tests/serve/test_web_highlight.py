"""The colours of code: they cover no more than they should, lose no character, make no markup and stay fast."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium, visit
from chat_page import canned
from http_server import Running

LANGUAGES = "python js rust c go css bash yaml ruby json sql lua html klingon "  # the last one has no name
PIECES = '" \' ` \\ / * // /* */ # < > <!-- --> </script> """ -- --[[ def for café 中文 😀 0x1F 1e 1.5e-3 &lt; ${a} n\''
SPACES = (" ", "\t", "\u2028", "\r", "\n", "\n", "\ud83d")
ENDLESS = ("'", '"\\', "\\", "/*", "<a", "<!-", "a1_", "1.", "1e", "`", "'a", '"""')

HIGHLIGHT = """async ([lines, language]) => {
  const { highlightLine } = await import("/web/highlight.js");
  const found = [];
  let state = null;
  for (const line of lines) {
    const read = highlightLine(line, language, state);
    for (const [from, to, kind] of read.ranges) found.push([line.slice(from, to), kind]);
    state = read.state;
  }
  return found;
}"""
CHECK = """async ([texts, languages]) => {
  const { drawCode } = await import("/web/code.js");
  const { highlightLine } = await import("/web/highlight.js");
  const wrong = [];
  for (const text of texts) {
    for (const language of languages) {
      const lines = [];
      let from = 0;
      for (const line of text.split("\\n")) {
        lines.push([from, from + line.length]);
        from += line.length + 1;
        let end = 0;
        for (const [begin, to, kind] of highlightLine(line, language).ranges) {
          if (begin < end || to <= begin || to > line.length || !/^(comment|string|keyword|number)$/.test(kind)) {
            wrong.push([line, language, begin, to, kind]);
          }
          end = to;
        }
      }
      const emit = (parent, begin, to) => parent.append(text.slice(begin, to));
      const { element } = drawCode(text, lines, language, emit);
      const shown = element.querySelector("code").textContent;
      if (shown !== text) wrong.push([text, language, shown]);
      if (element.querySelector("code :not(span)")) wrong.push([text, language, "an element that is not a span"]);
    }
  }
  return wrong;
}"""
TIMES = """async ([lines, languages]) => {
  const { highlightLine } = await import("/web/highlight.js");
  const start = performance.now();
  for (const line of lines) for (const language of languages) highlightLine(line, language);
  return performance.now() - start;
}"""
STREAM = """async ([parts]) => {
  const { MessageView } = await import("/web/message.js");
  const message = { role: "assistant", text: "", steps: [], state: "streaming" };
  const view = new MessageView(message, {});
  document.getElementById("messages").append(view.element);
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  let most = 0;
  let first = null;
  let copy = null;
  new MutationObserver((changes) => {
    most = Math.max(most, changes.reduce((sum, change) => sum + change.addedNodes.length, 0));
  }).observe(view.element, { childList: true, subtree: true });
  for (const text of parts) {
    view.add(text, [{ text, tokens: [1, 2], tried: 1, accepted: 1, sources: ["suffix"], seconds: 1 }]);
    await frame();
    if (view.body.querySelectorAll(".line").length < 2) continue;
    first ??= view.body.querySelector(".line");
    copy ??= view.body.querySelector(".code-bar button");
  }
  message.state = "done";
  view.render();
  const found = {
    most, first: first.isConnected, copy: copy.isConnected,
    lines: view.body.querySelectorAll(".line").length,
    shown: view.body.querySelector("code").textContent,
    blocks: [...view.body.querySelectorAll("code .block")].map((one) => one.textContent).join(""),
    after: view.body.lastElementChild.textContent,
  };
  view.element.remove();
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def page(browser: Any, server: Running) -> Iterator[Any]:
    with visit(browser, server.url) as one:
        yield one


def kinds(page: Any, language: str, *lines: str) -> list[tuple[str, str]]:
    return [(text, kind) for text, kind in page.evaluate(HIGHLIGHT, [list(lines), language])]


def test_python(page: Any) -> None:
    assert kinds(page, "python", 'def f(x=1.5e3):  # "no string"', "    return x.if_ or 'it\\'s' + classes") == [
        ("def", "keyword"),
        ("1.5e3", "number"),
        ('# "no string"', "comment"),
        ("return", "keyword"),
        ("or", "keyword"),
        ("'it\\'s'", "string"),
    ]
    assert kinds(page, "py", '"""A text', "# of two lines", 'ends""" in x') == [
        ('"""A text', "string"),
        ("# of two lines", "string"),
        ('ends"""', "string"),
        ("in", "keyword"),
    ]


def test_languages_with_braces(page: Any) -> None:
    assert kinds(page, "JavaScript", "const a = `one", "${b} // two`; // three", "a.return /* x", "*/ 0x1F") == [
        ("const", "keyword"),
        ("`one", "string"),
        ("${b} // two`", "string"),
        ("// three", "comment"),
        ("/* x", "comment"),
        ("*/", "comment"),
        ("0x1F", "number"),
    ]
    assert kinds(page, "rust", "fn f<'a>(c: &'a str) { 'x'; '\\n' }") == [
        ("fn", "keyword"),
        ("'x'", "string"),
        ("'\\n'", "string"),
    ]


def test_other_languages(page: Any) -> None:
    assert kinds(page, "bash", 'if [ $# -gt 2 ]; then echo "a b" # c') == [
        ("if", "keyword"),
        ("2", "number"),
        ("then", "keyword"),
        ('"a b"', "string"),
        ("# c", "comment"),
    ]
    assert kinds(page, "sql", "Select a FROM t -- x") == [
        ("Select", "keyword"),
        ("FROM", "keyword"),
        ("-- x", "comment"),
    ]
    assert kinds(page, "css", "a { color: #fff0; /* 1 */ }") == [("/* 1 */", "comment")]
    assert kinds(page, "html", '<p class="a>b">don\'t <!-- x', "--></p>", "<br", "id='1'>") == [
        ("<p", "keyword"),
        ('"a>b"', "string"),
        (">", "keyword"),
        ("<!-- x", "comment"),
        ("-->", "comment"),
        ("</p", "keyword"),
        (">", "keyword"),
        ("<br", "keyword"),
        ("'1'", "string"),
        (">", "keyword"),
    ]
    for unknown in ("", "text", "constructor", "__proto__"):
        assert kinds(page, unknown, 'def "a" # 1') == []


def test_nothing_is_lost_or_made_whatever_the_code(page: Any) -> None:
    chance = random.Random(5)
    pieces = (*PIECES.split(), *SPACES)
    texts = ["".join(chance.choices(pieces, k=chance.randrange(1, 40))) for _ in range(60)]
    assert page.evaluate(CHECK, [texts, LANGUAGES.split(" ")]) == []


@pytest.mark.slow
def test_long_lines_take_no_longer_than_their_length(page: Any) -> None:
    """A reader that goes back for each of these would need minutes."""
    length = 100_000
    lines = [(piece * length)[:length] for piece in ENDLESS]
    assert page.evaluate(TIMES, [lines, LANGUAGES.split(" ")]) < 5_000


@pytest.mark.slow
def test_a_block_that_streams_is_drawn_line_by_line(page: Any) -> None:
    lines = [f'    value_{number} = call({number}, "text")  # note\n' for number in range(150)]
    parts = ["```py", "thon\n", *lines, "``", "`\n", "The end."]
    found = page.evaluate(STREAM, [parts])
    assert found["shown"] == found["blocks"] == "".join(lines)
    assert found["lines"] == len(lines)
    assert found["after"] == "The end."
    assert found["first"]  # the first line is the one that was drawn first, and the button can keep the focus
    assert found["copy"]
    assert found["most"] < 60  # elements for one part of the answer, however long the block is by then


def test_script_in_code_is_shown_and_coloured(page: Any) -> None:
    evil = '<script>window.broken = 1</script><img src=x onerror="window.broken = 2">'
    text = f"```html\n{evil}\n```\n\n```python\nx = '{evil}'\n```\n\n```<script>\n{evil}\n```"
    canned(page, text, size=7)
    page.fill("#prompt", "Write some.")
    page.click("#send")
    page.wait_for_selector(".facts:not(:empty)")
    shown = page.locator(".assistant pre").all_text_contents()
    assert shown == [f"{evil}\n", f"x = '{evil}'\n", f"{evil}\n"]
    assert page.locator("#messages :is(script, img)").count() == 0
    assert page.evaluate("window.broken") is None
    assert "<script" in page.locator("pre >> nth=0").locator(".hl-keyword").all_text_contents()
    assert page.locator("pre >> nth=1").locator(".hl-string").all_text_contents()[0] == f"'{evil}'"
    assert page.locator("pre >> nth=2").locator("[class^=hl]").count() == 0
    assert "".join(page.locator("pre >> nth=0").locator(".block").all_text_contents()) == f"{evil}\n"
