"""Incremental text equals the full decode, and stop strings cut at the same token however tokens arrive."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lookahead.engine.byte_text import ByteDetokenizer
from lookahead.engine.text import CONTEXT, Detokenizer, SharedTokenizer, StopStrings, TextStream

FFFD = "\ufffd"
SPECIALS = ["<s>", "</s>", "<|x|>"]
UNKNOWN = 100_000  # an id past every vocabulary, as models with a padded head can emit


def wrap(pieces: list[str], decoder: Any) -> PreTrainedTokenizerFast:
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(SPECIALS + pieces))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|x|>"]
    )


def byte_spelling() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


SPELL = byte_spelling()
EMOJI, FAMILY = "😀".encode(), "👩‍👧".encode()
CHUNKS = [
    *(bytes([b]) for b in range(256)),
    *(text.encode() for text in ("ab", " a", "aab", "\n\n", "你", "好", "é", " 你好", FFFD, "😀", ".", " .")),
    *(
        EMOJI[:2],
        EMOJI[2:],
        EMOJI[:3],
        FAMILY[:6],
        FAMILY[6:],
        b"a" + EMOJI[:1],
        EMOJI[3:] + b"b",
        b"\x80\xff",
    ),
]
BYTES = [f"<0x{b:02X}>" for b in range(256)]
PIECES = ["▁", "▁▁", "▁▁▁", "▁a", "▁b", "a", "b", "ab", "▁ab", "c", "你", "▁你好", FFFD, ".", "▁."]

TOKENIZERS = {
    "byte-level": wrap(["".join(SPELL[b] for b in chunk) for chunk in CHUNKS], decoders.ByteLevel()),
    "llama": wrap(
        BYTES + PIECES,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "gemma": wrap(
        BYTES + PIECES,
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    "metaspace": wrap(PIECES, decoders.Metaspace()),
    "wordpiece": wrap(["a", "##b", "c", ".", "##", "n't", "你", FFFD], decoders.WordPiece()),
    "word-end": wrap(["a", "b</w>", "c</w>", "你</w>", "."], decoders.BPEDecoder()),
}
EVERY = pytest.mark.parametrize("name", TOKENIZERS)
BYTE_STOPS = ["ab", "aab", "a\n", "你好", "你", "好", "😀", "a😀b", FFFD, "a" + FFFD, " ", "b ."]


def full(name: str, ids: Sequence[int]) -> str:
    return str(TOKENIZERS[name].decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def ids_of(name: str, pieces: str | bytes | Sequence[str]) -> list[int]:
    """Ids of vocabulary pieces; of single bytes where `pieces` is bytes."""
    if isinstance(pieces, bytes):
        pieces = [SPELL[b] if name == "byte-level" else f"<0x{b:02X}>" for b in pieces]
    return [TOKENIZERS[name].get_vocab()[piece] for piece in pieces]


@cache
def token_lists(name: str, max_size: int) -> st.SearchStrategy[list[int]]:
    """Random ids: uniform ones (mostly invalid UTF-8), runs of one id, specials, real characters in bytes."""
    vocabulary = TOKENIZERS[name].get_vocab()
    any_id = st.sampled_from(sorted(vocabulary.values()))
    common = st.sampled_from(sorted(i for piece, i in vocabulary.items() if len(piece) not in (1, 6)))
    bursts: list[st.SearchStrategy[list[int]]] = [
        st.lists(any_id, min_size=1, max_size=8),
        st.lists(common, min_size=1, max_size=8),
        st.lists(st.sampled_from([*range(len(SPECIALS)), UNKNOWN]), min_size=1, max_size=3),
        st.builds(lambda i, n: [i] * n, any_id, st.integers(2, 40)),
    ]
    if name in ("byte-level", "llama", "gemma"):
        ids = {char: ids_of(name, char.encode()) for char in "aé你好😀\n" + FFFD}
        spelled = st.lists(st.sampled_from(sorted(ids)), min_size=1, max_size=12)
        bursts += [spelled.map(lambda chars: [i for char in chars for i in ids[char]])] * 2
    return st.lists(st.one_of(bursts), max_size=8).map(lambda parts: list(chain.from_iterable(parts))[:max_size])


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def blocks(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """`ids` in blocks of the given sizes, over and over."""
    rest, cycle = iter(ids), itertools.cycle(sizes)
    while block := list(itertools.islice(rest, next(cycle))):
        yield block


def is_byte(name: str, token: int) -> bool:
    return TOKENIZERS[name].convert_ids_to_tokens(token) in BYTES


def stable_oracle(name: str, ids: Sequence[int]) -> str:
    """What must be stable after `ids`, from full decodes alone."""
    seen = [i for i in ids if i >= len(SPECIALS) and i != UNKNOWN]
    while seen and is_byte(name, seen[-1]):
        seen.pop()
    text = full(name, seen)
    held = next((n for n in (3, 2, 1) if text.endswith(FFFD * n)), 0)
    return text[: len(text) - held]


def visible_oracle(name: str, ids: Sequence[int]) -> str:
    """The text stop strings are looked up in: the decode so far, less an unfinished character."""
    stable, whole = stable_oracle(name, ids), full(name, ids)
    assert whole.startswith(stable)
    return stable + whole[len(stable) :].rstrip(FFFD)


def stop_oracle(name: str, ids: Sequence[int], stops: Sequence[str]) -> tuple[int | None, str]:
    """(index of the stopping token, final text), from full decodes alone."""
    for k in range(1, len(ids) + 1):
        text = visible_oracle(name, ids[:k])
        starts = [text.index(stop) for stop in stops if stop in text]
        if starts:
            return k - 1, text[: min(starts)]
    whole = full(name, ids)
    return None, whole[: min([whole.index(stop) for stop in stops if stop in whole], default=len(whole))]


def could_become(text: str, stops: Sequence[str]) -> int:
    return max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)


# --- the detokeniser ---


@EVERY
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
@pytest.mark.thinned(1, most=2)
def test_pushes_and_flush_equal_the_full_decode(name: str, data: st.DataObject) -> None:
    ids = data.draw(token_lists(name, 90))
    detokenizer = Detokenizer(TOKENIZERS[name])
    pushed, seen = "", []
    for block in blocks(ids, data.draw(SIZES)):
        pushed += detokenizer.push(block)
        seen += block
        assert pushed == detokenizer.text == stable_oracle(name, seen)
    assert pushed + detokenizer.flush() == detokenizer.text == full(name, ids)
    assert detokenizer.flush() == ""


SHARED = {name: SharedTokenizer(tokenizer) for name, tokenizer in TOKENIZERS.items()}
"""Each knows what all examples before have found out."""


@EVERY
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
@pytest.mark.thinned(1, most=2)
def test_texts_that_share_a_tokenizer_are_the_same(name: str, data: st.DataObject) -> None:
    ids = data.draw(token_lists(name, 40))
    shared, own = Detokenizer(SHARED[name]), Detokenizer(TOKENIZERS[name])
    for block in blocks(ids, [1, 3, 2]):
        assert shared.push(block) == own.push(block)
    assert shared.flush() == own.flush()
    assert shared.text == full(name, ids)


@EVERY
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
@pytest.mark.thinned(1, most=2)
def test_stable_text_survives_every_continuation(name: str, data: st.DataObject) -> None:
    ids, more = data.draw(token_lists(name, 50)), data.draw(token_lists(name, 6))
    detokenizer = Detokenizer(TOKENIZERS[name])
    detokenizer.push(ids)
    assert full(name, ids + more).startswith(detokenizer.text)


@pytest.mark.parametrize("name", ["byte-level", "llama"])
@pytest.mark.parametrize("char", ["é", "你", "😀"])
def test_no_half_characters(name: str, char: str) -> None:
    detokenizer = Detokenizer(TOKENIZERS[name])
    out = [detokenizer.push([i]) for i in ids_of(name, ["a"]) + ids_of(name, char.encode()) + ids_of(name, ["b"])]
    assert "".join(out) == f"a{char}b"
    assert out[: len(char.encode())] == ["a"] + [""] * (len(char.encode()) - 1)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZERS["byte-level"])
    assert detokenizer.push(ids_of("byte-level", b"a" + EMOJI[:3])) == "a"
    assert detokenizer.flush() == FFFD
    with pytest.raises(RuntimeError, match="flush"):
        detokenizer.push([5])


def test_genuine_replacement_characters_are_held_for_a_bounded_time() -> None:
    detokenizer = Detokenizer(TOKENIZERS["byte-level"])
    genuine = ids_of("byte-level", ["".join(SPELL[b] for b in FFFD.encode())])
    for n in range(1, 200):
        detokenizer.push(genuine)
        assert len(detokenizer.text) >= n - 3
    assert detokenizer.push(ids_of("byte-level", ["a"])).endswith(FFFD + "a")


def test_an_invalid_byte_rewrites_its_whole_run() -> None:
    """The byte-fallback trap: a broken character takes the newline before it along."""
    bad, good = Detokenizer(TOKENIZERS["llama"]), Detokenizer(TOKENIZERS["llama"])
    a, b = ids_of("llama", ["▁a", "b"])
    assert [bad.push([a]), bad.push(ids_of("llama", b"\n")), bad.push(ids_of("llama", b"\xff"))] == [
        "a",
        "",
        "",
    ]
    assert bad.push([b]) == FFFD * 2 + "b" == full("llama", ids_of("llama", b"\n\xff")) + "b"
    assert [good.push([a]), good.push(ids_of("llama", b"\n")), good.push([b])] == ["a", "", "\nb"]


def test_special_tokens_do_not_end_a_run_of_bytes() -> None:
    detokenizer = Detokenizer(TOKENIZERS["llama"])
    first, second, third = ids_of("llama", "你".encode())
    assert detokenizer.push([first, 0, second, 1, UNKNOWN]) == ""
    assert detokenizer.push([third, *ids_of("llama", ["b"])]) == "你b"


def test_a_leading_space_byte_then_a_special_token() -> None:
    """Both decode to nothing on their own; only the special token may be dropped."""
    detokenizer = Detokenizer(TOKENIZERS["llama"])
    space = ids_of("llama", b" ")
    assert detokenizer.push([*space, *space, 0]) == ""
    assert detokenizer.push(ids_of("llama", b"\xff") + ids_of("llama", ["b"])) == FFFD * 3 + "b"


def test_the_window_does_not_start_where_a_run_reads_differently() -> None:
    """Without its first, invalid byte this run is valid; what is held of it must stay as it was."""
    name = "llama"
    ids = ids_of(name, ["a"] * 20) + ids_of(name, b"\xff" + "你".encode() * 5) + ids_of(name, [FFFD, "b", "a"])
    detokenizer = Detokenizer(TOKENIZERS[name])
    assert "".join(detokenizer.push([i]) for i in ids) == full(name, ids)


class Recorder:
    """A tokenizer with `decode` alone, which notes the length of every decode."""

    def __init__(self, name: str) -> None:
        self.name, self.lengths = name, list[int]()

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.lengths.append(len(ids))
        return full(self.name, ids)


COSTS = [
    ("byte-level", [3 + i % (len(TOKENIZERS["byte-level"]) - 3) for i in range(2000)]),
    ("llama", ids_of("llama", PIECES) * 100),
    ("wordpiece", [3 + i % (len(TOKENIZERS["wordpiece"]) - 3) for i in range(2000)]),
    ("byte-level", ids_of("byte-level", EMOJI * 500)),
    ("byte-level", ids_of("byte-level", b"\xff\xf0" * 1000)),
    ("metaspace", ids_of("metaspace", ["▁a"]) + [0, 1] * 1000),
    ("metaspace", ids_of("metaspace", ["▁a"]) + ids_of("metaspace", ["▁"]) * 2000),
]


@pytest.mark.parametrize(("name", "ids"), COSTS)
def test_cost_does_not_grow_with_the_output(name: str, ids: list[int]) -> None:
    recorder = Recorder(name)
    detokenizer = Detokenizer(recorder)
    for start in range(0, len(ids), 5):
        detokenizer.push(ids[start : start + 5])
    detokenizer.flush()
    assert detokenizer.text == full(name, ids)
    assert max(recorder.lengths) <= 2 * CONTEXT + 5


def test_a_bare_tokenizers_tokenizer_will_do() -> None:
    ids = ids_of("llama", ["▁a", "▁b"]) + ids_of("llama", "\n你".encode()) + [1] + ids_of("llama", ["▁"])
    detokenizer = Detokenizer(TOKENIZERS["llama"].backend_tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == "a b\n你 "


def test_clean_up_of_spaces_is_off() -> None:
    tokenizer = wrap(["a", " .", "."], decoders.Fuse())
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode([3, 4]) == "a."
    assert Detokenizer(tokenizer).push([3, 4]) == "a ."


# --- stop strings ---


class Pieces:
    """The ids are indices into a list of strings."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces, self.calls = pieces, 0

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        self.calls += 1
        return "".join(self.pieces[i] for i in ids)


