// @ts-check
// What has been solved, and the file with it for the teacher.

import { count } from "./format.js";
import { button, field, soft } from "./parts.js";
import { h } from "./render.js";
import { numbersByHand, resultText } from "./result_file.js";
import { address, download } from "./save.js";

let student = "";
let said = "";

/** @param {any[]} exercises  each with its newest progress @param {any} actions */
export function resultCard(exercises, actions) {
  const numbers = numbersByHand();
  const solved = (/** @type {any[]} */ list) => list.filter((x) => x.solved).length;
  const save = () => {
    download("learn.json", address(resultText(student, exercises), "application/json"));
    said = "saved as learn.json";
    actions.redraw();
  };
  return h(
    "section.card",
    { "aria-label": "Your result", key: "result", id: "result" },
    h("h3", "Your result"),
    h(
      "p",
      { id: "solved" },
      `${solved(exercises.map((e) => e.progress))} of ${count(exercises.length, "exercise")} and `,
      `${solved(numbers)} of ${count(numbers.length, "number")} by hand solved.`,
    ),
    h(
      "div.controls",
      field(
        "Your name",
        h("input", {
          type: "text",
          id: "student",
          autocomplete: "name",
          maxlength: "80",
          value: student,
          oninput: (/** @type {any} */ event) => (student = event.target.value),
        }),
      ),
      button("Save for the teacher", save, { id: "save-result" }),
      h("output", { id: "result-saved", "aria-live": "polite" }, said),
    ),
    soft(
      "The file has, for each task, whether and when it was solved, the attempts, hints and solutions taken, and a hash of the answer. " +
        "A hash of everything shows later changes. Nothing is sent: you hand it in.",
    ),
  );
}
