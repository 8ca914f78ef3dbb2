// The server's status, from /metrics: charts of the last minutes, and a card for each subject.

import { request } from "./api.js";
import { cardsOf, listsOf, TIMES } from "./cards.js";
import { chart } from "./chart.js";
import { byId } from "./dom.js";
import { bucketsOf, History } from "./history.js";
import { parseMetrics } from "./prometheus.js";
import { seconds } from "./steps.js";

const PAUSE = 2000; // milliseconds between two looks
const history = new History();
let timer = null;
let visible = false;

/** Returns {shown(yes)}: the view is looked at or not. It asks the server only while it is. */
export function startStatus() {
  document.addEventListener("visibilitychange", look);
  return {
    shown(yes) {
      if (yes === visible) return;
      visible = yes;
      look();
    },
  };
}

async function look() {
  clearTimeout(timer);
  if (!visible || document.hidden) return;
  try {
    const metrics = parseMetrics(await (await request("metrics")).text());
    remember(metrics);
    showCharts();
    byId("status-cards").replaceChildren(...cardsOf(metrics));
    byId("status-lists").replaceChildren(...listsOf(metrics));
    byId("status-note").hidden = false;
    state("");
  } catch (error) {
    if (error.status === 403) {
      for (const id of ["status-charts", "status-cards", "status-lists"]) byId(id).replaceChildren();
      state("This key may not see the server's status: it needs the right “metrics” in the server's key file.", true);
      return; // asking again would be refused again
    }
    state(`The metrics cannot be read. ${error.message}`, true);
  }
  clearTimeout(timer);
  if (visible) timer = setTimeout(look, PAUSE);
}

function remember(metrics) {
  const histograms = {};
  for (const [name, metric] of Object.entries(TIMES)) histograms[name] = bucketsOf(metrics.get(`${metric}_bucket`));
  const tokens = metrics.get("generation_tokens_total")?.[0]?.value ?? 0;
  history.add({ time: performance.now() / 1000, tokens, histograms });
}

function showCharts() {
  const speed = [{ name: "now", spans: history.speeds() }];
  const shares = [["50 %", 0.5], ["95 %", 0.95]];
  const times = (name) => shares.map(([share, part]) => ({ name: share, spans: history.quantiles(name, part) }));
  byId("status-charts").replaceChildren(
    chart("Tokens per second", speed, history.range, (value) => (value ? value.toFixed(value < 10 ? 1 : 0) : "0")),
    chart("Time to first token, last minute", times("first"), history.range, seconds),
    chart("Time between tokens, last minute", times("between"), history.range, seconds),
  );
}

function state(text, bad = false) {
  byId("status-state").textContent = text;
  byId("status-state").classList.toggle("bad", bad);
}
