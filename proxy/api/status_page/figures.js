"use strict";
// Numbers from one or two scrapes of /metrics. `pdproxy top` (proxy/tools/top/scrape.py) calculates them in the same way,
// and scripts/test-status-page compares both.

/** @typedef {{at: number, samples: Map<string, {labels: Object<string, string>, key: string, value: number}[]>}} Scrape */

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** Parses Prometheus' text format, and keeps the wanted samples. `at`: time of the scrape in milliseconds. */
function readScrape(exposition, at, isWanted = () => true) {
  const samples = new Map();
  for (const line of exposition.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const found = SAMPLE.exec(line);
    if (found === null) throw new Error("this is no exposition of metrics");
    const [, name, key = "", value] = found;
    if (!isWanted(name)) continue;
    const labels = Object.create(null);
    for (const [, label, text] of key.matchAll(LABEL)) labels[label] = unescaped(text);
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, key, value: number(value) });
  }
  return { at, samples };
}

function unescaped(text) {
  return text.replace(/\\(.)/g, (_, mark) => (mark === "n" ? "\n" : mark));
}

function number(text) {
  return text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text);
}

function samplesOf(scrape, name) {
  return scrape.samples.get(name) ?? [];
}

function matches(labels, wanted) {
  return Object.entries(wanted).every(([name, value]) => labels[name] === value);
}

/** Returns the sum of the samples with this name and these labels. */
function total(scrape, name, wanted = {}) {
  return samplesOf(scrape, name).reduce((sum, one) => (matches(one.labels, wanted) ? sum + one.value : sum), 0);
}

/** Returns the growth of each counter. A counter that has restarted has grown by its value. */
function growth(before, after, name) {
  const old = new Map(samplesOf(before, name).map((one) => [one.key, one.value]));
  return samplesOf(after, name).map(({ labels, key, value }) => {
    const earlier = old.get(key) ?? 0;
    return { labels, grown: value >= earlier ? value - earlier : value };
  });
}

/** Returns the growth per second of the counters for which `isPart` returns true. */
function rateOf(before, after, name, isPart) {
  const grown = growth(before, after, name).reduce((sum, one) => (isPart(one.labels) ? sum + one.grown : sum), 0);
  return (1000 * grown) / Math.max(after.at - before.at, 1e-6);
}

/** Returns the growth per second of the counters with this name and these labels. */
function rate(before, after, name, wanted = {}) {
  return rateOf(before, after, name, (labels) => matches(labels, wanted));
}

/** Returns a quantile of the series with these labels between two scrapes, as Prometheus does, or null. */
function quantile(before, after, name, share, wanted = {}) {
  const buckets = new Map();
  for (const { labels, grown } of growth(before, after, `${name}_bucket`)) {
    if (!matches(labels, wanted)) continue;
    const bound = number(labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + grown);
  }
  const bounds = [...buckets.keys()].sort((a, b) => a - b);
  const count = bounds.length ? buckets.get(bounds.at(-1)) : 0;
  if (!count) return null;
  let lower = 0;
  let below = 0;
  for (const bound of bounds) {
    const upTo = buckets.get(bound);
    if (upTo >= share * count) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (share * count - below)) / Math.max(upTo - below, 1e-9);
    }
    [lower, below] = [bound, upTo];
  }
  return lower;
}

// Formats of numbers

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

function count(value) {
  return grouped.format(value);
}

/** Formats a number per second, or a number of cores. */
function perSecond(value) {
  if (value > 0 && value < 0.05) return "<0.1";
  return (value >= 100 ? grouped : precise).format(value);
}

function percent(share) {
  return `${grouped.format(100 * share)}\u00a0%`;
}

/** Formats a duration as `pdproxy top` does. */
function latency(seconds) {
  if (seconds === null) return "–";
  return seconds >= 1 ? `${seconds.toFixed(2)}\u00a0s` : `${(1000 * seconds).toFixed(0)}\u00a0ms`;
}

/** Formats the age of a state. */
function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)}\u00a0s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}\u00a0min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}\u00a0h`;
  return `${Math.floor(seconds / 86400)}\u00a0d`;
}

function clockTime(date) {
  return date.toLocaleTimeString("en-GB", { hour12: false });
}
