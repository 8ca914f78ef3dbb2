"""The files of the page at `/`: small, from here alone, open to everybody, and under a strict policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import Running, running

from lookahead.serve import pages

WEB = Path(pages.__file__).parent / "web"
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def guarded(loaded: Any) -> Iterator[Running]:
    with running(loaded, keys=("first-secret",)) as one:
        yield one


def test_the_page_and_its_files_need_no_key_and_have_a_policy(guarded: Running) -> None:
    answers = [guarded.client.get("/"), *(guarded.client.get(f"/web/{path.name}") for path in WEB.iterdir())]
    for answer in answers:
        assert answer.status_code == 200, answer.url
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    assert sum(len(answer.content) for answer in answers[1:]) < MOST_BYTES  # the first one is index.html again
    assert answers[0].headers["Content-Type"] == "text/html; charset=utf-8"


def test_only_reading_is_open(guarded: Running) -> None:
    for path in ("/", "/web/main.js", "/health"):
        assert guarded.client.post(path, content=b"x").status_code == 401


def test_a_file_is_sent_once(guarded: Running) -> None:
    first = guarded.client.get("/web/main.js")
    again = guarded.client.get("/web/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert guarded.client.get("/web/main.js", headers={"If-None-Match": '"old"'}).status_code == 200


@pytest.mark.parametrize("path", ["/web/nothing.js", "/web/", "/web/..%2Fpages.py", "/web/%2e%2e/pages.py"])
def test_nothing_else_comes_out_of_the_folder(guarded: Running, path: str) -> None:
    answer = guarded.client.get(path)
    assert answer.status_code in (401, 404)
    assert "error" in answer.json()


def test_the_page_names_no_other_address_and_holds_no_inline_code() -> None:
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[\w.]+", text))
        assert addresses <= {"http://www.w3.org"}, path.name  # the name of SVG, which nobody fetches
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", text)
        if path.suffix == ".js":
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


def test_every_file_that_is_named_exists_and_every_file_is_used() -> None:
    names = {path.name for path in WEB.iterdir()}
    named = {"index.html"}
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:"web/|from "\./)([\w.-]+)"', text))
    assert named == names
