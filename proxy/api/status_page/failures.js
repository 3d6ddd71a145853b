// The latest failed requests, and the details of one of them. Disconnected clients are not included.

const SHOWN_FAILURES = 20;
const WHO = { S: "an engine failed", s: "an engine was too slow", P: "rejected by the gateway", K: "cut off by a shutdown" };
const WHERE = {
  R: "while it was read",
  Q: "in the queue",
  E: "while media were encoded",
  F: "in the prefill",
  H: "in the handoff",
  T: "before the first token",
  D: "in the stream",
};

const CLIENT_MISTAKES = new Set([400, 404, 413, 415, 422]);

/** The party that ended a request, and the stage, by its status and the two letters of `term` in the log. */
function ending(term, code) {
  const who = term[0] === "S" && CLIENT_MISTAKES.has(code) ? "rejected by an engine" : (WHO[term[0]] ?? term);
  return [who, WHERE[term[1]] ?? ""].join(" ").trim();
}

class Failures {
  constructor() {
    this._count = null;
    this._isStale = true;
    this._links = new Map();
    this._table = new Table(byId("failures-table"), "Requests", [
      { title: "Time", kind: "time" },
      { title: "Latest request", kind: "id" },
      { title: "Count", kind: "number" },
      { title: "Status", kind: "code" },
      { title: "Ended", kind: "ending" },
      { title: "Prefiller and decoder", kind: "path" },
      { title: "Attempts", kind: "number" },
      { title: "Took", kind: "number" },
      { title: "Error", kind: "remarks" },
    ]);
  }

  /** Loads the failed requests if the metrics count new ones. */
  async look(now) {
    const ended = samplesOf(now, "pdproxy_request_end_total").filter(({ labels }) => !/^[-Cc]/.test(labels.term));
    const count = ended.reduce((sum, one) => sum + one.value, 0);
    const isNews = count !== this._count;
    this._count = count;
    this._isStale ||= isNews;
    // Rows do not move while the pointer or the focus is on the table, or the details of one are open.
    const isUsed = byId("failures-table").matches(":hover, :focus-within") || byId("receipt").open;
    if (this._isStale && !isUsed) {
      this._isStale = isNews; // load again later: another worker may not have stored its request yet
      const told = await askAsAdministrator("admin/requests/recent?failed=true&limit=100", () => {});
      if (told !== null) this._show(told.requests.filter(({ term }) => !/^[Cc]/.test(term)));
    }
  }

  forget() {
    this._count = null;
  }

  _show(requests) {
    const groups = groupsOf(requests).slice(0, SHOWN_FAILURES);
    const byKey = new Map(groups.map((group) => [`${group[0].time} ${group[0].id}`, group]));
    this._links = kept(this._links, [...byKey.keys()], (key) => linkTo(byKey.get(key)[0].id));
    const rows = [...byKey].map(([key, group]) => {
      const [latest] = group;
      return { key, cells: [clockTime(new Date(latest.time)), this._links.get(key), count(group.length), ...failureOf(latest)] };
    });
    this._table.show(rows);
    setHidden(byId("failures-table"), rows.length === 0);
    setHidden(byId("no-failures"), rows.length > 0);
  }
}

/** Returns groups of requests that have failed alike, each with its latest first. */
function groupsOf(requests) {
  const groups = new Map();
  for (const request of requests) {
    const { code, term, p, d, key, error } = request;
    const alike = JSON.stringify([code, term, code < 500 ? "" : p, code < 500 ? "" : d, key, words(error)]);
    if (!groups.has(alike)) groups.set(alike, []);
    groups.get(alike).push(request);
  }
  return [...groups.values()];
}

/** Returns an error without its numbers, which often differ. */
function words(error) {
  return (error ?? "").replace(/\d+(\.\d+)?/g, "#");
}

function failureOf({ code, term, p, d, attempts, dur, error }) {
  return [String(code), ending(term, code), [p, d].filter((one) => one && one !== "-").join(" "), count(attempts), latency(dur), error ?? ""];
}

/** Returns a link to the details of a request. A plain link would not send the admin key. */
function linkTo(id) {
  const path = `admin/requests?id=${encodeURIComponent(id)}`;
  const link = element("a", { href: path }, id);
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    showReceipt(id, path);
  });
  return link;
}

async function showReceipt(id, path) {
  setText(byId("receipt-title"), `Request ${id}`);
  byId("receipt-body").replaceChildren("Loading.");
  byId("receipt").showModal();
  try {
    const { requests } = await (await ask(path)).json();
    byId("receipt-body").replaceChildren(...requests.flatMap(receiptOf));
  } catch (error) {
    byId("receipt-body").replaceChildren(error instanceof Refused ? error.message : "The gateway cannot be reached.");
  }
}

/** Returns the elements that describe a request: a table of values, a table of attempts, and all fields as JSON. */
function receiptOf(request) {
  const { time, code, term, key, client, model, p, d, kv, tokens_in: read, tokens_cached: cached, tokens_out: written, ttft, dur, error } = request;
  const values = {
    Ended: `${clockTime(new Date(time))}, status ${code}: ${term === "--" ? "complete" : ending(term, code)}`,
    Error: error,
    Client: [key, client].filter((one) => one && one !== "-").join(", "),
    Model: model,
    "Prefiller and decoder": `${p} ${d}, KV ${kv}`,
    Tokens: `${count(read ?? 0)} in, ${count(cached ?? 0)} of them cached, ${count(written ?? 0)} out`,
    Time: `first token after ${latency(ttft ?? null)}, complete after ${latency(dur)}`,
  };
  const facts = Object.entries(values).filter(([, value]) => value);
  const rows = facts.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value)));
  const attempts = new Table(element("table", { class: "attempts" }), "Attempts", [
    { title: "Began after", kind: "time" },
    { title: "Prefiller", kind: "path" },
    { title: "Decoder", kind: "path" },
    { title: "Time in each stage", kind: "stages" },
    { title: "KV", kind: "kv" },
    { title: "Failure", kind: "remarks" },
  ]);
  attempts.show(request.history.map((one, index) => ({ key: String(index), cells: attemptOf(one) })));
  const fields = element("details", {}, element("summary", {}, "All fields"), element("pre", {}, JSON.stringify(request, null, 2)));
  return [element("table", { class: "facts" }, element("tbody", {}, ...rows)), attempts.element, fields];
}

function attemptOf({ began, p, d, choices, stages, kv, continues, failure }) {
  const place = (name, reason) => (name === "-" ? "" : `${name}${reason ? ` (${reason.replaceAll("_", " ")})` : ""}`);
  const times = Object.entries(stages).map(([stage, seconds]) => `${stage.replaceAll("_", " ")} ${latency(seconds)}`);
  return [
    `${latency(began)}${continues ? ", resumed" : ""}`,
    place(p, choices.prefill?.reason),
    place(d, choices.decode?.reason),
    times.join(", "),
    kv === "-" ? "" : kv,
    failure === null ? "" : `${failure.instance}: ${failure.message}`,
  ];
}
