"""Take the pictures of the web page: `python docs/screenshots.py`, or `--all FOLDER` for every view in every look.

A real server with the embedded model answers, so the texts and the numbers in the pictures are what this machine gave:
take them while it is idle. The server learns from each picture's answer, as it does from a user's.

Needs playwright, Pillow and a Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

import lookahead
from lookahead.serve.life import make_server
from lookahead.serve.settings import ServeSettings

IMAGES = Path(__file__).parent / "img"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDE, NARROW = {"width": 1180, "height": 760}, {"width": 390, "height": 800}
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": WIDE, "color_scheme": "light"},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "narrow": {"viewport": NARROW, "color_scheme": "light"},
}
VIEWS = ("welcome", "chat", "race", "inside", "status")
KEPT = ("chat-light", "chat-dark", "chat-narrow", "race-light", "inside-light", "inside-dark", "status-light")
"""The pictures that docs/img keeps, besides the animation."""
COLOURS = 64
ANIMATION = "page-chat.gif"
FILM = {"width": 860, "height": 540}
FILM_TOKENS = 170
FRAME_SECONDS = 0.25
LOOK_MS = 2500  # a little more than the page waits between two looks at the status
REQUEST = """async () => {
  const messages = [{ role: "user", content: "List the planets of the solar system." }];
  const options = { method: "POST", headers: { "Content-Type": "application/json" } };
  await (await fetch("v1/chat/completions", { ...options, body: JSON.stringify({ messages, max_tokens: 60 }) })).text();
}"""
LAST_FRAME_SECONDS = 3.0


@contextmanager
def served() -> Iterator[str]:
    """The address of a server with the embedded model."""
    model = lookahead.load()
    server = make_server(model, ServeSettings(port=0), lambda line: None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield server.address
    server.begin_drain()
    thread.join(20)


def ask(page: Page, text: str, tokens: int) -> None:
    """Send a message of the chat, for an answer of at most this number of tokens."""
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#set-max-tokens", str(tokens))
    page.locator("#set-max-tokens").blur()
    page.evaluate("document.getElementById('settings').open = false")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def show(page: Page, view: str) -> None:
    """Bring the page to a view that has something to show."""
    if view == "chat":
        ask(page, "Write a Python class for a queue with enqueue, dequeue, peek and is_empty.", 150)
        page.wait_for_selector(".facts:not(:empty)", timeout=120_000)
        page.evaluate("document.getElementById('scroll').scrollTop = 0")
        page.mouse.move(0, 0)
    elif view == "race":
        page.click("#race-start")
        page.wait_for_selector("#race-result:not([hidden])", timeout=120_000)
    elif view == "inside":
        page.fill("#inside-tokens", "24")
        page.click("#inside-start")
        page.wait_for_selector("#inside-tree svg", timeout=120_000)
        page.wait_for_selector("#inside-tree .axis")
    elif view == "status":
        page.wait_for_selector(".card")
        for _ in range(3):  # so that the charts have something to show
            page.evaluate(REQUEST)
            page.wait_for_timeout(LOOK_MS)


def picture(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def few_colours(full: Image.Image) -> Image.Image:
    """A picture with few colours, which makes its file small."""
    return full.quantize(COLOURS, dither=Image.Dither.NONE)


def take_all(browser: Any, url: str, folder: Path, wanted: set[str]) -> None:
    for look, options in LOOKS.items():
        for view in VIEWS:
            if f"{view}-{look}" not in wanted:
                continue
            context = browser.new_context(reduced_motion="reduce", **options)
            page = context.new_page()
            page.goto(f"{url}/#{'chat' if view == 'welcome' else view}")
            show(page, view)
            path = folder / f"page-{view}-{look}.png"
            few_colours(picture(page.screenshot(full_page=True))).save(path, optimize=True)
            print(f"{path.name}: {path.stat().st_size // 1024} KiB")
            context.close()


def animate(browser: Any, url: str, path: Path) -> None:
    """Film an answer as it comes, at its true speed. Its blocks do not fade in: that would make the file large."""
    page = browser.new_page(viewport=FILM, color_scheme="light", reduced_motion="reduce")
    page.goto(url)
    ask(page, "Write a Python class for a stack with push, pop, peek and is_empty.", FILM_TOKENS)
    page.wait_for_selector(".assistant .block", timeout=120_000)
    frames, ends, begin = list[Image.Image](), list[float](), time.monotonic()
    done = False
    while not done:
        done = page.locator(".facts:not(:empty)").count() > 0
        frames.append(picture(page.screenshot()))
        ends.append(time.monotonic() - begin)
        time.sleep(max(0.0, len(frames) * FRAME_SECONDS - ends[-1]))
    starts = [0.0, *ends[:-1]]
    durations = [round(1000 * (end - start)) for start, end in zip(starts, ends, strict=True)]
    durations[-1] = round(1000 * LAST_FRAME_SECONDS)
    colours = few_colours(frames[-1])  # the same for all frames, so that only what changes is stored again
    frames = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1024} KiB, {len(frames)} frames")


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of the web page.")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="take every view in every look, into this folder")
    folder = parser.parse_args().all
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        print("no Chromium is installed; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    wanted = set(KEPT) if folder is None else {f"{view}-{look}" for view in VIEWS for look in LOOKS}
    folder = folder or IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        animate(browser, url, folder / ANIMATION)
        take_all(browser, url, folder, wanted)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
