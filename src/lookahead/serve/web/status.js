// The server's status, from /metrics: what is served, how busy it is, and how many draft tokens are accepted.

import { request } from "./api.js";
import { byId, el } from "./dom.js";
import { parseMetrics } from "./prometheus.js";
import { fixed, seconds } from "./steps.js";

const PAUSE = 2000; // milliseconds between two looks
let timer = null;
let before = null; // {time, tokens} of the last look
let visible = false;

/** Returns {shown(yes)}: the view is looked at or not. It asks the server only while it is. */
export function startStatus() {
  document.addEventListener("visibilitychange", look);
  return {
    shown(yes) {
      if (yes === visible) return;
      visible = yes;
      before = null;
      look();
    },
  };
}

async function look() {
  clearTimeout(timer);
  if (!visible || document.hidden) return;
  try {
    const text = await (await request("metrics")).text();
    show(parseMetrics(text));
    state("");
  } catch (error) {
    if (error.status === 403) {
      byId("status-cards").replaceChildren();
      state("This key may not see the server's status: it needs the right “metrics” in the server's key file.", true);
      return; // asking again would be refused again
    }
    state(`The metrics cannot be read. ${error.message}`, true);
  }
  clearTimeout(timer);
  if (visible) timer = setTimeout(look, PAUSE);
}

function show(metrics) {
  const one = (name) => metrics.get(name)?.[0]?.value ?? 0;
  const info = metrics.get("server_info")?.[0]?.labels ?? {};
  const tokens = one("generation_tokens_total");
  const now = performance.now() / 1000;
  const speed = before && now > before.time ? (tokens - before.tokens) / (now - before.time) : 0;
  before = { time: now, tokens };
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
  const mean = (name) => one(`${name}_sum`) / (one(`${name}_count`) || 1);
  const [tried, accepted] = ["draft", "accepted"].map((kind) => one(`spec_decode_num_${kind}_tokens_total`));
  byId("status-cards").replaceChildren(
    card("Model", info.model_name ?? "–", [["Device", info.device ?? "–"], ["Numbers", info.dtype ?? "–"]]),
    card("Load", `${one("num_requests_running")} running`, [
      ["waiting", String(one("num_requests_waiting"))],
      ["tokens per second now", fixed(speed, 1)],
      ["had to make room", String(one("num_preemptions_total"))],
    ]),
    card("Cache in use", `${(100 * one("kv_cache_usage_perc")).toFixed(1)} %`, [
      ["prompt tokens found in it", percent(one("prefix_cache_hits_total"), one("prefix_cache_queries_total"))],
    ]),
    card("S, tokens per step", fixed(one("compression"), 2), [
      ["draft tokens accepted", percent(accepted, tried)],
      ["tokens generated", tokens.toLocaleString("en")],
      ["steps", one("steps_total").toLocaleString("en")],
    ]),
    card("Time to first token", seconds(mean("time_to_first_token_seconds")), [
      ["between tokens", seconds(mean("inter_token_latency_seconds"))],
      ["in the queue", seconds(mean("request_queue_time_seconds"))],
    ]),
    bars("Accepted draft tokens by source", metrics.get("accepted_tokens_by_source_total"), "source"),
    bars("Accepted draft tokens by depth", depths(metrics.get("spec_decode_num_accepted_tokens_per_pos_total")), "position"),
    bars("Requests by their end", metrics.get("request_success_total"), "finished_reason"),
  );
}

/** Depths count from 1 here: how far below the root a draft token was. */
function depths(samples = []) {
  const numbered = samples.map(({ labels, value }) => ({ labels: { position: Number(labels.position) + 1 }, value }));
  return numbered.sort((one, other) => one.labels.position - other.labels.position).slice(0, 8);
}

function card(title, figure, facts) {
  const lines = facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  const parts = [el("h2", {}, title), el("p", { class: "figure" }, figure), el("dl", {}, ...lines)];
  return el("article", { class: "card" }, ...parts);
}

function bars(title, samples = [], label) {
  const most = Math.max(1, ...samples.map((sample) => sample.value));
  const lines = samples.map(({ labels, value }) => {
    const name = String(labels[label]);
    const bar = el("meter", { min: 0, max: most, value, "aria-label": `${name}: ${value}` });
    return el("li", {}, el("span", {}, name), bar, el("span", { class: "value" }, value.toLocaleString("en")));
  });
  const body = lines.length ? el("ul", { class: "bars" }, ...lines) : el("p", { class: "small" }, "None yet.");
  return el("article", { class: "card" }, el("h2", {}, title), body);
}

function state(text, bad = false) {
  byId("status-state").textContent = text;
  byId("status-state").classList.toggle("bad", bad);
}
