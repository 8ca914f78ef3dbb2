"""The web page at `/`: static files without secrets, so they need no key. The page itself prompts for one.

The files are read once at startup. The headers restrict the page to these files and this server, and forbid inline
scripts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

from lookahead.serve.errors import ApiError
from lookahead.serve.limits import OPEN_FOLDER

HOME = "index.html"
KINDS = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The Content-Security-Policy. With the last two directives, supporting browsers refuse to parse text as markup."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class WebFile:
    """One file of the page. `tag` changes with its content."""

    content: bytes
    kind: str
    tag: str


@lru_cache(1)
def web_files() -> dict[str, WebFile]:
    """The page's files by name."""
    found = {}
    for item in files("lookahead.serve").joinpath("web").iterdir():
        suffix = item.name[item.name.rfind(".") :]
        if suffix in KINDS:
            content = item.read_bytes()
            tag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
            found[item.name] = WebFile(content, f"{KINDS[suffix]}; charset=utf-8", tag)
    return found


@router.get("/")
async def home(request: Request) -> Response:
    """The page."""
    return _answer(HOME, request)


@router.get(OPEN_FOLDER + "{name}")
async def web_file(name: str, request: Request) -> Response:
    """A file of the page."""
    return _answer(name, request)


def _answer(name: str, request: Request) -> Response:
    found = web_files().get(name)
    if found is None:
        raise ApiError(404, f"there is no {OPEN_FOLDER}{name[:80]} here")
    headers = {**HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.kind, headers=headers)
