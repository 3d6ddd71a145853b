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
    // Rows do not move while the pointer or the focus is on the table.
    if (this._isStale && !byId("failures-table").matches(":hover, :focus-within")) {
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
  setText(byId("receipt-text"), "The gateway is being asked.");
  byId("receipt").showModal();
  try {
    const { requests } = await (await ask(path)).json();
    setText(byId("receipt-text"), requests.map((one) => JSON.stringify(one, null, 2)).join("\n\n"));
  } catch (error) {
    setText(byId("receipt-text"), error instanceof Refused ? error.message : "The gateway cannot be reached.");
  }
}
