// @ts-check
// “Play the pass”: which lines the pulse takes and when. The forward pass goes down the left side, the backward pass up the
// right side; where a row is read twice the pulse splits, and where a row reads two others, it waits for both and they are
// added. Widths and brightness come from ‖a‖ and ‖Δ‖. One block is shown with its layers, the others as one row each.

import { count, number } from "./format.js";
import { mapLines, widths } from "./map_lines.js";

export const WIDE = 360; // pixels
const ROOM = 600; // for the rows; many blocks share it
const FIRST = 50; // y of the first row
const HIGH = 24, // of a row
  FAN = 66; // of the row with the heads
const SECONDS = { pass: 4.5, turn: 0.5, end: 0.5 };
const EFFORT = { outside: 2, folded: 1, inside: 3 }; // relative time until a row is reached

/**
 * @typedef {import("./map_lines.js").Row & { label: string, kind: "outside" | "folded" | "inside", station: any, high: number }} Row
 * @typedef {{ kind: "forward" | "backward", from: number, to: number, width: number, light: number, points: number[][] }} Way
 *   a line of the map as the pulse takes it: from one time to another, along points
 * @typedef {{ row: Row, kind: "forward" | "backward", at: number, text: string, meets: boolean }} Stop  a row is reached
 * @typedef {{ rows: Row[], ways: Way[], stops: Stop[], seconds: number, high: number, block: [number, number], heads: number,
 *   lengths: { a: Record<string, number | null>, delta: Record<string, number | null> } }} Plan
 */

/** @param {any} table @param {any} overview @param {number} shown  the block with its layers
 * @param {{ length?: number, incoming: number }[] | null} heads  of that block @returns {Plan} */
export function planOf(table, overview, shown, heads) {
  const lengths = { a: lengthsOf(overview, "a"), delta: lengthsOf(overview, "delta") };
  const rows = rowsOf(table, shown);
  const efforts = rows.map((row, i) => (i ? EFFORT[row.kind] : 0));
  const total = efforts.reduce((sum, x) => sum + x, 0);
  let spent = 0;
  const down = efforts.map((x) => (SECONDS.pass * (spent += x)) / total);
  const back = SECONDS.pass + SECONDS.turn;
  const up = down.map((t) => back + SECONDS.pass - t);
  const time = (/** @type {any} */ row, /** @type {string} */ kind) => (kind === "forward" ? down : up)[rows.indexOf(row)];
  const brightness = { forward: brightnessOf(lengths.a), backward: brightnessOf(lengths.delta) };
  const fan = heads ? rows.findIndex(isFan) : -1;
  /** @type {Way[]} */
  const ways = [];
  for (const line of mapLines(rows, WIDE, lengths.a, lengths.delta, "both", table.stations)) {
    if (line.part === "tip") continue;
    const { kind, from, to, width } = line;
    const [first, last] = kind === "forward" ? [from, to] : [to, from];
    const near = line.part === "flow" && [from, to].includes(rows[fan]);
    const length = kind === "forward" ? lengths.a[from.id] : lengths.delta[line.part === "skip" && adds(to) ? to.id : from.id];
    const times = { kind, from: time(first, kind), to: time(last, kind) };
    if (near && heads) ways.push(...fanOf(heads, rows[fan], line, times));
    else ways.push({ ...times, width, light: brightness[kind](length ?? null), points: pointsOf(line, first.y, last.y) });
  }
  const inside = rows.filter((row) => row.kind === "inside");
  const edge = inside.flatMap((row) => [row.y - row.high / 2, row.y + row.high / 2]);
  const plan = { rows, ways, seconds: back + SECONDS.pass + SECONDS.end, high: rows[rows.length - 1].y + 88, lengths };
  const stops = rows.flatMap((row, i) => [stopOf("forward", i), stopOf("backward", i)]).sort((a, b) => a.at - b.at);
  return { ...plan, stops, heads: fan < 0 ? 0 : (heads?.length ?? 0), block: [Math.min(...edge), Math.max(...edge)] };

  /** @param {"forward" | "backward"} kind @param {number} i @returns {Stop} */
  function stopOf(kind, i) {
    const at = (kind === "forward" ? down : up)[i];
    const arriving = new Set(ways.filter((way) => way.kind === kind && Math.abs(way.to - at) < 1e-9).map((way) => way.from));
    const text = (kind === "forward" ? aboutForward : aboutBackward)(rows, i, lengths, { overview, table, heads });
    return { row: rows[i], kind, at, text, meets: arriving.size > 1 };
  }
}

