// @ts-check
// The view “Exercises”: the reader writes a backward function; the prover grades it on this sentence.

import { has, post } from "./api.js";
import { judgment } from "./exercise_result.js";
import { count } from "./format.js";
import { button, chips, field, ofBlock, select, soft, table, tr, viewHead } from "./parts.js";
import { numberTasks } from "./number_tasks.js";
import { resultCard } from "./result_card.js";
import { h, math } from "./render.js";

/**
 * @typedef {object} Work  what the reader has done with an exercise since the page was opened
 * @property {string} [code]
 * @property {string} [before]    the answer that “start again” has replaced
 * @property {string} [station]   whose numbers judge it
 * @property {number} [hints]     how many are shown
 * @property {boolean} [solution] whether it is shown
 * @property {any} [result]
 * @property {any} [progress]
 * @property {boolean} [busy]
 * @property {string} [problem]
 */

/** @type {Record<string, Work>} */
const work = {};

const workOf = (/** @type {any} */ exercise) => (work[exercise.name] ??= {});
const progressOf = (/** @type {any} */ exercise) => workOf(exercise).progress ?? exercise.progress;

/** The exercises of a station, as buttons that open them there. @param {any} station @param {any} state @param {any} actions */
export function exerciseButtons({ id, exercises }, state, actions) {
  if (!exercises.length || !has("learn")) return null;
  const open = (/** @type {string} */ name) => {
    state.exercise = name;
    Object.assign((work[name] ??= {}), { station: id });
    actions.open("exercises");
  };
  const opener = (/** @type {string} */ name) =>
    button(name, () => open(name), { class: "small", "data-open": name, key: name });
  return h("p.walk", { key: "exercises" }, "Write the backward pass yourself: ", exercises.map(opener));
}

export const exercisesView = {
  id: "exercises",
  title: "Exercises",
  available: () => has("learn"),
  needs: () => ({ course: ["learn", {}] }),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, { course }, actions) {
    const open = course.exercises.findIndex((e) => e.name === state.exercise);
    const next = course.exercises.findIndex((e) => !progressOf(e).solved);
    const exercise = course.exercises[open >= 0 ? open : Math.max(0, next)];
    state.exercise = exercise.name; // it stays open when it is solved
    const solved = course.exercises.filter((e) => progressOf(e).solved).length;
    return [
      viewHead(
        course.grading
          ? `${solved} of ${course.exercises.length} solved`
          : "to read; run handgrad explain to have answers judged",
        "Write the backward pass yourself",
      ),
      course.grading ? null : numberTasks(state, actions),
      picker(course, exercise, actions),
      task(exercise),
      course.grading ? editor(course, exercise, state, actions) : null,
      help(course, exercise, actions),
      course.grading ? numberTasks(state, actions) : null,
      resultCard(course.exercises.map((e) => ({ name: e.name, progress: progressOf(e) })), actions),
    ];
  },
};

function picker(course, exercise, actions) {
  const items = course.exercises.map((e) => ({
    content: [
      h("small", String(e.number)),
      h("b", e.title),
      progressOf(e).solved ? h("span.good", " ✔") : null,
    ],
    label: `Exercise ${e.number}: ${e.title}${progressOf(e).solved ? ", solved" : ""}`,
    data: { "data-exercise": e.name },
  }));
  const choose = (/** @type {number} */ i) => actions.select({ exercise: course.exercises[i].name });
  return chips({
    label: "Exercises",
    items,
    chosen: course.exercises.indexOf(exercise),
    choose,
    class: "strip course",
  });
}

/** A paragraph, or lines of formulas. @param {any} part @param {number} i */
const paragraph = ({ text, math: lines }, i) =>
  lines.length
    ? h(
        "div.task-math",
        { key: i, tabindex: "0", role: "region", "aria-label": "Formulas" },
        lines.map((line, k) => h("div", { key: k }, line.map(formula))),
      )
    : h("p", { key: i }, text);
const formula = (/** @type {string} */ mathml, /** @type {number} */ j) => math(String(j), { mathml });

function task(exercise) {
  const rows = (list, role) =>
    list.map((x) => tr({ key: x.name }, role, h("code", x.name), x.shape, x.meaning));
  return h(
    "section.card.task",
    { "aria-label": "Task", key: `task ${exercise.name}` },
    h("h3", `${exercise.number}. ${exercise.title}`),
    exercise.task.map(paragraph),
    table(
      "Arguments and results",
      ["", "name", "shape", "meaning"],
      [...rows(exercise.arguments, "given"), ...rows(exercise.returns, "to return")],
    ),
    soft(`Derived in ${exercise.page}.`),
  );
}

