"""The page at `/` in a real browser, against a real server with the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium, visit
from chat_page import answered, ask, canned, set_field
from http_server import Running, running, soon

import lookahead
from lookahead import LookaheadConfig

pytestmark = pytest.mark.model
KEYS = ("plain-secret", "trace-secret")
FRANCE = "What is the capital of France?"
STORY = "Tell me a long story about a fox and a crow."
SCRIPT = "Repeat: <script>window.broken = 1</script><img src=x onerror='window.broken = 2'><b>bold</b>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def served(browser: Any) -> Iterator[Running]:
    """After the browser, so that nothing is loaded where the tests are skipped."""
    with running(lookahead.load(config=LookaheadConfig(window=0, guesses=4, budget=12), backend="eager")) as server:
        yield server


@pytest.fixture
def page(browser: Any, served: Running) -> Iterator[Any]:
    with visit(browser, served.url) as one:
        yield one


def test_a_chat_streams_blocks_and_tells_their_steps(page: Any, served: Running) -> None:
    page.evaluate(
        """() => {
          window.seen = new Set();
          new MutationObserver(() => {
            const body = document.querySelector(".assistant .body[aria-busy=true]");
            if (body) window.seen.add(body.textContent);
          }).observe(document.getElementById("messages"), { childList: true, subtree: true });
        }"""
    )
    ask(page, FRANCE, 20)
    text = answered(page)
    expected = served.model.generate([{"role": "user", "content": FRANCE}], max_tokens=20)
    assert text == expected.text
    seen = page.evaluate("[...window.seen]")
    assert len(seen) > 2  # it came piece by piece
    assert all(text.startswith(piece) for piece in seen)
    steps = page.locator("#strip .bar").count()
    facts = re.match(r"(\d+) tokens in (\d+) steps · S = ([\d.]+)", page.locator(".facts").text_content())
    assert facts is not None
    assert (int(facts[1]), int(facts[2])) == (len(expected.token_ids), steps)
    assert page.locator("#pulse-s").text_content() == facts[3]
    assert page.locator("#pulse-first").text_content() != "–"
    # Every character belongs to a block, and a block tells its step: to the pointer, and to the keyboard.
    assert "".join(page.locator(".assistant .block").all_text_contents()) == text
    page.hover(".assistant .block >> nth=0")
    assert page.locator("#tip").text_content().startswith("Step 1: ")
    page.focus(".assistant .body")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#said").text_content().startswith("Step 2: ")
    assert page.locator(".block.pointed").count() >= 1


@pytest.mark.slow
def test_regenerate_edit_and_what_the_browser_keeps(page: Any) -> None:
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    set_field(page, "set-system", "You are brief.")
    set_field(page, "set-seed", 5)
    ask(page, FRANCE, 8)
    first = answered(page)
    page.click("text=Regenerate")
    assert answered(page) == first
    assert asked[0] == asked[1]
    assert asked[0]["messages"][0] == {"role": "system", "content": "You are brief."}
    assert (asked[0]["seed"], asked[0]["max_tokens"], asked[0]["temperature"]) == (5, 8, 0)
    page.click(".user >> text=Edit")
    page.fill(".edit textarea", "And of Italy?")
    page.click("text=Send again")
    second = answered(page)
    assert page.locator(".message").count() == 2
    assert asked[2]["messages"][1:] == [{"role": "user", "content": "And of Italy?"}]
    page.reload()
    assert page.locator(".user .body").text_content() == "And of Italy?"
    assert page.locator(".assistant .body").text_content() == second
    assert page.locator("#set-seed").input_value() == "5"
    assert page.locator("#strip .bar").count() > 0
    page.click("[aria-label^='Delete the conversation']")
    assert page.locator(".message").count() == 0
    assert page.locator("#welcome").is_visible()


@pytest.mark.slow
def test_stop_keeps_the_text_and_frees_the_server(page: Any, served: Running) -> None:
    ask(page, STORY, 400)
    page.wait_for_selector(".assistant .block")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.")
    assert page.locator(".assistant .body").text_content()
    assert soon(lambda: not served.model.engine.running, 10)
    assert page.locator("#send").is_visible()


def test_a_server_that_goes_away_leaves_the_text_and_a_way_to_try_again(page: Any, served: Running) -> None:
    ask(page, STORY, 60)
    page.wait_for_selector(".assistant .block")
    loop, state = served.server._loop, served.server.server_state
    assert loop is not None
    loop.call_soon_threadsafe(lambda: [one.transport.abort() for one in list(state.connections)])
    page.wait_for_selector(".problem")
    message = page.inner_text(".problem")
    assert message.startswith("The server went away before the answer was complete. The text so far is kept.")
    kept = page.locator(".assistant .body").text_content()
    assert kept
    page.reload()
    assert page.locator(".assistant .body").text_content() == kept
    set_field(page, "set-max-tokens", 6)
    page.context.set_offline(True)
    page.click("text=Try again")
    page.wait_for_selector("text=The server cannot be reached. The text so far is kept.")
    assert page.locator(".assistant .body").text_content() == kept
    page.context.set_offline(False)
    page.click("text=Try again")
    assert answered(page)
    assert page.locator(".problem").count() == 0
    page.problems.forgive("ERR_INTERNET_DISCONNECTED")
    if page.problems:  # whether the console tells of the broken stream depends on when it broke
        page.problems.forgive("net::ERR_")


def test_html_in_a_prompt_and_in_an_answer_stays_text(page: Any) -> None:
    ask(page, SCRIPT, 8)
    answered(page)
    assert page.locator(".user .body").text_content() == SCRIPT
    evil = f"{SCRIPT} [click](javascript:alert(1)) [data](data:text/html,x) **<i>x</i>**\n\n```html\n{SCRIPT}\n```"
    canned(page, evil)
    page.click("text=Regenerate")
    page.wait_for_selector(".assistant pre")
    assert page.locator("#messages :is(script, img, iframe, b, i, a, style, form)").count() == 0
    assert page.evaluate("window.broken") is None
    shown = page.locator(".assistant .body").text_content()
    assert shown.count("<script>window.broken = 1</script>") == 2
    assert "[click](javascript:alert(1))" in shown
    assert page.locator(".assistant strong").text_content() == "<i>x</i>"


@pytest.mark.slow
def test_markdown_code_and_copy(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    source = (
        "# Title\n\nSome **bold**, *light* and `code` with a [link](https://example.org/a).\n\n"
        "- one\n- two\n  - inner\n\n3. three\n4. four\n\n> quoted\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```python\nx = 1 < 2\n\nprint(x)\n```\nend"
    )
    canned(page, source)
    ask(page, "Show me Markdown.", 8)
    page.wait_for_selector(".facts:not(:empty)")
    body = page.locator(".assistant .body")
    for selector, text in {
        "h3": "Title",
        "strong": "bold",
        "em": "light",
        "p code": "code",
        "a[href='https://example.org/a'][rel~=noopener]": "link",
        "li li": "inner",
        "ol[start='3'] li >> nth=1": "four",
        "blockquote p": "quoted",
        "th >> nth=1": "b",
        "td >> nth=0": "1",
        "pre": "x = 1 < 2\n\nprint(x)\n",
        "p >> nth=-1": "end",
    }.items():
        assert body.locator(selector).text_content() == text, selector
    page.click(".code-bar button")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1 < 2\n\nprint(x)"
    page.click(".assistant .foot >> text=Copy")
    assert page.evaluate("navigator.clipboard.readText()") == source
    page.uncheck("#set-tint")
    assert "untinted" in page.locator("#messages").get_attribute("class")


@pytest.mark.slow
def test_a_race_has_equal_tokens(browser: Any, served: Running) -> None:
    with visit(browser, f"{served.url}/#race", reduced_motion="reduce") as page:
        asked: list[Any] = []
        page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
        page.fill("#race-prompt", "Count from one to ten.")
        page.fill("#race-tokens", "16")
        page.click("#race-start")
        page.wait_for_selector("#race-result:not([hidden])")
        assert page.locator("#race-same").text_content().startswith("Same tokens: all 16 are equal. 16 steps against ")
        assert re.fullmatch(r"\d+\.\d\d×", page.locator("#race-ratio").text_content())
        plain, ahead = (page.locator(f"#{name}-text").text_content() for name in ("plain", "ahead"))
        assert plain == ahead != ""
        assert page.locator("#plain-text .block:not(.t1)").count() == 0
        assert page.locator("#ahead-text .block:not(.t1)").count() > 0
        assert [body["lookahead"].get("sources") for body in asked] == [[], [], None]
        assert "one after the other" in page.locator("#race .lead").inner_text()


@pytest.mark.slow
def test_the_race_notices_other_tokens(browser: Any, served: Running) -> None:
    with visit(browser, f"{served.url}/#race", reduced_motion="reduce") as page:
        canned(page, "Only one text.")
        calls = []

        def differ(route: Any) -> None:
            calls.append(1)
            step = {"step": 1, "text": "x", "tokens": [len(calls)], "tried": 0, "accepted": 0}
            chunk = {"choices": [{"delta": {}}], "lookahead": {"steps": [{**step, "sources": [], "seconds": 0.1}]}}
            route.fulfill(body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

        page.route("**/v1/chat/completions", differ)
        page.click("#race-start")
        page.wait_for_selector("#race-result:not([hidden])")
        assert page.locator("#race-same").text_content().startswith("The tokens differ from number 1 on")


@pytest.mark.slow
def test_the_tree_of_a_step(browser: Any, served: Running) -> None:
    with visit(browser, f"{served.url}/#inside") as page:
        page.fill("#inside-prompt", "Repeat: one two three, one two three, one two three.")
        page.fill("#inside-tokens", "12")
        page.click("#inside-start")
        page.wait_for_selector("#inside-tree svg")
        assert page.locator("#inside-tree .row2").count() > 0  # three rows of the window
        path = page.locator(".node.accepted").count()
        assert f"{path} accepted" in page.locator("#inside-about").text_content()
        assert path > 0
        assert page.locator(".node.target").count() == 1
        page.focus(".node.root")
        page.keyboard.press("ArrowRight")
        said = page.locator("#inside-sees").text_content()
        assert "at p+1: a draft token from " in said
        assert "accepted. It sees the text so far, “" in said
        seen = page.locator("g.node[data-node]:not(.unseen)").count()
        assert seen == 2  # the root and itself
        page.click("#inside-mask-box summary")
        page.wait_for_selector("#inside-mask .mask .unseen")  # it is drawn when the box has opened
        assert page.locator("#inside-mask .mask .unseen").count() == 1
        number = int(page.locator("#inside-number").text_content().split()[0])
        page.click("#inside-before" if number > 1 else "#inside-after")
        assert page.locator("#inside-number").text_content().split()[0] in (str(number - 1), "2")


def test_keys_are_asked_for_and_some_views_need_rights(browser: Any, served: Running) -> None:
    lines = (KEYS[0], f"{KEYS[1]} rights=metrics+trace")
    with running(served.model, keys=lines) as guarded, visit(browser, guarded.url) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key-input", "wrong-secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=this API key is not known here")
        page.fill("#key-input", KEYS[0])
        page.keyboard.press("Enter")
        page.wait_for_selector("#model:not(:empty)")
        assert not page.locator("#key-dialog").is_visible()
        assert KEYS[0] not in page.evaluate("JSON.stringify(localStorage)")
        page.click("nav >> text=Inside a step")
        page.click("#inside-start")
        page.wait_for_selector("text=This key may not look inside.")
        page.click("nav >> text=Status")
        page.wait_for_selector("text=This key may not see the server's status")
        assert page.locator("#status-cards").inner_text() == ""
        page.reload()  # the key is still there
        page.wait_for_selector("#model:not(:empty)")
        page.problems.forgive("401")
        page.problems.forgive("403")


@pytest.mark.slow
def test_the_page_is_painted_before_the_server_answers(browser: Any, served: Running) -> None:
    with visit(browser, "about:blank") as page:
        page.route("**/v1/**", lambda route: None)  # no answer, ever
        page.goto(served.url)
        page.wait_for_selector("text=Several tokens per step. The same text.")
        assert page.locator("#prompt").is_visible()
        assert page.locator("#model").text_content() == ""


@pytest.mark.slow
def test_the_status_shows_sums_and_no_text(page: Any, served: Running) -> None:
    page.click("nav >> text=Status")
    page.wait_for_selector(".card")
    shown = page.locator("#status-cards").inner_text()
    for words in (served.service.name, "cpu", "float32", "waiting", "K/V cache in use", "draft tokens accepted"):
        assert words in shown
    assert FRANCE not in page.content()


@pytest.mark.slow
def test_narrow_dark_and_named(browser: Any, served: Running) -> None:
    with visit(browser, served.url, viewport={"width": 360, "height": 740}, color_scheme="dark") as page:
        for view in ("chat", "race", "inside", "status"):
            page.goto(f"{served.url}/#{view}")
            page.wait_for_selector(f"nav a[href='#{view}'][aria-current]")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            if view == "chat":  # the conversation scrolls, and not the page: the field to write into stays in sight
                assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
            nameless = """[...document.querySelectorAll("button, input, textarea, select")].filter((one) =>
              !(one.textContent.trim() || one.labels?.length || one.getAttribute("aria-label"))).map((one) => one.id)"""
            assert page.evaluate(nameless) == []
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.locator("html").get_attribute("data-theme") == "light"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        page.goto(f"{served.url}/#chat")
        page.click("#show-shelf")
        assert page.locator("#new-chat").is_visible()
        page.click("#hide-shelf")
        assert not page.locator("#new-chat").is_visible()


def test_the_policy_stops_markup_and_inline_code(page: Any) -> None:
    tries = """() => [
      () => { document.body.innerHTML = "<b>x</b>"; },
      () => { document.body.setAttribute("onclick", "window.broken = 1"); },
      () => { document.body.append(document.createElement("script")).text = "window.broken = 2"; },
    ].map((one) => { try { one(); return "done"; } catch (error) { return error.name; } })"""
    assert page.evaluate(tries) == ["TypeError"] * 3
    assert page.evaluate("window.broken") is None
    with page.expect_console_message(lambda said: "policy: style-src-attr" in said.text):
        page.evaluate("document.body.setAttribute('style', 'color: red')")
    page.problems.forgive("policy: require-trusted-types-for")
    page.problems.forgive("policy: style-src-attr")
    page.problems.forgive("The action has been blocked")  # what the browser itself says of all these
