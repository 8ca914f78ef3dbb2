"""What other packages warn of when a model is loaded does not stand above every reply."""

from __future__ import annotations

import enum
import logging
import subprocess
import sys

import pytest

from lookahead.cli.quiet import quiet_torchao

PYTREE = "%s is an Enum subclass and is now natively supported by torch.compile as an opaque value type."


class Kind(enum.Enum):
    ONE = 1


def test_these_two_warnings_and_no_others(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, trees = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    for logger in (kernels, trees):
        monkeypatch.setattr(logger, "filters", list(logger.filters))
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    quiet_torchao()
    theirs = enum.Enum("KernelPreference", {"AUTO": 1}, module="torchao.quantization.quantize_")
    kernels.warning("Failed to load /venv/torchao/_C_mxfp8.cpython-310.so: Could not load this library")
    trees.warning(PYTREE, theirs)
    assert not caplog.messages
    kernels.warning("Failed to load /data/weights.pt: no such file")
    trees.warning(PYTREE, Kind)
    trees.warning("another warning")
    trees.warning("%s is a leaf", theirs)
    assert len(set(caplog.messages)) == 4


@pytest.mark.slow
def test_the_command_is_quiet() -> None:
    """With torchao installed, transformers imports it with the first model."""
    pytest.importorskip("torchao")
    code = (
        "from lookahead.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "import torchao.quantization\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Failed to load" not in done.stderr
    assert "Enum subclass" not in done.stderr
