"""Which reader a checkpoint's `quantization_config` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lookahead.loading.quantised.awq import awq_reader
from lookahead.loading.quantised.compressed_tensors import compressed_reader
from lookahead.loading.quantised.eight_bits import fp8_reader
from lookahead.loading.quantised.gptq import gptq_reader
from lookahead.loading.quantised.mxfp4 import mxfp4_reader
from lookahead.loading.quantised.weights import Reader

SUPPORTED = (
    "FP8 (fp8, fbgemm_fp8, modelopt), AWQ (gemm), GPTQ (4 bits; 8 symmetric), compressed-tensors (pack-, int-, float-, "
    "naive-quantized, mxfp4-pack-quantized), MXFP4 (gpt-oss) and GGUF files"
)


def reader_of(config: Mapping[str, Any]) -> Reader:
    """The reader of checkpoints with this `quantization_config`. Raises ValueError, in one line, if there is none."""
    method = method_of(config)
    try:
        if method in ("fp8", "fbgemm_fp8"):
            return fp8_reader(config)
        if method == "modelopt":
            if config.get("quant_algo") != "FP8":
                raise ValueError(f"ModelOpt's {config.get('quant_algo')}")
            return fp8_reader({})
        if method == "awq":
            return awq_reader(config)
        if method == "gptq":
            return gptq_reader(config)
        if method == "compressed-tensors":
            return compressed_reader(config)
        if method == "mxfp4":
            return mxfp4_reader()
        raise ValueError(f"quant_method {method!r}")
    except ValueError as error:
        raise ValueError(
            f"its weights are quantised in a way that is not read: {error}; known are {SUPPORTED}. "
            "Load others with transformers and the format's own package, and give (model, tokenizer)"
        ) from None


def method_of(config: Mapping[str, Any]) -> str:
    """The name of the method. Old configs of bitsandbytes and ModelOpt do not have it in its field."""
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return str(config.get("quant_method") or (config.get("producer") or {}).get("name"))
