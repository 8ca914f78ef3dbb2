// The cards of the status: what is served, how busy it is, how long requests take, and how many draft tokens are
// accepted.

import { el } from "./dom.js";
import { bucketsOf, quantile } from "./history.js";
import { sourceSentence } from "./sources.js";
import { fixed, S_MEANS, seconds } from "./steps.js";

/** The histograms that have a history, and their metrics. */
export const TIMES = { first: "time_to_first_token_seconds", between: "inter_token_latency_seconds" };
const DEEPEST = 8; // depths that are shown
const ROWS_COST = "Where more rows take more time, as on a CPU, a step tries fewer draft tokens.";

/** The cards with a figure. */
export function cardsOf(metrics) {
  const one = (name) => metrics.get(name)?.[0]?.value ?? 0;
  const info = metrics.get("server_info")?.[0]?.labels ?? {};
  const timeCard = (title, name) => card(title, ...percentiles(metrics, name));
  const [tried, accepted] = ["draft", "accepted"].map((kind) => one(`spec_decode_num_${kind}_tokens_total`));
  const cached = percent(one("prefix_cache_hits_total"), one("prefix_cache_queries_total"));
  const queued = one("request_queue_time_seconds_sum");
  const compression = [
    ["draft tokens accepted", percent(accepted, tried)],
    ["tokens generated", one("generation_tokens_total").toLocaleString("en")],
    ["steps", one("steps_total").toLocaleString("en")],
  ];
  return [
    card("Model", info.model_name ?? "–", [["device", info.device ?? "–"], ["number format", info.dtype ?? "–"]]),
    card("Load", `${one("num_requests_running")} running`, [
      ["waiting", String(one("num_requests_waiting"))],
      ["mean time in the queue", seconds(queued / (one("request_queue_time_seconds_count") || 1))],
      ["preempted since the start", String(one("num_preemptions_total"))],
      ["K/V cache in use", percent(one("kv_cache_usage_perc"), 1)],
      ["prompt tokens found in the cache", cached],
    ]),
    card("Tokens per step (S)", fixed(one("compression"), 2), compression, S_MEANS),
    timeCard("Time to first token", TIMES.first),
    timeCard("Time between tokens", TIMES.between),
    timeCard("Time of a whole request", "e2e_request_latency_seconds"),
  ];
}

/** The cards with a list: bars that all run from 0 to 100 % of what their card says, and the times of steps. */
export function listsOf(metrics) {
  const of = (name) => metrics.get(name) ?? [];
  const one = (name) => of(name)[0]?.value ?? 0;
  const accepted = one("spec_decode_num_accepted_tokens_total");
  const drafts = one("spec_decode_num_drafts_total");
  const ends = of("request_success_total");
  const all = ends.reduce((sum, { value }) => sum + value, 0);
  const depths = byDepth(of("spec_decode_num_accepted_tokens_per_pos_total"));
  const sources = shares("source", of("accepted_tokens_by_source_total"), accepted);
  const each = "Of all steps with draft tokens. Depth 1 comes right after the last token.";
  return [
    bars("Accepted draft tokens by source", "Of all accepted draft tokens.", sources),
    bars("Accepted draft tokens by depth", each, shares("position", depths, drafts)),
    bars("Requests by their end", "Of all requests.", shares("finished_reason", ends, all)),
    card("Time of a step by its rows", "", stepTimes(metrics), ROWS_COST),
  ];
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

/** The median as the figure, and other percentiles and the mean below it. */
function percentiles(metrics, name) {
  const buckets = bucketsOf(metrics.get(`${name}_bucket`));
  const [sum, count] = ["sum", "count"].map((end) => metrics.get(`${name}_${end}`)?.[0]?.value ?? 0);
  const at = (share) => seconds(quantile(buckets, share));
  const rows = [["95 % are below", at(0.95)], ["99 % are below", at(0.99)], ["mean", seconds(sum / (count || 1))]];
  return [at(0.5), rows, "Median since the start."];
}

/** The mean time of a step for each number of rows that occurred. */
function stepTimes(metrics) {
  const counts = new Map((metrics.get("step_time_seconds_count") ?? []).map((one) => [one.labels.rows, one.value]));
  const sums = (metrics.get("step_time_seconds_sum") ?? []).map(({ labels, value }) => [Number(labels.rows), value]);
  const named = (rows) => (rows === 1 ? "1 row" : `up to ${rows} rows`);
  sums.sort((one, other) => one[0] - other[0]);
  return sums.map(([rows, sum]) => [named(rows), seconds(sum / counts.get(String(rows)))]);
}

/** Depths count from 1 here: how far below the root a draft token was. */
function byDepth(samples) {
  const numbered = samples.map(({ labels, value }) => ({ labels: { position: Number(labels.position) + 1 }, value }));
  return numbered.sort((one, other) => one.labels.position - other.labels.position).slice(0, DEEPEST);
}

/** [name, count, share of the whole] of each sample. */
function shares(label, samples, whole) {
  return samples.map(({ labels, value }) => [String(labels[label]), value, whole ? Math.min(1, value / whole) : 0]);
}

function card(title, figure, facts, note = "") {
  const lines = facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  const parts = [el("h2", {}, title)];
  if (figure) parts.push(el("p", { class: "figure" }, figure));
  if (note) parts.push(el("p", { class: "small" }, note));
  parts.push(lines.length ? el("dl", {}, ...lines) : el("p", { class: "small" }, "None yet."));
  return el("article", { class: "card" }, ...parts);
}

/** Bars from 0 to 100 %, one for each [name, count, share]. */
function bars(title, note, lines) {
  const items = lines.map(([name, value, share]) => {
    const label = `${name}: ${value.toLocaleString("en")}, ${percent(share, 1)}`;
    const bar = el("meter", { min: 0, max: 1, value: share, "aria-label": label });
    const number = el("span", { class: "value" }, `${value.toLocaleString("en")} · ${Math.round(100 * share)} %`);
    return el("li", { title: sourceSentence(name) || null }, el("span", {}, name), bar, number);
  });
  const body = items.length ? el("ul", { class: "bars" }, ...items) : el("p", { class: "small" }, "None yet.");
  return el("article", { class: "card" }, el("h2", {}, title), el("p", { class: "small" }, note), body);
}
