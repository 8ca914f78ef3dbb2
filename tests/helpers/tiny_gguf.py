"""A GGUF file of a tiny random Llama or Qwen3-MoE with a byte-level vocabulary, as llama.cpp would write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

WIDTH, INNER, HEADS, EXPERTS = 32, 64, 4, 3


def write_gguf(path: Path, tokenizer: Any, *, says_prefix: bool = True, mixture: bool = False) -> Path:
    """The file, with the vocabulary of this tokenizer. `says_prefix`: it says that texts begin without a space.

    `mixture`: a Qwen3-MoE.
    """
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.get_added_vocab())
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = GGUFWriter(str(path), "qwen3moe" if mixture else "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([TokenType.CONTROL if piece in special else TokenType.NORMAL for piece in pieces])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if says_prefix:
        writer.add_add_space_prefix(False)

    if mixture:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INNER)
        writer.add_key_length(WIDTH // HEADS)
        writer.add_value_length(WIDTH // HEADS)
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(pieces), WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        **{f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
    }
    sizes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    if mixture:
        shapes |= {f"blk.0.ffn_{part}_exps": (EXPERTS, *size) for part, size in sizes.items()}
        shapes |= {"blk.0.ffn_gate_inp": (EXPERTS, WIDTH)}
        shapes |= {f"blk.0.attn_{part}_norm": (WIDTH // HEADS,) for part in "qk"}
    else:
        shapes |= {f"blk.0.ffn_{part}": size for part, size in sizes.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
