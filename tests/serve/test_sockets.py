"""The address is taken before the model is loaded, and whatever keeps a server from starting is named."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import lookahead.parallel
from lookahead.cli import app
from lookahead.cli.common import Host
from lookahead.cli.ranks import Ranks
from lookahead.serve.service import Service
from lookahead.serve.sockets import allow_port_reuse, bind, bound

HERE = "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server((HERE, 0)) as other:
        yield other.getsockname()[1]


def run(*args: str, load: Any) -> Any:
    return CliRunner().invoke(app, ["serve", "--no-memory", *args], obj=Host(load=load))


def never(*given: Any, **options: Any) -> Any:
    raise AssertionError("the model was loaded")


def test_a_port_in_use_shows_before_the_model_is_loaded(taken: int) -> None:
    done = run("--port", str(taken), load=never)
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: cannot listen on {HERE}:{taken}: the port is in use; stop what uses it, or give another --port (0 for "
        "any free one)\n"
    )


def test_a_port_in_use_shows_before_ranks_are_started(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "launch", never)
    done = run("--port", str(taken), "--ranks", "2", load=never)
    assert done.exit_code == 2
    assert f"cannot listen on {HERE}:{taken}: the port is in use" in done.stderr
    assert done.stderr.count("\n") == 1


def test_rank_0_takes_the_port_before_it_loads(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(lookahead.parallel, "load", never)
    done = run("--port", str(taken), load=never)
    assert done.exit_code == 2
    assert f"cannot listen on {HERE}:{taken}: the port is in use" in done.stderr


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no-such-host.invalid", "the host is not known"),
        ("x" * 70, "the host is not known"),
        ("203.0.113.7", "this machine has no such address; give another --host"),
    ],
)
def test_a_wrong_host_shows_before_the_model_is_loaded(host: str, says: str) -> None:
    done = run("--host", host, "--port", "0", "--allow-public", load=never)
    assert done.exit_code == 2
    assert f"cannot listen on {host}:0: {says}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_needs_a_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Any, address: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbidden)
    with pytest.raises(ValueError, match=r"cannot listen on 127.0.0.1:80: there is no permission to; give a --port"):
        bind(HERE, 80)


def test_clients_are_refused_while_the_model_loads() -> None:
    """Nobody else can have the port meanwhile; and an error of the load is told as it is."""
    with bound(HERE, 0) as free:
        port = free[0].getsockname()[1]
    found: list[str] = []

    def load(name: str, **options: Any) -> Any:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, port))
        with pytest.raises(ValueError, match="the port is in use"):
            bind(HERE, port)
        found.append("loaded")
        raise ValueError("no such model")

    done = run("--port", str(port), load=load)
    assert found == ["loaded"]
    assert (done.exit_code, done.stderr) == (2, "error: no such model\n")
    with bound(HERE, port):  # it is free again
        pass


def test_an_error_at_the_start_names_itself(loaded: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def fail(self: Service) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(Service, "start", fail)
    with caplog.at_level(logging.ERROR):
        done = run("--port", "0", load=lambda name, **options: loaded)
    assert (done.exit_code, done.stderr) == (2, "error: the server cannot start: OSError: the disk is on fire\n")
    assert "Traceback" not in caplog.text


def test_connections_of_an_earlier_server_are_no_obstacle() -> None:
    with bound(HERE, 0) as sockets:
        allow_port_reuse(sockets)
        (own,) = sockets
        own.listen()
        port = own.getsockname()[1]
        with socket.create_connection((HERE, port)) as client:
            own.accept()[0].close()  # who closes first keeps the connection for a while
            assert client.recv(1) == b""
    time.sleep(0.01)
    assert time_waits(port)
    with bound(HERE, port) as again:
        again[0].listen()


def time_waits(port: int) -> bool:
    """Whether Linux still keeps a connection of this port that has ended."""
    with open("/proc/net/tcp") as table:
        return any(
            line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "06" for line in table.readlines()[1:]
        )


def test_a_name_of_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that this machine has are bound to the same port; one that it has not is left out."""
    addresses = [(socket.AF_INET, ("203.0.113.7", 0)), (socket.AF_INET, (HERE, 0)), (socket.AF_INET, ("127.0.0.2", 0))]

    def known(host: str, port: int, **options: Any) -> Any:
        return [(family, socket.SOCK_STREAM, 6, "", (name, port)) for family, (name, _) in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    with bound("several", 0) as free:
        assert [one.getsockname()[0] for one in free] == [HERE]
        port = free[0].getsockname()[1]
    with bound("several", port) as sockets:
        assert [one.getsockname() for one in sockets] == [(HERE, port), ("127.0.0.2", port)]