/** Whether the pulse is split over heads here. @param {any} row */
export const isFan = ({ kind, station }) => kind === "inside" && station?.kind === "attention";

const adds = (/** @type {any} */ row) => row.station?.kind === "add";

/** The length of a or Δ at every station, over all tokens. @param {any} overview @param {"a" | "delta"} kind */
function lengthsOf({ flows }, kind) {
  /** @type {Record<string, number | null>} */
  const found = {};
  for (const flow of flows) found[flow.id] = flow[kind] ? Math.hypot(...flow[kind]) : null;
  return found;
}

/** From length to brightness, from 0.4 to 1, logarithmic as the widths. @param {Record<string, number | null>} lengths */
function brightnessOf(lengths) {
  const width = widths(Object.values(lengths));
  return (/** @type {number | null} */ x) => 0.4 + (0.6 * Math.max(0, width(x) - 1.5)) / 8;
}

/** The rows of the picture, from top to bottom. @param {any} table @param {number} shown @returns {Row[]} */
function rowsOf({ stations, blocks }, shown) {
  const first = stations.findIndex((/** @type {any} */ s) => s.block !== null);
  const folded = [...Array(blocks).keys()].map((b) => stations.filter((/** @type {any} */ s) => s.block === b));
  const name = (/** @type {any} */ s) => `${s.id === "loss" ? "L" : s.symbol}  ${s.title}`;
  const plain = (/** @type {any} */ s) => ({ id: s.id, station: s, block: s.block, label: name(s) });
  /** @type {any[]} */
  const found = [];
  for (const s of stations.slice(0, first)) found.push({ ...plain(s), kind: "outside" });
  folded.forEach((inside, b) => {
    if (b !== shown) {
      const last = inside[inside.length - 1];
      return found.push({ id: last.id, station: last, block: b, label: `Block ${b + 1}`, kind: "folded" });
    }
    const { id, station } = found[found.length - 1];
    found.push({ id, station: { ...station, kind: "top" }, block: b, label: `Block ${b + 1}`, kind: "inside", top: true });
    for (const s of inside) found.push({ ...plain(s), kind: "inside" });
  });
  for (const s of stations.slice(first)) if (s.block === null) found.push({ ...plain(s), kind: "outside" });
  const folds = found.filter((row) => row.kind === "folded").length;
  const high = Math.max(9, Math.min(HIGH, (ROOM - HIGH * (found.length - folds)) / Math.max(1, folds)));
  let y = FIRST;
  return found.map((row, i) => {
    row.high = row.kind === "folded" ? high : isFan(row) ? FAN : HIGH;
    if (i) y += (row.high + found[i - 1].high) / 2;
    return { ...row, y };
  });
}

/** The points of a line, evenly spread. @param {any} line @param {number} from @param {number} to */
function pointsOf({ x, bend, part }, from, to) {
  if (part === "flow") return [[x, from], [x, to]];
  const way = Math.min(14, Math.abs(to - from) / 2) * Math.sign(to - from);
  const angles = [0, 0.25, 0.5, 0.75, 1].map((t) => (t * Math.PI) / 2);
  const turn = angles.map((angle) => [x + (bend - x) * Math.sin(angle), from + way * (1 - Math.cos(angle))]);
  return [...turn, ...turn.map(([a, b]) => [a, to + from - b]).reverse()];
}

