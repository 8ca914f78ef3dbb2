"""Classes that read images, video or sound as well as text: the description of their text model.

Only text is generated, so what follows the prompt is tokens. The prompt itself runs through the model's own modules if
it has images. Qwen2-VL and its kin give an image's tokens positions along three axes; a token of text has the same
position along all of them, shifted by a number per sequence that the backend is given with the prompt's K/V.

PaliGemma attends bidirectionally to its prompt, also without images unless a mask is materialised. So its own modules
run every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lookahead.models.facts import UnsupportedModelError
from lookahead.models.families import (
    cohere,
    gemma,
    gemma4,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    mixtral,
    neox,
    olmo,
    phi,
    phi3,
    qwen3_next,
    qwen_moe,
    smollm3,
    starcoder2,
)  # fmt: skip
from lookahead.models.parts import CausalLM, EqualAxes, FeedForwardReader, TextReader, check_causal
from lookahead.models.spec import Decoder, Rope


def read_three_axes(base: Any, head: Any, config: Any, feed_forward: FeedForwardReader | None = None) -> Decoder:
    """A Qwen2 or Qwen3 with positions along three axes."""
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in base.layers]
    described = llama.read_with_windows(base, head, config, windows, feed_forward=feed_forward)
    ropes: dict[Rope, Rope] = {}
    blocks = []
    for block in described.blocks:
        rope = None if block.attention is None else block.attention.rope
        if rope is not None and rope not in ropes:
            ropes[rope] = replace(rope, module=EqualAxes(rope.module))
        blocks.append(block if rope is None else block.with_attention(rope=ropes[rope]))
    return replace(described, blocks=blocks)


def read_qwen3_vl_moe(base: Any, head: Any, config: Any) -> Decoder:
    return read_three_axes(base, head, config, qwen_moe.qwen3_feed_forward(config))


def read_glm4v_moe(base: Any, head: Any, config: Any) -> Decoder:
    return read_three_axes(base, head, config, glm_moe.glm_feed_forward(config))


FAMILIES = (
    cohere,
    gemma,
    gemma4,
    glm,
    glm_moe,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    mixtral,
    neox,
    olmo,
    phi,
    phi3,
    qwen3_next,
    qwen_moe,
    smollm3,
    starcoder2,
)
TEXT: Mapping[str, TextReader] = {
    **{
        name.replace("ForCausalLM", ending): reader.read_text
        for family in FAMILIES
        for name, reader in family.READERS.items()
        for ending in ("Model", "TextModel")
    },
    "Qwen2VLTextModel": read_three_axes,
    "Qwen2_5_VLTextModel": read_three_axes,
    "Qwen3VLTextModel": read_three_axes,
    "Qwen2_5OmniThinkerTextModel": read_three_axes,
    "Qwen3VLMoeTextModel": read_qwen3_vl_moe,
    "Qwen3OmniMoeThinkerTextModel": read_qwen3_vl_moe,
    "Glm4vMoeTextModel": read_glm4v_moe,
    "PaddleOCRTextModel": read_three_axes,
    "Emu3TextModel": llama.read_llama,
}
"""Class of a text model -> its reader."""


@dataclass(frozen=True)
class WithText:
    """The reader of a class with a text model of this name inside, and a head on it.

    Most classes take the head's logits as they are, even if the text model's own class scales or caps them.
    `own_logits`: this one scales and caps them, too. `aliases`: of its config, the placeholder tokens that it reads as
    other ones where there is no image or sound. `causal_prompt`: see `Decoder`.
    """

    name: str = "language_model"
    own_logits: bool = False
    aliases: Callable[[Any], tuple[tuple[int, int], ...]] = lambda config: ()
    causal_prompt: bool = True

    def __call__(self, model: Any) -> Decoder:
        base = getattr(model.model, self.name, model.model)  # up to transformers 5.21, Qwen2.5-Omni has no part of it
        kind = type(base).__name__
        if kind not in TEXT:
            raise UnsupportedModelError(f"there is no reader for its {kind}")
        if self.causal_prompt:
            check_causal(base.config)
        described = TEXT[kind](base, model.lm_head, base.config)
        described = replace(described, aliases=self.aliases(model.config), causal_prompt=self.causal_prompt)
        return described if self.own_logits else replace(described, logit_scale=1.0, logit_softcap=None)


def _gemma4_placeholders(config: Any) -> tuple[tuple[int, int], ...]:
    names = ("image_token_id", "video_token_id", "audio_token_id")
    return tuple((getattr(config, name), config.text_config.pad_token_id) for name in names)


READERS = {
    **dict.fromkeys(
        (
            "AudioFlamingo3ForConditionalGeneration",
            "AyaVisionForConditionalGeneration",
            "Cohere2VisionForConditionalGeneration",
            "Cosmos3OmniForConditionalGeneration",
            "DeepseekVLForConditionalGeneration",
            "DeepseekVLHybridForConditionalGeneration",
            "Exaone4_5_ForConditionalGeneration",
            "FastVlmForConditionalGeneration",
            "FunAsrNanoForConditionalGeneration",
            "Gemma3ForConditionalGeneration",
            "FuyuForCausalLM",
            "Glm4vMoeForConditionalGeneration",
            "GlmAsrForConditionalGeneration",
            "GotOcr2ForConditionalGeneration",
            "InternVLForConditionalGeneration",
            "JanusForConditionalGeneration",
            "Lfm2VlForConditionalGeneration",
            "LightOnOcrForConditionalGeneration",
            "LlavaForConditionalGeneration",
            "LlavaNextForConditionalGeneration",
            "LlavaNextVideoForConditionalGeneration",
            "LlavaOnevisionForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
            "MossTranscribeDiarizeForConditionalGeneration",
            "MusicFlamingoForConditionalGeneration",
            "Ovis2ForConditionalGeneration",
            "PaddleOCRVLForConditionalGeneration",
            "PerceptionLMForConditionalGeneration",
            "QianfanOCRForConditionalGeneration",
            "Qwen2AudioForConditionalGeneration",
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ASRForConditionalGeneration",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "VibeVoiceAsrForConditionalGeneration",
            "VideoLlama3ForConditionalGeneration",
            "VideoLlavaForConditionalGeneration",
            "VipLlavaForConditionalGeneration",
            "VoxtralForConditionalGeneration",
        ),
        WithText(),
    ),
    **dict.fromkeys(
        (
            "Emu3ForConditionalGeneration",
            "Idefics2ForConditionalGeneration",
            "Idefics3ForConditionalGeneration",
            "SmolVLMForConditionalGeneration",
        ),
        WithText("text_model"),
    ),
    **dict.fromkeys(
        ("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration"),
        WithText(aliases=lambda config: ((config.audio_token_id, 0),)),
    ),
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        WithText(own_logits=True, aliases=_gemma4_placeholders),
    ),
    "PaliGemmaForConditionalGeneration": WithText(causal_prompt=False),
    "Emu3ForCausalLM": CausalLM(llama.read_llama),
    "Phi4MultimodalForCausalLM": CausalLM(phi3.read_phi3),
}
