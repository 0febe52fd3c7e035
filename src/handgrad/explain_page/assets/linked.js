// @ts-check
// Everything is linked: an element says in data-link what it stands for (token-3, head-2-0, feature-stream-17), several with
// spaces between. Pointing at it or focusing it lights whatever stands for the same: elements by one rule of a style sheet,
// pictures that draw themselves by a function that they register. A picture calls light() itself for what it points at.

/** The features of an activation, by the end of its name. @type {[string, string[]][]} */
const KINDS = [
  ["stream", ["1", "2", "4", "4_norm", "5", "6", "9", "9_norm", "10", "11"]],
  ["mixed", ["3"]],
  ["hidden", ["7", "8", "gate", "up"]],
];
/** The features that the rows and the columns of a weight's gradient stand for. @type {Record<string, string[]>} */
const WEIGHTS = {
  w_3: ["mixed", "stream"],
  w_6: ["stream", "hidden"],
  w_gate: ["stream", "hidden"],
  w_up: ["stream", "hidden"],
  w_8: ["hidden", "stream"],
};

export const tokenLink = (/** @type {number} */ t) => `token-${t}`;
export const headLink = (/** @type {number} */ block, /** @type {number} */ head) => `head-${block}-${head}`;

/** The features of a tensor of the trace, a or Δ: those of the residual stream are the same in every block.
 * @param {string} name @returns {string | null} */
export function spaceOf(name) {
  const [, block, letter] = /^(?:blocks\.(\d+)\.)?(?:a|delta)_(\w+)$/.exec(name) ?? [];
  return spaceIn(KINDS.find(([, letters]) => letters.includes(letter))?.[0], block);
}

const spaceIn = (/** @type {string | null | undefined} */ kind, /** @type {string | undefined} */ block) =>
  kind ? (kind === "stream" ? kind : `${kind}-${block}`) : null;

/**
 * @typedef {{ prefix: string, size: number }} Axis  entry i stands for prefix + the index of the group of `size` that holds it
 * @typedef {{ rows: Axis[], columns: Axis[], also: string[] }} Links  what the entries of a matrix stand for
 */

const axis = (/** @type {string | null} */ space) => (space ? [{ prefix: `feature-${space}-`, size: 1 }] : []);
const TOKENS = [{ prefix: "token-", size: 1 }];

/** What rows and columns of a tensor stand for. @param {string} name @param {number | null | undefined} head
 * @param {{ width: number, heads: number }} shape @returns {Links} */
export function linksOf(name, head, { width, heads }) {
  const [, block, last] = /^(?:blocks\.(\d+)\.)?(\w+)$/.exec(name) ?? [];
  const one = head === null || head === undefined || block === undefined ? [] : [headLink(Number(block), head)];
  if (["rho", "delta_raw", "sent"].includes(last)) return { rows: TOKENS, columns: TOKENS, also: one };
  if (["q", "k", "v"].includes(last)) return { rows: TOKENS, columns: [], also: [] };
  if (last?.startsWith("grad_")) {
    const [rows, columns] = (WEIGHTS[last.slice(5)] ?? [null, null]).map((kind) => axis(spaceIn(kind, block)));
    return { rows, columns, also: [] };
  }
  const space = spaceOf(name);
  const ofHeads = space?.startsWith("mixed") && width % heads === 0 ? [{ prefix: `head-${block}-`, size: width / heads }] : [];
  const rows = /^(a|delta)_/.test(last ?? "") ? TOKENS : [];
  return { rows, columns: [...axis(space), ...ofHeads], also: space ? [`space-${space}`] : [] };
}

/** What an entry stands for. @param {Links} links @param {number | null} row @param {number | null} column */
export const thingsAt = ({ rows, columns, also }, row, column) => [
  ...(row === null ? [] : rows.map(({ prefix, size }) => `${prefix}${Math.floor(row / size)}`)),
  ...(column === null ? [] : columns.map(({ prefix, size }) => `${prefix}${Math.floor(column / size)}`)),
  ...also,
];

/** The entries along an axis that stand for what is lit, first and after the last. @param {Axis[]} axes @param {string[]} things */
export const entriesLit = (axes, things) =>
  axes.flatMap(({ prefix, size }) =>
    things
      .filter((thing) => thing.startsWith(prefix) && /^\d+$/.test(thing.slice(prefix.length)))
      .map((thing) => Number(thing.slice(prefix.length)))
      .map((i) => [i * size, (i + 1) * size]),
  );

// ── what is lit ────────────────────────────────────────────────────────────────────────────────────────────────────

/** @type {string[]} */
let lit = [];
/** @type {CSSStyleSheet | null} */
let sheet = null;
/** Pictures that draw what is lit, each with its element. @type {Map<Element, (things: string[]) => void>} */
const pictures = new Map();

export const whatIsLit = () => lit;

/** Light all that stands for one of these. @param {string[]} things */
export function light(things) {
  if (things.join(" ") === lit.join(" ")) return;
  lit = things;
  if (!sheet) document.adoptedStyleSheets = [...document.adoptedStyleSheets, (sheet = new CSSStyleSheet())];
  const selectors = lit.map((thing) => `[data-link~="${thing}"]`).join(", ");
  sheet.replaceSync(selectors && `${selectors} { box-shadow: inset 0 0 0 2px var(--focus); }`);
  document.documentElement.dataset.lit = lit.join(" ");
  for (const [node, draw] of pictures) node.isConnected ? draw(lit) : pictures.delete(node);
}

/** Call `draw` with what is lit, as long as the element is on the page. @param {Element} node
 * @param {(things: string[]) => void} draw */
export const register = (node, draw) => void pictures.set(node, draw);

/** Listen to the pointer and to the focus, once for the whole page. */
export function listenToLinks() {
  const under = (/** @type {any} */ target) => target.closest?.("[data-link]")?.dataset.link.split(" ") ?? [];
  let at = "";
  document.addEventListener("pointerover", ({ target, pointerType, clientX, clientY }) => {
    const before = at;
    at = `${clientX} ${clientY}`;
    // a touch selects; and the page may have moved below a pointer that rests
    if (pointerType !== "touch" && at !== before) light(under(target));
  });
  document.addEventListener("focusin", ({ target }) => {
    if (/** @type {Element} */ (target).matches(":focus-visible")) light(under(target));
  });
}
