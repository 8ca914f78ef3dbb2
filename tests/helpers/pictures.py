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
WIDTH = 1.2
"""Of the weights; with wider ones, outputs repeat less and a guess is rarely right."""

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

    `beside` makes what is as long as the prompts, of their tokens and numbers.
    """

    name: str
    config: dict[str, Any]
    picture: Callable[[int], Picture]
    beside: Callable[[torch.Tensor, Sequence[int]], Inputs] = lambda ids, rows: {}
    ending: str = "ForConditionalGeneration"


@torch.no_grad()
def widen(model: Any, seed: int) -> None:
    """Wide random weights, so that no two logits are within rounding of each other and each token matters."""
    generator = torch.Generator().manual_seed(seed)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        inputs = weight[0].numel() if weight.dim() > 3 else weight.shape[-1] if weight.dim() else 1
        if id(weight) in tables:
            weight.copy_(noise)
        elif weight.numel() == 1:
            weight.fill_(0.5)  # a gate, which is shut in a new model
        elif weight.dim() > 1:
            weight.copy_(noise * WIDTH / math.sqrt(inputs))
        else:
            weight.add_(0.1 * noise)


def model_of(name: str) -> Any:
    family = FAMILIES[name]
    torch.manual_seed(SEEDS[name])
    config = getattr(transformers, f"{family.name}Config")(**family.config)
    model = getattr(transformers, family.name + family.ending)(config).float().eval()
    widen(model, SEEDS[name])
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD)
    return model


def inputs_of(name: str, rows: Sequence[int]) -> Inputs:
    """A left-padded batch of these prompts, with a picture each."""
    family = FAMILIES[name]
    pictures = [family.picture(row) for row in rows]
    prompts = [BEFORE[row] + picture.tokens + AFTER[row] for row, picture in zip(rows, pictures, strict=True)]
    ids, mask = left(prompts), left([[1] * len(prompt) for prompt in prompts])
    inputs: Inputs = {"input_ids": ids, "attention_mask": mask}
    tensors = [picture.tensors for picture in pictures]
    return inputs | family.beside(ids, rows) | {key: stacked([one[key] for one in tensors]) for key in tensors[0]}


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


def apart(row: int) -> Picture:
    """As PaddleOCR's: patches as small pictures, four of them to a token."""
    tokens, tensors = patched(row)
    patches = int(tensors["image_grid_thw"].prod())
    return Picture(tokens, tensors | {"pixel_values": pixels(row, patches, 3, PATCH, PATCH)})


def flat(row: int) -> Picture:
    """As Fuyu's: each patch is a token, with a mark after each line of them."""
    return Picture([*[IMAGE] * 3, BREAK] * 2, {"pixel_values": pixels(row, 1, 6, 3 * PATCH * PATCH)})


def numbered(row: int) -> Picture:
    """As Kosmos-2.5's: each patch after the numbers of its line and its column; always four tokens."""
    places = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, 4)).float()
    patches = torch.cat([places, pixels(row, 6, 48)], dim=1)
    return Picture([BEGIN, *[IMAGE] * 4, END], {"flattened_patches": patches[None]})


def attended(row: int) -> Picture:
    """As Llama 3.2's: one token, and up to four squares that each layer with cross-attention looks at."""
    squares = 2 - row
    shown = (torch.arange(4) < squares).long()
    tensors = {
        "pixel_values": pixels(row, 1, 1, 4, 3, 8, 8) * shown.view(4, 1, 1, 1),
        "aspect_ratio_ids": torch.tensor([[squares]]),
        "aspect_ratio_mask": shown.view(1, 1, 4),
    }
    return Picture([IMAGE], tensors)


def looking(ids: torch.Tensor, rows: Sequence[int]) -> Inputs:
    """From the picture on, each token looks at its squares."""
    seen = (ids == IMAGE).cumsum(dim=-1)
    squares = torch.cat([attended(row).tensors["aspect_ratio_mask"] for row in rows])
    return {"cross_attention_mask": seen[:, :, None, None] * squares[:, None]}


