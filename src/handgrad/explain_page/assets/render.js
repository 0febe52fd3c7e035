// @ts-check
// The renderer. A view describes its elements with h(); render() makes the page equal to that description and changes only
// what differs, so an element that stays keeps its focus, its scroll position and its open sections.

const SVG_TAGS = new Set(["svg", "g", "path", "circle", "line", "polyline", "rect", "text"]);
const PROPERTIES = new Set(["value", "checked"]); // the reader may change them: set only if the description changes

/**
 * @typedef {{ tag: string, attributes: Record<string, any>, children: any[] }} Description
 * @typedef {{ node: HTMLElement | Element, update: (options: any) => void }} Widget
 */

/** Describe an element: h("p.soft", { id: "note" }, "text"). Classes follow the tag; attributes may be left out. `key` tells
 * siblings apart; `style` is an object; null, undefined and false are left out.
 * @param {string} selector @param {...any} content  attributes, if any, and children @returns {Description} */
export function h(selector, ...content) {
  const [tag, ...classes] = selector.split(".");
  const given = isAttributes(content[0]) ? content.shift() : {};
  const children = content
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && typeof child !== "boolean");
  return { tag, attributes: classes.length ? { class: classes.join(" "), ...given } : given, children };
}

const isAttributes = (/** @type {any} */ x) => x?.constructor === Object && !("tag" in x); // a description has a tag

/** Describe an element that draws itself: make(options) returns its node and a function that takes new options.
 * @param {string} key @param {(options: any) => Widget} make @param {any} options */
export const widget = (key, make, options) => ({
  tag: `widget ${make.name}`,
  attributes: { key },
  children: [],
  make,
  options,
});

/** An element of page.html, or of a view. @param {string} id @returns {any} */
export const find = (id) => document.getElementById(id);

const described = new WeakMap(); // node → its description
const widgets = new WeakMap(); // node → its widget
const textOf = (/** @type {any} */ child) => (typeof child === "object" ? null : String(child));
const identity = (/** @type {any} */ child) =>
  textOf(child) === null ? `${child.tag} ${child.attributes.key ?? ""}` : "#text";

/** Make the children of `parent` equal to the description.
 * @param {Element} parent @param {any[]} wanted */
export function render(parent, wanted) {
  const old = new Map();
  for (const node of parent.childNodes) {
    const name = node.nodeType === 3 ? "#text" : identity(described.get(node) ?? { tag: "foreign", attributes: {} });
    old.set(name, [...(old.get(name) ?? []), node]);
  }
  const nodes = wanted.map((child) => fit(old.get(identity(child))?.shift(), child));
  for (const left of [...old.values()].flat()) left.remove();
  let here = parent.firstChild;
  for (const node of nodes) {
    if (node === here) here = here?.nextSibling ?? null;
    else parent.insertBefore(node, here);
  }
}

/** Return `node`, changed to fit the description, or a new one. @param {any} node @param {any} wanted */
function fit(node, wanted) {
  const text = textOf(wanted);
  if (text !== null) {
    if (!node) return document.createTextNode(text);
    if (node.data !== text) node.data = text;
    return node;
  }
  if (wanted.make) {
    if (node) widgets.get(node).update(wanted.options);
    else {
      const made = wanted.make(wanted.options);
      ({ node } = made);
      widgets.set(node, made);
    }
  } else {
    node ??= SVG_TAGS.has(wanted.tag)
      ? document.createElementNS("http://www.w3.org/2000/svg", wanted.tag)
      : document.createElement(wanted.tag);
    render(node, wanted.children); // before the attributes: the value of a select needs its options
    setAttributes(node, described.get(node)?.attributes ?? {}, wanted.attributes);
  }
  described.set(node, wanted);
  return node;
}

/** @param {any} node @param {Record<string, any>} before @param {Record<string, any>} after */
function setAttributes(node, before, after) {
  for (const name of new Set([...Object.keys(before), ...Object.keys(after)])) {
    const value = after[name];
    if (value === before[name] || name === "key") continue;
    if (name.startsWith("on")) node[name] = value ?? null;
    else if (PROPERTIES.has(name)) node[name] = value ?? "";
    else if (name === "style") {
      node.removeAttribute("style");
      Object.assign(node.style, value); // a style attribute would need a wider content security policy
    } else if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

/** Return a function that puts the focus back after a redraw: on the element that has it now or, if that was removed or hidden,
 * on what is left around it, so that the Tab key goes on from there. */
export function keepFocus() {
  const around = /** @type {HTMLElement[]} */ ([]);
  const { activeElement: focused, body } = document;
  for (let node = focused; node && node !== body; node = node.parentElement) around.push(/** @type {any} */ (node));
  return () => {
    const left = around.find((node) => node.isConnected && !node.closest("[hidden]"));
    if (!left || left === document.activeElement) return;
    if (left !== focused && left.tabIndex < 0) left.setAttribute("tabindex", "-1");
    left.focus({ preventScroll: true });
  };
}

/** A formula of the station table. @param {string} key @param {{ mathml: string }} formula */
export const math = (key, formula) => widget(key, mathWidget, formula);

/** @param {{ mathml: string }} formula @returns {Widget} */
function mathWidget(formula) {
  const parse = (/** @type {string} */ text) =>
    document.importNode(new DOMParser().parseFromString(text, "application/xml").documentElement, true);
  const node = document.createElement("span");
  let shown = "";
  const update = (/** @type {{ mathml: string }} */ { mathml }) => {
    if (mathml === shown) return;
    shown = mathml;
    node.replaceChildren(parse(mathml));
  };
  update(formula);
  return { node, update };
}
