"""The server's settings. Each is checked once, and an error says what to change."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from lookahead.serve.logs import FORMATS, LEVELS

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+", re.IGNORECASE)


@dataclass(frozen=True)
class ServeSettings:
    """Settings of `lookahead serve`.

    At most `max_concurrency` sequences run at once, and `max_queue` more may wait; then clients get a 429. `max_body`
    is in bytes. A request's headers must arrive within `header_timeout` seconds, and its body within `body_timeout`.
    `request_timeout` and `drain_seconds` are seconds, too. `keep_alive` is how long a stream may be silent before a
    comment is sent. `share_memory` lets all keys share the prefix cache and the recycled successors. `memory_folder`
    saves these successors across restarts; None saves nothing. `public` allows serving on a reachable address without
    keys. `keys` are lines of a key file (see `keys`). `log_prompts` writes prompts to the log, whose records are those
    from `log_level` up, in the format `log_format`.
    `reasoning_tags` are the tags around a model's reasoning, such as "<think> </think>", `auto` or `none`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    keys: tuple[str, ...] = field(default=(), repr=False)
    public: bool = False
    share_memory: bool = False
    cors_origins: tuple[str, ...] = ()
    max_concurrency: int = 64
    max_queue: int = 256
    max_body: int = 4 << 20
    request_timeout: float = 600.0
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    drain_seconds: float = 30.0
    keep_alive: float = 15.0
    vllm_metrics: bool = False
    memory_folder: Path | None = None
    memory_seconds: float = 300.0
    memory_keys: int = 50_000
    log_prompts: bool = False
    log_level: str = "info"
    log_format: str = "text"
    reasoning_tags: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be from 0 (any free one) to 65535")
        for name, least in (("max_concurrency", 1), ("max_queue", 0), ("max_body", 1024), ("memory_keys", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in (
            "request_timeout",
            "header_timeout",
            "body_timeout",
            "drain_seconds",
            "keep_alive",
            "memory_seconds",
        ):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)) or (value == 0 and name != "drain_seconds"):
                raise ValueError(f"{name}={value} must be a number of seconds above 0")
        for name, known in (("log_level", LEVELS), ("log_format", FORMATS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        tags = self.reasoning_tags.split()
        if self.reasoning_tags not in ("auto", "none") and len(set(tags)) != 2:
            raise ValueError(
                f"reasoning_tags={self.reasoning_tags!r} must be auto, none, or two tags such as '<think> </think>'"
            )
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins has {origin!r}, which is not an origin; write it as https://page.example"
                )
        if not self.keys and not self.public and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host!r} is reachable from other machines, and there is no API key; give "
                "--api-key-file, or --allow-public to accept all clients"
            )

    @property
    def allowed_hosts(self) -> frozenset[str] | None:
        """The names in a `Host` header that are answered; None for any.

        A web page can have its own name resolve to this machine, and then a browser lets it read what a server on
        loopback answers. Keys protect from that, as does this check.
        """
        if self.keys or self.public or not is_loopback(self.host):
            return None
        return frozenset(("localhost", "127.0.0.1", "::1", self.host.lower()))


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
