"""Load a transformers model and its tokenizer by name, and read the settings of its own configs.

A name is the embedded model's, a preset's, a hub id, a folder or a `.gguf` file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lookahead.loading.chunks import shorter_chunks
from lookahead.loading.decoder import fix_decoder
from lookahead.loading.embedded import EMBEDDED, ModelError, resolve
from lookahead.loading.formats import FORMATS, check_unquantised, quantise_model, quantised_copy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of 'auto', 'cpu', 'cuda' or 'cuda:N', after checking that it exists."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ModelError(f"device {name!r} is not available; use cpu or auto")
    return device


def pick_dtype(name: str, device: torch.device) -> Any:
    """The dtype to load with: 'auto' is float32 on a CPU and the model's own elsewhere.

    On a CPU half precision is slower than float32, by up to 20 times. What a format does not quantise has the dtype of
    'auto'.
    """
    if name == "auto" or name in FORMATS:
        return torch.float32 if device.type == "cpu" else "auto"
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; use auto, {', '.join((*DTYPES, *FORMATS))}")
    return DTYPES[name]


def open_model(
    name: str | Path | tuple[Any, Any] | None,
    *,
    dtype: str,
    device: str,
    log: Callable[[str], None] | None,
    fused: bool = False,
) -> tuple[Any, Any, str]:
    """The argument of `lookahead.load` -> model, tokenizer and label. `fused`: see `load_pretrained`."""
    if not isinstance(name, tuple):
        return load_pretrained(name, dtype=dtype, device=device, log=log, fused=fused)
    if dtype not in ("auto", *FORMATS) or device != "auto":
        raise ValueError(f"dtype={dtype!r}, device={device!r}: a model that is already loaded keeps its own")
    model, tokenizer = name
    if dtype in FORMATS:
        model = quantised_copy(model, dtype, log)
    return model.eval(), tokenizer, getattr(model.config, "name_or_path", "") or type(model).__name__


def load_pretrained(
    name: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    log: Callable[[str], None] | None = None,
    fused: bool = False,
) -> tuple[Any, Any, str]:
    """Load a model. Returns it in eval mode on its device, its tokenizer, and the name to show for it.

    `name` is None (the embedded model), a preset, a hub id, a folder or a `.gguf` file. `log` gets lines of progress.

    The weights of safetensors files are mapped, and then copied once: to their device, which with `fused` is straight
    into the layout of the graph backend. A dtype other than the files' is converted on the host first. On a CPU
    the weights stay mapped, whatever `fused` is. Quantised weights stay quantised: see `loading.quantised`. Those of a
    `.gguf` file do with `fused` in half precision on a GPU, and are expanded elsewhere. Matrices that `dtype` quantises
    go to the device one by one. Mamba-2 layers run shorter chunks on a CPU: see `loading.chunks`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    label = str(name) if name is not None else EMBEDDED
    target = pick_device(device)
    options: dict[str, Any] = {"dtype": pick_dtype(dtype, target)}
    gguf = Path(label) if label.endswith(".gguf") else None
    if gguf is not None:
        if not gguf.is_file():
            raise ModelError(f"no file {label!r}; give the path of a .gguf file")
        source, options["gguf_file"] = str(gguf.parent), gguf.name
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        source = resolve(label, log=log)
    if log is not None:
        log(f"loading {label} on {target} ...")
    try:
        if gguf is None:
            config = AutoConfig.from_pretrained(source)
            if dtype in FORMATS:
                check_unquantised(config, dtype)
            options |= quantised_options(source, target)
            for field, size in shorter_chunks(config, target).items():
                if log is not None:
                    log(f"note: its Mamba-2 layers run chunks of {size} tokens, not of {getattr(config, field)}")
                if "config" in options:
                    setattr(options["config"], field, size)
                else:
                    options[field] = size
        tokenizer = AutoTokenizer.from_pretrained(source, **({"gguf_file": gguf.name} if gguf else {}))
        found: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
        model, report = found
        check_complete(model, report["missing_keys"])
        if "config" not in options:
            check_unscaled(report["unexpected_keys"])
        if dtype in FORMATS:
            quantise_model(model, dtype, target, log)
        elif gguf is not None and fused and keeps_blocks(model, target):
            from lookahead.loading.quantised.gguf import keep_packed

            keep_packed(model, gguf)
        if fused and target.type != "cpu":
            from lookahead.backends.graph.placing import place_fused

            place_fused(model, target)
        model.to(target)  # what is there already is not moved
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot load model {label!r}: {first}") from error
    fix_decoder(getattr(tokenizer, "backend_tokenizer", None))
    if gguf is not None:
        fix_gguf_tokenizer(tokenizer, model.config, gguf)
    return model.eval(), tokenizer, label


