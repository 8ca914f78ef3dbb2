"""The benchmark of quantised products, in the interpreter and with small matrices."""

from __future__ import annotations

import pytest
import quantised_products
import torch

from lookahead.backends.graph.kernels import quantised

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="times real matrices on a GPU")
TINY = ["--tiny", "--layers", "1", "--formats", "int4-zeros", "--rows", "1", "3"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_products, "copy_bandwidth", lambda device: 1e12)
    monkeypatch.setattr(quantised_products, "TINY", ((64, 256), (16, 384)))


def checks(output: str) -> list[tuple[str, ...]]:
    """The rows, launch and check of each line of the table."""
    lines = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| int4-zeros")]
    return [(rows, launch, check) for _, rows, launch, _, _, _, check in lines]


def test_it_times_launches_and_checks_them(capsys: pytest.CaptureFixture[str]) -> None:
    quantised_products.main([*TINY, "--stages", "3", "4"])
    tiles = [(str(rows), f"64x16 s{stages} c2", "ok") for stages in (3, 4) for rows in (1, 3)]
    assert checks(capsys.readouterr().out) == tiles


def test_a_wrong_product_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One row more than rounding explains, and one row other than among several."""
    real = quantised.multiply

    def wrong(x: torch.Tensor, weights: object, out: torch.Tensor, *args: object) -> None:
        real(x, weights, out, *args)  # type: ignore[arg-type]
        if len(x) == 1:
            out[0, 0] *= 1.001

    monkeypatch.setattr(quantised_products, "multiply", wrong)
    quantised_products.main(TINY)
    assert [check for *_, check in checks(capsys.readouterr().out)] == ["WRONG", "ok"]
    monkeypatch.setattr(quantised_products, "multiply", lambda x, weights, out, *args: out.fill_(1.0))
    quantised_products.main(TINY)
    assert [check for *_, check in checks(capsys.readouterr().out)] == ["WRONG", "WRONG"]
