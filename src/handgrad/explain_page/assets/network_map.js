// @ts-check
// The map: the forward pass down the left side in orange, the error up the right side in blue, blocks in lavender.

import { number, quote } from "./format.js";
import { entriesLit, headLink, register, spaceOf, whatIsLit } from "./linked.js";
import { joints, mapLines } from "./map_lines.js";
import { button, choice } from "./parts.js";
import { h, render } from "./render.js";

/** @param {boolean} autograd  whether the checks compare with it */
export const note = (autograd) =>
  "Numbers are the lengths ‖a‖ and ‖Δ‖ over all tokens. Wider arrows mean larger lengths (logarithmic scale). " +
  `✔ means verified${autograd ? ", ✓ by autograd alone" : ""}.`;

const open = new Set(); // the unfolded blocks
let shownFlow = "both"; // "a", "delta" or "both"
let lastStation = ""; // the station for which the map was last drawn

let drawnToken = /** @type {number | null} */ (null); // whose lengths are shown; null: of all tokens together
let waiting = false;

/** The token that is lit: the map then shows its lengths alone. @param {any} overview */
function tokenLit({ tokens }) {
  const found = entriesLit([{ prefix: "token-", size: 1 }], whatIsLit());
  return found.length && found[0][0] < tokens.length ? found[0][0] : null;
}

const noteOf = (token, { tokens }) =>
  `Numbers and arrows: ‖a‖ and ‖Δ‖ of ${quote(tokens[token].label)} (position ${token + 1}) alone.`;

/** Once for all that the pointer crosses between two frames. @param {HTMLElement} nav @param {any} state @param {any} actions */
function redrawSoon(nav, state, actions) {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    drawMap(nav, state, actions);
  });
}

/** What a station stands for: its heads, and the space of its features. @param {any} station @param {any} table */
function linksOfStation({ id, kind, block }, { heads }) {
  const space = spaceOf(id);
  const own = kind === "attention" ? [...Array(heads).keys()].map((i) => headLink(block, i)) : [];
  return [...own, ...(space ? [`space-${space}`] : [])].join(" ") || null;
}

/** Draw the map into `nav`. @param {HTMLElement} nav @param {any} state @param {any} actions */
export function drawMap(nav, state, actions) {
  const { table, overview } = state;
  const here = table.stations.find((s) => s.id === state.station);
  const moved = lastStation !== `${state.view} ${here.id}`;
  // a newly opened station unfolds its block
  if (here.block !== null && moved && state.view === "station") open.add(here.block);
  if (moved) unfold(nav, false); // on a narrow page: the station is what was asked for
  lastStation = `${state.view} ${here.id}`;
  const token = tokenLit(overview);
  const length = (values) => (values ? (token === null ? Math.hypot(...values) : values[token]) : null);
  register(nav, () => tokenLit(state.overview) !== drawnToken && redrawSoon(nav, state, actions));
  drawnToken = token;
  const lengths = { a: {}, delta: {} };
  for (const flow of overview.flows) {
    lengths.a[flow.id] = length(flow.a);
    lengths.delta[flow.id] = length(flow.delta);
  }
  const redraw = () => drawMap(nav, state, actions);
  const first = table.stations.findIndex((s) => s.block !== null);
  const outside = (before) => table.stations.filter((s, i) => s.block === null && before === i < first);
  const blocks = [...Array(table.blocks).keys()];
  const isUnfolded = nav.classList.contains("unfolded");
  render(nav, [
    h(
      "button.map-fold",
      {
        type: "button",
        "aria-expanded": String(isUnfolded),
        onclick: () => {
          unfold(nav, !isUnfolded);
          redraw(); // the lines depend on where the rows are
        },
      },
      turn(isUnfolded),
      ` Map · ${here.block === null ? "" : `block ${here.block + 1} · `}${here.title}`,
    ),
    h(
      "div.map-head",
      h("span.forward", "forward ↓"),
      choice(
        "What the width of the arrows shows",
        { a: "‖a‖", both: "both", delta: "‖Δ‖" },
        shownFlow,
        (key) => {
          shownFlow = key;
          redraw();
        },
        { class: "map-choice" },
      ),
      h("span.backward", "↑ backward"),
    ),
    h("p.map-play", button("Play the pass", () => actions.play(), { class: "small", id: "play-pass" })),
    h(
      "div.map-scroll",
      h(
        "div.map-sheet",
        h("svg.lines", { "aria-hidden": "true" }),
        h(
          "ol.stations",
          outside(true).map((station) => item(station, state, actions, lengths)),
          blocks.map((b) => block(b, state, actions, lengths, redraw)),
          outside(false).map((station) => item(station, state, actions, lengths)),
        ),
      ),
    ),
    h("p.map-note", token === null ? note(table.torch) : noteOf(token, overview)),
  ]);
  drawLines(nav, lengths, table.stations);
  if (moved) scrollTo(nav);
}

/** Show or hide the map of a narrow page; a wide one always shows it. @param {HTMLElement} nav @param {boolean} wanted */
const unfold = (nav, wanted) => void nav.classList.toggle("unfolded", wanted);

const turn = (unfolded) => h("span.turn", { "aria-hidden": "true" }, unfolded ? "▾" : "▸");

/** What a row of the map shows. */
const columns = (forward, label, mark, backward) => [
  h("span.num.forward", forward),
  h("span.label", label),
  h("span", { class: `tick ${mark === "✘" ? "bad" : "good"}`, "aria-hidden": "true" }, mark),
  h("span.num.backward", backward),
];

