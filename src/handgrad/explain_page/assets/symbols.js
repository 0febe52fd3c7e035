// @ts-check
// Every symbol explains itself where it is pointed at, tapped, or reached by keyboard, from the table of presentation/symbols.py.

import { chips, table, tr } from "./parts.js";
import { find, h, render } from "./render.js";

/** @typedef {{ keys: string[], shown: string, name: string, meaning: string, shape: string, introduced: string }} Entry */

let entries = /** @type {Entry[]} */ ([]);
const byKey = new Map();

/** The line of a symbol: Δ_12 by itself, else as Δ with any subscript. @param {string} given @returns {Entry | null} */
export function explain(given) {
  const key = given.normalize("NFC"),
    [base] = key.split("_");
  return byKey.get(key) ?? (key.includes("_") ? byKey.get(`${base}_#`) : null) ?? null;
}

// ── in a formula ───────────────────────────────────────────────────────────────────────────────────────────────────

const WORDS = ["elsewhere", "chosen"]; // in a formula, and no symbols
const SIGNS = new Map([["~", "~"], ["˜", "~"], ["¯", "\u0304"], ["^", "\u0302"]]);
const WITH_PARTS = ["msub", "msubsup", "munder", "munderover", "msup"];
const textOf = (/** @type {Element | undefined} */ node) => (node?.textContent ?? "").replace(/\s/g, "");
const isOver = (/** @type {Element | null} */ node) => node?.localName === "mover";

/** The symbol with its accent, without tilde: b̃ is a b, repeated; ā is a symbol. @param {Element} node */
function baseOf(node) {
  if (!isOver(node)) return textOf(node);
  const sign = SIGNS.get(textOf(node.children[1])) ?? "";
  return (textOf(node.children[0]) + (sign === "~" ? "" : sign)).normalize("NFC");
}

/** The key of the symbol that a leaf of a formula belongs to; null for numbers, brackets and relations. @param {Element} leaf */
export function keyOf(leaf) {
  if (leaf.localName === "mtext") return null;
  let node = leaf;
  /** @type {Element | null} */ let sub = null;
  for (let parent = node.parentElement; parent && parent.localName !== "math"; node = parent, parent = node.parentElement) {
    const at = [...parent.children].indexOf(node),
      kind = parent.localName;
    if (kind === "mover" && at === 1 && SIGNS.get(textOf(leaf)) === "~") return "~";
    if (["munder", "munderover"].includes(kind)) return textOf(parent.children[0]);
    if ((kind === "msup" && at === 1) || (kind === "msubsup" && at === 2)) {
      const above = textOf(node);
      if (/^[thg~′]$/.test(above)) return above === "~" ? "~" : `^${above}`;
      break; // an exponent: its letters speak for themselves
    }
    if (["msub", "msubsup"].includes(kind)) sub = parent;
    if (["mrow", "mfrac", "msqrt", "mstyle"].includes(kind) && !inSubscript(parent)) break;
  }
  const text = textOf(leaf);
  if (WORDS.includes(text)) return null;
  if (sub && textOf(sub.children[0]) === "∑") return "∑";
  if (sub && !/^[)\]}]$/.test(textOf(sub.children[0]))) return `${baseOf(sub.children[0])}_${textOf(sub.children[1])}`;
  if (leaf.localName === "mn" || /^[()[\]{}=+\-−/,.…<>≤≥≠∈;:|∞]*$/.test(text)) return null;
  const parent = leaf.parentElement;
  return parent && isOver(parent) ? baseOf(parent) : text;
}

const inSubscript = (/** @type {Element | null} */ node) => {
  for (let here = node; here?.parentElement; here = here.parentElement)
    if (WITH_PARTS.includes(here.parentElement.localName) && here !== here.parentElement.children[0]) return true;
  return false;
};

/** The leaves of a formula. @param {Element} math */
export const leavesOf = (math) => [...math.querySelectorAll("mi, mo, mn, mtext")];

