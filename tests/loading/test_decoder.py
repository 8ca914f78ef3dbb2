"""Byte-level tokenizers with the decoder that transformers 5.17 gave them: from GGUF files, and from saved folders."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from json_model import decoder_of_5_17, json_network, json_tokenizer
from tiny_gguf import write_gguf
from tokenizers import Tokenizer, decoders, models

from lookahead.engine.text import SharedTokenizer
from lookahead.loading.decoder import fix_decoder
from lookahead.loading.embedded import gguf_to_safetensors
from lookahead.loading.load import load_pretrained

TEXTS = ["plain", " two  words ", "naïve café 中文 🙂", '{"title": "x"}\n']


def kind(inner: Any) -> str:
    return type(inner.decoder).__name__


@pytest.mark.parametrize("strips", [False, True])
def test_it_becomes_byte_level(strips: bool) -> None:
    inner = json_tokenizer(decoder=decoder_of_5_17(strips=strips)).backend_tokenizer
    plain = json_tokenizer().backend_tokenizer
    rng = random.Random(1)
    some = [[rng.randrange(inner.get_vocab_size()) for _ in range(9)] for _ in range(50)]
    before = inner.decode_batch(some)

    assert fix_decoder(inner)
    assert kind(inner) == "ByteLevel"
    assert [inner.decode(inner.encode(text).ids) for text in TEXTS] == TEXTS
    assert inner.decode_batch(some) == plain.decode_batch(some)
    assert strips or inner.decode_batch(some) == before  # with no added tokens but special ones
    assert not fix_decoder(inner)


def sentencepiece(pieces: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoder_of_5_17()
    return made


@pytest.mark.parametrize("pieces", [["a", "\u2581b"], ["a", "<0x0A>"]])
def test_a_vocabulary_that_needs_the_other_decoders_keeps_them(pieces: list[str]) -> None:
    inner = sentencepiece(pieces)
    assert not fix_decoder(inner)
    assert kind(inner) == "Sequence"


def test_only_this_decoder_is_replaced() -> None:
    level = decoders.ByteLevel()
    others = [
        level,
        decoders.Sequence([level]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), level]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("_", " "), level]),
        decoders.Sequence(
            [
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Replace("\u2581", " "),
                level,
                decoders.Strip("x", 1, 0),
            ]
        ),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")]),
    ]
    for other in others:
        inner = json_tokenizer(decoder=other).backend_tokenizer
        before = inner.to_str()
        assert not fix_decoder(inner)
        assert inner.to_str() == before
    assert not fix_decoder(None)
    assert not fix_decoder(Tokenizer(models.BPE()))  # it has none


def test_a_folder_that_was_saved_with_it(tmp_path: Path) -> None:
    saved = json_tokenizer(decoder=decoder_of_5_17())
    saved.save_pretrained(tmp_path)
    json_network(saved).save_pretrained(tmp_path)
    assert saved_decoder(tmp_path) == "Sequence"
    _, tokenizer, _ = load_pretrained(tmp_path, device="cpu")
    check_loaded(tokenizer)


@pytest.mark.parametrize("says_prefix", [True, False])
def test_a_gguf_file(tmp_path: Path, says_prefix: bool) -> None:
    """The tokenizer is made by the installed transformers, so with the oldest one this is its decoder itself."""
    path = write_gguf(tmp_path / "tiny.gguf", json_tokenizer(), says_prefix=says_prefix)
    _, tokenizer, _ = load_pretrained(path, device="cpu")
    check_loaded(tokenizer)
    folder = tmp_path / "converted"
    folder.mkdir()
    gguf_to_safetensors(path, folder)
    assert saved_decoder(folder) == "ByteLevel"
    check_loaded(load_pretrained(folder, device="cpu")[1])


def saved_decoder(folder: Path) -> str:
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["decoder"]["type"]


def check_loaded(tokenizer: Any) -> None:
    """It has the plain decoder, so that its texts are made the fast way."""
    assert kind(tokenizer.backend_tokenizer) == "ByteLevel"
    assert SharedTokenizer(tokenizer).token_bytes is not None
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text
