// The map of the network: the forward pass down the left side in orange, the error up the right side in blue, blocks in
// lavender.

import { el, svg } from "./dom.js";
import { number } from "./format.js";

const LINE = 26; // distance of the main line from the edge, in pixels
const BEND = 9; // distance of a skip connection from the edge

let open = new Set(); // the unfolded blocks
let shownFlow = "both"; // "a", "delta" or "both"
let lastStation = null; // the station for which the map was last drawn

/* Draw the map into `nav`. `go(station, direction)` opens a station. */
export function drawMap(nav, state, go) {
  const { table, overview } = state;
  const here = table.stations.find((s) => s.id === state.station);
  if (here.block !== null && lastStation !== here.id) open.add(here.block); // unfold the block of a newly opened station
  lastStation = here.id;
  const flows = Object.fromEntries(overview.flows.map((f) => [f.id, f]));
  const short = (x) => number(x, x >= 1e-3 && x < 1e4 ? 2 : 1); // little space
  const length = (values) => (values ? Math.hypot(...values) : null);
  const a = Object.fromEntries(overview.flows.map((f) => [f.id, length(f.a)]));
  const delta = Object.fromEntries(overview.flows.map((f) => [f.id, length(f.delta)]));
  const widthOf = { a: widths(Object.values(a)), delta: widths(Object.values(delta)) };

  const before = nav.querySelector(".map-scroll")?.scrollTop ?? 0;
  const focused = nav.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const list = el("ol", { class: "stations" });
  const rows = []; // the points that the lines connect
  const addPoint = (node, id, block = null, part = "") => rows.push({ node, id, block, part });

  const item = (station) => {
    const proof = state.proofs?.[station.id];
    const current = station.id === state.station && state.view === "station";
    const mark = proof?.passed === false ? "✘" : proof?.passed ? "✔" : "";
    const status = proof?.passed === false ? ", check failed" : proof?.passed ? ", verified" : "";
    const symbol = station.id === "loss" ? "L" : station.symbol;
    const button = el(
      "button",
      {
        type: "button", class: `station${current ? ` here ${state.direction}` : ""}`, "data-key": station.id,
        "aria-current": current ? "step" : null, onclick: () => go(station.id, state.direction),
        "aria-label": `${symbol} ${station.title}${station.block === null ? "" : `, block ${station.block + 1}`}${status}`,
      },
      el("span", { class: "num forward" }, shownFlow !== "delta" && flows[station.id].a ? short(a[station.id]) : ""),
      el("span", { class: "label" }, el("b", {}, symbol), ` ${station.title.replace(" connection", "")}`),
      el("span", { class: `tick ${proof?.passed === false ? "bad" : "good"}`, "aria-hidden": "true" }, mark),
      el("span", { class: "num backward" }, shownFlow !== "a" && flows[station.id].delta ? short(delta[station.id]) : ""),
    );
    const li = el("li", {}, button);
    addPoint(li, station.id, station.block);
    return li;
  };

  for (const station of table.stations.filter((s) => s.block === null && s.index <= 1)) list.append(item(station));
  for (let b = 0; b < table.blocks; b++) {
    const inside = table.stations.filter((s) => s.block === b);
    const unfolded = open.has(b);
    const last = `blocks.${b}.a_10`;
    const header = el(
      "button",
      {
        type: "button", class: "fold", "aria-expanded": String(unfolded), "data-key": `block ${b}`,
        "aria-label": `Block ${b + 1}, ${unfolded ? "fold" : "unfold"}`,
        onclick: () => {
          unfolded ? open.delete(b) : open.add(b);
          drawMap(nav, state, go);
        },
      },
      el("span", { class: "num forward" }, unfolded || shownFlow === "delta" ? "" : short(a[last])),
      el("span", { class: "label" }, el("span", { class: "turn", "aria-hidden": "true" }, unfolded ? "▾" : "▸"), ` Block ${b + 1}`),
      el("span", { class: "tick good", "aria-hidden": "true" }, inside.every((s) => state.proofs?.[s.id]?.passed) ? "✔" : ""),
      el("span", { class: "num backward" }, unfolded || shownFlow === "a" ? "" : short(delta[last])),
    );
    const li = el("li", { class: `block${unfolded ? " open" : ""}` }, header);
    if (!unfolded) addPoint(li, last, null);
    else {
      addPoint(header, null, b, "top");
      li.append(el("ol", {}, inside.map(item)));
    }
    list.append(li);
  }
  for (const station of table.stations.filter((s) => s.block === null && s.index > 1)) list.append(item(station));

  const lines = svg("svg", { class: "lines", "aria-hidden": "true" });
  const scroll = el("div", { class: "map-scroll" }, el("div", { class: "map-sheet" }, lines, list));
  const choice = el("div", { class: "map-choice", role: "group", "aria-label": "What the width of the arrows shows" });
  for (const [key, text] of [["a", "‖a‖"], ["both", "both"], ["delta", "‖Δ‖"]]) {
    choice.append(
      el("button", { type: "button", class: "small", "aria-pressed": String(shownFlow === key), onclick: () => { shownFlow = key; drawMap(nav, state, go); } }, text),
    );
  }
  const heading = el("div", { class: "map-head" },
    el("span", { class: "forward" }, "forward ↓"), choice, el("span", { class: "backward" }, "↑ backward"));
  nav.replaceChildren(heading, scroll, el("p", { class: "map-note" }, "Numbers are the lengths ‖a‖ and ‖Δ‖ over all tokens. Wider arrows mean larger lengths (logarithmic scale). ✔ means verified."));
  scroll.scrollTop = before;

  const strokes = () => drawLines(lines, list, rows, { a, delta, widthOf });
  strokes();
  if (focused) nav.querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
  const current = nav.querySelector(".here");
  if (current) {
    const top = current.offsetTop, view = scroll.clientHeight;
    if (top < scroll.scrollTop + 40 || top > scroll.scrollTop + view - 60) scroll.scrollTop = top - view / 2;
  }
}