// ── in a text ──────────────────────────────────────────────────────────────────────────────────────────────────────

const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";
const MARK = "\\u0303|\\u0304|\\u0302";
const IN_TEXT = new RegExp(
  `[Δδρσμθεη](?:_[A-Za-z]+|[${SUBSCRIPTS}]+)?|[A-Za-zāx](?:${MARK})?(?:[${SUBSCRIPTS}]+)|(?:ā|[a-z]\\u0304|[a-z]\\u0303)|` +
    "\\b(?:y_pred|y_gt|n_T|[wbdum]_[A-Za-z0-9]+)|Σ(?:_tok)?|one-hot|softmax|[∂⊖∘ᵗ‖~]",
  "gu",
);

/** The key of the symbol in a text at this place, with its first and last character; null if there is none.
 * @param {string} text @param {number} at */
export function symbolAt(text, at) {
  for (const found of text.matchAll(IN_TEXT)) {
    const from = found.index,
      to = from + found[0].length;
    if (at < from || at >= to) continue;
    const plain = found[0].normalize("NFC").replace(/[₀-₉]+/u, (x) => `_${[...x].map((c) => SUBSCRIPTS.indexOf(c)).join("")}`);
    const key = plain === "one-hot" ? "ohe" : /\u0303$/.test(found[0]) ? "~" : plain;
    return { key, from, to };
  }
  return null;
}

// ── the note ───────────────────────────────────────────────────────────────────────────────────────────────────────

const CONTROLS = "button, a, input, select, textarea, summary, label, canvas, [role=tab]";

/** Take the table, and explain what is pointed at from now on. @param {Entry[]} given */
export function listenToSymbols(given) {
  entries = given;
  for (const entry of entries) for (const key of entry.keys) byKey.set(key.normalize("NFC"), entry);
  const note = document.createElement("div");
  note.id = "symbol-note";
  note.className = "symbol-note";
  note.setAttribute("role", "tooltip");
  note.hidden = true;
  find("main").append(note); // a landmark, as all content has one
  let waiting = 0;
  const hide = () => (note.hidden = true);
  document.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch" || waiting) return;
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      if (note.contains(document.elementFromPoint(event.clientX, event.clientY))) return; // it can be read, and copied
      const found = under(event.clientX, event.clientY);
      if (found) show(note, found.entry, found.box);
      else if (!document.activeElement?.matches("[data-symbol]")) hide();
    });
  });
  document.addEventListener("click", ({ target, clientX, clientY }) => {
    const element = /** @type {Element} */ (target);
    if (element.closest("[data-symbol]")) return showFocused(note, element);
    if (element.closest(CONTROLS) || note.contains(element)) return;
    const found = under(clientX, clientY);
    if (found) show(note, found.entry, found.box);
    else hide();
  });
  document.addEventListener("focusin", ({ target }) => {
    const element = /** @type {Element} */ (target);
    if (element.closest("[data-symbol]")) showFocused(note, element);
    else hide();
  });
  document.addEventListener("keydown", ({ key }) => key === "Escape" && hide());
  document.addEventListener("scroll", hide, true);
}

/** The symbol under a point, with its place on the screen. @param {number} x @param {number} y */
function under(x, y) {
  const element = document.elementFromPoint(x, y);
  if (!element || element.closest("canvas, textarea, input, pre, svg")) return null;
  if (element.closest("math")) {
    const key = leavesOf(element.closest("math") ?? element).includes(element) ? keyOf(element) : null;
    const entry = key === null ? null : explain(key);
    return entry && { entry, box: element.getBoundingClientRect() };
  }
  const caret = caretAt(x, y);
  if (!caret || caret.node.nodeType !== 3 || !element.contains(caret.node)) return null;
  const text = caret.node.textContent ?? "";
  for (const at of [caret.offset, caret.offset - 1]) {
    const found = symbolAt(text, at),
      entry = found && explain(found.key);
    if (!found || !entry) continue;
    const range = document.createRange();
    range.setStart(caret.node, found.from);
    range.setEnd(caret.node, found.to);
    const box = range.getBoundingClientRect();
    if (x >= box.left - 1 && x <= box.right + 1 && y >= box.top && y <= box.bottom) return { entry, box };
  }
  return null;
}

