// Creates, finds and changes elements. Only differences are changed, so that the selection, focus and layout stay.
// Text is always inserted as text. This page never parses markup.

const SVG = "http://www.w3.org/2000/svg";

function byId(id) {
  return document.getElementById(id);
}

/** Returns an element with attributes and children, which are elements or texts. */
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

/** Gives the list one item for each text with a note, in their order. */
function setNotedList(list, lines) {
  while (list.children.length > lines.length) list.lastElementChild.remove();
  lines.forEach(([text, note], index) => {
    const item = list.children[index] ?? list.appendChild(element("li", {}, element("span"), element("small")));
    setText(item.firstChild, text);
    setText(item.lastChild, note);
  });
}

/** Replaces the children of the parent. Children that it already has are not touched. */
function setChildren(parent, children) {
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

/** Returns a map with the values of these keys: those in `before`, and results of `make` for new keys. */
function kept(before, keys, make) {
  return new Map(keys.map((key) => [key, before.get(key) ?? make(key)]));
}

/** A number with its name and a remark. */
class Tile {
  constructor(name) {
    this._value = element("span", { class: "value" });
    this._unit = element("span", { class: "unit" });
    this._remark = element("dd", { class: "remark" });
    this.element = element(
      "div",
      { class: "tile" },
      element("dt", {}, name),
      element("dd", {}, this._value, " ", this._unit),
      this._remark,
    );
  }

  show({ value, unit = "", remark = "", level = "" }) {
    setText(this._value, value);
    setText(this._unit, unit);
    setText(this._remark, remark);
    setAttribute(this.element, "data-level", level);
  }
}
