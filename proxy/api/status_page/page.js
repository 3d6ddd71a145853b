// The page: loads the metrics every two seconds while it is visible, and shows them.

const EVERY_MS = 2000;
const TIMEOUT_MS = 5000;
const RATE_MS = 10_000;
const WINDOW_MS = 60_000;
const KEY = "pdproxy admin key";
const WANTED =
  /^pdproxy_(requests_total|inflight_requests|queued_requests|tokens_total|(time_to_first_token|inter_token|queue)_seconds_bucket|request_end_total|streams_broken_total|resumes_total|retries_total|rejected_total|workers|worker_replacements_total|cpu_seconds_total|connections|loop_lag_seconds|memory_share|overload_state|config_last_reload_successful|status_(state|reason)|build_info|instance_(state|inflight|load_tokens|kv_capacity_tokens|tokens_per_second|pinned_kv|misfit|requests_total)|key_(inflight_requests|(requests|tokens|engine_seconds)_total|time_to_first_token_seconds_bucket))$/;

class Refused extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

/** Returns an answer of this gateway. Raises Refused, or TypeError or DOMException if there is no answer. */
async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const answer = await fetch(path, {
    headers: key === null ? {} : { "X-Admin-Key": key },
    cache: "no-store",
    credentials: "omit",
    referrerPolicy: "no-referrer",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error?.message ?? `the gateway answers with status ${answer.status}`);
}

/** Returns an answer for administrators, or null if it is rejected. Then `onRefused` is called. */
async function askAsAdministrator(path, onRefused) {
  try {
    return await (await ask(path)).json();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    onRefused(error);
    return null;
  }
}

// The contents

const TILES = {
  requests: "Requests",
  output: "Tokens written",
  first: "First token, p95",
  between: "Between tokens, p95",
  queue: "Waiting in the queue",
  errors: "Server errors (5xx)",
  saved: "Answers saved",
  gateway: "Gateway",
};

/** Returns the numbers of each tile from the scrapes of now, 10 seconds ago and a minute ago. */
function figures(recent, minute, now) {
  const per = (name, labels) => rate(recent, now, `pdproxy_${name}`, labels);
  const all = (name) => total(now, `pdproxy_${name}`);
  const took = (name, share) => quantile(minute, now, `pdproxy_${name}_seconds`, share);
  const isNew = recent === now;
  const figure = (value, unit, remark) => ({ value: isNew ? "–" : perSecond(value), unit, remark });
  const spread = (name) => ({
    value: latency(took(name, 0.95)),
    remark: `p50 ${latency(took(name, 0.5))}, p99 ${latency(took(name, 0.99))}`,
  });
  const prompts = per("tokens_total", { kind: "prompt" });
  const cached = prompts ? per("tokens_total", { kind: "cached" }) / prompts : 0;
  const coded = (digit) => rateOf(recent, now, "pdproxy_requests_total", ({ code }) => code.startsWith(digit));
  const [refused, errors] = [coded("4"), coded("5")];
  const broken = per("streams_broken_total", { side: "engine" });
  const replaced = all("worker_replacements_total");
  return {
    requests: figure(per("requests_total"), "/s", `${count(all("inflight_requests"))} in flight`),
    output: figure(
      per("tokens_total", { kind: "completion" }),
      "/s",
      `${perSecond(prompts)}/s read, ${percent(cached)} of them cached`,
    ),
    first: spread("time_to_first_token"),
    between: spread("inter_token"),
    queue: {
      value: count(all("queued_requests")),
      remark: `waited p95 ${latency(took("queue", 0.95))}, ${perSecond(per("rejected_total"))}/s refused`,
    },
    errors: {
      ...figure(errors, "/s", `${perSecond(refused)}/s are 4xx, ${perSecond(broken)}/s broken off by engines`),
      level: errors + broken > 0 ? "bad" : "",
    },
    saved: figure(per("resumes_total"), "/s", `${perSecond(per("retries_total"))}/s tried again`),
    gateway: {
      ...figure(per("cpu_seconds_total"), "cores", ""),
      remark: `${workers(all("workers"), replaced)}, memory ${percent(all("memory_share"))}, loop ${latency(all("loop_lag_seconds"))} late`,
    },
  };
}

function workers(alive, replaced) {
  const words = `${count(alive)} ${alive === 1 ? "worker" : "workers"}`;
  return replaced ? `${words} (${count(replaced)} replaced)` : words;
}

const STATES_OF_GATEWAY = ["healthy", "degraded", "impaired", "down"];
const LEVELS = { healthy: "Healthy", degraded: "Degraded", impaired: "Impaired", down: "Down", gone: "Unreachable" };
const SHOWN_REASONS = 10;

/** Returns the state of the gateway and its reasons: as /admin/status has them, or else without sentences, from the metrics. */
function verdict(now, status) {
  if (status) return { state: status.state, reasons: status.reasons, omitted: status.omitted };
  const reasons = samplesOf(now, "pdproxy_status_reason").map(({ labels: { code, kind, subject } }) => {
    return { code, subject: { kind, name: subject }, text: `${code.replaceAll("_", " ")}: ${kind} ${subject}`, since: null, look_at: "" };
  });
  return { state: STATES_OF_GATEWAY[total(now, "pdproxy_status_state")] ?? "healthy", reasons, omitted: 0 };
}

/** Returns the lines of the banner: a text and a note for each reason. */
function linesOf({ reasons, omitted }) {
  const lines = reasons.slice(0, SHOWN_REASONS).map(({ text, since, look_at: lookAt }) => {
    return [text, since === null ? "" : `since ${clockTime(new Date(1000 * since))}. Look at ${lookAt}.`];
  });
  const rest = reasons.length - lines.length + omitted;
  return rest > 0 ? [...lines, [`${count(rest)} more: see GET /admin/status.`, ""]] : lines;
}

