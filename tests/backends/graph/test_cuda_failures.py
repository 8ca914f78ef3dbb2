"""On CUDA: memory that is really full, a device that is really lost, and compilers that really fail.

What ends a process or leaves nothing to go on with runs in a process of its own.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PROMPTS, outputs, tiny

from lookahead import LookaheadConfig
from lookahead.backends.failures import DeviceMemoryError
from lookahead.backends.graph.backend import GraphBackend
from lookahead.cli.common import DEVICE_LOST

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@contextmanager
def no_more_memory(spare: int = 0) -> Iterator[None]:
    """Torch may take no more from the GPU than it has now, and `spare` bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_steps_run_uncaptured_while_the_memory_is_full(
    settings: LookaheadConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """The same tokens; and a step that does fit afterwards is captured."""
    model = tiny("Llama", device="cuda").to(torch.bfloat16)
    expected = outputs(GraphBackend(model, kv_tokens=2048), PROMPTS, settings)
    backend = GraphBackend(model, kv_tokens=2048)
    with no_more_memory(8 << 20), caplog.at_level(logging.WARNING, "lookahead"):
        filled: list[torch.Tensor] = []
        try:
            while True:
                filled.append(torch.empty(1 << 19, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            filled = filled[: -max(1, len(filled) // 8)]
        found = outputs(backend, PROMPTS, settings)
        del filled
    assert found == expected
    lines = [record.getMessage() for record in caplog.records if record.name == "lookahead"]
    assert len(lines) == 1
    assert "needs" in lines[0]
    assert "GiB are free on cuda" in lines[0]
    assert backend.runner.state.full
    backend.check_room(2, 4000)  # larger pages: everything is captured again
    assert not backend.runner.state.full
    assert outputs(backend, PROMPTS, settings) == expected
    assert all(step.forward.graph is not None for step in backend.runner.steps.pairs.values())


def test_pages_that_do_not_fit_are_one_line(settings: LookaheadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before says that there is room: another program was faster."""
    backend = GraphBackend(tiny("Llama", device="cuda"), kv_tokens=2048)
    expected = outputs(backend, PROMPTS, settings)
    monkeypatch.setattr("lookahead.backends.graph.kv.free_bytes", lambda device: 1 << 40)
    with no_more_memory(), pytest.raises(DeviceMemoryError, match=r"^room for 64 sequences of 4000 tokens needs"):
        backend.check_room(64, 4000)
    assert outputs(backend, PROMPTS, settings) == expected


LOST = """
import sys, torch, lookahead
from lookahead.cli import app, main

pair = torch.load(sys.argv[1], weights_only=False)
model = lookahead.load((pair[0].to("cuda"), pair[1]), config=lookahead.LookaheadConfig())
model.generate("the fox", max_tokens=8)
collect = model.backend.collect

def faulty(running):
    torch._assert_async(torch.zeros(1, device="cuda"))
    return collect(running)

model.backend.collect = faulty
lines = []
for _ in range(3):
    try:
        model.generate("the fox", max_tokens=8)
    except lookahead.DeviceError as error:
        lines.append(str(error))
assert len(lines) == 3 and len(set(lines)) == 1, lines
app.command("lost")(lambda: model.generate("the fox"))
main(["lost"])
"""

BROKEN = """
import sys, torch, lookahead

pair = torch.load(sys.argv[1], weights_only=False)
pair = pair[0].to("cuda").to(torch.bfloat16), pair[1]
lines = []
model = lookahead.load(pair, config=lookahead.LookaheadConfig(), log=lines.append)
print(type(model.backend).__name__, len(model.generate("the fox", max_tokens=8).token_ids))
print([line for line in lines if "compile" in line or "Triton" in line])
try:
    lookahead.load(pair, config=lookahead.LookaheadConfig(), backend="graph")
except lookahead.UnsupportedModelError as error:
    print(error)
"""


def ran(script: str, model: Any, tokenizer: Any, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    pair = folder / "pair.pt"
    torch.save((model.to("cpu"), tokenizer), pair)
    env = {**os.environ, "LOOKAHEAD_CACHE": str(folder), **variables}
    command = [sys.executable, "-c", script, str(pair)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_a_lost_device_is_one_class_one_line_and_an_exit_code(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    done = ran(LOST, make_model(), tokenizer, tmp_path)
    assert done.returncode == DEVICE_LOST, done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("error: the device cuda:0 is lost (CUDA error: device-side assert triggered); no call of")
    assert "Traceback" not in done.stderr


def test_without_a_compiler_the_eager_backend_runs(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Triton builds its launchers with the machine's C compiler."""
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'error: it broke' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = ran(BROKEN, make_model(), tokenizer, tmp_path, CC=str(broken), TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.returncode == 0, done.stderr
    backend, said, refused = done.stdout.strip().splitlines()
    assert backend == "EagerBackend 8"
    assert "the eager backend runs it" in said
    assert "does not" in refused
    assert "using the Python drafter instead of the C one: " in done.stderr
    assert "error: it broke" in done.stderr
