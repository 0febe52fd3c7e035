// @ts-check
// The lens of a feed-forward layer: the neurons with the largest blame, what they write, and what the gradient would
// have them write, as words of the vocabulary.

import { filled } from "./colors.js";
import { number, quote, signed, visible } from "./format.js";
import { tokenLink } from "./linked.js";
import { caption, chips, soft } from "./parts.js";
import { h } from "./render.js";
import { savedFigure } from "./save.js";
import { whatIfButton } from "./what_if.js";

let chosen = 0; // index among the neurons shown

/** @param {any} found @param {any} state @param {any} actions */
export function neuronCard(found, state, actions) {
  const neuron = found.neurons[Math.min(chosen, found.neurons.length - 1)];
  const most = Math.max(...found.neurons.map((n) => Math.abs(n.blame)), 1e-300);
  const choose = (/** @type {number} */ i) => {
    chosen = i;
    actions.redraw();
  };
  const items = found.neurons.map((n) => ({
    content: [h("small", `neuron ${n.neuron}`), h("b", signed(n.blame, 2))],
    label: `Neuron ${n.neuron}, blame ${signed(n.blame)}`,
    style: filled("delta", (0.7 * n.blame) / most),
    data: { "data-neuron": n.neuron, "data-link": `feature-hidden-${found.block}-${n.neuron}` },
  }));
  const listed = (words) => words.map((x) => x.word).join(" ");
  return savedFigure(
    {
      class: "card neurons",
      key: "neurons",
      tag: "h3",
      attributes: { "aria-label": "Neurons" },
      title: `Neurons of block ${found.block + 1}: what they write, and what they should`,
      python: found.python,
      values: () =>
        found.neurons.map((n) => [n.neuron, n.blame, n.cosine, listed(n.writes.more), listed(n.would_write.more)]),
      columnLabels: ["neuron", "blame", "cosine", "writes", "should write"],
    },
    caption(found.caption),
    chips({ label: "Neurons with the largest blame", items, chosen: found.neurons.indexOf(neuron), choose }),
    soft(
      "Blame: Σ Δ₈ a₈, what the neuron adds to the explained number, to first order. Red: it raises it. Blue: it lowers it.",
    ),
    h(
      "div.lens-columns",
      words("it writes", "its row of w₈, read through the last norm and the head", neuron.writes),
      words("the gradient would have it write", "−∂ of that row", neuron.would_write),
      firing(neuron, found, actions, state),
    ),
    soft(`Cosine of what it writes and what it should: ${number(neuron.cosine)}.`),
    whatIfButton({ kind: "neuron", block: found.block, neuron: neuron.neuron }, `neuron ${neuron.neuron}`, actions),
  );
}

function words(title, what, { more, less }) {
  const chip = (kind) => (x) =>
    h("span", { class: `word-chip ${kind}`, title: `logit ${signed(x.logit)}` }, visible(x.word));
  return h(
    "div",
    h("h4", title),
    soft(what),
    h("p", h("span.soft", "more "), more.map(chip("up"))),
    h("p", h("span.soft", "less "), less.map(chip("down"))),
  );
}

/** When the neuron fires, and how the error pushes what makes it fire. */
function firing(neuron, found, actions, state) {
  const at = state.token;
  const most = Math.max(...neuron.values.map(Math.abs), 1e-300);
  const items = found.tokens.map((label, t) => ({
    content: visible(label),
    label: `${visible(label)}: ${number(neuron.values[t])}`,
    title: `a₈ = ${number(neuron.values[t])}, blame ${signed(neuron.by_token[t])}`,
    data: { "data-link": tokenLink(t) },
    style: filled("a", neuron.values[t] / most),
  }));
  const select = (/** @type {number} */ token) => actions.select({ token });
  const input = ([name, { values, push }]) =>
    h("li", { key: name }, `${name === "7" ? "a₇" : name} is ${number(values[at])}; push ${signed(push[at])}`);
  return h(
    "div",
    h("h4", "when it fires"),
    chips({ label: "How strongly the neuron fires", items, chosen: at, choose: select, class: "chips" }),
    soft(`At ${quote(found.tokens[at])}:`),
    h("ul.inputs", Object.entries(neuron.inputs).map(input)),
  );
}
