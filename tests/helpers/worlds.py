"""Worlds of a few processes for tests: started together, given a hard limit, and never left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "worker.py"
TENSOR_PARALLEL = Path(__file__).parent / "tensor_parallel.py"
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Ours, one thread per process, the loopback interface, and no rank of some other launcher's."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback, "PYTHONPATH": path}
    return {**kept, **fixed, **more}


class World:
    """R processes of one script, each with torchrun's variables. Use it in a `with`: what still runs then is killed."""

    def __init__(
        self, folder: Path, ranks: int, *parts: dict[str, Any], variables: dict[str, str] | None = None
    ) -> None:
        """`parts` are done one after the other, each by a group of its own."""
        self.folder, self.ranks = folder, ranks
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "task.json").write_text(json.dumps({"parts": parts}))
        port = free_port()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(ranks):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(variables or {}),
            }
            with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, str(WORKER), str(folder)], env=environment(**place), stdout=out, stderr=err
                )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def wait(self, seconds: float) -> list[int]:
        """The exit codes; a process that has not ended by then fails the test."""
        end = time.monotonic() + seconds
        for rank, process in self.processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} still runs after {seconds} s\n{self.everything()}") from None
        return [process.returncode for process in self.processes.values()]

    def until(self, rank: int, text: str, seconds: float = 60.0) -> None:
        """Wait until a rank has written this to stdout."""
        end = time.monotonic() + seconds
        while text not in self.out(rank):
            assert time.monotonic() < end, f"rank {rank} did not write {text!r}\n{self.everything()}"
            assert self.processes[rank].poll() is None, self.everything()
            time.sleep(0.02)

    def out(self, rank: int) -> str:
        return (self.folder / f"out{rank}").read_text()

    def err(self, rank: int) -> str:
        return (self.folder / f"err{rank}").read_text()

    def everything(self) -> str:
        return "\n".join(f"-- rank {r}\n{self.out(r)[-1000:]}{self.err(r)[-2000:]}" for r in self.processes)

    def reports(self, seconds: float) -> list[list[Any]]:
        """What each rank wrote down of every part, once all of them have ended well."""
        codes = self.wait(seconds)
        assert codes == [0] * self.ranks, self.everything()
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(self.ranks)]


def torchrun(folder: Path, ranks: int, *parts: dict[str, Any], seconds: float) -> list[list[Any]]:
    """A world that torchrun starts and keeps the store of; what each rank wrote down."""
    (folder / "task.json").write_text(json.dumps({"parts": parts}))
    return torchrun_script(WORKER, folder, ranks, seconds)


def torchrun_script(script: Path, folder: Path, ranks: int, seconds: float, **variables: str) -> list[Any]:
    """`script FOLDER` on ranks of torchrun's; what each rank wrote down in FOLDER/rank<r>.json."""
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*run, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(script), str(folder)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # and it ends its ranks
        output, _ = process.communicate()
    assert process.returncode == 0, output
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
