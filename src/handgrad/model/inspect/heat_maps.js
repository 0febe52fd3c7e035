// Draws the maps of a page of heat_maps.py. Pointing at a cell, or moving to it by arrow keys, marks it in every map of the
// same shape and writes its value there.
"use strict";

const { kind, scale, maps } = JSON.parse(document.querySelector("script[type='application/json']").textContent);
const output = document.querySelector("output");
const dark = matchMedia("(prefers-color-scheme: dark)");
// at −1, 0 and 1; as on the explain page
const COLORS = {
  a: [["#065f56", "#faf8f5", "#963c00"], ["#78e8d6", "#262321", "#ffc88c"]],
  delta: [["#104284", "#faf8f5", "#8c123e"], ["#a8d6ff", "#262321", "#ffaaba"]],
};
const MOST_WORDS = 60; // columns that are named above a map
let at = null; // row and column of the marked cell
let here = 0; // the map that is pointed at

const rgb = (hex) => [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));

function color(value) {
  const [low, zero, high] = COLORS[kind][dark.matches ? 1 : 0].map(rgb);
  if (value === null) return dark.matches ? "#454240" : "#e7e5e4"; // not measured
  const t = scale ? Math.max(-1, Math.min(1, value / scale)) : 0;
  const mixed = zero.map((c, i) => Math.round(c + ((t < 0 ? low : high)[i] - c) * Math.abs(t)));
  return `rgb(${mixed})`;
}

// ── geometry ──────────────────────────────────────────────────────────────────────────────────────────────────────

const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink");
const measure = document.createElement("canvas").getContext("2d");
measure.font = "12px system-ui, sans-serif";
const longest = (words) => Math.min(130, Math.max(0, ...words.map((word) => measure.measureText(word).width)));

function geometry(map) {
  const [rows, columns] = [map.values.length, map.values[0].length];
  const width = Math.max(2, Math.min(22, Math.floor((maps.length > 1 ? 260 : 760) / columns)));
  const height = map.rows.length && rows <= MOST_WORDS ? 16 : Math.max(2, Math.min(16, Math.floor(360 / rows)));
  const named = map.columns.length === columns && columns <= MOST_WORDS;
  const cell = named ? Math.max(width, 14) : width;
  return {
    rows,
    columns,
    width: cell,
    height,
    named,
    left: height === 16 && map.rows.length ? Math.ceil(longest(map.rows)) + 6 : 0,
    top: named ? Math.ceil(longest(map.columns)) + 6 : 0,
  };
}

// ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────

const drawn = maps.map((map, index) => {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const canvas = document.createElement("canvas");
  caption.textContent = map.title;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${map.title || document.title}: ${map.shape.join(" by ")}; arrow keys read cells`);
  figure.append(caption, canvas);
  document.querySelector(".maps").append(figure);
  const g = geometry(map);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const shrunk = box.width / (g.left + g.columns * g.width);
    const column = Math.floor(((event.clientX - box.left) / shrunk - g.left) / g.width);
    const row = Math.floor(((event.clientY - box.top) / shrunk - g.top) / g.height);
    if (row >= 0 && row < g.rows && column >= 0 && column < g.columns) mark(index, row, column);
  });
  canvas.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const [row, column] = at ?? [-down, -right];
    mark(index, clamp(row + down, g.rows), clamp(column + right, g.columns));
  });
  return { map, canvas, caption, g };
});

const clamp = (i, count) => Math.max(0, Math.min(count - 1, i));

function draw({ map, canvas, g }) {
  const ratio = globalThis.devicePixelRatio || 1;
  const [width, height] = [g.left + g.columns * g.width, g.top + g.rows * g.height];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.aspectRatio = `${width} / ${height}`;
  const to = canvas.getContext("2d");
  to.scale(ratio, ratio);
  map.values.forEach((row, i) =>
    row.forEach((value, j) => {
      to.fillStyle = color(value);
      to.fillRect(g.left + j * g.width, g.top + i * g.height, g.width, g.height);
    }),
  );
  to.fillStyle = ink();
  to.font = measure.font;
  to.textBaseline = "middle";
  if (g.left) {
    to.textAlign = "right";
    map.rows.forEach((word, i) => to.fillText(word, g.left - 5, g.top + (i + 0.5) * g.height, g.left - 6));
  }
  if (g.named) {
    map.columns.forEach((word, j) => {
      to.save();
      to.translate(g.left + (j + 0.5) * g.width, g.top - 4);
      to.rotate(-Math.PI / 2);
      to.textAlign = "left";
      to.fillText(word, 0, 0, g.top - 6);
      to.restore();
    });
  }
  if (at && at[0] < g.rows && at[1] < g.columns) {
    to.strokeStyle = ink();
    to.lineWidth = 1;
    to.strokeRect(g.left + at[1] * g.width + 0.5, g.top + at[0] * g.height + 0.5, g.width - 1, g.height - 1);
    to.globalAlpha = 0.35;
    to.strokeRect(g.left + 0.5, g.top + at[0] * g.height + 0.5, g.columns * g.width - 1, g.height - 1);
    to.strokeRect(g.left + at[1] * g.width + 0.5, g.top + 0.5, g.width - 1, g.rows * g.height - 1);
  }
}

const written = (value) => (value === null ? "not measured" : String(value).replace("-", "−"));

/** The name of a row or column, or the range of those that a cell stands for. */
function named(what, labels, pool, count, i) {
  if (pool > 1) return `${what}s ${i * pool}–${Math.min(count, (i + 1) * pool) - 1}, furthest from 0`;
  return labels.length ? labels[i] : `${what} ${i}`;
}

function mark(index, row, column) {
  at = [row, column];
  here = index;
  for (const one of drawn) {
    draw(one);
    const value = one.map.values[row]?.[column];
    one.caption.textContent = value === undefined ? one.map.title : `${one.map.title} ${written(value)}`.trim();
  }
  const { map } = drawn[here];
  const place = [
    named("row", map.rows, map.pool[0], map.shape[0], row),
    named("column", map.columns, map.pool[1], map.shape[1], column),
  ].join(" · ");
  output.textContent = `${map.title ? `${map.title}: ` : ""}${place} → ${written(map.values[row][column])}`;
}

const all = () => drawn.forEach(draw);
dark.addEventListener("change", all);
all();
