// @ts-check
// The head of the page: the loss, and what a stored page lets the reader choose: a sentence, in place of the box in which one
// is typed, and a model; and what is shared.

import { has, model, models, sentences } from "./api.js";
import { count, number } from "./format.js";
import { select } from "./parts.js";
import { find, h, render } from "./render.js";
import { shareMenu } from "./share.js";
import { lastStep } from "./step.js";

/** Another model is another page. @param {any} state @param {string} name */
function openModel(state, name) {
  const view = state.view === "station" ? "station/a_1/forward" : state.view;
  location.assign(`?model=${encodeURIComponent(name)}#/${view}`);
}

/** @param {any} state @param {any} actions */
function drawChoices(state, actions) {
  const names = models.map(({ name, text }) => /** @type {[string, string]} */ ([name, text]));
  const choice = select({ id: "models", value: model }, names, (name) => openModel(state, name));
  render(find("chosen-model"), names.length < 2 ? [] : [h("label", { for: "models" }, "Model"), choice]);
  if (!sentences) return;
  find("sentence-form").classList.add("chosen");
  const choose = (/** @type {string} */ text) => {
    find("sentence").value = text;
    return actions.trace(text, { push: true, fresh: true });
  };
  const texts = sentences.map(({ text }) => /** @type {[string, string]} */ ([text, text]));
  const about = { id: "sentences", "aria-label": "Sentence", value: state.overview.text };
  render(find("chosen-sentence"), [select(about, texts, choose)]);
}

/** In an exported file only the step view shows new weights; the stations show the original ones.
 * @param {any} state @param {any} actions */
export function drawHeader(state, actions) {
  const last = !has("step") && state.view === "step" ? lastStep() : null;
  const loss = last ? last.measured : state.overview.loss,
    steps = last ? last.steps : state.overview.steps;
  find("loss").textContent = number(loss, 4);
  find("loss").dataset.value = loss;
  find("steps-taken").textContent = steps ? ` after ${count(steps, "step")}` : "";
  find("reset-weights").hidden = !steps || !has("sentence");
  drawChoices(state, actions);
  render(find("share"), [shareMenu(state)]);
}
