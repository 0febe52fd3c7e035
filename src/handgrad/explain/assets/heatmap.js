// Heat maps: matrices drawn as coloured cells on a canvas, with exact values, zoom and keyboard control.

import { get, offline } from "./api.js";
import { colour, css, palette } from "./colours.js";
import { el } from "./dom.js";
import { exact, number, shapeOf, visible } from "./format.js";

function cellsOf(picture) {
  const bytes = Uint8Array.from(atob(picture.q), (c) => c.charCodeAt(0));
  return new Int8Array(bytes.buffer);
}

// A part of a picture, for when the server cannot be asked for it.
function crop(picture, rows, columns) {
  const [pr, pc] = picture.pool;
  const r0 = Math.floor((rows[0] - picture.rows[0]) / pr), r1 = Math.ceil((rows[1] - picture.rows[0]) / pr);
  const c0 = Math.floor((columns[0] - picture.columns[0]) / pc), c1 = Math.ceil((columns[1] - picture.columns[0]) / pc);
  const cells = cellsOf(picture), wide = picture.cells[1];
  const part = new Int8Array((r1 - r0) * (c1 - c0));
  for (let i = r0; i < r1; i++) for (let j = c0; j < c1; j++) part[(i - r0) * (c1 - c0) + j - c0] = cells[i * wide + j];
  const bytes = new Uint8Array(part.buffer);
  return {
    ...picture,
    rows: [picture.rows[0] + r0 * pr, Math.min(picture.rows[0] + r1 * pr, picture.shape[0])],
    columns: [picture.columns[0] + c0 * pc, Math.min(picture.columns[0] + c1 * pc, picture.shape[1])],
    cells: [r1 - r0, c1 - c0],
    q: btoa(String.fromCharCode(...bytes)),
  };
}

let counter = 0;

/* Draw a matrix as colours. Options:
   title, caption what it is, and what to notice
   picture, kind  the cells (see pictures.py), and "a" or "delta" for the colours
   sentence, name, head   id and tensor, to request exact values and parts; without a name there are none
   rowLabels, columnLabels   tokens, if rows or columns are tokens;  rowName, columnName what they are otherwise
   square         draw square cells
   selected       the row to mark;  select(row, column) is called on a click
   positive       show the scale from 0 only
   describe(value)   how to write a value, if not as a number;  scale the texts at both ends of the colour scale */
