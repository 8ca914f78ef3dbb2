"""One rank of a tensor-parallel run: decode some calls plainly and with lookahead, and write down what came out.

`torchrun ... tensor_parallel.py FOLDER`: FOLDER holds `calls.json` and one folder per model; rank r writes
`rank<r>.json`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import lookahead


def digest(tensor: torch.Tensor) -> str:
    """Of the exact bits."""
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def decode(model: Any, calls: list[dict[str, Any]], settings: dict[str, int] | None) -> list[dict[str, Any]]:
    """Each call's new tokens, its forward passes, and the state that it leaves the random generator in.

    With settings None it is `generate` alone that decodes; with none given, `decoding()` chooses its own.
    """
    passes = []
    counter = model.register_forward_hook(lambda *_: passes.append(1))
    hook = {} if settings is None else {"custom_generate": lookahead.decoding(**settings)}
    found = []
    for call in calls:
        passes.clear()
        torch.manual_seed(call["seed"])
        ids, mask = torch.tensor(call["ids"]), torch.tensor(call["mask"])
        output = model.generate(ids, attention_mask=mask, **call["options"], **hook)
        tokens = output[:, ids.shape[1] :].tolist()
        found.append({"tokens": tokens, "passes": len(passes), "random": digest(torch.get_rng_state())})
    counter.remove()
    return found


def shards(model: Any) -> dict[str, list[int]]:
    """Shapes of what this rank holds: some weights, and the keys of one cached token."""
    weights = {"keys": model.model.layers[0].self_attn.k_proj.weight, "head": model.lm_head.weight}
    held = {name: list(weight.to_local().shape) for name, weight in weights.items()}
    cache = model(torch.zeros((1, 1), dtype=torch.long), use_cache=True).past_key_values
    return {**held, "cached": list(cache.layers[0].keys.shape)}


def main(folder: Path) -> None:
    task = json.loads((folder / "calls.json").read_text())
    report: dict[str, Any] = {}
    for name in task["models"]:
        model = AutoModelForCausalLM.from_pretrained(
            folder / name, distributed_config=DistributedConfig(tp_plan="auto"), dtype=torch.float32
        ).eval()
        with torch.inference_mode():
            report[name] = {
                "shards": shards(model),
                "logits": digest(model(torch.tensor(task["calls"][0]["ids"])).logits),
                "plain": decode(model, task["calls"], None),
                "lookahead": decode(model, task["calls"], task["settings"]),
                "unset": decode(model, task["calls"][:1], {}),
            }
    (folder / f"rank{distributed.get_rank()}.json").write_text(json.dumps(report))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
