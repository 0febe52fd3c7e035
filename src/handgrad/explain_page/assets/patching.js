// @ts-check
// A part of the view “Compare”: what happens to the explained number if a part of this trace gets the values of the other
// one. All patches are predicted by ⟨Δ, a′ − a⟩; the chosen one is measured as well.

import { signed } from "./format.js";
import { heat, positioned } from "./heatmap.js";
import { button, caption, choice, field, select, soft } from "./parts.js";
import { h } from "./render.js";
import { forwardResult } from "./what_if.js";

let of = "a_3"; // the activation
/** @type {{ block: number, head: number | null, position: number } | null} */
let chosen = null;
let where = "one"; // the chosen position, or all
let pair = ""; // the traces that `chosen` belongs to

const WHERE = { one: "at this position", all: "at every position" };

/** What the part asks the server for. @param {any} state @param {string} other */
export function patchRequests(state, other) {
  const now = `${state.overview.id} ${other} ${of}`;
  if (now !== pair) chosen = null;
  pair = now;
  const requests = { patches: ["patch-map", { other, of }] };
  if (!chosen) return requests;
  const { block, head, position } = chosen;
  const at = { ...(head === null ? {} : { head }), ...(where === "one" ? { position } : {}) };
  return { ...requests, patched: ["patch", { other, of, block, ...at }] };
}

/** @param {any} state @param {any} patches @param {any} patched @param {any} actions */
export function patchSections(state, patches, patched, actions) {
  const show = () => actions.show({ push: false });
  const pick = (/** @type {any} */ cell) => {
    chosen = cell;
    show();
  };
  const kind = (/** @type {string} */ key) => {
    of = key;
    show();
  };
  const turn = (/** @type {string} */ key) => {
    where = key;
    show();
  };
  const labels = state.overview.tokens.map((/** @type {any} */ t) => t.label);
  return [
    h(
      "section.card.controls",
      { "aria-label": "Patching", key: "patching" },
      h("h3", "Patch from the other sentence"),
      soft(
        "A part of this trace gets the values a′ of the other one, and everything after it is computed again. " +
          "The gradient predicts the change of the explained number: ⟨Δ, a′ − a⟩. Choose a cell to measure it.",
      ),
      field("what is patched", select({ id: "patch-kind", value: patches.of }, kinds(patches), kind)),
    ),
    heat({
      key: "patches",
      title: patches.of === "a_3" ? "Predicted change by head, as block.head" : "Predicted change by block",
      caption: patches.caption,
      picture: patches.picture,
      kind: "delta",
      rowLabels: labels,
      columnLabels: patches.places.map(shortName),
      nameRow: positioned(labels),
      nameColumn: (column) => longName(patches.places[column]),
      entry: (row, column) => signed(patches.values[row][column], 4),
      values: () => patches.values,
      python: patches.python,
      selected: chosen?.position ?? -1,
      choose: (position, column) => {
        const [block, head] = patches.places[column];
        pick({ block, head, position });
      },
      chooses: "patches it and measures",
    }),
    largest(patches, pick),
    chosen && patched ? choice("Where", WHERE, where, turn) : null,
    chosen && patched
      ? forwardResult(patched, `With ${patched.label} from the other trace`, "⟨Δ, a′ − a⟩", "patch")
      : null,
  ];
}

const shortName = (/** @type {any} */ [block, head]) => (head === null ? `${block + 1}` : `${block + 1}.${head + 1}`);
const longName = (/** @type {any} */ [block, head]) =>
  head === null ? `block ${block + 1}` : `head ${head + 1} of block ${block + 1}`;

const kinds = (/** @type {any} */ patches) =>
  patches.kinds.map((/** @type {any} */ kind) => /** @type {[string, string]} */ ([kind.of, kind.label]));

/** The patches with the largest predicted change, as buttons. */
function largest(patches, pick) {
  if (!patches.largest.length) return null;
  const item = ({ label, predicted, ...cell }) => {
    const pressed = chosen !== null && JSON.stringify(cell) === JSON.stringify(chosen);
    const about = { class: "small", "aria-pressed": String(pressed), "data-value": predicted };
    return button(`${label}: ${signed(predicted)}`, () => pick(cell), { ...about, key: label });
  };
  return h(
    "section.card",
    { "aria-label": "Largest predicted changes", key: "largest" },
    caption("The largest predicted changes. Choose one to measure it."),
    h("div.walk", patches.largest.map(item)),
  );
}
