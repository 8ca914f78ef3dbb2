"""Kernels are compiled in advance, in threads, without being launched. Triton compiles for a GPU that is not there: in
a process of its own, because in this one it interprets kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = '''
import threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Driver:
    """As on an H100; a launch is an error, because nothing can be loaded."""
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_active_torch_device(self): return torch.device("cpu")
    def __getattr__(self, name): raise RuntimeError("launched")

driver.set_active(Driver())
from lookahead.backends.graph.kernels import ends
from lookahead.backends.graph.kernels.activations import activate
from lookahead.backends.graph.kernels.compiling import compile_launched, package_kernels
from lookahead.models.feed_forward import Activation

compiled = []
def note(**about):
    compiled.append(about["fn"].name.rsplit(".", 1)[-1])
triton.knobs.runtime.jit_post_compile_hook = note

x, out = torch.ones(16, 512, dtype=torch.bfloat16), torch.ones(16, 256, dtype=torch.bfloat16)
table, tokens = torch.ones(8, 256, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
elsewhere = []

def gate(x, out):
    activate(x, None, out, Activation.SILU)

def launch_elsewhere():
    try:
        gate(x, out)
    except RuntimeError as error:
        elsewhere.append(str(error))

def work():
    for _ in range(3):
        gate(x, out)
        gate(x[:, :256], out[:, :128].contiguous())
        ends.embed(table, tokens, out)
    other = threading.Thread(target=launch_elsewhere)
    other.start()
    other.join()

compile_launched(work, threads=2)
found = len(compiled)
assert (compiled.count("_embed"), set(compiled)) == (1, {"_embed", "_activate"}), compiled
assert compiled.count("_activate") in (2, 3), compiled  # the other thread may compile it once more
assert elsewhere == ["launched"], elsewhere
assert torch.equal(out, torch.ones_like(out))
compile_launched(work, threads=2)
assert len(compiled) == found, compiled
assert {"_activate", "_attend", "_draw"} <= {kernel.fn.__name__ for kernel in package_kernels()}
assert not any("run" in vars(kernel) for kernel in package_kernels())

def broken():
    raise ValueError("work")

def launched():
    try:
        gate(x, out)
    except RuntimeError as error:
        return str(error)

try:
    compile_launched(broken, threads=2)
except ValueError as error:
    assert str(error) == "work"
else:
    raise AssertionError
assert launched() == "launched"

# A kernel that does not compile: its error comes when it is launched.
wide = torch.ones(16, 1024, dtype=torch.bfloat16)
triton.compiler.compiler.ASTSource.make_ir = lambda *args, **options: 1 / 0
compile_launched(lambda: gate(wide, wide[:, :512].contiguous()), threads=2)
try:
    gate(wide, wide[:, :512].contiguous())
except ZeroDivisionError:
    print("done")
'''


def test_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "done"
