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
        (("--dtype", "int5"), "--dtype does not know 'int5'"),
    ],
)
@pytest.mark.thinned(1, most=5)
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


# A file of options.


def settings_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *args: str
) -> tuple[Any, dict[str, Any], list[str]]:
    """The settings that a file and a command line make, what is loaded, and the address."""
    from lookahead.serve import life, sockets

    found: list[Any] = []

    @contextmanager
    def no_sockets(*address: Any) -> Iterator[list[Any]]:
        yield []

    def load(name: str | None, **options: Any) -> str:
        found.append({"model": name, **options})
        return "model"

    monkeypatch.setattr(sockets, "bound", no_sockets)
    monkeypatch.setattr(life, "serve", lambda model, settings, say, sockets: found.append(settings))
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    done = run("--config", str(file), *args, load=load)
    assert done.exit_code == 0, done.stderr
    loaded, settings = found
    return settings, loaded, done.stderr


FILE = """
# a server
model: some/model
port: 9000
max_queue: 7
max-concurrency: 5
request-timeout: 2.5
cors: [https://a.example, https://b.example]
memory: false
allow-public: true
host: 0.0.0.0
served-name:
"""


def test_options_come_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, loaded, _ = settings_from(monkeypatch, tmp_path, FILE)
    assert loaded["model"] == "some/model"
    assert (settings.host, settings.port, settings.public) == ("0.0.0.0", 9000, True)
    assert (settings.max_queue, settings.max_concurrency, settings.request_timeout) == (7, 5, 2.5)
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert settings.memory_folder is None
    assert settings.model_name is None
    assert settings.drain_seconds == 30.0


def test_the_command_line_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = ("--port", "81", "--memory", "--cors", "https://c.example")
    settings, _, _ = settings_from(monkeypatch, tmp_path, FILE, *args)
    assert (settings.port, settings.max_queue) == (81, 7)
    assert settings.cors_origins == ("https://c.example",)
    assert settings.memory_folder is not None


def test_a_switch_may_have_its_other_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, _, _ = settings_from(monkeypatch, tmp_path, "no-memory: true\ncors: https://a.example")
    assert settings.memory_folder is None
    assert settings.cors_origins == ("https://a.example",)
    assert settings_from(monkeypatch, tmp_path, "")[0].port == 8000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-queu: 3", "no option 'max-queu'; did you mean 'max-queue'?"),
        ("xyzzy: 3", "no option 'xyzzy'; there are allow-public, api-key-file,"),
        ("config: other.yaml", "no option 'config'"),
        ("port: many", "port cannot be 'many': "),
        ("port: 3.5", "port cannot be 3.5: "),
        ("port: true", "port cannot be True; give a text or a number"),
        ("port: [1, 2]", "port takes one value, not a list"),
        ("memory: 1", "memory is true or false, not 1"),
        ("memory: true\nno_memory: true", "'no_memory' is given twice"),
        ("max-queue: -1", "max_queue=-1 must be at least 0"),
        ("- port", "must have lines such as 'port: 9000', not a list"),
        ("port: [", "is not YAML"),
        (None, "cannot be read"),
    ],
)
@pytest.mark.thinned(1, most=5)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "serve.yaml"
    if text is not None:
        file.write_text(text)
    done = run("--config", str(file))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
