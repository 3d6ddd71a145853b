// The traffic of the last five minutes, which the gateway keeps: a reload of the page loses nothing.

const CHARTS = [
  { title: "Tokens written per second", format: perSecond },
  { title: "Requests in flight", format: count },
  { title: "Waiting in the queue", format: count },
  { title: "First token, p95", format: latency },
];
const CHART_POINTS = 60;
const CHART_HEIGHT = 40;

/** A line over time with its present and its highest value. Screen readers get a sentence. */
class Chart {
  constructor({ title, format }) {
    this._title = title;
    this._format = format;
    this._line = document.createElementNS(SVG, "path");
    this._area = document.createElementNS(SVG, "path");
    this._area.setAttribute("class", "area");
    this._svg = document.createElementNS(SVG, "svg");
    this._svg.setAttribute("preserveAspectRatio", "none");
    this._svg.setAttribute("role", "img");
    this._svg.append(this._area, this._line);
    this._now = element("span", { class: "now" });
    this._most = element("span");
    this._start = element("span");
    this.element = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("span", {}, title), this._now),
      this._svg,
      element("p", { class: "axis" }, this._start, this._most, element("span", {}, "now")),
    );
  }

  /** Shows values, the oldest first; null: there is none. `points`: number of values in the whole width. */
  show(values, points, stepSeconds) {
    const known = values.filter((one) => one !== null);
    const most = Math.max(...known, 0);
    const last = values.at(-1) ?? null;
    const words = (value) => (value === null ? "–" : this._format(value));
    setText(this._now, words(last));
    setText(this._most, known.length ? `highest ${words(most)}` : "no values yet");
    setText(this._start, `${duration(points * stepSeconds)} ago`);
    setAttribute(this._svg, "viewBox", `0 0 ${points - 1} ${CHART_HEIGHT}`);
    setAttribute(this._svg, "aria-label", `${this._title}, last ${duration(points * stepSeconds)}: now ${words(last)}, highest ${words(known.length ? most : null)}`);
    const first = points - values.length;
    const height = (value) => (CHART_HEIGHT - 1 - ((CHART_HEIGHT - 4) * value) / (most || 1)).toFixed(1);
    const runs = [];
    values.forEach((value, index) => {
      if (value === null) return;
      if (index === 0 || values[index - 1] === null) runs.push([]);
      runs.at(-1).push([first + index, height(value)]);
    });
    // A value between two missing ones has no line, so it gets one of half a step.
    const drawn = runs.map((run) => (run.length > 1 ? run : [run[0], [run[0][0] + 0.5, run[0][1]]]));
    const path = (run) => `M${run.map((point) => point.join(",")).join("L")}`;
    setAttribute(this._line, "d", drawn.map(path).join(""));
    setAttribute(this._area, "d", drawn.map((run) => `${path(run)}L${run.at(-1)[0]},${CHART_HEIGHT}L${run[0][0]},${CHART_HEIGHT}Z`).join(""));
  }
}

class Charts {
  constructor() {
    this._charts = CHARTS.map((one) => new Chart(one));
    byId("charts").append(...this._charts.map((one) => one.element));
  }

  /** Loads the samples and draws them. */
  async look() {
    const { samples, step_seconds: stepSeconds } = await (await ask("metrics/history")).json();
    this._charts.forEach((chart, index) => chart.show(samples.map((one) => one[index]), CHART_POINTS, stepSeconds));
  }
}
