"""Tiny random models with wide weights whose steps are chains, of every family that has any."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

sys.path.append(str(Path(__file__).parents[2] / "docs"))

from tiny_models import tiny_model

RECURRENT = (
    "BailingHybridForCausalLM", "BambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM",
    "InklingForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Mamba2ForCausalLM",
    "MiniMaxForCausalLM", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "RwkvForCausalLM", "ZayaForCausalLM", "xLSTMForCausalLM",
)  # fmt: skip
"""Classes with a recurrent state."""
OTHERS = (
    "BartForCausalLM", "BigBirdPegasusForCausalLM", "BloomForCausalLM", "GPTNeoForCausalLM",
    "MiniMaxM3VLForCausalLM", "MllamaForCausalLM", "MptForCausalLM", "RoFormerForCausalLM", "TrOCRForCausalLM",
)  # fmt: skip
"""Classes whose attention takes no mask of ours, or counts indices in the cache."""
REFUSED = {
    "MambaForCausalLM": "Mamba-1",
    "JambaForCausalLM": "Mamba-1",
    "ZambaForCausalLM": "does not continue from the state",
    "NemotronHForCausalLM": "bounds the time steps",
    "Zamba2ForCausalLM": "bounds the time steps",
    "DeepseekV32ForCausalLM": "indexed attention",
    "DeepseekV4ForCausalLM": "indexed attention",
    "RecurrentGemmaForCausalLM": "returns no cache",
}
"""Classes that run no chains either, and why."""
QUICK = ("Qwen3NextForCausalLM", "Mamba2ForCausalLM", "BloomForCausalLM")

_made: dict[str, Any] = {}


def chain_model(name: str) -> Any:
    """The model of this class. Nobody changes it."""
    if name not in _made:
        transformers.logging.set_verbosity_error()
        _made[name] = tiny_model(name)
    return _made[name]


def known(names: tuple[str, ...]) -> list[str]:
    """Those that the installed transformers has."""
    return [name for name in names if hasattr(transformers, name)]
