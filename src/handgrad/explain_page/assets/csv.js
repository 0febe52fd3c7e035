// @ts-check
// Tables of numbers as CSV, and the line of Python that makes a picture's data.

/** @param {any} cell */
const field = (cell) =>
  /[",\n\r]/.test(String(cell ?? "")) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell ?? "");

/** Rows of values, with the labels of rows and columns if there are any.
 * @param {any[][]} values @param {string[] | null} [rowLabels] @param {string[] | null} [columnLabels] */
export function csvText(values, rowLabels, columnLabels) {
  const rows = values.map((row, i) => (rowLabels ? [rowLabels[i], ...row] : row));
  const head = columnLabels ? [[...(rowLabels ? [""] : []), ...columnLabels]] : [];
  return [...head, ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

/** trace["blocks.0.rho"][2] @param {string} name @param {number | null} [head] */
export const pythonOf = (name, head) => `trace["${name}"]${head === null || head === undefined ? "" : `[${head}]`}`;
