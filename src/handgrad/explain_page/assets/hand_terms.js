// @ts-check
// The terms of an entry: as `follow` answers them, and as an exported file stores them in little space; which cells of which
// matrices they come from.

/**
 * @typedef {{ name: string, symbol: string, head: number | null, row: number, column: number }} Cell
 * @typedef {{ value: number, symbol: string, digits: string, cell: Cell | null }} Factor
 * @typedef {{ value: number, factors: Factor[], scale: number, place: string | number | number[] | null }} Term  a token of the
 *   vocabulary, a position from 0, a feature in a list
 * @typedef {{ symbol: string, block: number | null, rowLabel: string | null, columnLabel: string | null, formula: string,
 *   count: number, terms: Term[], rest: number, sum: number, value: number,
 *   shapes: Record<string, number[]> }} Entry
 */

/** Terms over the tokens of the sentence in their order; others as they are, the largest first. @param {Term[]} terms */
const inOrder = (terms) =>
  terms.every((t) => typeof t.place === "number") ? terms.sort((a, b) => Number(a.place) - Number(b.place)) : terms;

const all = (/** @type {number} */ x) => String(Number(x.toPrecision(9)));

/** An answer of `follow`. @param {any} found @returns {Entry} */
export function entryOf(found) {
  const place = ({ token, position, feature }) =>
    token === null ? (feature === null ? null : [feature]) : position === null ? token : position - 1;
  const factor = ({ value, symbol, cell }) => ({ value, symbol, digits: all(value), cell });
  const { symbol, block, row_label, column_label, formula, count, sum, value } = found;
  return {
    symbol, block, rowLabel: row_label, columnLabel: column_label, formula, count, sum, value, rest: found.rest.value,
    terms: inOrder(found.terms.map((t) => ({ value: t.value, scale: t.scale, factors: t.factors.map(factor), place: place(t) }))),
    shapes: {},
  };
}

/** The same as a file has it: packed in views/by_hand.py. @param {any} stored @returns {Entry} */
export function unpack(stored) {
  const shapes = {};
  const terms = stored.parts.flatMap((part) =>
    part.terms.map(([place, ...rest]) => {
      const scale = Number(part.scale);
      const factors = part.names.map((name, k) => {
        const digits = rest.shift();
        if (name !== null) shapes[name] = part.shapes[k];
        const [row, column] = name === null ? [0, 0] : [rest.shift(), rest.shift()];
        const cell = name === null ? null : { name, symbol: part.tensors[k], head: part.heads[k], row, column };
        return { value: Number(digits), digits, symbol: part.symbols[k], cell };
      });
      return { value: factors.reduce((product, f) => product * f.value, scale), factors, scale, place };
    }),
  );
  const { symbol, block, row_label, column_label, formula, count } = stored;
  return {
    symbol, block, rowLabel: row_label, columnLabel: column_label, formula, count, shapes,
    terms: inOrder(terms.sort((a, b) => Math.abs(b.value) - Math.abs(a.value))),
    rest: Number(stored.rest), sum: Number(stored.sum), value: Number(stored.value),
  };
}

/** The matrices that the factors are entries of, those with the largest terms first, with the row or the column that they are in.
 * @param {Entry} entry */
export function operandsOf(entry) {
  const found = new Map();
  for (const { factors } of entry.terms)
    for (const { cell } of factors) {
      if (!cell) continue;
      const key = `${cell.name} ${cell.head}`;
      if (!found.has(key)) found.set(key, { ...cell, rows: new Set(), columns: new Set() });
      found.get(key).rows.add(cell.row);
      found.get(key).columns.add(cell.column);
    }
  return [...found.values()].map(({ name, head, symbol, rows, columns }) => {
    const only = (/** @type {Set<number>} */ some) => (some.size === 1 ? [...some][0] : null);
    return { name, head, symbol, row: only(rows), column: only(columns) };
  });
}

/** What all terms call their k-th factor, if it is the same in all that have one. @param {Entry} entry @param {number} k */
export function headingOf(entry, k) {
  const factors = entry.terms.map((t) => t.factors[k]).filter(Boolean);
  const names = new Set(factors.map((f) => `${f.symbol} ${f.cell?.name} ${f.cell?.head}`));
  if (names.size !== 1) return null;
  const [{ symbol, cell }] = factors,
    all = (/** @type {"row" | "column"} */ axis) => factors.every((f) => f.cell?.[axis] === cell?.[axis]);
  const head = cell && cell.head !== null ? `, head ${cell.head + 1}` : "";
  if (!cell || factors.length < 2 || all("row") === all("column")) return symbol + head;
  return `${symbol}${head}, ${all("row") ? `row ${cell.row}` : `column ${cell.column}`}`;
}
