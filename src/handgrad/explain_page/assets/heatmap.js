// @ts-check
// Heat maps: matrices as colored cells, with exact values, zoom, and control by mouse, touch and keyboard.

import { get, has } from "./api.js";
import { count, exact, number, quote, shapeOf } from "./format.js";
import { cellAt, cellsOf, crop, layout, litCells, range } from "./heat_geometry.js";
import { paintCanvas, paintScale, pixelsOf, svgText } from "./heat_paint.js";
import { entriesLit, light, linksOf, register, thingsAt, whatIsLit } from "./linked.js";
import { h, widget } from "./render.js";
import { pictureFiles, saveMenu } from "./save.js";
import { state } from "./state.js";

/**
 * A matrix as colors.
 * @typedef {object} Options
 * @property {string} key         tells the heat maps of a view apart
 * @property {string} title       what it is
 * @property {string} [caption]   what to notice
 * @property {import("./heat_geometry.js").Picture} picture
 * @property {number[]} [shape]  of the matrix, if the picture shows only some of its columns
 * @property {import("./colors.js").Kind} kind
 * @property {string} [sentence]  id of the traced sentence, and
 * @property {string | null} [name]  of the tensor, to request exact values and parts; without a name there are none
 * @property {number | null} [head]
 * @property {string[] | null} [rowLabels]     tokens, if rows are tokens
 * @property {string[] | null} [columnLabels]
 * @property {number[] | null} [rowIds]     the row of the tensor that each row of the picture shows, if not all are shown
 * @property {number[] | null} [columnIds]  the column, likewise
 * @property {(from: number, to: number) => string} [nameRow]   how to write which rows a cell shows
 * @property {(from: number, to: number) => string} [nameColumn]
 * @property {string} [join]      what stands between the row and the column
 * @property {boolean} [square]   draw square cells
 * @property {number} [selected]  the row to mark
 * @property {{ row: number | null, column: number | null }} [lit]  the row and the column, or the entry of both, that light up
 * @property {(row: number, column: number) => void} [choose]  called on a click, with the entry that the cell shows
 * @property {string} [chooses]   what a click does
 * @property {boolean} [positive] show the scale from 0 only
 * @property {(row: number, column: number) => string} [entry]  the text of an entry, if the page knows all of them
 * @property {[string, string]} [scale]  the texts at both ends of the color scale
 * @property {import("./linked.js").Links} [links]  what its rows and columns stand for, if the name does not say it
 * @property {string} [python]    the line of Python that makes the data
 * @property {() => number[][] | Promise<number[][]>} [values]  the entries, for a file, if there is no name
 */

/** 15 × 576; if only some columns are shown, 15 × 64 of 49,152. @param {Options} options */
function shownShape({ shape, picture, rowIds, columnIds }) {
  const all = shape ?? picture.shape;
  const part = [rowIds, columnIds];
  return all.map((n, i) => (part[i] ? `${count(part[i].length)} of ` : "") + count(n)).join(" × ");
}

/** @param {Options} options */
export function heat(options) {
  const { key, title, kind, square, caption } = options;
  return h(
    "figure",
    { key, class: `heat ${kind}${square ? " square" : ""}` },
    h("figcaption", h("span.heat-title", title), h("span.shape", shownShape(options)), saveMenu(options)),
    widget("map", heatmap, options),
    h("p.caption", caption || ""),
  );
}

/** Name entries of an axis by their number: “feature 3”, “feature 3 to 6”. @param {string} what */
export const numbered = (what) => (/** @type {number} */ from, /** @type {number} */ to) =>
  to - from > 1 ? `${what} ${from} to ${to - 1}` : `${what} ${from}`;

/** Name entries of an axis by their tokens. @param {string[]} labels */
export const positioned = (labels) => (/** @type {number} */ from) => `${quote(labels[from])} (position ${from + 1})`;

/** Name columns of a matrix over the vocabulary by their tokens. @param {string[]} words */
export const worded = (words) => (/** @type {number} */ from) => `token ${quote(words[from] ?? "")}`;

/** @param {string} tag @param {Record<string, string>} attributes @returns {any} */
function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** @param {Options} options */
const headOf = ({ head }) => (head === null || head === undefined ? {} : { head });

