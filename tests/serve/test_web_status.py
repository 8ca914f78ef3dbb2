"""The status: rates, percentiles and their history, from what /metrics says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium, visit
from http_server import Running

BOUNDS = (0.1, 0.2, 0.4)
QUANTILES = """async ([samples, shares]) => {
  const { bucketsOf, quantile } = await import("/web/history.js");
  const buckets = bucketsOf(samples.map(([le, value]) => ({ labels: { le }, value })));
  return shares.map((share) => quantile(buckets, share));
}"""
HISTORY = """async ([looks]) => {
  const { History } = await import("/web/history.js");
  const history = new History();
  for (const [time, tokens, low, high] of looks) {
    history.add({ time, tokens, histograms: { first: [[1, low], [2, low + high], [Infinity, low + high]] } });
  }
  return {
    speeds: history.speeds(), medians: history.quantiles("first", 0.5), range: history.range,
    kept: history.looks.length,
  };
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


@pytest.fixture
def page(browser: Any, server: Running) -> Iterator[Any]:
    with visit(browser, server.url) as one:
        yield one


def metrics(tokens: int, first: tuple[int, int, int]) -> str:
    """What /metrics says after so many tokens, and so many first tokens per bucket."""
    lines = [
        f'generation_tokens_total{{model_name="m"}} {tokens}',
        'compression{model_name="m"} 2.5',
        'spec_decode_num_drafts_total{model_name="m"} 50',
        'spec_decode_num_accepted_tokens_total{model_name="m"} 80',
        'spec_decode_num_accepted_tokens_per_pos_total{position="0",model_name="m"} 40',
        'spec_decode_num_accepted_tokens_per_pos_total{position="1",model_name="m"} 10',
        'accepted_tokens_by_source_total{source="recycle",model_name="m"} 60',
        'accepted_tokens_by_source_total{source="<b>odd</b>",model_name="m"} 20',
        'request_success_total{finished_reason="stop",model_name="m"} 1',
        'request_success_total{finished_reason="length",model_name="m"} 3',
        'step_time_seconds_sum{rows="1",model_name="m"} 0.4',
        'step_time_seconds_count{rows="1",model_name="m"} 20',
        'step_time_seconds_sum{rows="16",model_name="m"} 1.0',
        'step_time_seconds_count{rows="16",model_name="m"} 10',
    ]
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        counted = 0
        for bound, count in zip(BOUNDS, first, strict=True):
            counted += count
            lines.append(f'{name}_bucket{{le="{bound}",model_name="m"}} {counted}')
        lines.append(f'{name}_bucket{{le="+Inf",model_name="m"}} {counted}')
        lines += [f'{name}_count{{model_name="m"}} {counted}', f'{name}_sum{{model_name="m"}} {counted * 0.15}']
    return "".join(f"lookahead:{line}\n" for line in lines)


def test_quantiles_of_buckets(page: Any) -> None:
    buckets = [["+Inf", 12], ["0.1", 2], ["0.4", 10], ["0.2", 2]]
    found = page.evaluate(QUANTILES, [buckets, [0.05, 0.5, 0.8, 0.99]])
    # Of 12: 0.6 is in the first bucket, 6 the fourth of the eight between 0.2 and 0.4. The last has no upper bound.
    assert found == pytest.approx([0.03, 0.3, 0.39, 0.4], abs=1e-9)
    assert page.evaluate(QUANTILES, [[["0.1", 0], ["+Inf", 0]], [0.5]]) == [None]
    assert page.evaluate(QUANTILES, [[], [0.5]]) == [None]


def test_a_history_of_rates_and_medians(page: Any) -> None:
    found = page.evaluate(HISTORY, [[[0, 0, 0, 0], [2, 30, 4, 0], [10, 30, 4, 0], [70, 90, 4, 6]]])
    assert found["speeds"] == [[0, 2, 15], [2, 10, 0], [10, 70, 1]]  # over a pause: its mean
    assert found["medians"] == [[0, 2, 0.5], [2, 10, 0.5], [10, 70, 1.5]]  # of the last minute alone
    assert found["range"] == [0, 70]
    again = page.evaluate(HISTORY, [[[0, 50, 5, 0], [2, 60, 5, 0], [4, 10, 0, 0]]])
    assert (again["kept"], again["speeds"]) == (1, [])  # a server that was started again
    idle = page.evaluate(HISTORY, [[[0, 5, 5, 0], [2, 5, 5, 0]]])
    assert idle["medians"] == [[0, 2, None]]
    long = page.evaluate(HISTORY, [[[2 * number, number, 0, 0] for number in range(1000)]])
    assert long["range"] == [1398, 1998]
    assert long["kept"] < 310


@pytest.mark.slow
def test_charts_percentiles_and_bars_of_one_scale(page: Any) -> None:
    readings = iter([metrics(100, (1, 0, 0)), metrics(160, (1, 8, 0))])
    last = metrics(160, (1, 8, 0))
    page.route("**/metrics", lambda route: route.fulfill(body=next(readings, last), content_type="text/plain"))
    page.click("nav >> text=Status")
    page.wait_for_selector("svg[aria-label^='Tokens per second: now, now ']")
    said = page.locator("svg[aria-label^='Tokens per second']").get_attribute("aria-label")
    highest = re.search(r"highest ([\d.]+)$", said)
    assert highest is not None
    assert 5 < float(highest[1]) <= 31  # 60 tokens in two seconds, or more on a busy machine
    first = page.locator("svg[aria-label^='Time to first token']").get_attribute("aria-label")
    assert first.endswith("50 %, now 150 ms, highest 150 ms; 95 %, now 195 ms, highest 195 ms")
    assert page.locator(".curve.c0").first.get_attribute("d").startswith("M")
    card = page.locator("#status-cards .card", has_text="Time to first token").inner_text()
    assert "144 ms" in card  # 4.5 of 9: 3.5 of the eight between 0.1 and 0.2
    for row, value in (("95 % are below", "194 ms"), ("99 % are below", "199 ms"), ("mean", "150 ms")):
        assert f"{row}\n{value}" in card
    assert "S is generated tokens divided by steps" in page.locator("#status-cards").inner_text()
    bars = page.locator("meter").evaluate_all("(all) => all.map((one) => [one.max, one.getBoundingClientRect().width])")
    assert len(bars) == 6
    assert {most for most, _ in bars} == {1}
    assert len({round(width) for _, width in bars}) == 1
    shown = page.locator("#status-lists").inner_text()
    for value in ("40 · 80 %", "10 · 20 %", "60 · 75 %", "20 · 25 %", "1 · 25 %", "3 · 75 %", "<b>odd</b>"):
        assert value in shown
    assert "1 row\n20 ms" in shown
    assert "up to 16 rows\n100 ms" in shown
    title = page.locator("li", has_text="recycle").get_attribute("title")
    assert title.startswith("successors: the model's top tokens")


@pytest.mark.slow
def test_the_server_is_asked_only_while_the_status_is_shown(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None)
    page.wait_for_selector("#model:not(:empty)")
    assert asked == []
    page.click("nav >> text=Status")
    page.wait_for_selector(".card dl")
    page.click("nav >> text=Chat")
    before = len(asked)
    page.wait_for_timeout(2500)
    assert len(asked) == before >= 1
