// Tables with one row for each key. ARIA roles are explicit, because narrow windows show rows as blocks, and browsers
// then drop the implicit roles.

class Table {
  /** `columns`: `{title, kind}`, of which the first names the row; `kind` is a class. */
  constructor(table, caption, columns) {
    this._columns = columns;
    this._rows = new Map();
    this._body = element("tbody", { role: "rowgroup" });
    this._caption = element("caption", {}, caption);
    const titles = columns.map(({ title, kind = "" }) =>
      element("th", { scope: "col", role: "columnheader", class: kind }, title),
    );
    table.setAttribute("role", "table");
    table.replaceChildren(
      this._caption,
      element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...titles)),
      this._body,
    );
    this.element = table;
  }

  set caption(text) {
    setText(this._caption, text);
  }

  /** Rows as `{key, level, cells}`; a cell is a text or an element that stays the same one. */
  show(rows) {
    const keys = rows.map(({ key }) => key);
    this._rows = kept(this._rows, keys, () => this._made());
    rows.forEach((row) => this._fill(this._rows.get(row.key), row));
    setChildren(this._body, [...this._rows.values()]);
  }

  _fill(row, { level = "", cells }) {
    setAttribute(row, "data-level", level);
    cells.forEach((cell, index) => {
      const place = row.children[index];
      if (!(cell instanceof Node)) setText(place, cell);
      else if (place.firstChild !== cell) place.replaceChildren(cell);
    });
  }

  _made() {
    const cells = this._columns.map(({ title, kind = "" }, index) =>
      index === 0
        ? element("th", { scope: "row", role: "rowheader", class: kind })
        : element("td", { role: "cell", class: kind, "data-title": title }),
    );
    return element("tr", { role: "row" }, ...cells);
  }
}

// The instances of a role

const ROLES = { prefill: "Prefillers", decode: "Decoders", encode: "Encoders" };
const STATES = ["unknown", "up", "down", "ejected", "on probation"];
const COLUMNS = [
  { title: "Instance", kind: "name" },
  { title: "State", kind: "state" },
  { title: "In flight", kind: "number load" },
  { title: "Computing, tokens", kind: "number" },
  { title: "KV held, tokens", kind: "number memory" },
  { title: "Tokens/s", kind: "number" },
  { title: "Requests/s", kind: "number" },
  { title: "Failures/s", kind: "number" },
  { title: "Pinned KV", kind: "number" },
  { title: "Engine", kind: "engine" },
  { title: "Remarks", kind: "remarks" },
];

/** Returns the data of an instance, from the metrics and, if `details` is given, from /instances. */
function instance(before, after, { role, address }, state, details) {
  const its = { role, address };
  const requests = rate(before, after, "pdproxy_instance_requests_total", its);
  const served = (result) => rate(before, after, "pdproxy_instance_requests_total", { ...its, result });
  const ok = served("ok") + served("invalid_request"); // the engine has rejected a mistake of the client
  const misfits = samplesOf(after, "pdproxy_instance_misfit").filter((one) => matches(one.labels, its));
  return {
    role,
    address,
    state: details?.membership === "joining" ? "joining" : (STATES[state] ?? "unknown"),
    isAway: ["draining", "disabled"].includes(details?.membership),
    inFlight: total(after, "pdproxy_instance_inflight", its),
    most: details?.load?.max_running ?? null,
    learned: details?.load?.learned_max_running ?? null,
    compute: total(after, "pdproxy_instance_load_tokens", { ...its, kind: "compute" }),
    kv: total(after, "pdproxy_instance_load_tokens", { ...its, kind: "kv" }),
    capacity: samplesOf(after, "pdproxy_instance_kv_capacity_tokens").find((one) => matches(one.labels, its))?.value ?? null,
    tokens: samplesOf(after, "pdproxy_instance_tokens_per_second").find((one) => matches(one.labels, its))?.value ?? null,
    requests,
    failures: Math.max(0, requests - ok),
    pinned: total(after, "pdproxy_instance_pinned_kv", its),
    misfits: misfits.map((one) => one.labels.kind).sort(),
    pairs: pairsOf(after, address),
    details,
  };
}

const PAIRS = {
  pair_apart: "kept apart from",
  pair_recomputes: "KV is computed again with",
  pair_slow: "slow handoffs with",
};

/** Returns a remark for each pair of this instance that does not work as others do. */
function pairsOf(scrape, address) {
  return samplesOf(scrape, "pdproxy_status_reason").flatMap(({ labels: { code, kind, subject } }) => {
    const partner = kind === "pair" ? subject.split(" ").find((one) => one !== address) : undefined;
    return partner !== undefined && subject.split(" ").includes(address) ? [`${PAIRS[code] ?? code} ${partner}`] : [];
  });
}

function levelOf(one) {
  if (one.state === "down" || one.state === "ejected") return "bad";
  return one.state !== "up" || one.misfits.length || one.pairs.length || one.isAway || elsewhere(one).length ? "warn" : "well";
}

const LEVELS_FIRST = ["bad", "warn", "well"];

class Pool {
  constructor(role) {
    this._bars = new Map();
    this._memory = new Map();
    this.table = new Table(element("table", { class: "pool" }), ROLES[role] ?? role, COLUMNS);
    this._name = ROLES[role] ?? role;
  }

