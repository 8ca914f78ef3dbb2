"""Downloads of a conversation: what was said, what the steps did, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, visit
from chat_page import answered, canned, set_field
from http_server import Running

QUESTION = "What is <b>HTML</b>?\nAnd ../../etc?"
ANSWER = "# It\n\n```html\n<script>window.broken = 1</script>\n```\nis **text**, é 中 😀."


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    with visit(browser, server.url) as one:
        yield one


def ask(page: Any, text: str, answer: str) -> None:
    canned(page, answer, size=6)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    answered(page)


def download(page: Any, kind: str) -> tuple[str, str]:
    """The name and the text of what a button gives."""
    with page.expect_download() as found:
        page.click(f"#export-{kind}")
    return found.value.suggested_filename, Path(found.value.path()).read_text(encoding="utf-8")


def test_there_is_nothing_to_download_before_the_first_message(page: Any) -> None:
    assert not page.locator("#export").is_visible()
    ask(page, "Hello", "Hi.")
    assert page.locator("#export").is_visible()
    page.click("#new-chat")
    assert not page.locator("#export").is_visible()


@pytest.mark.slow
def test_markdown(page: Any) -> None:
    page.evaluate("sessionStorage.setItem('lookahead.key', 'top-secret')")
    page.wait_for_selector("#model:not(:empty)")
    set_field(page, "set-system", "Be brief.")
    ask(page, QUESTION, ANSWER)
    name, text = download(page, "markdown")
    assert name == "lookahead-what-is-b-html-b-and-etc.md"
    steps = page.locator("#strip .bar").count()
    assert text == (
        "# What is <b>HTML</b>? And ../../etc?\n\n"
        f"Model: {page.locator('#model').text_content()}\n\n"
        "## System\n\nBe brief.\n\n"
        f"## You\n\n{QUESTION}\n\n"
        f"## Model\n\n{ANSWER}\n\n"
        f"*{2 * steps} tokens in {steps} steps, S = 2.00.*\n"
    )
    assert page.evaluate("window.broken") is None
    assert page.locator("#said").text_content() == f"{name} is downloaded."


def test_json(page: Any) -> None:
    page.evaluate("sessionStorage.setItem('lookahead.key', 'top-secret')")
    page.wait_for_selector("#model:not(:empty)")
    set_field(page, "set-system", "Be brief.")
    set_field(page, "set-seed", 3)
    ask(page, QUESTION, ANSWER)
    ask(page, "More?", "No.")
    name, text = download(page, "json")
    assert name == "lookahead-what-is-b-html-b-and-etc.json"
    assert "top-secret" not in text
    record = json.loads(text)
    said = [(one["role"], one["content"]) for one in record["messages"]]
    assert said == [
        ("system", "Be brief."),
        ("user", QUESTION),
        ("assistant", ANSWER),
        ("user", "More?"),
        ("assistant", "No."),
    ]
    assert record["settings"] == {"temperature": 0, "top_p": 1, "seed": 3, "max_tokens": 256}
    assert record["model"] == page.locator("#model").text_content()
    first, last = record["messages"][2], record["messages"][4]
    assert (first["state"], last["state"]) == ("done", "done")
    assert last["steps"] == [
        {"characters": 3, "tokens": 2, "tried": 3, "accepted": 1, "sources": ["suffix"], "seconds": 0.01}
    ]
    assert sum(step["characters"] for step in first["steps"]) == page.evaluate("text => text.length", ANSWER)


def test_a_failed_answer_says_so(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#prompt", "¿?")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".problem")
    name, text = download(page, "markdown")
    assert name == "lookahead-conversation.md"
    assert text.endswith("## Model\n\n*Failed before its end.*\n")
    last = json.loads(download(page, "json")[1])["messages"][-1]
    assert (last["content"], last["state"], last["error"]) == ("", "failed", "The server cannot be reached.")
    page.problems.forgive("net::ERR_FAILED")
