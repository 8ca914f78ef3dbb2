// What the page has seen of the server's counters: rates and percentiles between two looks, and a short history.

const LONGEST = 600; // seconds of history
const WINDOW = 60; // seconds over which a percentile of the history is taken: shorter ones hold too few requests

/** Cumulative buckets of a histogram, [[upper bound, count]], from the samples of its metric. */
export function bucketsOf(samples = []) {
  const found = samples.map(({ labels, value }) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value]);
  return found.sort((one, other) => one[0] - other[0]);
}

/**
 * A quantile (0 to 1) of cumulative buckets, taken as even within a bucket, as Prometheus does. Null without counts. In
 * the last bucket, which has no upper bound, it is the lower one.
 */
export function quantile(buckets, share) {
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  let [low, before] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= rank && count > before) {
      return bound === Infinity ? low : low + ((bound - low) * (rank - before)) / (count - before);
    }
    [low, before] = [bound, count];
  }
  return low;
}

/** Looks at the server: {time, tokens, histograms: {name: buckets}}, the oldest first. */
export class History {
  constructor() {
    this.looks = [];
  }

  add(look) {
    const last = this.looks.at(-1);
    if (last && look.tokens < last.tokens) this.looks = []; // the server was started again
    this.looks.push(look);
    while (this.looks.length > 2 && this.looks[1].time < look.time - LONGEST) this.looks.shift();
  }

  /** From when to when there is a history, in seconds, and at least a minute of it. */
  get range() {
    const now = this.looks.at(-1)?.time ?? 0;
    const length = now - (this.looks[0]?.time ?? now);
    return [now - Math.min(Math.max(length, 60), LONGEST), now];
  }

  /** Tokens per second between one look and the next: [[from, to, value]]. */
  speeds() {
    return this.spans((look, before) => (look.tokens - before.tokens) / (look.time - before.time));
  }

  /** A quantile of the last minute before each look: [[from, to, value]], with null where nothing was counted. */
  quantiles(name, share) {
    return this.spans((look) => {
      const since = this.looks.findLast((one) => one.time <= look.time - WINDOW) ?? this.looks[0];
      const begin = since.histograms[name];
      const counts = look.histograms[name].map(([bound, count], at) => [bound, count - (begin[at]?.[1] ?? 0)]);
      return quantile(counts, share);
    });
  }

  spans(value) {
    return this.looks.slice(1).map((look, index) => {
      const before = this.looks[index];
      return [before.time, look.time, value(look, before)];
    });
  }
}