  /** Those that need a look stand first. */
  show(instances) {
    instances.sort((a, b) => LEVELS_FIRST.indexOf(levelOf(a)) - LEVELS_FIRST.indexOf(levelOf(b)));
    const up = instances.filter((one) => one.state === "up").length;
    this.table.caption = `${this._name}: ${up} of ${instances.length} up`;
    const most = Math.max(1, ...instances.map((one) => one.inFlight));
    const addresses = instances.map(({ address }) => address);
    this._bars = kept(this._bars, addresses, makeBar);
    this._memory = kept(this._memory, addresses, makeBar);
    const rows = instances.map((one) => {
      const bar = this._bars.get(one.address);
      const of = one.learned === null ? one.most : one.learned;
      const words = of === null ? count(one.inFlight) : `${count(one.inFlight)} of ${count(of)}`;
      // Requests wait for a learned limit although the engine would take them.
      setText(bar.firstChild, one.learned === null ? words : `${words} (learned)`);
      setAttribute(bar.lastChild, "value", String(Math.min(1, one.inFlight / (one.most || most)).toFixed(2)));
      const memory = this._memory.get(one.address);
      setText(memory.firstChild, one.capacity === null ? count(one.kv) : `${count(one.kv)} of ${count(one.capacity)}`);
      setAttribute(memory.lastChild, "value", String(one.capacity ? Math.min(1, one.kv / one.capacity).toFixed(2) : 0));
      setHidden(memory.lastChild, one.capacity === null);
      return { key: one.address, level: levelOf(one), cells: cellsOf(one, bar, memory) };
    });
    this.table.show(rows);
  }
}

/** Returns a text with a bar below it. */
function makeBar() {
  return element("span", { class: "bar" }, element("span"), element("meter", { "aria-hidden": "true" }));
}

/** Returns the states that other workers see, such as `up in 2 of 3 workers`. */
function elsewhere({ state, details }) {
  const states = Object.entries(details?.states ?? {});
  const workers = states.reduce((sum, [, number]) => sum + number, 0);
  return states.filter(([other]) => other !== state).map(([other, number]) => `${other} in ${number} of ${workers} workers`);
}

function stateOf(one) {
  const since = one.details?.since_seconds ?? null;
  const state = one.isAway ? `${one.state}, ${one.details.membership}` : one.state;
  return [since === null ? state : `${state} for ${duration(since)}`, ...elsewhere(one)].join("; ");
}

function cellsOf(one, bar, memory) {
  return [
    one.address,
    stateOf(one),
    bar,
    count(one.compute),
    memory,
    one.tokens === null ? "" : perSecond(one.tokens),
    perSecond(one.requests),
    perSecond(one.failures),
    count(one.pinned),
    one.details?.engine?.version ?? "",
    remarksOf(one),
  ];
}

function remarksOf(one) {
  const { details, misfits } = one;
  const remarks = [];
  if (details?.reason && one.state !== "up") remarks.push(details.reason);
  if (details) remarks.push(...details.misfits.map(({ kind, hint }) => `${kind}: ${hint}`));
  else remarks.push(...misfits);
  remarks.push(...one.pairs);
  if (typeof details?.evacuated_in_seconds === "number") {
    remarks.push(`its requests are evacuated in ${duration(details.evacuated_in_seconds)}`);
  }
  return remarks.join("; ");
}

// The client keys

const SHOWN_KEYS = 20;

class Clients {
  constructor() {
    this._table = new Table(byId("clients-table"), "Client keys", [
      { title: "Key", kind: "name" },
      { title: "Engine time", kind: "number" },
      { title: "In flight", kind: "number" },
      { title: "Requests/s", kind: "number" },
      { title: "Limited/s", kind: "number" },
      { title: "Rejected/s", kind: "number" },
      { title: "Prompt tokens/s", kind: "number" },
      { title: "Answer tokens/s", kind: "number" },
      { title: "First token, p95", kind: "number" },
    ]);
  }

  /** Shows the keys from the scrapes of 10 seconds ago, of a minute ago and of now. */
  show(recent, minute, now) {
    const keys = samplesOf(now, "pdproxy_key_inflight_requests").map(({ labels, value }) => ({
      key: labels.key,
      inFlight: value,
      seconds: rate(recent, now, "pdproxy_key_engine_seconds_total", { key: labels.key }),
    }));
    const seconds = keys.reduce((sum, one) => sum + one.seconds, 0);
    keys.sort((a, b) => b.seconds - a.seconds || b.inFlight - a.inFlight || a.key.localeCompare(b.key));
    this._table.caption = keys.length > SHOWN_KEYS ? `${SHOWN_KEYS} of ${keys.length} client keys` : "Client keys";
    this._table.show(
      keys.slice(0, SHOWN_KEYS).map(({ key, inFlight, seconds: own }) => {
        const per = (name, labels = {}) => perSecond(rate(recent, now, `pdproxy_key_${name}_total`, { key, ...labels }));
        const first = quantile(minute, now, "pdproxy_key_time_to_first_token_seconds", 0.95, { key });
        return {
          key,
          cells: [
            key,
            percent(seconds ? own / seconds : 0),
            count(inFlight),
            per("requests"),
            per("requests", { result: "limited" }),
            per("requests", { result: "rejected" }),
            per("tokens", { kind: "prompt" }),
            per("tokens", { kind: "completion" }),
            latency(first),
          ],
        };
      }),
    );
    setHidden(byId("clients"), keys.length === 0);
  }
}
