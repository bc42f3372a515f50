// The samples of one answer of /metrics, which is Prometheus' text format.

const SAMPLE = /^trioserve_([a-zA-Z0-9_:]+)(?:\{(.*)\})?[ \t]+(\S+)/;
const LABEL = /([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"/g;

class Series {
  constructor(text) {
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const found = SAMPLE.exec(line);
      if (!found) continue;
      const [, name, labels, value] = found;
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels: parseLabels(labels ?? ""), value: parseNumber(value) });
    }
  }

  has(name) {
    return this.samples.has(name);
  }

  // Sum of the samples with these labels; 0 where there are none.
  total(name, labels = {}) {
    let sum = 0;
    for (const sample of this.samples.get(name) ?? []) {
      const fits = Object.entries(labels).every(([label, want]) =>
        [want].flat().includes(sample.labels.get(label)),
      );
      if (fits && Number.isFinite(sample.value)) sum += sample.value;
    }
    return sum;
  }

  // [upper bound in s, count up to it] of a histogram, over all its labels, ascending.
  buckets(name) {
    const counts = new Map();
    for (const { labels, value } of this.samples.get(`${name}_bucket`) ?? []) {
      const bound = parseNumber(labels.get("le") ?? "");
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return [...counts].sort(([a], [b]) => a - b);
  }
}

function parseLabels(text) {
  const labels = new Map();
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels.set(name, value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped)));
  }
  return labels;
}

function parseNumber(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}
