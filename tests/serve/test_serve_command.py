"""`lookahead serve` from the command line: mistakes are one line, and are told before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lookahead.cli import app
from lookahead.cli import serve as verb
from lookahead.cli.common import Host


def run(*args: str, load: Any = None) -> Any:
    def never(*given: Any, **options: Any) -> Any:
        raise AssertionError("the model was loaded")

    return CliRunner().invoke(app, ["serve", *args], obj=Host(load=load or never))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--host", "0.0.0.0"), "there is no API key; give --api-key-file, or --allow-public"),
        (("--port", "99999"), "port=99999 must be from 0"),
        (("--max-concurrency", "0"), "max_concurrency=0 must be at least 1"),
        (("--api-key-file", "/nothing/here"), "'/nothing/here' cannot be read"),
        (("--cors", "xyz"), "cors_origins has 'xyz', which is not an origin; write it as https://"),
        (("--log-level", "loud"), "log_level='loud' must be one of debug, info, warning, error"),
        (("--log-format", "xml"), "log_format='xml' must be one of text, json"),
        (("--backend", "magic"), "--backend does not know 'magic'"),
    ],
)
def test_a_mistake_is_one_line(args: tuple[str, ...], says: str) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "EXTRA", ("fastapi", "no_such_package"))
    done = run()
    assert done.exit_code == 2
    assert "needs no_such_package; install the extra: pip install 'lookahead-decoding[serve]'" in done.stderr


def test_options_become_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lookahead.serve import life, sockets

    keys = tmp_path / "keys"
    keys.write_text("a-long-secret\n")
    found: list[Any] = []
    bound: list[Any] = []

    @contextmanager
    def no_sockets(*address: Any) -> Iterator[list[Any]]:
        bound.append(address)
        yield []

    monkeypatch.setattr(sockets, "bound", no_sockets)
    monkeypatch.setattr(life, "serve", lambda model, settings, say, sockets: found.append((model, settings)))
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    options = ("--host", "0.0.0.0", "--port", "81", "--api-key-file", str(keys), "--max-queue", "3", "--no-memory")
    done = run(*options, "--cors", "https://a.example", load=lambda name, **options: "model")
    assert done.exit_code == 0, done.stderr
    ((model, settings),) = found
    assert model == "model"
    assert settings.keys == ("a-long-secret",)
    assert (settings.host, settings.port, settings.max_queue) == ("0.0.0.0", 81, 3)
    assert bound == [("0.0.0.0", 81)]
    assert settings.cors_origins == ("https://a.example",)
    assert settings.memory_folder is None
    assert "a-long-secret" not in done.stderr + done.stdout