/** A length, unless only the others are shown. @param {"a" | "delta"} kind @param {number | null} length */
const shownLength = (kind, length) => (["both", kind].includes(shownFlow) && length !== null ? short(length) : "");

const short = (x) => number(Number(x.toPrecision(2)), x >= 1e-3 && x < 1e5 ? 2 : 1); // little space

/** What the checks of these stations amount to: all passed, those that have been made, or one failed. @param {any[]} proofs */
export function markOf(proofs) {
  if (proofs.some((p) => p?.passed === false)) return ["✘", ", check failed"];
  if (!proofs.length || !proofs.every((p) => p?.passed)) return ["", ""];
  return proofs.every((p) => p.state === "done") ? ["✔", ", verified"] : ["✓", ", autograd agrees"];
}

function item(station, state, actions, lengths) {
  const proof = state.proofs?.[station.id];
  const current = station.id === state.station && state.view === "station";
  const [mark, status] = markOf(proof ? [proof] : []);
  const symbol = station.id === "loss" ? "L" : station.symbol;
  const numbers = (kind) => shownLength(kind, lengths[kind][station.id]);
  return h(
    "li",
    { key: station.id, "data-row": station.id, "data-block": station.block },
    h(
      "button",
      {
        type: "button",
        class: `station${current ? ` here ${state.direction}` : ""}`,
        "data-key": station.id,
        "data-link": linksOfStation(station, state.table),
        "aria-current": current ? "step" : null,
        "aria-label":
          `${symbol} ${station.title}${station.block === null ? "" : `, block ${station.block + 1}`}${status}`,
        onclick: () => actions.go(station.id),
      },
      columns(numbers("a"), [h("b", symbol), ` ${station.title.replace(" connection", "")}`], mark, numbers("delta")),
    ),
  );
}

function block(b, state, actions, lengths, redraw) {
  const inside = state.table.stations.filter((s) => s.block === b);
  const unfolded = open.has(b),
    last = inside.at(-1).id;
  const [mark, status] = markOf(inside.map((s) => state.proofs?.[s.id]));
  const numbers = (kind) => (unfolded ? "" : shownLength(kind, lengths[kind][last]));
  const toggle = () => {
    unfolded ? open.delete(b) : open.add(b);
    redraw();
  };
  return h(
    "li",
    { key: `block ${b}`, class: `block${unfolded ? " open" : ""}` },
    h(
      "button.fold",
      {
        type: "button",
        "aria-expanded": String(unfolded),
        "data-key": `block ${b}`,
        "data-row": unfolded ? "" : last,
        "data-block": b,
        "data-link": unfolded ? null : linksOfBlock(inside, state.table),
        "aria-label": `Block ${b + 1}${status}, ${unfolded ? "fold" : "unfold"}`,
        onclick: toggle,
      },
      columns(numbers("a"), [turn(unfolded), ` Block ${b + 1}`], mark, numbers("delta")),
    ),
    unfolded ? h("ol", inside.map((station) => item(station, state, actions, lengths))) : null,
  );
}

/** What a folded block stands for: all heads in it, and its features. @param {any[]} inside @param {any} table */
const linksOfBlock = (inside, table) =>
  [...new Set(inside.flatMap((station) => linksOfStation(station, table)?.split(" ") ?? []))].join(" ");

/** Connect the rows with lines, which depend on where the browser has put them.
 * @param {HTMLElement} nav
 * @param {any} lengths
 * @param {any[]} stations */
function drawLines(nav, lengths, stations) {
  const list = /** @type {HTMLElement} */ (nav.querySelector("ol.stations")),
    svg = /** @type {SVGElement} */ (nav.querySelector("svg.lines"));
  const box = list.getBoundingClientRect();
  let before = "";
  const rows = [...list.querySelectorAll("[data-row]")].map((node) => {
    const { top, height } = node.getBoundingClientRect(),
      { row, block } = /** @type {HTMLElement} */ (node).dataset;
    before = row || before; // the heading of an open block continues the line of the row before it
    return {
      y: top - box.top + height / 2,
      id: before,
      block: block === undefined ? null : Number(block),
      top: row === "",
    };
  });
  for (const [name, value] of Object.entries({
    viewBox: `0 0 ${box.width} ${box.height}`,
    width: box.width,
    height: box.height,
  }))
    svg.setAttribute(name, String(value));
  const style = { flow: "flow", skip: "flow skipline", tip: "tip" };
  const stroke = ({ d, kind, width, part }) =>
    part === "tip"
      ? [h("path", { d, class: `tip ${kind}` })]
      : [
          h("path", { d, class: `${style[part]} ${kind}`, "stroke-width": width.toFixed(1), fill: "none" }),
          h("path", { d, class: `moving ${kind}`, "stroke-width": Math.max(1, width / 3).toFixed(1), fill: "none" }),
        ];
  render(svg, [
    ...mapLines(rows, box.width, lengths.a, lengths.delta, shownFlow, stations).flatMap(stroke),
    ...joints(rows, box.width, shownFlow).map(({ x, y, kind }) =>
      h("circle", { cx: x, cy: y, r: 3.5, class: `joint ${kind}` }),
    ),
  ]);
}

/** Bring the current station into view, within the map only. @param {HTMLElement} nav */
function scrollTo(nav) {
  const scroll = /** @type {HTMLElement} */ (nav.querySelector(".map-scroll")),
    current = /** @type {HTMLElement | null} */ (nav.querySelector(".here"));
  if (!current) return;
  const top = current.getBoundingClientRect().top - scroll.getBoundingClientRect().top,
    view = scroll.clientHeight;
  if (top < 40 || top > view - 60) scroll.scrollTop += top - view / 2;
}
