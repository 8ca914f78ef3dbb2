"""The chat of the web page, used as a visitor does, and answers that are made up."""

from __future__ import annotations

import json
from typing import Any


def set_field(page: Any, id: str, value: Any) -> None:
    """Fill a field of the settings, which may be folded away."""
    page.evaluate("document.getElementById('settings').open = true")
    page.fill(f"#{id}", str(value))
    page.locator(f"#{id}").blur()


def ask(page: Any, text: str, tokens: int) -> None:
    """Send a message with the keyboard, for an answer of at most so many tokens."""
    set_field(page, "set-max-tokens", tokens)
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any) -> str:
    """Wait for the last answer's end, and return its text."""
    page.wait_for_selector(".message:last-child .facts:not(:empty)")
    return page.locator(".message:last-child .body").text_content()


def canned(page: Any, text: str, size: int = 4) -> None:
    """Answer the next chats with this text in place of the server: steps of so many characters each."""
    chunks = []
    for number, start in enumerate(range(0, len(text), size), start=1):
        part = text[start : start + size]
        facts = {"tried": 3, "accepted": 1, "sources": ["suffix"], "seconds": number / 100}
        step = {"step": number, "text": part, "tokens": [1, 2], **facts}
        chunks.append({"choices": [{"delta": {"content": part}}], "lookahead": {"steps": [step]}})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
