// Ten stops for the first visit, in plain words.

import { el } from "./drawing.js";

const STOPS = [
  ["A model reads your sentence", "It has read the sentence above, and at every place it has guessed what comes next. Everything you see is what happened inside while it did.", { view: "station", station: "a_0", face: "forward" }],
  ["Down the left side: forward", "Orange is the way down. Words become rows of numbers, and layer after layer works on them. The arrows are as wide as what flows is long.", { view: "station", station: "a_1", face: "forward" }],
  ["Tokens look at each other", "Attention is the only place where tokens meet. The triangle shows who takes from whom: a row looks, a column is looked at. Choose another head: each looks for something else.", { view: "station", station: "blocks.0.a_3", face: "forward" }],
  ["The stream goes straight on", "What a branch finds is added to the stream. With the lens you can read the stream in words: what would the model say if it had to speak here already?", { view: "station", station: "blocks.0.a_5", face: "forward" }],
  ["The loss: where it hurts", "At every place the model gave the true next token some probability. The smaller it was, the larger the loss. Choose the place with the darkest colour.", { view: "station", station: "loss", face: "backward" }],
  ["The turn", "Δ₁₂ is simply the probabilities minus the truth. Below zero: this word should have been more probable. This is the whole message; the rest of the way only translates it.", { view: "station", station: "loss", face: "backward" }],
  ["Up the right side: backward", "Blue is the way up. Each layer takes the error at its output and works out the error at its input, by the formula beside it. On the way the gradients of its parameters fall off.", { view: "station", station: "a_11", face: "backward" }],
  ["Proven, here and now", "The green badge is not a promise. On this very sentence the formula was compared with automatic differentiation and with finite differences, which know nothing of formulas. Open it to see every check.", { view: "station", station: "last block a_6", face: "backward" }],
  ["Whom does the loss blame?", "All at once: each row a depth, each column a token. The dark cells are where a change would matter most.", { view: "flow" }],
  ["Now change the model", "The gradient predicts what a small step will do. Take one, and see whether it was right. Then make the step longer, until it is not.", { view: "step" }],
];

// What the server says of the weights decides how the tour begins.
function weights(note) {
  if (/random|not trained/.test(note)) return "This model was not trained: its weights are random, and so are its guesses. ";
  return /^trained/.test(note) ? "This model was really trained. " : "";
}

let at = 0;
let opener = null;

export function startTour(aside, state, visit) {
  opener = document.activeElement;
  at = 0;
  show(aside, state, visit);
}

export function endTour(aside) {
  aside.hidden = true;
  try {
    localStorage.setItem("handgrad tour", "seen");
  } catch {
    // a file that may not remember asks again
  }
  opener?.focus?.();
}

export function seenTour() {
  try {
    return localStorage.getItem("handgrad tour") === "seen";
  } catch {
    return false;
  }
}

function show(aside, state, visit) {
  const [title, text, where] = STOPS[at];
  const place = { ...where };
  if (place.station === "last block a_6") place.station = `blocks.${state.table.blocks - 1}.a_6`;
  visit(place).then(() => {
    // where the page is narrow the box lies over its lower half: what it speaks of goes to the top
    if (matchMedia("(max-width: 860px)").matches) document.querySelector(at === 0 ? ".top" : at === 1 ? "#map" : "#main").scrollIntoView();
  });
  const move = (by) => {
    at = Math.max(0, Math.min(STOPS.length - 1, at + by));
    show(aside, state, visit);
  };
  aside.hidden = false;
  aside.replaceChildren(
    el("p", { class: "where" }, `Tour · ${at + 1} of ${STOPS.length}`),
    el("h2", { tabindex: "-1" }, title),
    el("p", {}, at ? text : weights(state.table.note) + text),
    el("div", { class: "walk" },
      el("button", { type: "button", id: "tour-end", onclick: () => endTour(aside) }, at === STOPS.length - 1 ? "done" : "leave"),
      el("button", { type: "button", id: "tour-back", disabled: at === 0, onclick: () => move(-1) }, "back"),
      at < STOPS.length - 1 ? el("button", { type: "button", id: "tour-next", class: "primary", onclick: () => move(1) }, "next") : null),
  );
  aside.querySelector("h2").focus({ preventScroll: true });
}
