"""The tests' tiny random models that see pictures, and what their processors would make of prompts with one.

`PICTURES[name]()` is a model and the arguments of `generate` for one prompt with a picture in it; `words` has a prompt
without one, `pair` two prompts of different lengths with a picture each. All in fp32, and the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from tiny import TINY, VOCABULARY

PAD = 0
IMAGE, VIDEO, BREAK, BEGIN, END = range(VOCABULARY - 5, VOCABULARY)
"""Placeholders and marks around them: the last tokens of the vocabulary."""
BEFORE = ([5, 9, 17, 23], [11])
AFTER = ([9, 17, 30, 5, 9, 17, 23, 42, 9, 17, 30], [8, 31, 8, 31, 8])
WORDS = [5, 9, 17, 23, 42, 9, 17, 30, 5, 9, 17, 23, 51, 8, 11, 9]
PATCH = 4
"""Pixels on a side of a patch, in all models."""
WINDOW = 8

TEXT = {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": False}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": PATCH,
}
Inputs = dict[str, Any]


class Picture(NamedTuple):
    """One picture as its processor hands it over: the tokens in its place, and the tensors beside them."""

    tokens: list[int]
    tensors: Inputs


class Family(NamedTuple):
    """A class, its config's arguments and its pictures: the first prompt's and the second's.

    `types` names the tensor that tells placeholders from words, where the class wants one.
    """

    name: str
    config: dict[str, Any]
    picture: Callable[[int], Picture]
    types: str = ""
    auto: str = "ForConditionalGeneration"


@torch.no_grad()
def widen(model: Any) -> None:
    """Wide random weights, so that no two logits are within rounding of each other and each token matters."""
    generator = torch.Generator().manual_seed(5)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        inputs = weight[0].numel() if weight.dim() > 3 else weight.shape[-1] if weight.dim() else 1
        if id(weight) in tables:
            weight.copy_(noise)
        elif weight.dim() > 1:
            weight.copy_(noise * 1.7 / math.sqrt(inputs))
        else:
            weight.add_(0.1 * noise)


def model_of(name: str) -> Any:
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.name}Config")(**family.config)
    model = getattr(transformers, family.name + family.auto)(config).float().eval()
    widen(model)
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD)
    return model


def inputs_of(name: str, rows: Sequence[int]) -> Inputs:
    """A left-padded batch of these prompts, with a picture each."""
    family = FAMILIES[name]
    pictures = [family.picture(row) for row in rows]
    prompts = [BEFORE[row] + picture.tokens + AFTER[row] for row, picture in zip(rows, pictures, strict=True)]
    ids, mask = left(prompts), left([[1] * len(prompt) for prompt in prompts])
    inputs: Inputs = {"input_ids": ids, "attention_mask": mask}
    if family.types:
        inputs[family.types] = (ids == IMAGE).long()
    tensors = [picture.tensors for picture in pictures]
    return inputs | {key: stacked([one[key] for one in tensors]) for key in tensors[0]}


def left(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One below the other, zeros after the smaller ones in all other dimensions."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    result = tensors[0].new_zeros([sum(tensor.shape[0] for tensor in tensors), *shape[1:]])
    start = 0
    for tensor in tensors:
        result[(slice(start, start + tensor.shape[0]), *map(slice, tensor.shape[1:]))] = tensor
        start += tensor.shape[0]
    return result


def pixels(row: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(101 + row))


def patched(row: int) -> Picture:
    """As Qwen2-VL's: all patches in a row of their own, four of them to a token."""
    high, wide = ((4, 6), (8, 4))[row]
    tensors = {
        "pixel_values": pixels(row, high * wide, 3 * 2 * PATCH * PATCH),
        "image_grid_thw": torch.tensor([[1, high, wide]]),
    }
    return Picture([BEGIN, *[IMAGE] * (high * wide // 4), END], tensors)


def square(row: int, count: int, tiles: Sequence[int] = (1, 1), side: int = 16) -> Picture:
    """Squares of one size, `count` tokens each; a picture can be some of them."""
    tokens = [BEGIN, *[IMAGE] * count * tiles[row], END]
    return Picture(tokens, {"pixel_values": pixels(row, tiles[row], 3, side, side)})


def tiled(row: int, **others: torch.Tensor) -> Picture:
    """As LLaVA-NeXT's: a small picture of everything, then tiles with a mark at the end of each line of patches."""
    high, wide = ((16, 16), (8, 16))[row]
    tiles, line = 1 + high * wide // 64, wide // PATCH + 1
    tensors = {"pixel_values": pixels(row, 1, tiles, 3, 8, 8), "image_sizes": torch.tensor([[high, wide]])}
    return Picture([IMAGE] * (4 + high // PATCH * line), tensors | others)


def split(row: int, count: int = 4) -> Picture:
    """As Idefics3's: a list of squares per prompt, `count` tokens each."""
    pictures = (2, 1)[row]
    tensors = {
        "pixel_values": pixels(row, 1, pictures, 3, 16, 16),
        "pixel_attention_mask": torch.ones(1, pictures, 16, 16, dtype=torch.long),
    }
    return Picture([BEGIN, *[IMAGE] * count, BEGIN] * pictures, tensors)


def lines(row: int, merged: int = 2) -> Picture:
    """As Pixtral's: of any size, with a mark after each line of `merged` times as high and wide patches."""
    high, wide = ((16, 24), (24, 8))[row]
    line = [*[IMAGE] * (wide // PATCH // merged), BREAK]
    tokens = line * (high // PATCH // merged)
    return Picture(
        [*tokens[:-1], END],
        {"pixel_values": pixels(row, 1, 3, high, wide), "image_sizes": torch.tensor([[high, wide]])},
    )


MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": PATCH}
QWEN3_TEXT = {**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}}
LLAMA = {"model_type": "llama", **TEXT}
QWEN2 = {"model_type": "qwen2", **TEXT}
PINPOINTS = [[8, 16], [16, 8], [16, 16]]

FAMILIES = {
    "qwen2_vl": Family(
        "Qwen2VL",
        {
            **QWEN_TOKENS,
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": PATCH},
        },
        patched,
        "mm_token_type_ids",
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {
            **QWEN_TOKENS,
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        patched,
        "mm_token_type_ids",
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        {
            **QWEN_TOKENS,
            "text_config": QWEN3_TEXT,
            "vision_config": {
                **QWEN_VISION,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        patched,
        "mm_token_type_ids",
    ),
    "glm4v": Family(
        "Glm4v",
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": BEGIN,
            "image_end_token_id": END,
            "video_start_token_id": BREAK,
            "video_end_token_id": BREAK,
            "text_config": {**TEXT, "num_attention_heads": 4, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32, "image_size": 16},
        },
        patched,
        "mm_token_type_ids",
    ),
    "llava": Family(
        "Llava",
        {
            "image_token_index": IMAGE,
            "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 8, "projection_dim": 32},
        },
        partial(square, count=4, side=8),
    ),
    "llava_next": Family(
        "LlavaNext",
        {
            "image_token_index": IMAGE,
            "image_grid_pinpoints": PINPOINTS,
            "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 8, "projection_dim": 32},
        },
        tiled,
    ),
    "llava_onevision": Family(
        "LlavaOnevision",
        {
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": PINPOINTS,
            "text_config": QWEN2,
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 8, "vision_use_head": False},
        },
        partial(tiled, batch_num_images=torch.tensor([1])),
    ),
    "internvl": Family(
        "InternVL",
        {
            "image_token_id": IMAGE,
            "tie_word_embeddings": False,
            "text_config": QWEN2,
            "vision_config": VISION,
        },
        partial(square, count=4, tiles=(2, 1)),
    ),
    "idefics3": Family(
        "Idefics3",
        {"image_token_id": IMAGE, "text_config": LLAMA, "vision_config": VISION},
        split,
    ),
    "smolvlm": Family(
        "SmolVLM",
        {"image_token_id": IMAGE, "text_config": LLAMA, "vision_config": VISION},
        split,
    ),
    "mistral3": Family(
        "Mistral3",
        {
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **VISION, "image_size": 32, "head_dim": 8},
        },
        lines,
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        },
        partial(square, count=4),
        "token_type_ids",
    ),
    "llama4": Family(
        "Llama4",
        {
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
            "text_config": {
                **TEXT,
                "head_dim": 8,
                "intermediate_size_mlp": 64,
                "num_local_experts": 4,
                "moe_layers": [1],
                "no_rope_layers": [1, 0],
                "attention_chunk_size": WINDOW,
                "floor_scale": WINDOW,
            },
            "vision_config": {
                **VISION,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
        partial(square, count=4, tiles=(2, 1)),
    ),
}


def made(name: str) -> tuple[Any, Inputs]:
    return model_of(name), inputs_of(name, [0])


PICTURES: dict[str, Callable[[], tuple[Any, Inputs]]] = {name: partial(made, name) for name in FAMILIES}


def words() -> Inputs:
    """A prompt without a picture, for any of the models."""
    return {"input_ids": torch.tensor([WORDS]), "attention_mask": torch.ones(1, len(WORDS), dtype=torch.long)}


def pair(name: str) -> Inputs:
    """Two prompts with a picture each, the second shorter: as the processor pads them, on the left."""
    return inputs_of(name, [0, 1])
