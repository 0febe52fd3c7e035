// The tour for the first visit: ten stops.

import { el } from "./dom.js";

const STOPS = [
  ["A model reads your sentence", "The model has read the sentence above and has predicted the next token at every position. This page shows what happened inside the model while it did so.", { view: "station", station: "a_0", direction: "forward" }],
  ["The forward pass", "Orange is the forward pass, from top to bottom on the left side of the map. Tokens become rows of numbers, and each layer transforms them. The wider an arrow, the larger the numbers that flow there.", { view: "station", station: "a_1", direction: "forward" }],
  ["Attention", "Attention is the only layer in which tokens exchange information. The triangle shows how much each token (row) takes from each other token (column). Choose another head: each head looks for something different.", { view: "station", station: "blocks.0.a_3", direction: "forward" }],
  ["The residual stream", "The output of every branch is added to the residual stream, which runs straight through the network. The lens shows what the model would predict if this were its last layer.", { view: "station", station: "blocks.0.a_5", direction: "forward" }],
  ["The loss", "At every position the model gave the true next token some probability. The lower this probability, the higher the loss. Choose the position with the strongest colour.", { view: "station", station: "loss", direction: "backward" }],
  ["The first error signal", "Δ₁₂ is the predicted probabilities minus the truth, divided by the number of targets. Below 0 means: this token should have been more probable. Everything in the backward pass is computed from this signal.", { view: "station", station: "loss", direction: "backward" }],
  ["The backward pass", "Blue is the backward pass, from bottom to top on the right side of the map. Each layer takes the error at its output and computes the error at its input, by the formula shown here. It also computes the gradients of its parameters.", { view: "station", station: "a_11", direction: "backward" }],
  ["Every formula is checked", "The green badge is a measurement: on this sentence, the formula was compared with automatic differentiation and with finite differences, which use no formula at all. Open “Show all checks” to see each comparison.", { view: "station", station: "last block a_6", direction: "backward" }],
  ["Which tokens does the error reach?", "The whole backward pass at once: each row is a layer, each column a token. The stronger the colour, the more a small change there would change the loss.", { view: "flow" }],
  ["Now change the model", "The gradient predicts what a small step does to the loss. Take a step and compare. Then increase the learning rate until the prediction fails.", { view: "step" }],
];

// The server's note about the weights decides the first sentence.
function aboutWeights(note) {
  if (/random|not trained/.test(note)) return "This model is not trained: its weights are random, and so are its predictions. ";
  return /^trained/.test(note) ? "This model has been trained. " : "";
}

let at = 0; // index of the current stop
let opener = null; // gets the focus back at the end

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
    // without storage the tour starts on every visit
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
  const target = { ...where };
  if (target.station === "last block a_6") target.station = `blocks.${state.table.blocks - 1}.a_6`;
  visit(target).then(() => {
    // on a narrow page the box covers the lower half: scroll what it describes to the top
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
    el("p", {}, at ? text : aboutWeights(state.table.note) + text),
    el("div", { class: "walk" },
      el("button", { type: "button", id: "tour-end", onclick: () => endTour(aside) }, at === STOPS.length - 1 ? "done" : "end tour"),
      el("button", { type: "button", id: "tour-back", disabled: at === 0, onclick: () => move(-1) }, "back"),
      at < STOPS.length - 1 ? el("button", { type: "button", id: "tour-next", class: "primary", onclick: () => move(1) }, "next") : null),
  );
  aside.querySelector("h2").focus({ preventScroll: true });
}
