"""Servers of `peers.py` and `soak.py`: their processes, metrics and memory. Only Python is needed."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError


@dataclass
class Served:
    """A server that is asked: its address, and its process if that is known."""

    url: str
    pid: int | None = None
    key: str | None = None
    lines: list[str] = field(default_factory=list)
    code: int | None = None
    begin: float = field(default_factory=time.monotonic)

    def get(self, path: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:  # nobody answers
            return 0, str(error)

    def metric(self, name: str) -> float | None:
        """The sum of a metric's samples, if there are any. Its name may begin with `lookahead:` or `lookahead_`."""
        status, text = self.get("/metrics")
        pattern = rf"^lookahead[:_]{name}(?:\{{[^}}]*\}})? (\S+)$"
        found = re.findall(pattern, text, re.MULTILINE) if status == 200 else []
        return sum(map(float, found)) if found else None

    def captures(self) -> float | None:
        """Parts of steps that were captured so far, where the server reports them."""
        return self.metric("captures(?:_total)?")

    def info(self) -> dict[str, str]:
        """Model, dtype and device."""
        found = re.search(r"^lookahead[:_]server_info\{(.*)\} ", self.get("/metrics")[1], re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1] if found else ""))
        return {"model": labels.get("model_name", "?"), **{k: labels.get(k, "?") for k in ("dtype", "device")}}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server that runs, such as http://127.0.0.1:8000; without it one is started")
    parser.add_argument("--pid", type=int, help="its process, whose memory is watched")
    parser.add_argument("--key", help="its API key")
    parser.add_argument("--inflate", metavar="SHAPE", help="start it with the model in this shape, such as 7b")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds in which the server must be ready")


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; those that are not the parser's are the `options` of the server that is started."""
    args, args.options = parser.parse_known_args(words)
    if args.url is not None and (args.options or args.inflate):
        given = " ".join(args.options) or "--inflate"
        parser.error(f"{given}: options of a server belong to one that is started, not to --url")
    return args


def connect(args: argparse.Namespace) -> AbstractContextManager[Served]:
    """The server at `--url`, or one that is started with `options`."""
    if args.url is None:
        return server(args.options, args.patience, args.inflate, args.key)
    given = Served(args.url.rstrip("/"), args.pid, args.key)
    if given.get("/health")[0] != 200:
        raise SystemExit(f"--url {args.url}: {given.get('/health')[1][:200]}")
    return nullcontext(given)


@contextmanager
def server(options: list[str], patience: float, shape: str | None = None, key: str | None = None) -> Iterator[Served]:
    """`lookahead serve` with these options, until the end of the context."""
    inflate = str(Path(__file__).with_name("inflate.py"))
    program = ["-m", "lookahead"] if shape is None else [inflate, shape]
    command = [sys.executable, *program, "serve", "--port", "0", "--no-memory", *options]
    with started(command, patience, key) as found:
        yield found


@contextmanager
def started(command: Sequence[str], patience: float, key: str | None = None, url: str = "") -> Iterator[Served]:
    """A server that is started by this command, until the end of the context.

    It is ready when it answers at `url`; without one when it prints `serving ... at URL`, as ours does.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL if url else None, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # whose processes all end with it
    )  # fmt: skip
    found = Served(url, process.pid, key)

    def read() -> None:
        for line in process.stderr or ():
            found.lines.append(line.rstrip())
            print(f"   {line.rstrip()}", file=sys.stderr, flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        end = time.monotonic() + patience
        while not _is_ready(found):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start: {found.lines[-1] if found.lines else 'it said nothing'}")
            time.sleep(0.1)
        yield found
        process.send_signal(signal.SIGTERM)
        found.code = process.wait(60)
        reader.join(5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(found: Served) -> bool:
    if found.url:
        return any(found.get(path)[0] == 200 for path in ("/health", "/v1/models"))
    ready = next((line for line in found.lines if line.startswith("serving ")), None)
    found.url = ready.split(" at ")[-1].removesuffix("/v1") if ready else ""
    return bool(ready)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# Its memory.


def resident(pid: int) -> int:
    """The bytes of a process and of those that it has started."""
    sizes, parents = dict[int, int](), dict[int, int]()
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:  # it has ended
            continue
        one = int(fields["Pid"])
        parents[one], sizes[one] = int(fields["PPid"]), int(fields.get("VmRSS", "0 kB").split()[0]) << 10
    family = {pid}
    while more := {one for one, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(sizes.get(one, 0) for one in family)


def on_gpu() -> int | None:
    """The bytes in use on all GPUs, where nvidia-smi reports them."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.findall(r"^\s*(\d+)\s*$", done.stdout, re.MULTILINE)
    return sum(map(int, found)) << 20 if done.returncode == 0 and found else None


def memory(pid: int | None) -> dict[str, int | None]:
    """Bytes of the server's processes, if their parent is known, and of all GPUs."""
    return {"host": None if pid is None else resident(pid), "gpu": on_gpu()}