class Page {
  constructor() {
    this._history = [];
    this._pools = new Map();
    this._tiles = new Map(Object.entries(TILES).map(([name, title]) => [name, new Tile(title)]));
    byId("tiles").append(...[...this._tiles.values()].map((tile) => tile.element));
    this._charts = new Charts();
    this._clients = new Clients();
    this._administration = new Administration();
    this._reachedAt = null;
    this._timer = null;
    this._isAsking = false;
    this._isPaused = false;
    setText(byId("place"), location.host);
    byId("pause").addEventListener("click", () => this._pause(!this._isPaused));
    document.addEventListener("visibilitychange", () => this.turn());
    this._administration.onKey = () => this.turn();
  }

  _pause(isPaused) {
    this._isPaused = isPaused;
    setAttribute(byId("pause"), "aria-pressed", String(isPaused));
    setText(byId("pause"), isPaused ? "Go on" : "Pause");
    this.turn();
  }

  /** Loads the metrics, and sets the timer for the next time. Does nothing while the page is hidden. */
  async turn() {
    clearTimeout(this._timer);
    if (this._isAsking || this._isPaused || document.hidden) return;
    this._isAsking = true;
    try {
      await this._look();
    } catch (error) {
      this._isGone(error);
    } finally {
      this._isAsking = false;
    }
    // The second scrape follows soon, because there are no rates before it.
    this._timer = setTimeout(() => this.turn(), this._history.length === 1 ? EVERY_MS / 2 : EVERY_MS);
  }

  async _look() {
    const exposition = await (await ask("metrics")).text();
    const now = readScrape(exposition, performance.now(), (name) => WANTED.test(name));
    await this._charts.look();
    const details = await this._administration.look(now);
    this._history = [...this._history.filter((one) => now.at - one.at <= 2 * WINDOW_MS), now];
    this._show(now, details);
    this._reachedAt = new Date();
    setText(byId("updated"), `as of ${clockTime(this._reachedAt)}`);
  }

  /** The last reading that is at least so old, or else the oldest there is. */
  _before(now, ms) {
    return this._history.findLast((one) => now.at - one.at >= ms) ?? this._history[0];
  }

  _show(now, details) {
    const recent = this._before(now, RATE_MS);
    const found = verdict(now, details?.status);
    const shown = figures(recent, this._before(now, WINDOW_MS), now);
    if (found.reasons.some(({ code }) => code === "queue")) shown.queue.level = shown.first.level = "bad";
    for (const [name, tile] of this._tiles) tile.show(shown[name]);
    const pools = poolsOf(recent, now, details);
    for (const [role, instances] of pools) {
      if (!this._pools.has(role)) this._pools.set(role, new Pool(role));
      this._pools.get(role).show(instances);
    }
    setChildren(
      byId("pools"),
      [...pools.keys()].map((role) => this._pools.get(role).table.element),
    );
    this._clients.show(recent, this._before(now, WINDOW_MS), now);
    const version = samplesOf(now, "pdproxy_build_info")[0]?.labels.version ?? "";
    setText(byId("version"), version);
    const sizes = [...pools].map(([role, all]) => `${all.length} ${(ROLES[role] ?? role).toLowerCase()}`);
    const lines = linesOf(found);
    this._summarize(found.state, lines.length ? lines : [[`${sizes.join(" and ") || "No instances"}: no problem is known.`, ""]]);
  }

  _isGone(error) {
    this._history = []; // what has grown when it is back, or another is there, is no rate
    const why = error instanceof Refused ? error.message : error.name === "TimeoutError" ? "it does not answer" : "there is no connection";
    const since = this._reachedAt === null ? "" : ` Everything below is as it was at ${clockTime(this._reachedAt)}.`;
    this._summarize("gone", [[`The gateway at ${location.host} cannot be reached: ${why}.${since}`, ""]]);
  }

  /** `lines`: texts with a note, which may be empty. */
  _summarize(state, lines) {
    const summary = byId("summary");
    setAttribute(summary, "data-level", state);
    setAttribute(document.body, "data-level", state);
    setText(summary.querySelector(".word"), LEVELS[state]);
    setNotedList(summary.querySelector("ul"), lines);
    setText(document.querySelector("title"), state === "healthy" ? "pdproxy" : `${LEVELS[state]} – pdproxy`);
  }
}

/** Returns the instances by role, in the order of the roles. */
function poolsOf(recent, now, details) {
  const known = new Map((details?.instances ?? []).map((one) => [`${one.role} ${one.address}`, one]));
  const states = samplesOf(now, "pdproxy_instance_state").map(({ labels, value }) => ({ ...labels, value }));
  const measured = new Set(states.map(({ role, address }) => `${role} ${address}`));
  const others = [...known.values()].filter((one) => !measured.has(`${one.role} ${one.address}`));
  const all = [...states, ...others.map(({ role, address }) => ({ role, address, value: 0 }))].map((one) =>
    instance(recent, now, one, one.value, known.get(`${one.role} ${one.address}`)),
  );
  all.sort((a, b) => a.address.localeCompare(b.address, "en", { numeric: true }));
  const roles = [...new Set([...Object.keys(ROLES), ...all.map((one) => one.role)])];
  return new Map(
    roles.map((role) => [role, all.filter((one) => one.role === role)]).filter(([, instances]) => instances.length),
  );
}

new Page().turn();