/** Where a head is, from left to right. @param {number} i @param {number} count */
export const slotOf = (i, count) => 60 + ((WIDE - 120) * (i + 0.5)) / count;

/** Where the pulse is split over the heads, and where it is joined again.
 * @param {{ length?: number, incoming: number }[]} heads @param {Row} row @param {any} line @param {any} times */
function fanOf(heads, row, line, times) {
  const forward = line.kind === "forward";
  const sizes = heads.map((head) => (forward ? (head.length ?? 1) : head.incoming));
  const width = widths(sizes);
  const other = line.from === row ? line.to : line.from;
  const splits = forward ? line.to === row : line.from === row; // the way leads to the heads
  return sizes.map((size, i) => {
    const slot = slotOf(i, sizes.length);
    const smooth = (/** @type {number} */ s) => line.x + (slot - line.x) * s * s * (3 - 2 * s);
    const points = [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1].map((s) => [smooth(s), other.y + (row.y - other.y) * s]);
    const light = 0.4 + (0.6 * Math.max(0, width(size) - 1.5)) / 8;
    return { ...times, width: (5 * width(size)) / 9.5, light, points: splits ? points : points.reverse() };
  });
}

// ── what is said where the pulse arrives ───────────────────────────────────────────────────────────────────────────

const long = (/** @type {number | null | undefined} */ x) => `length ${number(x)}`;

/** @param {Row[]} rows @param {number} i @param {any} lengths @param {any} about */
function aboutForward(rows, i, { a }, { overview, heads }) {
  const { id, station, kind, label, top } = rows[i];
  if (!i) return `Forward: ${count(overview.tokens.length, "token")} enter.`;
  if (id === "loss") return `${overview.objective.label}: ${number(overview.objective.value)}. Here the backward pass begins.`;
  if (top) return `${label} in detail: what enters goes two ways, into a branch and past it.`;
  if (kind === "folded") return `${label}: it leaves with ${long(a[id])}.`;
  if (station.kind === "add") {
    const read = station.reads.map((/** @type {string | null} */ x) => number(a[x ?? enters(rows)]));
    return `${label}: what it joins has lengths ${listed(read)}; the result has ${long(a[id])}.`;
  }
  const most = station.kind === "attention" && heads?.[0].length !== undefined ? mostOf(heads, "length") : null;
  const split = most
    ? ` ${count(heads.length, "head")} side by side; the longest output is that of head ${most.head}, ${number(most.size)}.`
    : "";
  return `${label}: ${long(a[id])}.${split}`;
}

/** @param {Row[]} rows @param {number} i @param {any} lengths @param {any} about */
function aboutBackward(rows, i, { delta }, { overview, heads }) {
  const { id, station, kind, label, top } = rows[i];
  if (id === "loss") return `Backward: the error begins at the loss.`;
  if (!i) return `The backward pass is complete: every layer has its gradient.`;
  if (top) return `What went two ways comes back two ways, and is added: ${long(delta[id])} leaves ${label}.`;
  if (kind === "folded") return `${label}: an error of ${long(delta[id])} arrives at its output.`;
  if (station.kind === "add") return `${label}: the error, ${long(delta[id])}, goes two ways, into the branch and past it.`;
  const most = station.kind === "attention" && heads ? mostOf(heads, "incoming") : null;
  const split = most ? ` Of ${count(heads.length, "head")}, head ${most.head} receives most, ${number(most.size)}.` : "";
  return `${label}: an error of ${long(delta[id])} arrives.${split}`;
}

/** What enters the block that is shown. @param {Row[]} rows */
const enters = (rows) => rows[rows.findIndex((row) => row.top)].id;

/** @param {any[]} heads @param {string} what */
function mostOf(heads, what) {
  const sizes = heads.map((head) => head[what]);
  const size = Math.max(...sizes);
  return { head: sizes.indexOf(size) + 1, size };
}

/** 1, 2 and 3 @param {string[]} parts */
const listed = (parts) => `${parts.slice(0, -1).join(", ")} and ${parts[parts.length - 1]}`;