def coded(row: int) -> Picture:
    """As Emu3's: lines of codes with a mark after each, all of them behind placeholders."""
    high, wide = ((8, 12), (8, 8))[row]
    tensors = {"pixel_values": pixels(row, 1, 3, high, wide), "image_sizes": torch.tensor([[high, wide]])}
    return Picture([BEGIN, *[IMAGE] * (high // PATCH * (wide // PATCH + 1)), END], tensors)


def heard(row: int) -> Picture:
    """As Qwen2-Audio's: a sound, four frames to a token."""
    frames = (16, 12)[row]
    mask = (torch.arange(16) < frames).long()[None]
    return Picture(
        [BEGIN, *[IMAGE] * (frames // 4), END],
        {"input_features": pixels(row, 1, 8, 16) * mask, "feature_attention_mask": mask},
    )


def recorded(row: int) -> Picture:
    """As Voxtral's: a sound in chunks of four tokens."""
    chunks = 2 - row
    return Picture([BEGIN, *[IMAGE] * 4 * chunks], {"input_features": pixels(row, chunks, 8, 32)})


def marked(ids: torch.Tensor, rows: Sequence[int], name: str) -> Inputs:
    return {name: (ids == IMAGE).long()}


MM_TYPES, TYPES = partial(marked, name="mm_token_type_ids"), partial(marked, name="token_type_ids")
POSITIONS = partial(marked, name="image_embeds_position_mask")

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": PATCH}
LLAMA = {"model_type": "llama", **TEXT}
QWEN2 = {"model_type": "qwen2", **TEXT}
GEMMA2 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW, "final_logit_softcapping": 3.0}
KOSMOS = {
    "vocab_size": VOCABULARY,
    "embed_dim": 32,
    "layers": 2,
    "ffn_dim": 64,
    "attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
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
        MM_TYPES,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {
            **QWEN_TOKENS,
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        patched,
        MM_TYPES,
    ),
    "qwen3_vl": Family(
        "Qwen3VL",
        {
            **QWEN_TOKENS,
            "text_config": {**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            "vision_config": {
                **QWEN_VISION,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        patched,
        MM_TYPES,
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
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "out_hidden_size": 32, "image_size": 16},
        },
        patched,
        MM_TYPES,
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
        TYPES,
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
                "floor_scale": 8192,
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
    "paligemma": Family(
        "PaliGemma",
        {
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "text_config": {"model_type": "gemma", **TEXT, "head_dim": 8},
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 8, "vision_use_head": False},
        },
        partial(square, count=4, side=8),
        lambda ids, rows: {"token_type_ids": torch.zeros_like(ids)},
    ),
    "paligemma2": Family(
        "PaliGemma",
        {
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "text_config": {"model_type": "gemma2", **TEXT, **GEMMA2},
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 8, "vision_use_head": False},
        },
        partial(square, count=4, side=8),
        lambda ids, rows: {"token_type_ids": torch.zeros_like(ids), "labels": torch.full_like(ids, -100)},
    ),
    "idefics2": Family(
        "Idefics2",
        {
            "image_token_id": IMAGE,
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": VISION,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
        },
        split,
    ),
    "aya_vision": Family(
        "AyaVision",
        {
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "cohere2",
                **TEXT,
                "logit_scale": 1.0,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        },
        partial(square, count=4, tiles=(2, 1)),
    ),
    "pixtral": Family(
        "Llava",
        {
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
            "vision_config": {"model_type": "pixtral", **VISION, "image_size": 32, "head_dim": 8},
        },
        partial(lines, merged=1),
    ),
    "got_ocr2": Family(
        "GotOcr2",
        {
            "image_token_index": IMAGE,
            "tie_word_embeddings": False,
            "text_config": QWEN2,
            "vision_config": {
                **VISION,
                "image_size": 32,
                "output_channels": 16,
                "mlp_dim": 64,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
        },
        partial(square, count=4, side=32),
    ),
    "ovis2": Family(
        "Ovis2",
        {
            "image_token_id": IMAGE,
            "visual_indicator_token_ids": [BEGIN, END, BREAK],
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "tie_word_embeddings": False,
            "text_config": QWEN2,
            "vision_config": {**VISION, "image_size": 8, "vocab_size": 32, "num_visual_indicator_tokens": 3},
        },
        partial(square, count=4, tiles=(2, 1), side=8),
    ),
    "paddleocr_vl": Family(
        "PaddleOCRVL",
        {
            **QWEN_TOKENS,
            "tie_word_embeddings": False,
            "text_config": {**TEXT, "head_dim": 8, "rope_parameters": MROPE},
            "vision_config": VISION,
        },
        apart,
        MM_TYPES,
    ),
    "video_llava": Family(
        "VideoLlava",
        {
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "text_config": LLAMA,
            "vision_config": {"model_type": "clip_vision_model", **VISION, "image_size": 8, "projection_dim": 32},
        },
        partial(square, count=4, side=8),
    ),
    "fuyu": Family(
        "Fuyu",
        {
            "image_token_id": IMAGE,
            "patch_size": PATCH,
            "text_config": {"model_type": "persimmon", **TEXT},
        },
        flat,
        ending="ForCausalLM",
    ),
    "emu3": Family(
        "Emu3",
        {
            "vocabulary_map": {
                "<image>": IMAGE,
                "<|extra_200|>": BREAK,
                **{f"<|visual token {code:06d}|>": 20 + code for code in range(16)},
            },
            "text_config": {**TEXT, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None},
            "vq_config": {
                "codebook_size": 16,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1],
                "num_res_blocks": 1,
                "hidden_size": 32,
            },
        },
        coded,
    ),
    "mllama": Family(
        "Mllama",
        {
            "image_token_index": IMAGE,
            "text_config": {
                **TEXT,
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "bos_token_id": 1,
                "pad_token_id": PAD,
            },
            "vision_config": {
                **VISION,
                "image_size": 8,
                "num_global_layers": 1,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
        },
        attended,
        looking,
    ),
    "kosmos2": Family(
        "Kosmos2",
        {
            "latent_query_num": 4,
            "tie_word_embeddings": False,
            "text_config": KOSMOS,
            "vision_config": VISION,
        },
        partial(square, count=4),
        POSITIONS,
    ),
    "kosmos2_5": Family(
        "Kosmos2_5",
        {
            "latent_query_num": 4,
            "tie_word_embeddings": False,
            "text_config": KOSMOS,
            "vision_config": {
                "hidden_size": 32,
                "patch_embed_hidden_size": 48,
                "intermediate_size": 64,
                "head_dim": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_num_patches": 16,
            },
        },
        numbered,
        POSITIONS,
    ),
    "qwen2_audio": Family(
        "Qwen2Audio",
        {
            "audio_token_index": IMAGE,
            "text_config": QWEN2,
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 8,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "d_model": 32,
                "max_source_positions": 8,
            },
        },
        heard,
    ),
    "voxtral": Family(
        "Voxtral",
        {
            "audio_token_id": IMAGE,
            "text_config": {**LLAMA, "head_dim": 8},
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_mel_bins": 8,
                "max_source_positions": 16,
                "model_type": "voxtral_encoder",
            },
        },
        recorded,
    ),
}

SEEDS = {
    "qwen2_vl": 3,
    "qwen2_5_vl": 2,
    "qwen3_vl": 10,
    "glm4v": 13,
    "llava": 9,
    "llava_next": 8,
    "llava_onevision": 3,
    "internvl": 15,
    "idefics3": 10,
    "smolvlm": 10,
    "mistral3": 1,
    "gemma3": 30,
    "llama4": 4,
    "paligemma": 24,
    "paligemma2": 10,
    "idefics2": 12,
    "aya_vision": 2,
    "pixtral": 13,
    "got_ocr2": 4,
    "ovis2": 5,
    "paddleocr_vl": 5,
    "video_llava": 4,
    "fuyu": 10,
    "emu3": 10,
    "mllama": 8,
    "kosmos2": 9,
    "kosmos2_5": 12,
    "qwen2_audio": 5,
    "voxtral": 7,
}
"""With these, outputs repeat in part and the two best logits of a token are never within rounding of each other."""


def made(name: str) -> tuple[Any, Inputs]:
    return model_of(name), inputs_of(name, [0])


PICTURES: dict[str, Callable[[], tuple[Any, Inputs]]] = {name: partial(made, name) for name in FAMILIES}


def words() -> Inputs:
    """A prompt without a picture, for any of the models but Kosmos-2, which wants one in each."""
    return {"input_ids": torch.tensor([WORDS]), "attention_mask": torch.ones(1, len(WORDS), dtype=torch.long)}


def pair(name: str) -> Inputs:
    """Two prompts with a picture each, the second shorter: as the processor pads them, on the left."""
    return inputs_of(name, [0, 1])
