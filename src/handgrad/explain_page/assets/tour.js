// @ts-check
// The tour: ten stops. Each scrolls to its subject, highlights it, and puts its box where it does not cover it.

import { button } from "./parts.js";
import { h, render } from "./render.js";
import { said, wordOf } from "./storyline.js";
import { freeCorner } from "./tour_place.js";

/** What Δ₁₂ and the push are, by what is explained. */
const FIRST_ERROR = {
  sentence:
    "Δ₁₂ is the predicted probabilities minus the truth, divided by the number of targets. The bars show the push " +
    "−Δ₁₂: right and blue means this token should have been more probable.",
  position:
    "In the row of the word that is explained, Δ₁₂ is the predicted probabilities minus the truth; in all other rows it " +
    "is 0. The bars show the push −Δ₁₂: right and blue means this token should have been more probable.",
  difference:
    "Δ₁₂ is 1 for the first of the two words that are compared, −1 for the second, and 0 everywhere else. The bars show " +
    "the push −Δ₁₂, which lowers the difference.",
};

/** Title, text, where to go, and the subject: what the text speaks of. */
const STOPS = [
  {
    title: "A model reads your sentence",
    subject: "#tokens",
    text: (/** @type {any} */ state) => {
      const { word, before, share } = wordOf(state);
      return (
        "The model has read the sentence above and has predicted the next token at every position. After " +
        `${said(before)} it gave ${said(word)} ${share}. The tour follows this word, down to its loss and back up.`
      );
    },
    where: { view: "station", station: "a_0", direction: "forward" },
  },
  {
    title: "The forward pass",
    subject: "#map",
    text:
      "Orange is the forward pass, from top to bottom on the left side of the map. Tokens become rows " +
      "of numbers, and each layer transforms them. The wider an arrow, the larger the numbers that " +
      "flow there.",
    where: { view: "station", station: "a_1", direction: "forward" },
  },
  {
    title: "Attention",
    subject: ".attention .squares figure",
    text:
      "Attention is the only layer in which tokens exchange information. The triangle shows how much " +
      "each token (row) takes from each other token (column). Choose another head: each head looks for " +
      "something different.",
    where: { view: "station", station: { kind: "attention", at: 0 }, direction: "forward" },
  },
  {
    title: "The residual stream",
    subject: ".lens",
    text:
      "The output of every branch is added to the residual stream, which runs straight through the " +
      "network. The lens shows what the model would predict if this were its last layer.",
    where: { view: "station", station: { kind: "add", at: 0 }, direction: "forward" },
  },
  {
    title: "The loss",
    subject: ".loss-card .strip",
    text:
      "At every position the model gave the true next token some probability. The lower this " +
      "probability, the higher the loss. The position that is open is the one before the word of the " +
      "story; choose another one to compare.",
    where: { view: "station", station: "loss", direction: "backward" },
  },
  {
    title: "The first error signal",
    subject: ".loss-card .bars.push",
    text: (/** @type {any} */ { overview }) =>
      `${FIRST_ERROR[overview.objective.kind]} Everything in the backward pass is computed from this signal.`,
    where: { view: "station", station: "loss", direction: "backward" },
  },
  {
    title: "The backward pass",
    subject: ".formula.backward",
    text:
      "Blue is the backward pass, from bottom to top on the right side of the map. Each layer takes " +
      "the error at its output and computes the error at its input, by the formula shown here. It also " +
      "computes the gradients of its parameters.",
    where: { view: "station", station: "a_11", direction: "backward" },
  },
  {
    title: "Every formula is checked",
    subject: ".proof",
    text: (/** @type {any} */ { table, proofs }, /** @type {string} */ station) =>
      "The badge is a measurement: on this sentence, the formula is compared " +
      [
        table.torch ? "with automatic differentiation" : "",
        proofs?.[station]?.state === "autograd" ? "" : "with finite differences, which use no formula at all",
      ]
        .filter(Boolean)
        .join(" and ") +
      ". Open “Show all checks” to see each comparison.",
    where: { view: "station", station: { kind: "norm", at: -1 }, direction: "backward" },
  },
  {
    title: "Which tokens does the error reach?",
    subject: ".flow-card",
    text:
      "The whole backward pass at once: each row is a layer, each column a token. The stronger the " +
      "color, the more of the error of this layer arrives at this token.",
    where: { view: "flow" },
  },
  {
    title: "Now change the model",
    subject: ".controls",
    text: (/** @type {any} */ state) =>
      "The gradient predicts what a small step does to the loss. Take a step and compare. Then increase the learning rate " +
      `until the prediction fails. Unless the page is a file, you can also take steps until it says ${said(wordOf(state).word)}, ` +
      "and see what they do to other prompts.",
    where: { view: "step" },
  },
];

