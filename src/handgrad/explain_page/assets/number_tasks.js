// @ts-check
// Exercises without code, which a page without a server can check: one number of a station each, computed by hand.

import { openTask, stateOfTask } from "./hand_task.js";
import { button, ofBlock, soft } from "./parts.js";
import { h } from "./render.js";

/** @typedef {[string, string, string, string]} Task  kind of the station, direction, question, what it shows */
/** @type {Task[]} */
const TASKS = [
  ["linear", "backward", "shape", "a gradient has the shape of its weight"],
  ["linear", "backward", "sign", "which tokens want a weight larger"],
  ["linear", "backward", "sum", "a gradient sums over the tokens"],
  ["attention", "forward", "sum", "a token gets a mixture of the values before it"],
  ["norm", "forward", "sum", "a norm shifts and scales a row"],
  ["add", "backward", "sum", "where two branches meet, their errors add up"],
  ["loss", "backward", "sign", "which words the loss pushes up, and which down"],
];
const QUESTIONS = { sum: "compute the number", sign: "say its sign", shape: "say the shape" };

/** @param {any} state @param {any} actions */
export function numberTasks(state, actions) {
  const { stations } = state.table;
  const found = TASKS.flatMap(([kind, direction, question, shows]) => {
    const ofKind = stations.filter((s) => s.kind === kind),
      last = ofKind.findLast((s) => s.block !== null)?.block,
      station = ofKind.find((s) => s.block === last) ?? ofKind[0];
    return station ? [{ station, direction, question, shows }] : [];
  });
  const item = ({ station, direction, question, shows }) => {
    const done = stateOfTask(station.id, direction, question, state);
    const title = `${station.title}${ofBlock(station.block)}, ${direction}: ${QUESTIONS[question]}`;
    const open = () => openTask(station.id, direction, question, state, actions);
    return h(
      "li",
      { key: `${station.id} ${direction} ${question}` },
      button(title, open, { class: "small", "data-task": `${station.kind} ${question}` }),
      h("span.soft", ` ${shows}`),
      done ? h("span", { class: done === "solved" ? "good" : "soft" }, done === "solved" ? " ✔ solved" : " · tried") : null,
    );
  };
  return h(
    "section.card",
    { "aria-label": "Numbers to compute", key: "numbers", id: "number-tasks" },
    h("h3", "Compute a number"),
    soft("Without programming: each opens By hand at a station of your sentence. Any other number counts too."),
    h("ol.tasks", found.map(item)),
  );
}