/** @param {Options} given */
function heatmap(given) {
  let options = given;
  let picture = options.picture,
    cells = cellsOf(picture),
    pixels = null;
  let cursor = null,
    drag = null,
    requested = 0,
    timer = 0,
    tapped = "";
  const canvas = make("canvas", { tabindex: "0", role: "application", "aria-roledescription": "heat map" });
  const readout = make("output", { class: "readout", "aria-live": "polite" });
  const legend = make("span", { class: "legend" });
  const reset = make("button", { type: "button", class: "small" }, "show all");
  const bar = make("canvas", { class: "bar", width: "96", height: "8", "aria-hidden": "true" });
  const frame = make("div", { class: "canvas-frame" }, canvas);
  const node = make("div", {}, frame, make("div", { class: "under" }, legend, readout, reset));
  reset.hidden = true;
  reset.onclick = () => zoom(null);

  const zoomable = () => !options.square && !options.rowIds && !options.columnIds;
  const at = () => layout(picture, options, frame.clientWidth);
  const marks = () => ({
    selected: options.selected === undefined ? -1 : options.selected - picture.rows[0],
    lit: options.lit && litCells(picture, options.lit),
    cursor,
    drag,
    lit: lit(),
  });

  const links = () => {
    const { heads } = state.table;
    return options.links ?? linksOf(options.name ?? "", options.head, { width: (options.shape ?? options.picture.shape)[1], heads });
  };

  /** The cells that show an entry; the picture may show some entries only. @param {number[]} entries */
  const cellsAt = ([from, to], axis) => {
    const ids = axis ? options.columnIds : options.rowIds,
      [first, end] = axis ? picture.columns : picture.rows;
    const [low, high] = ids ? [ids.indexOf(from), ids.indexOf(from) + 1] : [Math.max(from, first), Math.min(to, end)];
    const cell = (/** @type {number} */ i) => (i - first) / picture.pool[axis];
    return low < first || low >= high ? [] : [[Math.floor(cell(low)), Math.ceil(cell(high))]];
  };

  /** What is lit, as ranges of rows and of columns of cells. */
  function lit() {
    const { rows, columns } = links();
    const [one, other] = [rows, columns].map((axes, axis) => entriesLit(axes, whatIsLit()).flatMap((entries) => cellsAt(entries, axis)));
    return { rows: one, columns: other };
  }

  let wasLit = "";
  function redrawLit() {
    const now = JSON.stringify(lit());
    if (now === wasLit) return;
    wasLit = now;
    draw();
  }

  function draw() {
    if (!frame.isConnected || !frame.clientWidth) return;
    const here = at();
    pixels ??= pixelsOf(picture, options.kind);
    Object.assign(canvas.dataset, { left: here.left, top: here.top, cellWidth: here.cw, cellHeight: here.ch });
    Object.assign(canvas.style, { width: `${here.wide}px`, height: `${here.high}px` });
    paintCanvas(canvas, pixels, picture, here, options, marks());
  }

  function drawLegend() {
    paintScale(bar, options.kind, Boolean(options.positive));
    const beyond = picture.largest > picture.scale * 1.001 ? `, largest ${number(picture.largest)}` : "";
    const [low, high] = options.scale ?? [
      options.positive || !picture.scale ? "0" : number(-picture.scale),
      number(picture.scale) + beyond,
    ];
    legend.replaceChildren(`${low} `, bar, ` ${high}`);
    legend.title =
      options.kind === "delta" && !options.positive
        ? "blue: raising this lowers what is explained; red: lowering it does"
        : "";
  }

  function redraw() {
    pixels = null;
    drawLegend();
    draw();
  }

  /** @param {Options} next */
  function update(next) {
    const other = next.picture !== options.picture;
    options = next;
    if (other) {
      picture = next.picture;
      cells = cellsOf(picture);
      reset.hidden = true;
      show(null);
    }
    canvas.setAttribute(
      "aria-label",
      `${next.title}, ${shapeOf(next.shape ?? next.picture.shape)}${next.chooses ? `. Enter ${next.chooses}` : ""}`,
    );
    for (const name of ["name", "head"])
      next[name] === undefined || next[name] === null
        ? delete canvas.dataset[name]
        : (canvas.dataset[name] = next[name]);
    canvas.classList.toggle("chooses", Boolean(next.choose));
    redraw();
  }

  /** What a cell shows: all its entries, or the one that was found.
   * @param {number[]} cell @param {{ row: number, column: number }} [found] */
  const nameOf = (cell, found) => {
    const { nameRow = numbered("row"), nameColumn = numbered("feature"), join = " · ", rowIds, columnIds } = options;
    const rows = found && !rowIds ? [found.row, found.row + 1] : range(picture, cell[0], 0);
    const columns = found && !columnIds ? [found.column, found.column + 1] : range(picture, cell[1], 1);
    const row = options.picture.shape[0] > 1 ? nameRow(rows[0], rows[1]) : "";
    return [row, nameColumn(columns[0], columns[1])].filter(Boolean).join(join);
  };

  /** The entries of the tensor that cell i of an axis shows, first and after the last. @param {number} i */
  const entriesOf = (i, axis) => {
    const [from, to] = range(picture, i, axis),
      ids = axis ? options.columnIds : options.rowIds;
    return ids ? [ids[from], ids[from] + 1] : [from, to];
  };

  /** Which entry a cell shows: the one furthest from 0. @param {number[]} cell */
  async function entryOf(cell) {
    const rows = entriesOf(cell[0], 0),
      columns = entriesOf(cell[1], 1);
    if (!options.name || !has("value")) return { row: rows[0], column: columns[0], value: null };
    const where = { name: options.name, rows: rows.join(":"), columns: columns.join(":"), ...headOf(options) };
    return get("value", options.sentence, where);
  }

  /** Show the value of a cell. @param {number[] | null} cell */
  function show(cell) {
    if (cell || cursor) light(cell ? thingsAt(links(), entriesOf(cell[0], 0)[0], entriesOf(cell[1], 1)[0]) : []);
    cursor = cell;
    draw();
    clearTimeout(timer);
    const mine = ++requested;
    if (!cell) return void (readout.textContent = "");
    const where = nameOf(cell);
    if (options.entry) {
      const [row, column] = [0, 1].map((axis) => range(picture, cell[axis], axis)[0]);
      return void (readout.textContent = `${where}: ${options.entry(row, column)}`);
    }
    const approximate = (cells[cell[0] * picture.cells[1] + cell[1]] / 127) * picture.scale;
    readout.textContent = `${where}: ≈ ${number(approximate)}`;
    if (!options.name || !has("value")) return;
    timer = setTimeout(async () => {
      try {
        const found = await entryOf(cell);
        if (mine !== requested) return;
        readout.textContent = `${nameOf(cell, found)}: ${exact(found.value)}`;
        Object.assign(readout.dataset, { value: found.value, row: found.row, column: found.column });
      } catch {
        // the approximate value stays
      }
    }, 60);
  }

  /** Show some columns only, or all. @param {number[] | null} columns */
  async function zoom(columns) {
    if (columns && columns[1] - columns[0] < 2) return;
    const { picture: all, name, sentence } = options;
    let next = all;
    if (columns && (!name || !has("slice"))) next = crop(picture, columns);
    else if (columns) {
      const part = { name, rows: picture.rows.join(":"), columns: columns.join(":"), ...headOf(options) };
      try {
        next = await get("slice", sentence, part);
      } catch (reason) {
        return void (readout.textContent = /** @type {Error} */ (reason).message);
      }
      if (options.picture !== all) return; // another matrix is shown meanwhile
    }
    picture = next;
    cells = cellsOf(picture);
    reset.hidden = picture === options.picture;
    show(null);
    redraw();
  }

  /** @param {number[]} cell */
  async function choose(cell) {
    if (!options.choose) return;
    try {
      const { row, column } = await entryOf(cell);
      options.choose(row, column);
    } catch (reason) {
      readout.textContent = /** @type {Error} */ (reason).message;
    }
  }

  /** @param {PointerEvent} event */
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    return cellAt(picture, at(), event.clientX - box.left, event.clientY - box.top);
  };
  canvas.onpointermove = (event) => {
    const cell = under(event);
    if (drag && cell) drag[1] = cell[1];
    if (String(cell) !== String(cursor)) show(cell);
  };
  canvas.onpointerleave = (event) => {
    drag = null;
    if (event.pointerType !== "touch") show(null); // after a tap the value stays
  };
  canvas.onpointerdown = (event) => {
    const cell = under(event);
    if (cell) drag = [cell[1], cell[1]];
  };
  canvas.onpointerup = (event) => {
    const cell = under(event);
    const dragged = drag && drag[0] !== drag[1] ? [Math.min(...drag), Math.max(...drag)] : null;
    drag = null;
    if (dragged && zoomable())
      return zoom([range(picture, dragged[0], 1)[0], range(picture, dragged[1], 1)[1]]);
    if (!cell) return;
    const again = tapped === String(cell);
    tapped = String(cell);
    if (event.pointerType === "touch" && !again)
      show(cell); // the first tap shows the value, the second chooses
    else choose(cell);
  };
  canvas.onkeydown = (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const [rows, columns] = picture.cells;
    if (moves[event.key]) {
      const [i, j] = cursor ?? [0, 0];
      const [di, dj] = cursor ? moves[event.key] : [0, 0];
      show([Math.max(0, Math.min(rows - 1, i + di)), Math.max(0, Math.min(columns - 1, j + dj))]);
    } else if (event.key === "+" && cursor && zoomable()) {
      const [from, to] = picture.columns,
        middle = range(picture, cursor[1], 1)[0];
      const half = Math.max(1, Math.floor((to - from) / 4));
      zoom([Math.max(from, middle - half), Math.min(to, middle + half)]);
    } else if (event.key === "-" || (event.key === "Escape" && !reset.hidden)) zoom(null);
    else if (event.key === "Enter" && cursor) choose(cursor);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  pictureFiles.set(canvas, {
    svg: () => svgText(pixels ?? pixelsOf(picture, options.kind), picture, at(), options),
  });
  register(canvas, redrawLit);
  drawn.set(frame, redraw);
  resizing.observe(frame);
  update(options);
  return { node, update };
}

// Heat maps are drawn again when their size or the theme changes.
const drawn = new Map();
const resizing = new ResizeObserver((entries) => entries.forEach(({ target }) => renew(target)));
export function redrawHeatmaps() {
  for (const frame of drawn.keys()) renew(frame);
}

/** @param {Element} frame */
function renew(frame) {
  if (frame.isConnected) return drawn.get(frame)?.();
  drawn.delete(frame); // the view has removed it
  resizing.unobserve(frame);
}
