// @ts-check
// Parts that several views use: texts, buttons, fields, chips to choose from, bars, tables that scroll.

import { percent, signed, visible } from "./format.js";
import { h } from "./render.js";

/** What to notice. @param {...any} content */
export const caption = (...content) => h("p.caption", content);

/** How to read or to use what is shown. @param {...any} content */
export const soft = (...content) => h("p.soft", content);

/** @param {any} text @param {(event: any) => any} onclick @param {Record<string, any>} [attributes] */
export const button = (text, onclick, attributes) => h("button", { type: "button", onclick, ...attributes }, text);

/** A control below its label. @param {string} label @param {any} control */
export const field = (label, control) => h("label.field", label, control);

/** @param {Record<string, any>} attributes @param {[any, string][]} options  value and text of each
 * @param {(value: string) => void} choose */
export const select = (attributes, options, choose) =>
  h(
    "select",
    { ...attributes, onchange: (/** @type {any} */ event) => choose(event.target.value) },
    options.map(([value, text]) => h("option", { value, key: value }, text)),
  );

/** “ of block 3”, or nothing outside the blocks. @param {number | null} block */
export const ofBlock = (block) => (block === null ? "" : ` of block ${block + 1}`);

/** A section that opens. @param {string} title @param {Record<string, any>} attributes @param {...any} content */
export const foldable = (title, attributes, ...content) =>
  h("details", attributes, h("summary", title), content);

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

/** A bar from the left. @param {number} share @param {string} kind */
export const leftBar = (share, kind) =>
  h("span.track", h("i", { class: `fill ${kind}`, style: { width: `${Math.min(100, 100 * share)}%` } }));

/** A bar from the middle: to the right if the value is above 0, to the left if below.
 * @param {number} value @param {number} most @param {string} kind */
export const middleBar = (value, most, kind) =>
  h(
    "span.track.middle",
    h("i", {
      class: `fill ${kind} ${value < 0 ? "down" : "up"}`,
      style: { width: `${Math.min(50, (50 * Math.abs(value)) / (most || 1))}%` },
    }),
    h("i.zero"),
  );

/** @param {string} word @param {any} drawn @param {any} figure @param {boolean} target  whether it is the word that follows */
const barOf = (word, drawn, figure, target) =>
  h("li", { class: target ? "target" : null }, h("span.word", { title: visible(word) }, visible(word)), drawn, figure);

/** Predicted words with their probabilities p. @param {any[]} words @param {(word: any) => boolean} isTarget */
export function probabilityBars(words, isTarget) {
  const figure = (/** @type {number} */ p) => h("span.figure", percent(p));
  return h("ul.bars.a", words.map((x) => barOf(x.word, leftBar(x.p, "a"), figure(x.p), isTarget(x))));
}

/** Pushes −Δ on words: to the right and blue if it makes the word more likely, to the left and red if less.
 * @param {any[]} words @param {(word: any) => number} pushOn @param {(word: any) => boolean} isTarget */
export function pushBars(words, pushOn, isTarget) {
  const most = Math.max(...words.map((x) => Math.abs(pushOn(x))), 1e-300);
  const figure = (/** @type {number} */ push) => h("span.figure", { "data-value": push }, signed(push));
  return h(
    "ul.bars.push",
    words.map((x) => barOf(x.word, middleBar(pushOn(x), most, "push"), figure(pushOn(x)), isTarget(x))),
  );
}

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

/** A row of a table; what is no cell is put into one. @param {Record<string, any>} attributes @param {...any} cells */
export const tr = (attributes, ...cells) =>
  h("tr", attributes, cells.flat().map((cell) => (["td", "th"].includes(cell?.tag) ? cell : h("td", cell))));

/** A cell with a number. @param {any} text @param {Record<string, any>} [attributes] */
export const figureCell = (text, attributes) => h("td", { class: "figure", ...attributes }, text);

/** The name of a row. @param {string} text */
export const rowHead = (text) => h("th", { scope: "row" }, text);

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
      h("thead", h("tr", head.map((cell) => (cell === "" ? h("td") : h("th", { scope: "col" }, cell))))),
      h("tbody", rows),
    ),
    tall && rows.length > ROWS ? h("p.rows-note", `${rows.length} rows: scroll to see all`) : null,
  );

/** The heading of a view. @param {string} where @param {string} title @param {...any} rest */
export const viewHead = (where, title, ...rest) =>
  h("div.station-head.backward", h("div", h("p.where", where), h("h2", title)), rest);
