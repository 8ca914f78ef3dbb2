"""Warnings of other packages that tell a user of the command nothing.

transformers imports torchao, where it is installed, whenever it loads a model. torchao then warns of its own CUDA
kernels, which were built for another Python or device, and torch of the way in which torchao registers its enums.
"""

from __future__ import annotations

import logging


def quiet_torchao() -> None:
    """Drop these two warnings, and no others of their loggers."""
    logging.getLogger("torchao").addFilter(_no_kernels_missing)
    logging.getLogger("torch.utils._pytree").addFilter(_no_enums_of_torchao)


def _no_kernels_missing(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not (message.startswith("Failed to load ") and "torchao" in message and "_C" in message)


def _no_enums_of_torchao(record: logging.LogRecord) -> bool:
    named = record.args[0] if isinstance(record.args, tuple) and record.args else None
    of_torchao = str(getattr(named, "__module__", "")).split(".")[0] == "torchao"
    return not (of_torchao and "is an Enum subclass" in str(record.msg))
