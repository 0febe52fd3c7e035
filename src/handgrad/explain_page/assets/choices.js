// @ts-check
// The choice of a stored sentence, in place of the box in which a sentence is typed, and the choice of a model.

import { model, models, sentences } from "./api.js";
import { select } from "./parts.js";
import { find, h, render } from "./render.js";

/** Another model is another page. @param {any} state @param {string} name */
function openModel(state, name) {
  const view = state.view === "station" ? "station/a_1/forward" : state.view;
  location.assign(`?model=${encodeURIComponent(name)}#/${view}`);
}

/** @param {any} state @param {any} actions */
export function drawChoices(state, actions) {
  render(find("chosen-model"), models.length < 2
    ? []
    : [h("label", { for: "models" }, "Model"),
       select({ id: "models", value: model }, models.map(({ name, text }) => [name, text]), (name) => openModel(state, name))]); // prettier-ignore
  if (!sentences) return;
  find("sentence-form").classList.add("chosen");
  const choose = (/** @type {string} */ text) => {
    find("sentence").value = text;
    return actions.trace(text, { push: true, fresh: true });
  };
  const texts = sentences.map(({ text }) => [text, text]);
  render(find("chosen-sentence"), [select({ id: "sentences", "aria-label": "Sentence", value: state.overview.text }, texts, choose)]);
}
