// Reads Prometheus' text format and makes time series of it. Knows no element and asks nobody.

// [{name, labels, value}] of a text in Prometheus' exposition format; lines that are not samples are skipped.
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match || (Number.isNaN(numberOf(match[3])) && match[3] !== "NaN")) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
    }
    samples.push({ name: match[1], labels, value: numberOf(match[3]) });
  }
  return samples;
}

function numberOf(text) {
  return /^[+-]?inf$/i.test(text) ? (text.startsWith("-") ? -Infinity : Infinity) : Number(text);
}

// One reading of /metrics: the sum of the samples of that name whose labels are at least these; undefined without any.
export class Reading {
  constructor(text, seconds) {
    this.seconds = seconds;
    this.samples = Map.groupBy(parseMetrics(text), ({ name }) => name);
  }

  value(name, labels = {}) {
    const wanted = Object.entries(labels);
    const fits = (sample) => wanted.every(([key, value]) => sample.labels[key] === value);
    const found = (this.samples.get(`kvstore:${name}`) ?? []).filter(fits);
    return found.length ? found.reduce((sum, sample) => sum + sample.value, 0) : undefined;
  }
}

// The last readings, oldest first. Counters that went back (the server was started again) begin a new history.
export class History {
  constructor(most) {
    this.most = most;
    this.readings = [];
  }

  add(reading, counter) {
    const last = this.readings.at(-1);
    if (last && reading.value(counter) < last.value(counter)) this.readings = [];
    this.readings.push(reading);
    if (this.readings.length > this.most) this.readings.shift();
  }

  get last() {
    return this.readings.at(-1);
  }

  // [{seconds, value}]: what `of(newer, older)` says of each reading and the one `span` before it, or the first.
  series(of, span = 1) {
    return this.readings.slice(1).map((newer, index) => {
      const older = this.readings[Math.max(0, index + 1 - span)];
      return { seconds: newer.seconds, value: of(newer, older) };
    });
  }

  // Per second, of a counter.
  rate(name, labels, span = 1) {
    const gained = (newer, older) => newer.value(name, labels) - older.value(name, labels);
    return this.series((newer, older) => gained(newer, older) / (newer.seconds - older.seconds), span);
  }
}
