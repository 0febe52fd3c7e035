// @ts-check
// The view “Heads”: every head of every block as a small picture; choose one to enter it.

import { has } from "./api.js";
import { number } from "./format.js";
import { pixelsOf } from "./heat_paint.js";
import { headLink } from "./linked.js";
import { caption, choice, chips, leftBar, viewHead } from "./parts.js";
import { h, widget } from "./render.js";
import { savedFigure } from "./save.js";

const MAPS = { rho: "ρ, attention weights", sent: "error sent back between tokens" };
const KINDS = { rho: "a", sent: "size" };
const ABOUT = {
  rho: "Each square: tokens attending (rows) to tokens (columns).",
  sent: "Each square: the error that each token (row) sends back to each other token (column).",
};
let shown = "rho";

export const headsView = {
  id: "heads",
  title: "Heads",
  available: () => has("heads"),
  needs: () => ({ heads: ["heads", {}] }),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { heads }, actions) {
    const change = (/** @type {string} */ key) => {
      shown = key;
      actions.redraw();
    };
    const most = Math.max(...heads.blocks.flat().map((head) => head.incoming), 1e-300);
    return [
      viewHead("every layer at a glance", "All heads", choice("What to show", MAPS, shown, change)),
      h(
        "p.summary",
        `${ABOUT[shown]} Every head has its own scale. The bar below shows how much error reaches the ` +
          `head. Choose a head to enter it.`,
      ),
      savedFigure(
        {
          class: "card all-heads",
          key: "heads",
          title: MAPS[shown],
          python: heads.python[shown],
          values: () => table(heads),
          columnLabels: ["block", "head", "incoming error", "largest error between two tokens"],
        },
        heads.blocks.map((row, b) => (row.length ? block(row, b, most, state, actions) : null)),
        caption(heads.caption),
      ),
    ];
  },
};

const table = (heads) =>
  heads.blocks.flatMap((row, b) => row.map((head, i) => [b + 1, i + 1, head.incoming, head.sent_largest]));

function block(row, b, most, state, actions) {
  const items = row.map((head, i) => ({
    label: `Head ${i + 1} of block ${b + 1}: incoming error ${number(head.incoming)}`,
    title: `head ${i + 1} of block ${b + 1}: incoming error ${number(head.incoming)}`,
    data: { "data-head": `${b}.${i}`, "data-link": headLink(b, i) },
    content: [
      widget("picture", thumbnail, {
        picture: head[shown],
        kind: KINDS[shown],
        dark: document.documentElement.dataset.theme,
      }),
      leftBar(head.incoming / most, "size"),
    ],
  }));
  const { id } = state.table.stations.find((s) => s.block === b && s.kind === "attention");
  const here = state.station === id ? state.head : -1;
  const enter = (/** @type {number} */ i) => {
    state.head = i;
    actions.go(id, "backward");
  };
  return h(
    "div.head-row",
    { key: b },
    h("span.head-block", `block ${b + 1}`),
    chips({ label: `Heads of block ${b + 1}`, items, chosen: here, choose: enter, class: "thumbnails", moves: false }),
  );
}

/** A picture without labels, drawn once. @param {any} options */
function thumbnail(options) {
  const node = document.createElement("canvas");
  node.className = "thumbnail";
  node.setAttribute("aria-hidden", "true");
  let drawn = "";
  const update = (/** @type {any} */ { picture, kind, dark }) => {
    const key = `${picture.q} ${kind} ${dark}`;
    if (key === drawn) return;
    drawn = key;
    const pixels = pixelsOf(picture, kind);
    Object.assign(node, { width: pixels.width, height: pixels.height });
    node.getContext("2d")?.drawImage(pixels, 0, 0);
  };
  update(options);
  return { node, update };
}
