"""`benchmarks/quality.py`: its models are those that `dtype=` makes, and its figures are what their names say."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import quality
import torch
from quality import TRIED, Row, articles, in_bfloat16, in_common, losses, measure, rounded_copy, same_tokens, table

from lookahead.loading.formats import quantised_copy
from lookahead.models.rounding import quantise

IDS = torch.arange(3, 27).reshape(2, 12)


@pytest.fixture(scope="module")
def model(make_model: Any) -> Any:
    """Weights that are numbers of bfloat16, as those of the reference are."""
    return in_bfloat16(make_model(tie_word_embeddings=True)).float().requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", "fp8"), ("fp8_dynamic", "fp8_dynamic"), ("int8, activations too", "int8"), ("int4", "int4")],
)
def test_a_rounded_copy_is_what_the_library_makes(model: Any, name: str, dtype: str) -> None:
    """From the model in bfloat16, whose layers then compute in fp32."""
    made, _ = rounded_copy(model, TRIED[name])
    expected = quantised_copy(in_bfloat16(model), dtype).float()
    found = made(IDS).logits
    assert (found - expected(IDS).logits).norm() < 1e-5 * found.norm()
    assert (found - model(IDS).logits).norm() > 1e-3 * found.norm()


def test_the_model_in_bfloat16_is_one_that_was_loaded_so(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(in_bfloat16(model)(IDS).logits, loaded(IDS).logits)
    assert torch.equal(loaded.float()(IDS).logits, model(IDS).logits)


def test_a_rounded_copy_shares_what_is_not_rounded(model: Any) -> None:
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, format in TRIED.items():
        made, bytes = rounded_copy(model, format)
        assert made.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
        layer, old = made.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.up_proj
        assert torch.equal(layer.weight, quantise(old.weight.bfloat16(), format).dequantised()), name
        assert format.codes.bits / 8 < bytes < format.codes.bits / 8 + 0.3  # narrow matrices: many scales
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_losses_are_those_of_the_tokens_after_the_first(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "BATCH", 1)
    logits = model(IDS).logits.log_softmax(-1)
    expected = [-sum(float(logits[i, at - 1, IDS[i, at]]) for at in range(1, 12)) / 11 for i in range(2)]
    assert losses(model, IDS).tolist() == pytest.approx(expected, rel=1e-5)


def test_a_models_own_answer_is_the_same_up_to_a_token_that_is_changed(model: Any) -> None:
    prompt = IDS[0].tolist()
    answer = model.generate(IDS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 12:].tolist()
    assert same_tokens(model, [prompt], [answer]) == [[True] * 8]
    changed = [*answer[:5], (answer[5] + 1) % 40, *answer[6:]]
    (same,) = same_tokens(model, [prompt], [changed])
    assert same[:6] == [True] * 5 + [False]
    assert in_common(same) == 5
    assert in_common([]) == 0
    assert in_common([True, True]) == 2


def test_figures_of_a_row() -> None:
    reference = torch.tensor([1.0, 3.0], dtype=torch.float64)
    row = Row.of(0.5, reference + torch.tensor([0.1, 0.3]), reference, [[True, True, False, True], [True] * 4])
    assert row.perplexity == pytest.approx(math.exp(2.2), abs=1e-3)
    assert row.change == pytest.approx(100 * (math.exp(0.2) - 1), abs=0.01)
    assert row.error == pytest.approx(100 * math.exp(0.2) * 0.1, abs=0.01)
    assert (row.same, row.common, row.whole) == (87.5, 3.0, 1)
    assert "| int4 | 0.500 | 9.03 | +22.1% ± 12.2 | 87.5% | 3.0 | 1 of 2 |" in table({"int4": row}, 2)


def test_articles_are_cut_and_short_ones_left_out(lm: Any, data_dir: Path) -> None:
    texts = ["the fox", "the quick brown fox\n\n" * 9, "a dog", "once more the dog and the fox " * 9]
    rows = [{"id": str(i), "document": text, "summary": ""} for i, text in enumerate(texts)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (data_dir / "xsum_sample.jsonl").write_text(content, encoding="utf-8")
    expected = [list(lm.encode(texts[i], raw=True))[:15] for i in (1, 3)]
    assert articles(lm, "xsum", data_dir, 2, 15).tolist() == expected
    with pytest.raises(ValueError, match="'xsum' has 2 articles of 15 tokens, and 3 are asked for"):
        articles(lm, "xsum", data_dir, 3, 15)


def test_all_rows_are_measured_and_written(
    lm: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "open_reference", lambda name, device: lm)
    out = tmp_path / "quality.json"
    small = ["--set", "xsum", "--articles", "2", "--window", "2", "--prompts", "2", "--tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["quality.py", "--data-dir", str(data_dir), *small, "--out", str(out)])
    quality.main()
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert list(stored["rows"]) == ["bfloat16 in fp32", "bfloat16", *TRIED]
    assert (stored["about"]["model"], stored["about"]["window"]) == ("smollm2-135m-instruct", 2)
    reference = stored["rows"]["bfloat16 in fp32"]
    assert (reference["change"], reference["same"], reference["whole"]) == (0, 100, 2)
    assert stored["rows"]["int4"]["perplexity"] != reference["perplexity"]
    assert "| MXFP4 | " in capsys.readouterr().out


def test_missing_texts_are_one_line(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quality, "open_reference", lambda name, device: lm)
    monkeypatch.setattr(sys, "argv", ["quality.py", "--data-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        quality.main()
    assert stopped.value.code == 2
    assert "cnn_dm_sample.jsonl, which cannot be read" in capsys.readouterr().err


def test_formats_may_be_chosen(lm: Any, data_dir: Path) -> None:
    options = Namespace(set="xsum", data_dir=data_dir, articles=2, window=2, prompts=1, tokens=2)
    rows = measure(lm, Namespace(**vars(options), formats=["int8"], bfloat16=False), lambda line: None)
    assert list(rows) == ["bfloat16 in fp32", "int8"]
