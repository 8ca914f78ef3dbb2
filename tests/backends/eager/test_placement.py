"""Where the weights are must not matter: offloaded to disk, sharded over processes, quantised.

Such a model has hooks around its layers, fewer K/V heads than its config says, or weights that are no plain tensors.
Lookahead only calls it, and so must give the tokens of `model.generate`, each test with a check that the model really
is placed as it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig
from worlds import TENSOR_PARALLEL, torchrun_script

import lookahead

SETTINGS = {"window": 3, "ngram": 4, "guesses": 4, "budget": 40}
NEW_TOKENS = 32
FIELDS = {"vocab_size": 98, "num_hidden_layers": 3, "eos_token_id": None, "pad_token_id": 0}
"""Three layers, so that one stands between two of another kind; heads and vocabulary can be halved."""


def call(*prompts: list[int], **options: Any) -> dict[str, Any]:
    """Arguments of one `generate`: prompts padded on the left to one length, and the seed to set before it."""
    width = max(map(len, prompts))
    return {
        "ids": [[0] * (width - len(prompt)) + prompt for prompt in prompts],
        "mask": [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
        "options": {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options},
        "seed": 11,
    }


REPEATS, ONE, LOOSE = [5, 9, 2, 5, 9, 2, 5, 9, 7, 1, 5, 9, 2], [3], [60, 4, 4, 4, 90, 17, 4, 4]
CALLS = [
    call(REPEATS),
    call(ONE),
    call(LOOSE, REPEATS, ONE),
    call(REPEATS, do_sample=True, temperature=0.7),
    call(LOOSE, do_sample=True, temperature=1.5, top_k=20, top_p=0.9),
]


def decode(model: Any, call: dict[str, Any], **hook: Any) -> list[list[int]]:
    """New tokens."""
    torch.manual_seed(call["seed"])
    ids, mask = torch.tensor(call["ids"]), torch.tensor(call["mask"])
    output = model.generate(ids, attention_mask=mask, **call["options"], **hook)
    return output[:, ids.shape[1] :].tolist()


def assert_exact(model: Any, plain: Any) -> None:
    """Lookahead on `model` gives what `generate` gives on `plain`, in fewer forward passes."""
    hook, passes = lookahead.decoding(**SETTINGS), list[int]()
    # The counter stays: a hook that comes or goes makes the next call probe the model again.
    counter = model.register_forward_hook(lambda *_: passes.append(1))
    decode(model, call(ONE, max_new_tokens=1), custom_generate=hook)  # the model is probed once; not counted below
    for one in CALLS:
        expected = decode(plain, one)
        passes.clear()
        assert decode(model, one, custom_generate=hook) == expected
        assert len(one["ids"]) > 1 or len(passes) < NEW_TOKENS
    counter.remove()


@pytest.fixture(scope="module")
def plain(make_model: Callable[..., Any]) -> Any:
    """The model in memory, whole."""
    return make_model(**FIELDS)


@pytest.fixture(scope="module")
def saved(plain: Any, make_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that model as `untied`, and one whose head is its embedding as `tied`."""
    folder = tmp_path_factory.mktemp("models")
    plain.save_pretrained(folder / "untied")
    make_model(**FIELDS, tie_word_embeddings=True).save_pretrained(folder / "tied")
    return folder


PARTS = ["model.embed_tokens", *[f"model.layers.{i}" for i in range(3)], "model.norm", "model.rotary_emb", "lm_head"]


@pytest.mark.parametrize(
    "offloaded",
    [
        pytest.param(["model.layers.1"], id="layer", marks=pytest.mark.slow),
        pytest.param(["model.embed_tokens"], id="embedding", marks=pytest.mark.slow),
        pytest.param(["lm_head"], id="head"),
        pytest.param(PARTS, id="everything", marks=pytest.mark.slow),
    ],
)
def test_offloaded_to_disk(saved: Path, plain: Any, tmp_path: Path, offloaded: list[str]) -> None:
    """accelerate reads an offloaded part's weights when its turn comes; until then they are on no device at all."""
    model = AutoModelForCausalLM.from_pretrained(
        saved / "untied",
        device_map={part: "disk" if part in offloaded else "cpu" for part in PARTS},
        offload_folder=tmp_path,
        dtype=torch.float32,
    )
    absent = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    assert absent == [name for name, _ in plain.named_parameters() if name.startswith(tuple(offloaded))]
    assert_exact(model, plain)


@pytest.fixture(scope="module")
def ranks(saved: Path) -> list[dict[str, Any]]:
    """What two processes report that share each of the models; see `tensor_parallel.py`."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("transformers would share the model between accelerators, with another backend")
    task = {"models": ["untied", "tied"], "calls": CALLS, "settings": SETTINGS}
    (saved / "calls.json").write_text(json.dumps(task))
    return torchrun_script(TENSOR_PARALLEL, saved, 2, 120, LOOKAHEAD_CACHE=str(saved / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_sharded_over_two_processes(saved: Path, ranks: list[dict[str, Any]], name: str) -> None:
    """Each rank has half of the K/V heads and of the vocabulary, and decodes the whole text."""
    whole = AutoModelForCausalLM.from_pretrained(saved / name)
    heads, dim = whole.config.num_key_value_heads, whole.config.hidden_size // whole.config.num_attention_heads
    for report in ranks:
        held = report[name]["shards"]
        assert held["head"][0] == whole.config.vocab_size // 2
        assert held["keys"][0] == heads * dim // 2
        assert held["cached"] == [1, heads // 2, 1, dim]
    for number, one in enumerate(CALLS):
        expected = decode(whole, one)
        for report in ranks:
            assert report[name]["lookahead"][number]["tokens"] == expected
            assert len(one["ids"]) > 1 or report[name]["lookahead"][number]["passes"] < NEW_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["untied", "tied"])
def test_ranks_do_not_drift_apart(ranks: list[dict[str, Any]], name: str) -> None:
    """Bit for bit the same logits, so that a tie breaks alike; as many passes; the generator left in the same state.

    Ranks wait for each other in every layer: one that took another step would hang the other, or feed it nonsense.
    """
    first, second = (report[name] for report in ranks)
    assert first["logits"] == second["logits"]
    assert first["lookahead"] == second["lookahead"]
    states = [[one["random"] for one in first[method]] for method in ("plain", "lookahead")]
    assert states[0] == states[1]


@pytest.mark.slow
def test_ranks_time_nothing(saved: Path, ranks: list[dict[str, Any]]) -> None:
    """No two ranks measure the same step cost, and a step planned by it would have another size on each."""
    for report in ranks:
        for name in ("untied", "tied"):
            assert report[name]["unset"][0]["tokens"] == report[name]["plain"][0]["tokens"]
    assert not (saved / "cache" / "step-cost").exists()


@pytest.mark.parametrize("way", ["transformers", "torchao"])
@pytest.mark.thinned(1, most=1)
def test_quantised_weights(saved: Path, way: str) -> None:
    """int8 weights that are made floats again on use: a token's logits do not depend on the others in its pass."""
    pytest.importorskip("torchao", minversion="0.18")  # the first whose int8 weights are an `Int8Tensor` by default
    from torchao import quantization

    scheme = quantization.Int8WeightOnlyConfig()
    if way == "transformers":
        model = AutoModelForCausalLM.from_pretrained(
            saved / "untied", dtype=torch.float32, quantization_config=TorchAoConfig(scheme)
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(saved / "untied", dtype=torch.float32)
        quantization.quantize_(model, scheme)
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.qdata.dtype == torch.int8
    assert (type(model.lm_head.weight) is type(weight)) == (way == "torchao")
    assert_exact(model, model)