export function heatmap(options) {
  const { kind, name = null, head = null, rowLabels = null, columnLabels = null, square = false } = options;
  const full = options.picture;
  let picture = full, cells = cellsOf(full), cursor = null, drag = null, requested = 0, timer = 0;
  const id = `map-${++counter}`;
  const canvas = el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": `${options.title}, ${shapeOf(full.shape)}`,
    "aria-describedby": `${id}-caption`, "data-name": name, "data-head": head,
  });
  const readout = el("output", { class: "readout", "aria-live": "polite" });
  const legend = el("span", { class: "legend" });
  const reset = el("button", { type: "button", class: "small", hidden: true, onclick: () => zoom(null) }, "show all");
  const frame = el("div", { class: "canvas-frame" }, canvas);
  const figure = el(
    "figure",
    { class: `heat ${kind}${square ? " square" : ""}` },
    el("figcaption", {}, el("span", { class: "heat-title" }, options.title), el("span", { class: "shape" }, shapeOf(full.shape)), reset),
    frame,
    el("div", { class: "under" }, legend, readout),
    el("p", { class: "caption", id: `${id}-caption` }, options.caption || ""),
  );

  const longest = (labels, most) => Math.min(most, Math.max(...labels.map((label) => visible(label).length)));
  const m = {
    left: rowLabels ? 12 + 7.3 * longest(rowLabels, square ? 7 : 9) : full.shape[0] === 1 ? 4 : 34,
    top: columnLabels ? 10 + 7.3 * longest(columnLabels, 5) : 4,
  };

  function geometry() {
    const available = Math.max(120, frame.clientWidth - m.left - 2);
    const [rows, columns] = picture.cells;
    if (square) {
      const cell = Math.max(2, Math.min(26, available / columns, 560 / rows));
      return { ...m, cw: cell, ch: cell };
    }
    const high = full.shape[0] === 1 ? 30 : rowLabels ? Math.max(7, Math.min(17, 560 / rows)) : Math.max(1.5, Math.min(16, 150 / rows));
    return { ...m, cw: available / columns, ch: high };
  }

  function draw() {
    if (!frame.isConnected || !frame.clientWidth) return;
    const g = geometry();
    const [rows, columns] = picture.cells;
    const wide = Math.round(g.left + columns * g.cw + 2), high = Math.round(g.top + rows * g.ch + 2);
    const ratio = window.devicePixelRatio || 1;
    Object.assign(canvas.dataset, { left: g.left, top: g.top, cellWidth: g.cw, cellHeight: g.ch });
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const image = new ImageData(columns, rows);
    const colours = palette(kind), pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < cells.length; i++) pixels[i] = colours[cells[i] & 255];
    const small = document.createElement("canvas");
    small.width = columns;
    small.height = rows;
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, g.left, g.top, columns * g.cw, rows * g.ch);
    const style = getComputedStyle(document.documentElement);
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = `${Math.min(12, Math.max(9, g.ch - 1))}px ui-monospace, monospace`;
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(10 / g.ch));
    if (rowLabels) {
      context.textAlign = "right";
      for (let i = 0; i < rows; i += every) {
        const selected = picture.rows[0] + i === options.selected;
        context.fillStyle = style.getPropertyValue(selected ? "--ink" : "--soft");
        context.fillText(fit(visible(rowLabels[picture.rows[0] + i]), square ? 7 : 9), g.left - 6, g.top + (i + 0.5) * g.ch);
      }
    }
    if (columnLabels) {
      context.fillStyle = style.getPropertyValue("--soft");
      context.textAlign = "left";
      const step = Math.max(1, Math.ceil(10 / g.cw));
      for (let j = 0; j < columns; j += step) {
        context.save();
        context.translate(g.left + (j + 0.5) * g.cw, g.top - 4);
        context.rotate(-Math.PI / 2);
        context.fillText(fit(visible(columnLabels[picture.columns[0] + j]), 5), 0, 0);
        context.restore();
      }
    }
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(g.left - 0.5, g.top - 0.5, columns * g.cw + 1, rows * g.ch + 1);
    const mark = rowLabels && options.selected !== undefined && options.selected !== null ? options.selected - picture.rows[0] : -1;
    context.strokeStyle = style.getPropertyValue("--ink");
    if (mark >= 0 && mark < rows) context.strokeRect(g.left - 0.5, g.top + mark * g.ch - 0.5, columns * g.cw + 1, g.ch + 1);
    if (cursor) {
      context.lineWidth = 2;
      context.strokeRect(g.left + cursor[1] * g.cw - 1, g.top + cursor[0] * g.ch - 1, Math.max(4, g.cw + 2), Math.max(4, g.ch + 2));
    }
    if (drag && drag[1] !== drag[0]) {
      const [from, to] = [Math.min(...drag), Math.max(...drag) + 1];
      context.lineWidth = 2;
      context.strokeRect(g.left + from * g.cw, g.top - 1, (to - from) * g.cw, rows * g.ch + 2);
    }
  }

  const range = (i, axis) => {
    const [from, to] = axis ? picture.columns : picture.rows;
    const pool = picture.pool[axis];
    return [from + i * pool, Math.min(from + (i + 1) * pool, to)];
  };

  function describePosition([from, to], labels, what) {
    if (labels) return `‘${visible(labels[from])}’ (position ${from + 1})`;
    return to - from > 1 ? `${what} ${from} to ${to - 1}` : `${what} ${from}`;
  }

  function show(cell) {
    cursor = cell;
    draw();
    if (!cell) {
      readout.textContent = "";
      return;
    }
    const rows = range(cell[0], 0), columns = range(cell[1], 1);
    const where = [
      full.shape[0] > 1 ? describePosition(rows, rowLabels, options.rowName || "row") : "",
      describePosition(columns, columnLabels, options.columnName || "feature"),
    ].filter(Boolean).join(square ? " ← " : " · ");
    const approximate = (cells[cell[0] * picture.cells[1] + cell[1]] / 127) * picture.scale;
    const describe = options.describe || ((x) => number(x));
    readout.textContent = `${where}: ≈ ${describe(approximate)}`;
    if (!name || offline) return;
    const mine = ++requested;
    clearTimeout(timer);
    timer = setTimeout(async () => {
      try {
        const parameters = { name, rows: rows.join(":"), columns: columns.join(":"), ...(head === null ? {} : { head }) };
        const found = await get("value", options.sentence, parameters);
        if (mine !== requested) return;
        readout.textContent = `${where}: ${exact(found.value)}`;
        Object.assign(readout.dataset, { value: found.value, row: found.row, column: found.column });
      } catch {
        if (mine === requested) readout.textContent = `${where}: ≈ ${describe(approximate)}`;
      }
    }, 60);
  }

  async function zoom(columns) {
    if (columns && columns[1] - columns[0] < 2) return;
    if (!columns) picture = full;
    else if (!name || offline) picture = crop(picture, picture.rows, columns);
    else {
      const parameters = { name, rows: picture.rows.join(":"), columns: columns.join(":"), ...(head === null ? {} : { head }) };
      picture = await get("slice", options.sentence, parameters);
    }
    cells = cellsOf(picture);
    reset.hidden = picture === full;
    cursor = null;
    drawLegend();
    draw();
  }

  function drawLegend() {
    const bar = el("canvas", { class: "bar", width: 96, height: 8, "aria-hidden": "true" });
    const context = bar.getContext("2d");
    const single = options.positive;
    for (let x = 0; x < 96; x++) {
      context.fillStyle = css(colour(kind, single ? x / 95 : (2 * x) / 95 - 1));
      context.fillRect(x, 0, 1, 8);
    }
    if (options.scale) {
      legend.replaceChildren(`${options.scale[0]} `, bar, ` ${options.scale[1]}`);
      return;
    }
    const beyond = picture.largest > picture.scale * 1.001 ? `, largest ${number(picture.largest)}` : "";
    legend.replaceChildren(`${single || !picture.scale ? "0" : `−${number(picture.scale)}`} `, bar, ` ${number(picture.scale)}${beyond}`);
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect(), g = geometry();
    const i = Math.floor((event.clientY - box.top - g.top) / g.ch), j = Math.floor((event.clientX - box.left - g.left) / g.cw);
    const [rows, columns] = picture.cells;
    return i >= 0 && j >= 0 && i < rows && j < columns ? [i, j] : null;
  }

  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (drag && cell) drag[1] = cell[1];
    if (String(cell) !== String(cursor)) show(cell);
  });
  canvas.addEventListener("pointerleave", () => {
    drag = null;
    show(null);
  });
  canvas.addEventListener("pointerdown", (event) => {
    const cell = cellAt(event);
    if (cell) drag = [cell[1], cell[1]];
  });
  canvas.addEventListener("pointerup", (event) => {
    const cell = cellAt(event);
    const dragged = drag && drag[0] !== drag[1] ? [Math.min(...drag), Math.max(...drag)] : null;
    drag = null;
    if (dragged && !square) zoom([range(dragged[0], 1)[0], range(dragged[1], 1)[1]]);
    else if (cell && options.select) options.select(range(cell[0], 0)[0], range(cell[1], 1)[0]);
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const [rows, columns] = picture.cells;
    if (moves[event.key]) {
      const [i, j] = cursor || [0, 0];
      const [di, dj] = cursor ? moves[event.key] : [0, 0];
      show([Math.max(0, Math.min(rows - 1, i + di)), Math.max(0, Math.min(columns - 1, j + dj))]);
    } else if (event.key === "+" && cursor && !square) {
      const [from, to] = picture.columns, middle = range(cursor[1], 1)[0], half = Math.max(1, Math.floor((to - from) / 4));
      zoom([Math.max(from, middle - half), Math.min(to, middle + half)]);
    } else if (event.key === "-" || event.key === "Escape") zoom(null);
    else if (event.key === "Enter" && cursor && options.select) options.select(range(cursor[0], 0)[0], range(cursor[1], 1)[0]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  drawLegend();
  drawn.add({ figure, draw: () => (drawLegend(), draw()) });
  resizeObserver.observe(frame);
  frame.redraw = draw;
  return figure;
}

// Heat maps are redrawn when their size or the theme changes.
const drawn = new Set();
const resizeObserver = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.redraw?.()));
export function redrawHeatmaps() {
  for (const one of drawn) one.figure.isConnected ? one.draw() : drawn.delete(one);
}

const fit = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// A picture of values that the page itself has computed, in [0, 1] or [−1, 1].
export function pictureOf(values, scale = 1) {
  const rows = values.length, columns = values[0].length;
  const bytes = new Uint8Array(rows * columns);
  values.flat().forEach((x, i) => (bytes[i] = Math.round(127 * Math.max(-1, Math.min(1, x))) & 255));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { shape: [rows, columns], rows: [0, rows], columns: [0, columns], cells: [rows, columns], pool: [1, 1], scale, largest: scale, q: btoa(text) };
}