/** The text under a point. @param {number} x @param {number} y @returns {{ node: Node, offset: number } | null} */
function caretAt(x, y) {
  const page = /** @type {any} */ (document);
  if (page.caretPositionFromPoint) {
    const found = page.caretPositionFromPoint(x, y);
    return found && { node: found.offsetNode, offset: found.offset };
  }
  const range = page.caretRangeFromPoint?.(x, y);
  return range ? { node: range.startContainer, offset: range.startOffset } : null;
}

/** @param {HTMLElement} note @param {Element} element */
function showFocused(note, element) {
  const chip = /** @type {HTMLElement} */ (element.closest("[data-symbol]"));
  show(note, entries[Number(chip.dataset.symbol)], chip.getBoundingClientRect());
}

const GAP = 6; // between the note and its symbol, in pixels

/** @param {HTMLElement} note @param {Entry} entry @param {DOMRect} box */
function show(note, entry, box) {
  const { shown, name, meaning, shape, introduced } = entry;
  note.hidden = false;
  render(note, [
    h("p", h("b", shown), ` ${name}`),
    h("p", sentence(meaning)),
    h("p.soft", `Shape: ${shape}. Introduced in: ${introduced}.`),
  ]);
  const { offsetWidth: wide, offsetHeight: high } = note;
  const left = Math.max(4, Math.min(innerWidth - wide - 4, box.left + box.width / 2 - wide / 2));
  const above = box.top - high - GAP;
  Object.assign(note.style, { left: `${left}px`, top: `${above > 4 ? above : box.bottom + GAP}px` });
}

const sentence = (/** @type {string} */ text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

// ── lists ──────────────────────────────────────────────────────────────────────────────────────────────────────────

/** @type {Map<string, number[]>} */
const ofStations = new Map();

/** The symbols of a station's formulas, as numbers of lines of the table. @param {any} station */
function symbolsOf({ id, forward, backward }) {
  const key = JSON.stringify([id, forward.length, backward.map((f) => f.equation)]);
  if (!ofStations.has(key)) {
    const parser = new DOMParser();
    const parse = (/** @type {string} */ text) => parser.parseFromString(text, "application/xml").documentElement;
    const maths = [...forward, ...backward].flatMap((f) => f.math).map(parse);
    const found = maths.flatMap(leavesOf).map(keyOf).map((k) => (k === null ? null : explain(k)));
    ofStations.set(key, [...new Set(found)].flatMap((entry) => (entry ? [entries.indexOf(entry)] : [])).sort((a, b) => a - b));
  }
  return /** @type {number[]} */ (ofStations.get(key));
}

/** The symbols of a station in a row, for the keyboard and for a finger. @param {any} station */
export function symbolRow(station) {
  const items = symbolsOf(station).map((i) => {
    const { shown, name, meaning, shape, introduced } = entries[i];
    return {
      content: shown,
      label: `${shown}: ${name}. ${sentence(meaning)} Shape: ${shape}. Introduced in: ${introduced}`,
      class: "small",
      data: { "data-symbol": i },
    };
  });
  return h(
    "div.symbols",
    { key: "symbols" },
    h("span.soft", "Symbols here: "),
    chips({ label: "Symbols of this station", items, chosen: -1, choose: () => {}, class: "walk", moves: false }),
  );
}

/** The whole table. */
export const symbolTable = () =>
  table(
    "All symbols",
    ["symbol", "name", "meaning", "shape", "introduced in"],
    entries.map((e) => tr({ key: e.shown }, h("th", { scope: "row" }, e.shown), e.name, e.meaning, e.shape, e.introduced)),
    { tall: true },
  );
