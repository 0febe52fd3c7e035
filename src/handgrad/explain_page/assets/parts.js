// @ts-check
// Parts that several views use: chips to choose from, bars, tables that scroll.

import { signed, visible } from "./format.js";
import { h } from "./render.js";

/**
 * @typedef {{ content: any, label: string, style?: any, title?: string, class?: string, data?: Record<string, any> }} Chip
 */

/** A row of chips, of which one is chosen. The Tab key reaches the row once; the arrow keys move within it.
 * @param {{ label: string, items: Chip[], chosen: number, choose: (index: number) => void, class?: string, id?: string,
 *   moves?: boolean }} about */
export function chips({ label, items, chosen, choose, class: style = "strip", id, moves = true }) {
  const tabbable = chosen >= 0 && chosen < items.length ? chosen : 0;
  const onkeydown = (/** @type {any} */ event) => {
    const from = [...event.currentTarget.children].indexOf(event.target);
    const to = {
      ArrowRight: from + 1,
      ArrowDown: from + 1,
      ArrowLeft: from - 1,
      ArrowUp: from - 1,
      Home: 0,
      End: items.length - 1,
    }[event.key];
    if (to === undefined || from < 0) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.max(0, Math.min(items.length - 1, to));
    event.currentTarget.children[next].focus();
    if (moves) choose(next); // else Enter chooses: for what takes long, or leaves the view
  };
  return h(
    "div",
    { class: style, id, role: "group", "aria-label": label, onkeydown },
    items.map((item, i) =>
      h(
        "button",
        {
          type: "button",
          key: i,
          tabindex: i === tabbable ? 0 : -1,
          "aria-pressed": String(i === chosen),
          "aria-label": item.label,
          class: item.class,
          style: item.style,
          title: item.title,
          onclick: () => choose(i),
          ...item.data,
        },
        item.content,
      ),
    ),
  );
}

/** Buttons of which one is pressed.
 * @param {string} label
 * @param {Record<string, string>} choices
 * @param {string} chosen
 * @param {(key: string) => void} choose
 * @param {{ class?: string, moves?: boolean }} [options]  as of chips */
export const choice = (label, choices, chosen, choose, options = {}) =>
  chips({
    label,
    class: "walk",
    ...options,
    chosen: Object.keys(choices).indexOf(chosen),
    choose: (i) => choose(Object.keys(choices)[i]),
    items: Object.entries(choices).map(([key, text]) => ({
      content: text,
      label: text,
      class: "small",
      data: { "data-choice": key },
    })),
  });

/** A word, a bar from the left, a number.
 * @param {string} word
 * @param {number} share
 * @param {string} kind
 * @param {string} text */
export const bar = (word, share, kind, text, target = false) =>
  h(
    "li",
    { class: target ? "target" : null },
    h("span", { class: "word", title: visible(word) }, visible(word)),
    h(
      "span",
      { class: "track" },
      h("i", { class: `fill ${kind}`, style: { width: `${Math.min(100, 100 * share)}%` } }),
    ),
    h("span", { class: "figure" }, text),
  );

/** A bar from the middle: to the right if the value is above 0, to the left if below.
 * @param {number} value @param {number} most @param {string} kind */
export const middleBar = (value, most, kind) =>
  h(
    "span",
    { class: "track middle" },
    h("i", {
      class: `fill ${kind} ${value < 0 ? "down" : "up"}`,
      style: { width: `${Math.min(50, (50 * Math.abs(value)) / (most || 1))}%` },
    }),
    h("i", { class: "zero" }),
  );

/** A push −Δ on a word: to the right and blue if it makes the word more likely, to the left and red if less.
 * @param {string} word @param {number} push @param {number} most */
export const pushBar = (word, push, most, target = false) =>
  h(
    "li",
    { class: target ? "target" : null },
    h("span", { class: "word", title: visible(word) }, visible(word)),
    middleBar(push, most, "push"),
    h("span", { class: "figure", "data-value": push }, signed(push)),
  );

/** Move between the buttons of a table with the arrow keys; the Tab key reaches one of them. @param {any} event */
function moveInTable(event) {
  const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [];
  const cell = event.target.closest("td");
  if (!cell || down === undefined) return;
  event.preventDefault();
  event.stopPropagation();
  const { rows } = event.currentTarget.querySelector("tbody");
  const buttonAt = (i, j) => rows[i]?.cells[j]?.querySelector("button");
  let i = [...rows].indexOf(cell.parentElement) + down,
    j = cell.cellIndex + right;
  while (rows[i]?.cells[j] && !buttonAt(i, j)) [i, j] = [i + down, j + right]; // not every cell has one
  const next = buttonAt(i, j);
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

const ROWS = 12; // of a tall table, that are seen without scrolling

/** A table in a region that scrolls, and says so.
 * @param {string} label
 * @param {any[]} head
 * @param {any[]} rows
 * @param {{ class?: string, tall?: boolean, keys?: boolean }} [options]  keys: cells are buttons, reached by arrow keys */
export const table = (label, head, rows, { class: style, tall, keys } = {}) =>
  h(
    "div",
    {
      class: `scroll${tall ? " tall" : ""}`,
      tabindex: "0",
      role: "region",
      "aria-label": keys ? `${label}; arrow keys move between the cells` : label,
      onkeydown: keys ? moveInTable : null,
    },
    h(
      "table",
      { class: style },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((cell) => (cell === "" ? h("td", {}) : h("th", { scope: "col" }, cell))),
        ),
      ),
      h("tbody", {}, rows),
    ),
    tall && rows.length > ROWS ? h("p", { class: "rows-note" }, `${rows.length} rows: scroll to see all`) : null,
  );

/** The heading of a view. @param {string} where @param {string} title @param {...any} rest */
export const viewHead = (where, title, ...rest) =>
  h(
    "div",
    { class: "station-head backward" },
    h("div", {}, h("p", { class: "where" }, where), h("h2", {}, title)),
    rest,
  );

/** A card with a heading. @param {string} label @param {any} title @param {...any} content */
export const card = (label, title, ...content) =>
  h("section", { class: "card", "aria-label": label, key: label }, title ? h("h3", {}, title) : null, content);
