"""A real, headless Chromium for the tests of the web page, and what went wrong in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WATCH = """addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy: ${event.violatedDirective} refused ${event.blockedURI || "inline"}`))"""


def find_chromium() -> str | None:
    """The path of a browser that is installed, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser. Skips the tests where there is none, or no playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium is installed; on Debian: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        # Without its sandbox it also runs as root and in containers; it visits nothing but our own server.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


class Problems(list[str]):
    """What a page complained of: errors on its console, exceptions, and what its policy refused."""

    def forgive(self, words: str) -> None:
        """Drop the problems with these words. There must be one: otherwise the test did not do what it meant to."""
        assert any(words in one for one in self), (words, list(self))
        self[:] = [one for one in self if words not in one]


@contextmanager
def visit(browser: Any, url: str, **options: Any) -> Iterator[Any]:
    """A page in a fresh profile. `page.problems` must be empty at the end."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.add_init_script(WATCH)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.problems = Problems()
    page.on("console", lambda said: page.problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert page.problems == []
    finally:
        context.close()
