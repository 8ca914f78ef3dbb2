// Reads Prometheus' text format.

const SAMPLE = /^([\w:]+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Name without its prefix -> [{labels, value}]. */
export function parseMetrics(text, prefix = "lookahead:") {
  const found = new Map();
  for (const line of text.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (!sample || !line.startsWith(prefix)) continue;
    const name = sample[1].slice(prefix.length);
    const labels = {};
    for (const [, key, value] of (sample[2] ?? "").matchAll(LABEL)) labels[key] = value.replace(/\\(.)/g, "$1");
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(sample[3]) });
  }
  return found;
}