// Returns a function from length to stroke width, logarithmic between the smallest and the largest length.
function widths(lengths) {
  const logs = lengths.filter((x) => x > 0).map(Math.log);
  const [least, most] = [Math.min(...logs), Math.max(...logs)];
  return (x) => (x > 0 ? 1.5 + (most > least ? (8 * (Math.log(x) - least)) / (most - least) : 4) : 0);
}

function drawLines(lines, list, rows, { a, delta, widthOf }) {
  const box = list.getBoundingClientRect();
  const wide = box.width;
  lines.setAttribute("viewBox", `0 0 ${wide} ${box.height}`);
  lines.setAttribute("width", wide);
  lines.setAttribute("height", box.height);
  const middle = (row) => {
    const r = row.node.getBoundingClientRect();
    return r.top - box.top + r.height / 2;
  };
  const found = [];
  const stroke = (kind, path, width, dotted = false) => {
    if (!width) return;
    found.push(svg("path", { d: path, class: `flow ${kind}${dotted ? " skipline" : ""}`, "stroke-width": width.toFixed(1), fill: "none" }));
    found.push(svg("path", { d: path, class: `moving ${kind}`, "stroke-width": Math.max(1, width / 3).toFixed(1), fill: "none" }));
  };
  const arrow = (kind, x, from, to, width) => {
    if (!width) return;
    const way = Math.sign(to - from), half = width / 2 + 2.5, length = 5 + width / 3;
    stroke(kind, `M${x} ${from}V${to - way * length}`, width);
    found.push(svg("path", { d: `M${x - half} ${to - way * length}H${x + half}L${x} ${to}Z`, class: `tip ${kind}` }));
  };
  const forward = shownFlow !== "delta", backward = shownFlow !== "a";
  let previous = null;
  for (const row of rows) {
    row.y = middle(row);
    if (row.part === "top") {
      row.id = previous.id;
      row.top = true;
    }
    if (previous && row.id !== "a_0") {
      const from = previous.y, to = row.y;
      if (forward) arrow("forward", LINE, from + 5, to - 6, previous.id === "a_0" ? 1.5 : widthOf.a(a[previous.id]));
      if (backward && delta[previous.id] !== null) arrow("backward", wide - LINE, to - 5, from + 6, widthOf.delta(delta[previous.id]));
    }
    if (forward) found.push(svg("circle", { cx: LINE, cy: row.y, r: 3.5, class: "joint forward" }));
    if (backward) found.push(svg("circle", { cx: wide - LINE, cy: row.y, r: 3.5, class: "joint backward" }));
    previous = row;
  }
  // The two skip connections of every unfolded block.
  for (const top of rows.filter((row) => row.top)) {
    const find = (i) => rows.find((row) => row.id === `blocks.${top.block}.a_${i}` && !row.top);
    for (const [from, to] of [[top, find(5)], [find(5), find(10)]]) {
      const arc = (edge, inner, y0, y1) => `M${inner} ${y0}C${edge} ${y0} ${edge} ${y0} ${edge} ${y0 + Math.sign(y1 - y0) * 16}V${y1 - Math.sign(y1 - y0) * 16}C${edge} ${y1} ${edge} ${y1} ${inner} ${y1}`;
      if (forward) stroke("forward", arc(BEND, LINE, from.y, to.y), Math.min(5, widthOf.a(a[from.id])), true);
      if (backward) stroke("backward", arc(wide - BEND, wide - LINE, to.y, from.y), Math.min(5, widthOf.delta(delta[to.id])), true);
    }
  }
  lines.replaceChildren(...found);
}
