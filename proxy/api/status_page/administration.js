// Data for administrators only: the reasons of instance states, failed requests and the configuration. And the admin key.

const REFUSED_MS = 60_000;

class Administration {
  constructor() {
    this.onKey = () => {};
    this._configuration = null;
    this._asksAgainAt = 0;
    this._failures = new Failures();
    this._table = new Table(byId("configuration-table"), "Options in force", [
      { title: "Option", kind: "name" },
      { title: "Value", kind: "value" },
      { title: "From", kind: "origin" },
    ]);
    byId("defaults").addEventListener("change", () => this._showConfiguration());
    byId("forget").addEventListener("click", () => this._setKey(null));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this._setKey(byId("key").value);
      byId("key").value = "";
    });
  }

  _setKey(key) {
    if (key === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, key);
    this._asksAgainAt = 0;
    this._configuration = null;
    this._failures.forget();
    this.onKey();
  }

  /** The instances, as /instances has them, with the `status`; null where that is refused. `now`: the latest metrics. */
  async look(now) {
    if (performance.now() < this._asksAgainAt) return null;
    const details = await askAsAdministrator("instances", (error) => this._refused(error));
    if (details !== null) {
      setHidden(byId("key-form"), true);
      setHidden(byId("admin-told"), true);
      setHidden(byId("forget"), sessionStorage.getItem(KEY) === null);
      details.status = await askAsAdministrator("admin/status", () => {});
      await this._failures.look(now);
      await this._lookAtConfiguration();
    }
    for (const section of ["failures", "configuration"]) setHidden(byId(section), details === null);
    return details;
  }

  _refused(error) {
    const wasTried = sessionStorage.getItem(KEY) !== null;
    if (error.status === 401) {
      sessionStorage.removeItem(KEY);
      this._asksAgainAt = Infinity; // when there is a key
      setHidden(byId("key-form"), false);
      if (wasTried) setText(byId("key-told"), "This is not the admin key of this gateway.");
    } else {
      this._asksAgainAt = performance.now() + REFUSED_MS;
      setText(byId("admin-told"), `Figures only: ${error.message}.`);
    }
    setHidden(byId("forget"), true);
    setHidden(byId("admin-told"), error.status === 401);
  }

  /** It seldom changes, and says when it was read. */
  async _lookAtConfiguration() {
    const configuration = await askAsAdministrator("admin/config", () => {});
    if (configuration === null || configuration.read_at === this._configuration?.read_at) return;
    this._configuration = configuration;
    this._showConfiguration();
  }

  _showConfiguration() {
    if (this._configuration === null) return;
    const { read_at: readAt, options } = this._configuration;
    const isAll = byId("defaults").checked;
    const shown = options.filter((one) => isAll || one.origin !== "default");
    setText(byId("configuration-note"), `${shown.length} of ${options.length} options, read ${when(readAt)}`);
    this._table.show(
      shown.map(({ name, value, origin }) => ({ key: name, cells: [name, written(value), origin ?? ""] })),
    );
  }
}

function written(value) {
  if (Array.isArray(value)) return value.map(written).join(", ") || "none";
  if (value === null) return "not set";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Formats a time, with its date unless it is today. */
function when(epochSeconds) {
  const date = new Date(1000 * epochSeconds);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? `at ${clockTime(date)}` : `on ${date.toLocaleDateString("en-CA")} at ${clockTime(date)}`;
}