let at = 0; // index of the current stop
/** @type {any} */
let opener = null; // gets the focus back at the end
let marked = /** @type {Element | null} */ (null); // the highlighted subject

/** The server's note about the weights decides the first sentence. @param {string} note */
function aboutWeights(note) {
  if (/random|not trained/.test(note))
    return "This model is not trained: its weights are random, and so are its predictions. ";
  return /^trained/.test(note) ? "This model has been trained. " : "";
}

/** @param {HTMLElement} aside @param {any} state @param {(where: any) => Promise<void>} visit */
export function startTour(aside, state, visit) {
  opener = document.activeElement;
  at = 0;
  show(aside, state, visit);
}

/** @param {HTMLElement} aside */
export function endTour(aside) {
  aside.hidden = true;
  marked?.classList.remove("subject");
  marked = null;
  opener?.focus?.();
}

/** The first or the last station of a kind inside a block. @param {{ kind: string, at: number }} which @param {any} table */
const insideBlocks = ({ kind, at }, { stations }) => stations.filter((s) => s.block !== null && s.kind === kind).at(at).id;

/** The station of a stop, and its text. @param {number} index @param {any} state */
export function stopOf(index, state) {
  const { text, where } = STOPS[index];
  const station = typeof where.station === "object" ? insideBlocks(where.station, state.table) : where.station;
  const said = typeof text === "string" ? text : text(state, station ?? "");
  return { station, text: index ? said : aboutWeights(state.table.note) + said };
}

/** @param {HTMLElement} aside @param {any} state @param {(where: any) => Promise<void>} visit */
async function show(aside, state, visit) {
  const { title, where, subject } = STOPS[at];
  const mine = at;
  const { station, text } = stopOf(at, state);
  const move = (/** @type {number} */ by) => {
    at = Math.max(0, Math.min(STOPS.length - 1, at + by));
    show(aside, state, visit);
  };
  const last = at === STOPS.length - 1;
  aside.hidden = false;
  render(aside, [
    h("p.where", `Tour · ${at + 1} of ${STOPS.length}`),
    h("h2", { tabindex: "-1" }, title),
    h("p", text),
    h(
      "div.walk",
      button(last ? "done" : "end tour", () => endTour(aside), { id: "tour-end" }),
      button("back", () => move(-1), { id: "tour-back", disabled: at === 0 }),
      last ? null : button("next", () => move(1), { id: "tour-next", class: "primary" }),
    ),
  ]);
  /** @type {HTMLElement} */ (aside.querySelector("h2")).focus({ preventScroll: true });
  await visit({ ...where, ...(station ? { station } : {}) });
  if (mine !== at || aside.hidden) return;
  requestAnimationFrame(() => pointAt(aside, subject)); // after the heat maps have their size
}

/** @param {HTMLElement} aside @param {string} subject */
function pointAt(aside, subject) {
  marked?.classList.remove("subject");
  const panel = "[role=tabpanel]:not([hidden])";
  marked =
    document.querySelector(`${panel} ${subject}`) ??
    document.querySelector(subject) ??
    document.querySelector(`${panel} h2`); // the last token has no push
  if (!marked) return;
  marked.classList.add("subject");
  /** @type {HTMLElement | null} */ (marked.querySelector(".map-fold[aria-expanded=false]"))?.click(); // of a narrow page
  const narrow = innerWidth <= 860,
    box = marked.getBoundingClientRect();
  const room = narrow ? innerHeight - aside.offsetHeight : innerHeight;
  const top = box.height < room - 40 ? (room - box.height) / 2 : 20; // what does not fit is shown from its beginning
  scrollTo({ top: scrollY + box.top - top, behavior: "instant" });
  aside.dataset.pointed = String(at + 1);
  aside.dataset.corner = narrow
    ? "bottom"
    : freeCorner(marked.getBoundingClientRect(), aside.getBoundingClientRect(), innerWidth, innerHeight);
}
