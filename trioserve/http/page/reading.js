// From looks at a server to figures: rates are means over seconds, quantiles are of the last minute.

const RATES_S = 5;
const WINDOW_S = 60;
const COMPLETE = ["stop", "length"];
const FAILED = ["error", "timeout", "cut"];
const LEFT = ["gone", "aborted"];

// Past looks at one life of one server: {at, startup, series}, `at` in seconds.
class History {
  constructor() {
    this.looks = [];
  }

  add(look) {
    const last = this.now;
    if (last && look.startup.uptime_s < last.startup.uptime_s) this.looks = []; // started anew
    this.looks = this.looks.filter((past) => look.at - past.at <= WINDOW_S + RATES_S);
    this.looks.push(look);
  }

  get now() {
    return this.looks.at(-1);
  }

  // The latest that is this much older than the last, else the oldest of all others.
  before(seconds) {
    const past = this.looks.slice(0, -1);
    return past.findLast((look) => this.now.at - look.at >= seconds) ?? past[0];
  }
}

function makeReading(history) {
  const { startup, series } = history.now;
  const recent = history.before(RATES_S);
  const older = history.before(WINDOW_S);
  const queries = gained("prefix_cache_queries_total", series, older);
  const finished = (reason) => series.total("choices_finished_total", { reason });
  return {
    output: rate("generation_tokens_total", history.now, recent),
    prompts: rate("prefill_tokens_total", history.now, recent),
    outputNow: rate("generation_tokens_total", history.now, history.looks.at(-2)),
    promptsNow: rate("prefill_tokens_total", history.now, history.looks.at(-2)),
    running: series.total("requests_running"),
    waiting: series.total("requests_waiting"),
    complete: finished(COMPLETE),
    failed: finished(FAILED),
    left: finished(LEFT),
    cache: series.total("kv_cache_usage_ratio"),
    cacheTokens: startup.info ? startup.info.num_blocks * startup.info.block_size : 0,
    hits: queries > 0 ? gained("prefix_cache_hits_total", series, older) / queries : null,
    preemptions: series.total("preemptions_total"),
    memory: series.total("process_resident_memory_bytes"),
    restarts: series.total("engine_restarts_total"),
    first: quantiles("time_to_first_token_seconds", series, older),
    next: quantiles("inter_token_seconds", series, older),
    whole: quantiles("request_seconds", series, older),
  };
}

// Growth of a counter. One that went down was the former worker's and began anew.
function gained(name, series, before) {
  const now = series.total(name);
  const then = before ? before.series.total(name) : 0;
  return now >= then ? now - then : now;
}

function rate(name, last, before) {
  if (!before || last.at <= before.at) return null;
  return gained(name, last.series, before) / (last.at - before.at);
}

// Median and 99th percentile of what a histogram has counted since `before`.
function quantiles(name, series, before) {
  let counts = series.buckets(name);
  const then = before ? before.series.buckets(name) : [];
  if (then.length === counts.length) {
    counts = counts.map(([bound, count], i) => [bound, count - then[i][1]]);
  }
  return { median: quantile(counts, 0.5), tail: quantile(counts, 0.99) };
}

// The value below which `share` of the counts lie, taken as even within a bucket; null without any.
// What lies above the last finite bound is given as that bound.
function quantile(counts, share) {
  const total = counts.length ? counts.at(-1)[1] : 0;
  if (!(total > 0)) return null;
  const rank = share * total;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= rank && count > below) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / (count - below);
    }
    [lower, below] = [bound, count];
  }
  return null;
}