class Stripped(Pieces):
    """Strips the text on both sides, as pure Python SentencePiece tokenizers do."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return super().decode(ids, skip_special_tokens=skip_special_tokens).strip()


def test_a_decoder_that_strips_both_sides() -> None:
    ids = [1, 0, *[1] * (4 * CONTEXT), 0, 2, *[1] * 3]
    detokenizer = Detokenizer(Stripped(["x", " ", " y"]))
    assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush() == f"x{' ' * 4 * CONTEXT}x y"


def splits(text: str) -> list[list[str]]:
    """Every way to cut `text` into tokens."""
    masks = itertools.product([False, True], repeat=len(text) - 1)
    return [
        [text[i:j] for i, j in itertools.pairwise([0, *(k + 1 for k, cut in enumerate(mask) if cut), len(text)])]
        for mask in masks
    ]


SWEEP = [
    ("xaaabyz", ["aab"], "xa"),  # the prefix repeats: "aaab" holds "aab" from its second "a"
    ("xabcyab", ["abc"], "x"),
    ("xababac", ["abac"], "xab"),
    ("xyabzab", ["zabq", "b"], "xya"),
    ("aabaabc", ["aabc"], "aab"),
    ("abcdefg", ["g"], "abcdef"),
    ("abcdefg", ["abcdefg"], ""),
    ("abcdefg", ["gh", "fgh"], None),  # held back to the end, never completed
    ("ab\n\nxyz", ["\n\n", "\n\nx"], "ab"),
]


@pytest.mark.parametrize(("text", "stops", "expected"), SWEEP)
def test_every_cut_of_the_text_into_tokens(text: str, stops: list[str], expected: str | None) -> None:
    for pieces in splits(text):
        stream = TextStream(Pieces(pieces), stops)
        out, stopped_at = "", None
        for i in range(len(pieces)):
            if stream.push_token(i):
                stopped_at = i
                break
            so_far = "".join(pieces[: i + 1])
            out += stream.take()
            assert out == so_far[: len(so_far) - could_become(so_far, stops)]
        out += stream.finish()
        first = [i for i in range(len(pieces)) if any(s in "".join(pieces[: i + 1]) for s in stops)]
        assert stopped_at == (first[0] if first else None)
        assert out == stream.text == (text if expected is None else expected)
        assert (stream.stop is not None) == (expected is not None)


def test_overlapping_stops() -> None:
    for pieces, stop, text in [
        (["x", "ab", "c"], "ab", "x"),  # "ab" is complete first
        (["x", "abc"], "abc", "x"),  # both at once, same start: same cut, the longer is named
        (["xab", "cd"], "ab", "x"),
        (["x", "a", "b"], "ab", "x"),
    ]:
        stream = TextStream(Pieces(pieces), ["ab", "abc"])
        assert [stream.push_token(i) for i in range(len(pieces))].index(True) >= 0
        assert (stream.stop, stream.finish()) == (stop, text)


def test_the_earliest_start_wins_among_stops_completed_by_one_token() -> None:
    stream = TextStream(Pieces(["x1", "23y"]), ["3", "12", "23"])
    assert not stream.push_token(0)
    assert stream.take() == "x"
    assert stream.push_token(1)
    assert (stream.stop, stream.take(), stream.finish()) == ("12", "", "")


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(Pieces(["a", "STOP", "b"]), ["STOP"])
    assert [stream.push_token(i) for i in (0, 1, 2)] == [False, True, True]
    assert (stream.take(), stream.take(), stream.finish(), stream.text) == ("a", "", "", "a")


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    """Not even if it only begins there: what was taken cannot be withdrawn."""
    pieces = ["aSTOP", "bST", "OPc", "dST", "OP"]
    stream = TextStream(Pieces(pieces), ["STOP"], min_tokens=2)
    assert [stream.push_token(i) for i in range(3)] == [False] * 3
    assert stream.take() == "aSTOPbSTOPc"
    assert [stream.push_token(i) for i in (3, 4)] == [False, True]
    assert (stream.finish(), stream.text) == ("d", "aSTOPbSTOPcd")


def test_a_stop_waits_for_its_last_byte() -> None:
    ids = ids_of("byte-level", b"a" + EMOJI)
    stream = TextStream(TOKENIZERS["byte-level"], ["😀"])
    assert [stream.push_token(i) for i in ids] == [False] * 4 + [True]
    assert stream.finish() == "a"


def test_a_newline_byte_piece_stops_at_once() -> None:
    """The run is still open, but if generation stops here the newline is the text."""
    stream = TextStream(TOKENIZERS["llama"], ["\n"])
    assert [stream.push_token(i) for i in ids_of("llama", ["▁a"]) + ids_of("llama", b"\n")] == [False, True]
    assert stream.finish() == "a"


def test_without_stops_nothing_is_decoded_before_take() -> None:
    pieces = Pieces(["a", "b"])
    stream = TextStream(pieces)
    assert not any(stream.push_token(i % 2) for i in range(100))
    assert pieces.calls == 0
    assert stream.take() == "ab" * 50
    assert (stream.take(), stream.finish(), stream.text) == ("", "", "ab" * 50)
    with pytest.raises(RuntimeError, match="finish"):
        stream.push_token(0)


@pytest.mark.parametrize(("stops", "named"), [([""], "''"), (["a", 7], "7"), ([None], "None"), ("ab", "'ab'")])
def test_bad_stops_are_named(stops: Any, named: str) -> None:
    with pytest.raises(ValueError, match="stop string") as error:
        StopStrings(stops)
    assert named in str(error.value)


@EVERY
@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
@pytest.mark.thinned(1, most=2)
def test_stops_do_not_depend_on_the_partition(name: str, data: st.DataObject) -> None:
    ids = data.draw(token_lists(name, 50))
    whole = full(name, ids)
    cuts = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 5))
    inside = cuts.map(lambda cut: whole[cut[0] : cut[0] + cut[1]] or "a")
    stops = data.draw(st.lists(st.one_of(inside, st.sampled_from(BYTE_STOPS)), min_size=1, max_size=3))
    index, text = stop_oracle(name, ids, stops)

    stream = TextStream(TOKENIZERS[name], stops)
    out, stopped_at, seen = "", None, []
    for block in blocks(ids, data.draw(SIZES)):
        for token in block:
            seen.append(token)
            if stream.push_token(token):
                stopped_at = len(seen) - 1
                break
        out += stream.take()
        assert text.startswith(out)
        if stopped_at is not None:
            break
        stable = stable_oracle(name, seen)
        assert out == stable[: len(stable) - could_become(stable, stops)]
    out += stream.finish()
    assert (stopped_at, out, stream.text) == (index, text, text)
    assert not any(stop in out for stop in stops)


@settings(max_examples=examples(200), deadline=None)
@example(stops=["aab"], text="aaab")
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("ab", max_size=12),
)
def test_pending_is_the_longest_unfinished_stop(stops: list[str], text: str) -> None:
    found = StopStrings(stops).find(text)
    starts = [text.index(stop) for stop in stops if stop in text]
    assert (found[0] if found else None) == min(starts, default=None)
    if not found:
        assert StopStrings(stops).pending(text) == could_become(text, stops)


# --- tokens that are bytes ---


@EVERY
@settings(max_examples=80, deadline=None)
@given(data=st.data())
@pytest.mark.thinned(1, most=1)
def test_a_text_without_stop_strings_is_the_full_decode(name: str, data: st.DataObject) -> None:
    """Byte-level vocabularies have a faster detokeniser; text that was taken stays, whatever comes."""
    ids = data.draw(token_lists(name, 90))
    stream, taken = TextStream(SHARED[name]), ""
    assert isinstance(stream._detokenizer, ByteDetokenizer) == (name == "byte-level")
    for block in blocks(ids, data.draw(SIZES)):
        stream.push_tokens(block)
        taken += stream.take()
    assert taken + stream.finish() == full(name, ids)


def test_a_searched_text_has_the_general_detokeniser() -> None:
    assert isinstance(TextStream(SHARED["byte-level"], ["stop"])._detokenizer, Detokenizer)
    assert isinstance(TextStream(TOKENIZERS["byte-level"])._detokenizer, Detokenizer)


def test_an_added_token_is_spelled_as_it_is() -> None:
    added = wrap(["a", "b"], decoders.ByteLevel())
    added.add_tokens(["<tool call>"])
    ids = [*added.convert_tokens_to_ids(["a", "<tool call>", "<s>", "b"])]
    stream = TextStream(SharedTokenizer(added))
    stream.push_tokens(ids)
    assert isinstance(stream._detokenizer, ByteDetokenizer)
    assert stream.finish() == added.decode(ids, skip_special_tokens=True) == "a<tool call>b"