def check_complete(model: Any, missing: Collection[str]) -> None:
    """Raise ValueError if the files lack weights, which transformers makes random, with a warning only."""
    weights = sorted(name for name, _ in model.named_parameters() if name in missing)
    if weights:
        others = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        raise ValueError(f"its files have no weights for {weights[0]}{others}")


def quantised_options(source: str, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs to read a quantised checkpoint; nothing for others."""
    from lookahead.loading.quantised.quantizer import quantised_config

    config = quantised_config(source, device)
    return {} if config is None else {"config": config}


def keeps_blocks(model: Any, device: torch.device) -> bool:
    """Whether a model from a GGUF file is run by kernels that multiply with its blocks as they are."""
    from lookahead.models.read import readers

    return device.type == "cuda" and model.dtype.itemsize == 2 and type(model).__name__ in readers()


def check_unscaled(unexpected: Collection[str]) -> None:
    """Raise ValueError if the files have scales of quantised weights that nothing has applied to them."""
    scales = sorted(name for name in unexpected if name.endswith((".weight_scale", ".weight_scale_inv")))
    if scales:
        raise ValueError(f"its files have {scales[0]}, and its config does not say how its weights are quantised")


def fix_gguf_tokenizer(tokenizer: Any, config: Any, path: Path) -> None:
    """Correct the tokenizer that transformers made from a GGUF by the file's own fields.

    The tokenizer may have the BOS as its EOS (transformers 5.17). It may also add no BOS although the file requires
    one, without which Gemma generates nonsense: then `lookahead_bos` is set, and `generate.encode` prepends it.
    """
    from gguf import GGUFReader

    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    if eos is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    fields = GGUFReader(str(path)).fields
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if add_bos is not None and bos is not None and bool(add_bos.contents()):
        tokenizer.lookahead_bos = int(bos.contents())


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The token ids that end an answer: the generation config's, as in `generate`, else the model's, else the
    tokenizer's."""
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
    return frozenset()


def greedy_settings(model: Any) -> dict[str, Any]:
    """The settings of the model's generation config that change greedy output, in the order `generate` applies them."""
    neutral: dict[str, tuple[Any, ...]] = {
        "sequence_bias": (None,),
        "repetition_penalty": (None, 1.0),
        "no_repeat_ngram_size": (None, 0),
        "bad_words_ids": (None,),
        "forced_bos_token_id": (None,),
        "forced_eos_token_id": (None,),
        "suppress_tokens": (None,),
        "begin_suppress_tokens": (None,),
    }
    config = getattr(model, "generation_config", None)
    found = {name: getattr(config, name, None) for name in neutral}
    return {name: value for name, value in found.items() if value not in neutral[name]}


def logits_processors(model: Any, prompt_tokens: int, max_tokens: int, stop: Iterable[int]) -> Any:
    """The logits processors that `generate` would create from the model's generation config; None for none.

    The repetition penalty is not among them: it becomes a setting of the request (`SamplingParams`).
    """
    settings = {name: value for name, value in greedy_settings(model).items() if name != "repetition_penalty"}
    if not settings:
        return None
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process

    device = model.get_input_embeddings().weight.device
    makers: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": logits_process.SequenceBiasLogitsProcessor,
        "no_repeat_ngram_size": logits_process.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda ids: logits_process.NoBadWordsLogitsProcessor(
            ids, torch.tensor(sorted(stop), device=device)
        ),
        "forced_bos_token_id": logits_process.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda ids: logits_process.ForcedEOSTokenLogitsProcessor(
            prompt_tokens + max_tokens, ids, device
        ),
        "suppress_tokens": lambda ids: logits_process.SuppressTokensLogitsProcessor(ids, device),
        "begin_suppress_tokens": lambda ids: logits_process.SuppressTokensAtBeginLogitsProcessor(
            ids, prompt_tokens, device
        ),
    }
    return LogitsProcessorList([makers[name](value) for name, value in settings.items()])


def static_generation(model: Any, length: int) -> dict[str, Any]:
    """Arguments for `generate` with a static cache of `length` tokens and a compiled step.

    Reuse them for all prompts: a new cache may have another address, and then the step is captured again.
    """
    from transformers import CompileConfig, StaticCache

    mode: Any = "reduce-overhead" if model.device.type == "cuda" else None
    compiling: Any = CompileConfig(fullgraph=True, mode=mode)
    compiling._compile_all_devices = True  # transformers compiles only on GPUs by default
    rounded = -(-(length + 1) // 64) * 64
    return {"past_key_values": StaticCache(config=model.config, max_cache_len=rounded), "compile_config": compiling}