function editor(course, exercise, state, actions) {
  const mine = workOf(exercise);
  mine.code ??= exercise.progress.code || exercise.starter;
  const grade = async () => {
    if (mine.busy) return;
    Object.assign(mine, { busy: true, problem: "" });
    actions.redraw();
    try {
      const body = { id: state.overview.id, exercise: exercise.name, code: mine.code, station: mine.station ?? "" };
      mine.result = await actions.busy(post("learn/grade", body), () => "Running your answer…");
      mine.progress = mine.result.progress;
    } catch (reason) {
      mine.problem = /** @type {Error} */ (reason).message;
    }
    mine.busy = false;
    actions.redraw();
  };
  const replace = (/** @type {string | undefined} */ code, /** @type {string | undefined} */ before) => {
    actions.redraw(); // the renderer sees what was typed, or it would not see that it changes
    Object.assign(mine, { code, before, result: null });
    actions.redraw();
  };
  const restart = () => replace(exercise.starter, mine.code === exercise.starter ? mine.before : mine.code);
  return h(
    "section.card",
    { "aria-label": "Answer", key: `editor ${exercise.name}` },
    exercise.stations.length > 1 ? stationChoice(exercise, state, mine) : null,
    h(
      "textarea.editor",
      {
      id: "code",
      "aria-label": "Your backward function",
      spellcheck: "false",
      maxlength: course.max_code,
      rows: String(Math.min(28, Math.max(10, mine.code.split("\n").length + 1))),
      value: mine.code,
      oninput: (event) => (mine.code = event.target.value),
      onkeydown: indent,
      "aria-describedby": "editor-keys",
    },
    ),
    h(
      "div.walk",
      button(mine.busy ? "judging…" : "Check my answer", grade, {
        id: "grade",
        class: "primary",
        "aria-disabled": mine.busy ? "true" : null,
      }),
      button("start again", restart, { id: "restart" }),
      mine.before && mine.code === exercise.starter
        ? button("bring my answer back", () => replace(mine.before), { id: "undo" })
        : null,
    ),
    h("p.soft", { id: "editor-keys", key: "keys" }, "Tab indents. To leave the editor, press Escape, then Tab."),
    soft(`Your code runs on this machine only, when you press the button. ${course.confinement}`),
    mine.problem ? h("p.problem", { role: "alert" }, mine.problem) : null,
    mine.result
      ? judgment(
          mine.result,
          hintsShown(exercise) >= course.exact_after,
          course.exact_after,
          following(course, exercise, state, actions),
        )
      : solvedBefore(course, exercise, state, actions),
  );
}

/** The success screen of an exercise that was solved before the page was opened. */
function solvedBefore(course, exercise, state, actions) {
  const { solved, attempts } = progressOf(exercise);
  if (!solved) return null;
  return h(
    "div.judgment",
    { key: "judgment" },
    h("p", { class: "badge good", id: "judgment" }, `✔ Solved on ${solved.slice(0, 10)}, ${count(attempts, "attempt")}.`),
    following(course, exercise, state, actions),
  );
}

/** What to do after a right answer: the exercise stays until the reader goes on. */
function following(course, exercise, state, actions) {
  const open = course.exercises.filter((e) => !progressOf(e).solved);
  const next = open.find((e) => e.number > exercise.number) ?? open[0];
  if (!next) return h("p", { key: "next" }, "That was the last one: you have written every backward pass of a transformer.");
  const go = () => actions.select({ exercise: next.name });
  return h("p", { key: "next" }, button(`next: ${next.title}`, go, { id: "next" }));
}

function stationChoice(exercise, state, mine) {
  const options = exercise.stations.map((id) => {
    const station = state.table.stations.find((s) => s.id === id);
    return [id, station ? station.title + ofBlock(station.block) : id];
  });
  const value = mine.station ?? exercise.stations[0];
  return field(
    "judged with the numbers of this sentence at",
    select({ id: "exercise-station", value }, options, (id) => (mine.station = id)),
  );
}

/** Tab indents; Escape, then Tab, leaves the editor. @param {any} event */
function indent(event) {
  const box = event.target;
  if (event.key === "Escape") box.dataset.leave = "yes";
  else if (event.key === "Tab" && !event.shiftKey && !box.dataset.leave) {
    event.preventDefault();
    box.setRangeText("    ", box.selectionStart, box.selectionEnd, "end");
    box.dispatchEvent(new Event("input"));
  } else delete box.dataset.leave;
}

const hintsShown = (exercise) => Math.min(exercise.hints.length, workOf(exercise).hints ?? exercise.progress.hints);

function help(course, exercise, actions) {
  const mine = workOf(exercise),
    shown = hintsShown(exercise);
  const solution = mine.solution ?? false;
  const tell = async (what) => {
    if (!course.grading) return;
    try {
      mine.progress = await post("learn/shown", { exercise: exercise.name, what });
      actions.redraw();
    } catch {
      // only the count of hints is lost
    }
  };
  const hint = () => {
    mine.hints = shown + 1;
    actions.redraw();
    tell("hint");
  };
  const reveal = () => {
    mine.solution = true;
    actions.redraw();
    tell("solution");
  };
  return h(
    "section.card",
    { "aria-label": "Help", key: `help ${exercise.name}` },
    shown
      ? h("ol.hints", exercise.hints.slice(0, shown).map((text, i) => h("li", { key: i }, text)))
      : null,
    h(
      "div.walk",
      shown < exercise.hints.length
        ? button(`hint ${shown + 1} of ${exercise.hints.length}`, hint, { id: "hint" })
        : null,
      solution ? null : button("show the solution", reveal, { id: "solution" }),
    ),
    solution ? h("pre.solution", { tabindex: "0" }, exercise.solution) : null,
  );
}
