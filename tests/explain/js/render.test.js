// The renderer, on the few parts of a document that it uses.
import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

class Node {
  childNodes = [];
  parent = null;
  get firstChild() { return this.childNodes[0] ?? null; }
  get nextSibling() { return this.parent?.childNodes[this.parent.childNodes.indexOf(this) + 1] ?? null; }
  remove() {
    this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this);
    this.parent = null;
  }
  insertBefore(node, before) {
    if (node.parent) node.remove();
    const at = before ? this.childNodes.indexOf(before) : this.childNodes.length;
    this.childNodes.splice(at, 0, node);
    node.parent = this;
    inserted++;
  }
}
class Text extends Node {
  nodeType = 3;
  constructor(data) { super(); this.data = data; }
  get text() { return this.data; }
}
class Element extends Node {
  nodeType = 1;
  style = {};
  attributes = {};
  constructor(tag) { super(); this.tag = tag; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  removeAttribute(name) { name === "style" ? (this.style = {}) : delete this.attributes[name]; }
  get text() { return this.childNodes.map((node) => node.text).join(""); }
}
let inserted = 0;
globalThis.document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag), createTextNode: (text) => new Text(text) };
const { h, render, widget } = await import("./render.js");

let root;
beforeEach(() => {
  root = new Element("main");
  inserted = 0;
});

test("an element that stays is the same element, wherever its neighbors go", () => {
  const list = (...keys) => keys.map((key) => h("li", { key }, key));
  render(root, list("a", "b", "c"));
  const [a, b, c] = root.childNodes;
  render(root, list("x", "b", "c", "y"));
  assert.deepEqual(root.childNodes.map((node) => node.text), ["x", "b", "c", "y"]);
  assert.equal(root.childNodes[1], b);
  assert.equal(a.parent, null);
  render(root, list("c", "b"));
  assert.deepEqual(root.childNodes, [c, b]);
});

test("nothing is moved or written if nothing changes", () => {
  const view = () => [h("p", { class: "x", style: { width: "3px" } }, "text ", h("b", {}, 7)), null].filter(Boolean);
  render(root, view());
  const before = inserted;
  render(root, view());
  assert.equal(inserted, before);
  assert.equal(root.text, "text 7");
});

test("attributes come and go, handlers are replaced, and what the reader changed stays", () => {
  const first = () => 1, second = () => 2;
  render(root, [h("input", { value: "1", disabled: true, onclick: first })]);
  const [input] = root.childNodes;
  assert.deepEqual([input.value, input.attributes, input.onclick], ["1", { disabled: "" }, first]);
  input.value = "typed";
  render(root, [h("input", { value: "1", onclick: second })]);
  assert.deepEqual([input.value, input.attributes, input.onclick], ["typed", {}, second]);
  render(root, [h("input", { value: "2" })]);
  assert.deepEqual([input.value, input.onclick], ["2", null]);
});

test("null, undefined and booleans are not shown, 0 is", () => {
  render(root, [h("p", null, undefined, false, true, 0, [["a"], []])]);
  assert.equal(root.text, "0a");
});

test("classes follow the tag, and attributes may be left out", () => {
  render(root, [h("p.soft.wide", { id: "x" }, h("b", "1")), h("p.soft", h("b", "2")), h("p")]);
  assert.deepEqual(root.childNodes.map((node) => node.attributes), [{ class: "soft wide", id: "x" }, { class: "soft" }, {}]);
  assert.equal(root.text, "12");
});

test("a widget is made once and then updated", () => {
  const seen = [];
  const make = (options) => ({ node: new Element("canvas"), update: (next) => seen.push([options, next]) });
  render(root, [widget("map", make, 1)]);
  const [node] = root.childNodes;
  render(root, [h("p", {}), widget("map", make, 2)]);
  assert.equal(root.childNodes[1], node);
  assert.deepEqual(seen, [[1, 2]]);
});
