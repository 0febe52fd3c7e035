// Elements, numbers and heat maps. Text always goes in as text.

import { ask, offline } from "./data.js";

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat(Infinity));
  return node;
}

// A formula from our own table.
export function math(formula) {
  const made = new DOMParser().parseFromString(formula.mathml, "application/xml").documentElement;
  const node = document.importNode(made, true);
  node.setAttribute("aria-label", formula.latex);
  return node;
}

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const LOWERED = "₀₁₂₃₄₅₆₇₈₉";

export function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e-3 && size < 1e4) return String(Number(x.toPrecision(digits))).replace("-", "−");
  const [mantissa, exponent] = x.toExponential(digits - 1).split("e");
  const power = [...String(Number(exponent))].map((c) => RAISED[c]).join("");
  return `${mantissa.replace("-", "−")}·10${power}`;
}

export const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)} %` : `${Number((100 * p).toPrecision(2))} %`);
export const low = (i) => [...String(i)].map((c) => LOWERED[c]).join("");
export const size = (shape) => shape.map((n) => n.toLocaleString("en")).join(" × ");

// A token with its blanks, line ends and control characters visible.
export function visible(label) {
  return [...label]
    .map((c) => {
      const code = c.codePointAt(0);
      if (c === " ") return "␣";
      if (c === "\n") return "⏎";
      if (c === "\t") return "⇥";
      if (code < 32) return String.fromCodePoint(0x2400 + code);
      if (code === 127) return "␡";
      if ((code >= 0x200b && code <= 0x200f) || (code >= 0x202a && code <= 0x202e) || code === 0xfeff || (code >= 0x80 && code < 0xa0))
        return `⟨${code.toString(16)}⟩`;
      return c;
    })
    .join("");
}

// ── colour ──────────────────────────────────────────────────────────────────────────────────────────────────────────
// Two hands for each kind: below 0 and above. Chosen to differ for every kind of colour vision, and in lightness.

const STOPS = {
  light: {
    zero: [250, 248, 245],
    a: [[[94, 190, 180], [6, 95, 86]], [[245, 166, 92], [150, 60, 0]]],
    delta: [[[232, 130, 150], [140, 18, 62]], [[110, 170, 226], [16, 66, 132]]],
  },
  dark: {
    zero: [38, 35, 33],
    a: [[[28, 122, 112], [120, 232, 214]], [[186, 92, 22], [255, 200, 140]]],
    delta: [[[160, 50, 84], [255, 170, 186]], [[42, 104, 176], [168, 214, 255]]],
  },
};

export const isDark = () => document.documentElement.dataset.theme === "dark";

// x from −1 to 1 → red, green, blue
export function colour(kind, x) {
  const { zero, [kind]: hands } = STOPS[isDark() ? "dark" : "light"];
  const [middle, end] = hands[x < 0 ? 0 : 1];
  const t = Math.min(1, Math.abs(x));
  const [from, to, share] = t < 0.5 ? [zero, middle, 2 * t] : [middle, end, 2 * t - 1];
  return from.map((c, i) => Math.round(c + (to[i] - c) * share));
}

// All 255 colours of a kind, as the canvas wants them.
const palettes = new Map();
function palette(kind) {
  const key = `${kind} ${isDark()}`;
  if (!palettes.has(key)) {
    const bytes = new Uint8Array(4 * 256);
    for (let i = -127; i <= 127; i++) bytes.set([...colour(kind, i / 127), 255], 4 * (i & 255));
    palettes.set(key, new Uint32Array(bytes.buffer));
  }
  return palettes.get(key);
}

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// Black or white, whichever reads better on this colour.
export function inkOn([r, g, b]) {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z > 0.18 ? "#000" : "#fff";
}

export function paint(node, kind, x) {
  const c = colour(kind, x);
  node.style.background = css(c);
  node.style.color = inkOn(c);
}

// ── heat maps ───────────────────────────────────────────────────────────────────────────────────────────────────────

function cellsOf(picture) {
  const bytes = Uint8Array.from(atob(picture.q), (c) => c.charCodeAt(0));
  return new Int8Array(bytes.buffer);
}

// A part of a picture, where nobody can be asked to draw it anew.
function cropped(picture, rows, columns) {
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

/* A matrix as colours. Options:
   title, words   what it is, and what to look for
   picture, kind  the cells, and "a" or "delta" for its colours
   name, head     of the tensor, to ask for exact values and for parts; without a name there are none
   rowLabels, columnLabels   tokens, where rows or columns are tokens;  rowName, columnName what else they are
   square         cells as wide as they are high
   chosen         the row to mark;  choose(row, column) is called on a click
   say(value)     how a value reads, if not as a number;  scale what stands at both ends of the colours */
export function heatmap(options) {
  const { kind, name = null, head = null, rowLabels = null, columnLabels = null, square = false } = options;
  const whole = options.picture;
  let picture = whole, cells = cellsOf(whole), cursor = null, drag = null, asked = 0, timer = 0;
  const id = `map-${++counter}`;
  const canvas = el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": `${options.title}, ${size(whole.shape)}`,
    "aria-describedby": `${id}-words`, "data-name": name, "data-head": head,
  });
  const readout = el("output", { class: "readout", "aria-live": "polite" });
  const legend = el("span", { class: "legend" });
  const reset = el("button", { type: "button", class: "small", hidden: true, onclick: () => zoom(null) }, "whole");
  const frame = el("div", { class: "canvas-frame" }, canvas);
  const figure = el(
    "figure",
    { class: `heat ${kind}${square ? " square" : ""}` },
    el("figcaption", {}, el("span", { class: "heat-title" }, options.title), el("span", { class: "shape" }, size(whole.shape)), reset),
    frame,
    el("div", { class: "under" }, legend, readout),
    el("p", { class: "words", id: `${id}-words` }, options.words || ""),
  );

  const longest = (labels, most) => Math.min(most, Math.max(...labels.map((label) => visible(label).length)));
  const m = {
    left: rowLabels ? 12 + 7.3 * longest(rowLabels, square ? 7 : 9) : whole.shape[0] === 1 ? 4 : 34,
    top: columnLabels ? 10 + 7.3 * longest(columnLabels, 5) : 4,
  };

  function geometry() {
    const room = Math.max(120, frame.clientWidth - m.left - 2);
    const [rows, columns] = picture.cells;
    if (square) {
      const cell = Math.max(2, Math.min(26, room / columns, 560 / rows));
      return { ...m, cw: cell, ch: cell };
    }
    const high = whole.shape[0] === 1 ? 30 : rowLabels ? Math.max(7, Math.min(17, 560 / rows)) : Math.max(1.5, Math.min(16, 150 / rows));
    return { ...m, cw: room / columns, ch: high };
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
        const chosen = picture.rows[0] + i === options.chosen;
        context.fillStyle = style.getPropertyValue(chosen ? "--ink" : "--soft");
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
    const mark = rowLabels && options.chosen !== undefined && options.chosen !== null ? options.chosen - picture.rows[0] : -1;
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

  function place(axis, [from, to], labels, what) {
    if (labels) return `‘${visible(labels[from])}’ (place ${from + 1})`;
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
      whole.shape[0] > 1 ? place(0, rows, rowLabels, options.rowName || "row") : "",
      place(1, columns, columnLabels, options.columnName || "feature"),
    ].filter(Boolean).join(square ? " ← " : " · ");
    const near = (cells[cell[0] * picture.cells[1] + cell[1]] / 127) * picture.scale;
    const say = options.say || ((x) => number(x));
    readout.textContent = `${where}: ≈ ${say(near)}`;
    if (!name || offline) return;
    const mine = ++asked;
    clearTimeout(timer);
    timer = setTimeout(async () => {
      try {
        const about = { name, rows: rows.join(":"), columns: columns.join(":"), ...(head === null ? {} : { head }) };
        const exact = await ask("value", options.look, about);
        if (mine !== asked) return;
        readout.textContent = `${where}: ${Number(exact.value.toPrecision(9))}`;
        Object.assign(readout.dataset, { value: exact.value, row: exact.row, column: exact.column });
      } catch {
        if (mine === asked) readout.textContent = `${where}: ≈ ${say(near)}`;
      }
    }, 60);
  }

  async function zoom(columns) {
    if (columns && columns[1] - columns[0] < 2) return;
    if (!columns) picture = whole;
    else if (!name || offline) picture = cropped(picture, picture.rows, columns);
    else {
      const about = { name, rows: picture.rows.join(":"), columns: columns.join(":"), ...(head === null ? {} : { head }) };
      picture = await ask("slice", options.look, about);
    }
    cells = cellsOf(picture);
    reset.hidden = picture === whole;
    cursor = null;
    explainColours();
    draw();
  }

  function explainColours() {
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
    const beyond = picture.largest > picture.scale * 1.001 ? `, reaches ${number(picture.largest)}` : "";
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
    else if (cell && options.choose) options.choose(range(cell[0], 0)[0], range(cell[1], 1)[0]);
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
    else if (event.key === "Enter" && cursor && options.choose) options.choose(range(cursor[0], 0)[0], range(cursor[1], 1)[0]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  explainColours();
  watching.add({ figure, draw: () => (explainColours(), draw()) });
  resized.observe(frame);
  frame.redraw = draw;
  return figure;
}

// Heat maps are drawn again when their room or the theme changes.
const watching = new Set();
const resized = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.redraw?.()));
export function redraw() {
  for (const one of watching) one.figure.isConnected ? one.draw() : watching.delete(one);
}

const fit = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Numbers of the page itself as a picture. Values in [0, 1] or [−1, 1].
export function pictureOf(values, scale = 1) {
  const rows = values.length, columns = values[0].length;
  const bytes = new Uint8Array(rows * columns);
  values.flat().forEach((x, i) => (bytes[i] = Math.round(127 * Math.max(-1, Math.min(1, x))) & 255));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { shape: [rows, columns], rows: [0, rows], columns: [0, columns], cells: [rows, columns], pool: [1, 1], scale, largest: scale, q: btoa(text) };
}
