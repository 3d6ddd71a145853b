// Elements: made, found, and changed only where they differ, so that a selection, the focus and the layout stay.
// Text goes in as text and nothing else; there is no place on this page that reads markup.

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes and children: elements, or texts. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

/** One child for each text, in their order. */
function setList(list, texts) {
  while (list.children.length > texts.length) list.lastElementChild.remove();
  texts.forEach((text, index) => setText(list.children[index] ?? list.appendChild(element("li")), text));
}

/** The parent's children are then these, in this order; those that are there already are not touched. */
function setChildren(parent, children) {
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

/** What was made for each of these keys: what there was `before`, and for new keys what `make` makes of them. */
function kept(before, keys, make) {
  return new Map(keys.map((key) => [key, before.get(key) ?? make(key)]));
}

/** A line over time, for who looks; figures beside it say the same in words. */
class Sparkline {
  constructor(points) {
    this._points = points;
    this._values = [];
    this._line = document.createElementNS(SVG, "polyline");
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("viewBox", `0 0 ${points - 1} 20`);
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("aria-hidden", "true");
    this.element.append(this._line);
  }

  /** One more value; null: there is none, and the line goes on behind it. */
  push(value) {
    this._values.push(value);
    if (this._values.length > this._points) this._values.shift();
    const most = Math.max(...this._values.map((one) => one ?? 0), 1e-9);
    const first = this._points - this._values.length;
    const points = this._values.flatMap((one, index) =>
      one === null ? [] : [`${first + index},${(19 - (18 * one) / most).toFixed(1)}`],
    );
    this._line.setAttribute("points", points.join(" "));
  }
}

/** A figure with its name, a remark, and perhaps its course. */
class Tile {
  constructor(name, points) {
    this._value = element("span", { class: "value" });
    this._unit = element("span", { class: "unit" });
    this._remark = element("dd", { class: "remark" });
    this._course = new Sparkline(points);
    this.element = element(
      "div",
      { class: "tile" },
      element("dt", {}, name),
      element("dd", {}, this._value, " ", this._unit),
      this._remark,
    );
    this.element.append(this._course.element);
  }

  show({ value, unit = "", remark = "", level = "", course = null }) {
    setText(this._value, value);
    setText(this._unit, unit);
    setText(this._remark, remark);
    setAttribute(this.element, "data-level", level);
    this._course.push(course);
  }
}
