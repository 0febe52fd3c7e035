// @ts-check
// The lines of the map: which arrows and arcs connect its rows, and how wide they are.

const LINE = 26; // distance of the main line from the edge, in pixels
const BENDS = [8, 14, 20]; // distances from the edge of lines past other rows, the longest outside

/**
 * @typedef {{ y: number, id: string, block: number | null, top?: boolean }} Row  a row of the map; `top` is the
 * heading of an open block
 * @typedef {{ d: string, kind: "forward" | "backward", width: number, part: "flow" | "skip" | "tip", from: Row, to: Row,
 *   x: number, bend: number }} Line  from the row that is read to the row that reads it; the backward pass goes the other way
 */

/** Returns a function from length to stroke width, logarithmic between the smallest and the largest length.
 * @param {(number | null)[]} lengths */
export function widths(lengths) {
  const logs = lengths.filter((x) => x !== null && x > 0).map((x) => Math.log(/** @type {number} */ (x)));
  const least = Math.min(...logs),
    most = Math.max(...logs);
  return (/** @type {number | null} */ x) =>
    x && x > 0 ? 1.5 + (most > least ? (8 * (Math.log(x) - least)) / (most - least) : 4) : 0;
}

/** @param {Row[]} rows @param {number} wide @param {Record<string, number | null>} a @param {Record<string, number | null>} delta
 * @param {string} shown  "a", "delta" or "both"
 * @param {{ id: string, kind: string, block: number | null, reads: (string | null)[] }[]} stations @returns {Line[]} */
export function mapLines(rows, wide, a, delta, shown, stations) {
  const widthOf = { a: widths(Object.values(a)), delta: widths(Object.values(delta)) };
  /** @type {Line[]} */
  const lines = [];
  /** @param {Line["kind"]} kind @param {number} x @param {Row[]} between @param {number} from @param {number} to
   * @param {number} width */
  const arrow = (kind, x, between, from, to, width) => {
    if (!width) return;
    const way = Math.sign(to - from),
      half = width / 2 + 2.5,
      end = to - way * (5 + width / 3);
    const about = { kind, from: between[0], to: between[1], x, bend: x };
    lines.push({ ...about, part: "flow", width, d: `M${x} ${from}V${end}` });
    lines.push({ ...about, part: "tip", width: 0, d: `M${x - half} ${end}H${x + half}L${x} ${to}Z` });
  };
  /** @param {Line["kind"]} kind @param {number} width @param {Row} from @param {Row} to @param {number} bend */
  const skip = (kind, width, from, to, bend) => {
    const [x, edge] = kind === "forward" ? [LINE, bend] : [wide - LINE, wide - bend];
    const d = kind === "forward" ? arc(edge, x, from.y, to.y) : arc(edge, x, to.y, from.y);
    lines.push({ kind, part: "skip", width: Math.min(5, width), d, from, to, x, bend: edge });
  };
  const forward = shown !== "delta",
    backward = shown !== "a";
  const tops = new Map(rows.filter((row) => row.top).map((row) => [row.block, row]));
  /** What a row reads, as rows: of an open block by its stations, else the row before. @param {Row} row @param {number} i */
  const sources = (row, i) => {
    const top = row.block === null || row.top ? undefined : tops.get(row.block);
    const station = top && stations.find((s) => s.id === row.id);
    if (!top || !station) return [rows[i - 1]];
    const found = station.reads.map((id) => (id === null ? top : rows.find((other) => other.id === id && !other.top)));
    return found.filter((other) => other !== undefined);
  };
  /** @type {{ from: Row, to: Row, adds: boolean }[]} */
  const past = [];
  rows.forEach((row, i) => {
    if (!i) return;
    for (const from of sources(row, i)) {
      if (from !== rows[i - 1]) {
        past.push({ from, to: row, adds: stations.some((s) => s.id === row.id && s.kind === "add") });
        continue;
      }
      const between = [from, row];
      if (forward) arrow("forward", LINE, between, from.y + 5, row.y - 6, from.id === "a_0" ? 1.5 : widthOf.a(a[from.id]));
      if (backward && delta[from.id] !== null)
        arrow("backward", wide - LINE, between, row.y - 5, from.y + 6, widthOf.delta(delta[from.id]));
    }
  });
  for (const { from, to, adds } of past) {
    const size = (/** @type {{ from: Row, to: Row }} */ one) => one.to.y - one.from.y;
    const within = past.filter((one) => size(one) > size({ from, to }) && one.from.y < to.y && one.to.y > from.y);
    const bend = BENDS[Math.min(within.length, BENDS.length - 1)];
    if (forward) skip("forward", widthOf.a(a[from.id]), from, to, bend);
    const sent = adds ? delta[to.id] : delta[from.id]; // an addition sends its own Δ
    if (backward) skip("backward", widthOf.delta(sent), from, to, bend);
  }
  return lines.filter((line) => line.part === "tip" || line.width);
}

/** From (inner, from) out to the edge and back to (inner, to).
 * @param {number} edge @param {number} inner @param {number} from @param {number} to */
function arc(edge, inner, from, to) {
  const way = 16 * Math.sign(to - from);
  return (
    `M${inner} ${from}C${edge} ${from} ${edge} ${from} ${edge} ${from + way}V${to - way}C${edge} ` +
    `${to} ${edge} ${to} ${inner} ${to}`
  );
}

/** Where the dots of a row are. @param {Row[]} rows @param {number} wide @param {string} shown */
export const joints = (rows, wide, shown) =>
  rows.flatMap((row) => [
    ...(shown !== "delta" ? [{ x: LINE, y: row.y, kind: "forward" }] : []),
    ...(shown !== "a" ? [{ x: wide - LINE, y: row.y, kind: "backward" }] : []),
  ]);
