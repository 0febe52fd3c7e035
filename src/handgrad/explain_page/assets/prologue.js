// @ts-check
// The view “Prologue”: three stations with small integers, before the real model. One symbol at a time, each with a question.

import { judgeSum, typedNumber } from "./by_hand_check.js";
import { number, quote, shapeOf } from "./format.js";
import { button, caption, chips, field, foldable, rowHead, soft, viewHead } from "./parts.js";
import { numbers, TOKENS } from "./prologue_numbers.js";
import { STATIONS, STEPS } from "./prologue_steps.js";
import { h } from "./render.js";
import { countAnswer, countShown } from "./result_file.js";
import { symbolTable } from "./symbols.js";

const NUMBERS = numbers();
let at = 0; // index of the open step
/** @typedef {import("./by_hand_check.js").Verdict} Verdict */
/** @typedef {{ given: string[], attempts: number, verdict: Verdict | null, shown: boolean }} Work */
/** @type {Work[]} */
const works = STEPS.map(() => ({ given: ["", ""], attempts: 0, verdict: null, shown: false }));
const solved = (/** @type {Work} */ work) => Boolean(work.verdict?.right);

export const prologueView = {
  id: "prologue",
  title: "Prologue",
  needs: () => ({}),

  /** @param {any} state @param {any} data @param {any} actions */
  draw(state, data, actions) {
    const step = STEPS[at],
      work = works[at];
    const go = (/** @type {number} */ to) => {
      at = to;
      actions.redraw();
    };
    return [
      viewHead(
        `${works.filter(solved).length} of ${STEPS.length} answered · no model, small integers`,
        "A backward pass by hand, one symbol at a time",
        h(
          "div.walk",
          { role: "group", "aria-label": "Go to another step" },
          button("← back", () => go(at - 1), { id: "prologue-back", disabled: at === 0 }),
          at < STEPS.length - 1
            ? button("next →", () => go(at + 1), { id: "prologue-next", class: "primary" })
            : button("to the real model →", () => actions.go("a_1", "forward"), { id: "prologue-end", class: "primary" }),
        ),
      ),
      ...STATIONS.map((title, station) => picker(title, station, go)),
      h(
        "section.card.prologue",
        { "aria-label": step.title, key: "step", id: "prologue-step", "data-step": at },
        h("h3", `${step.station + 1}. ${STATIONS[step.station]} · ${step.title}`),
        caption(step.text(NUMBERS)),
        h("div.small-matrices", { key: at }, step.shows.map((shown) => matrix(shown, work.shown || solved(work)))),
        question(step, work, actions),
      ),
      soft("The rows and columns that are multiplied are marked. Point at a symbol, or tap it, to see what it means."),
      foldable("All symbols", { class: "card", key: "symbols", id: "all-symbols" }, symbolTable()),
    ];
  },
};

/** @param {string} title @param {number} station @param {(to: number) => void} go */
function picker(title, station, go) {
  const first = STEPS.findIndex((s) => s.station === station);
  const mine = STEPS.filter((s) => s.station === station);
  const items = mine.map((s, i) => ({
    content: [h("b", s.symbol), solved(works[first + i]) ? h("span.good", " ✔") : null],
    label: `${s.title}${solved(works[first + i]) ? ", answered" : ""}`,
    data: { "data-open-step": first + i },
  }));
  return h(
    "div.prologue-station",
    { key: `station ${station}` },
    h("span.soft", `${station + 1}. ${title}`),
    chips({ label: title, items, chosen: at - first, choose: (i) => go(first + i), class: "strip course" }),
  );
}

/** A matrix as a table.
 * @param {import("./prologue_steps.js").Shown} shown @param {boolean} known  whether the asked entries are shown */
function matrix({ name, of, rows, lit, hidden = [] }, known) {
  const values = NUMBERS[of];
  const isAsked = (/** @type {number} */ i, /** @type {number} */ j) => hidden.some(([r, c]) => r === i && c === j);
  const isLit = (/** @type {number} */ i, /** @type {number} */ j) => lit && (lit[0] ?? i) === i && (lit[1] ?? j) === j;
  const cell = (/** @type {number} */ x, /** @type {number} */ i, /** @type {number} */ j) =>
    isAsked(i, j) && !known
      ? h("td.figure.asked-for", { "aria-label": "asked for" }, "?")
      : h("td.figure", { class: `figure${isLit(i, j) ? " lit" : isAsked(i, j) ? " asked-for" : ""}`, "data-value": x }, number(x));
  const label = (/** @type {number} */ i) => (rows === "targets" ? `after ${quote(TOKENS[i])}` : quote(TOKENS[i]));
  return h(
    "figure.small-matrix",
    { key: name, "data-matrix": of },
    h("figcaption", h("span", name), h("span.shape", shapeOf([values.length, values[0].length]))),
    h(
      "table",
      { "aria-label": name },
      h(
        "tbody",
        values.map((row, i) => h("tr", { key: i }, rows ? rowHead(label(i)) : null, row.map((x, j) => cell(x, i, j)))),
      ),
    ),
  );
}

function question(step, work, actions) {
  const asked = step.ask(NUMBERS),
    name = `prologue, ${at + 1}: ${step.title}`;
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    work.attempts += 1;
    work.verdict = judge(work.given.slice(0, asked.answer.length).map(typedNumber), asked, work.attempts);
    countAnswer(name, work.verdict, work.given.join(" ").trim());
    actions.redraw();
  };
  const input = (/** @type {number} */ i) =>
    h("input", {
      type: "text",
      inputmode: "decimal",
      autocomplete: "off",
      id: `prologue-answer${i ? `-${i + 1}` : ""}`,
      "aria-label": asked.answer.length > 1 ? `${asked.label}: number ${i + 1}` : null,
      value: work.given[i],
      oninput: (/** @type {any} */ event) => (work.given[i] = event.target.value),
    });
  const { verdict } = work;
  return h(
    "div.hand-question.asked",
    { key: `question ${at}` },
    h(
      "form.controls",
      { onsubmit: submit },
      asked.answer.length > 1
        ? h("div.field", h("span", asked.label), h("span.walk", asked.answer.map((_, i) => input(i))))
        : field(`${asked.label}:`, input(0)),
      h("button.primary", { type: "submit", id: "prologue-check" }, "Check"),
    ),
    h(
      "p",
      {
        role: "status",
        id: "prologue-verdict",
        class: `verdict ${verdict ? (verdict.right ? "good" : "problem") : ""}`,
        "data-kind": verdict?.kind,
      },
      verdict?.text ?? "",
    ),
    work.shown || verdict?.right
      ? h("p.soft", { id: "prologue-why" }, `${asked.why}.`)
      : button("Show the answer", () => ((work.shown = true), countShown(name), actions.redraw()), { class: "small", id: "prologue-show" }),
  );
}

/** @param {number[]} given @param {import("./prologue_steps.js").Asked} asked @param {number} attempts */
export function judge(given, { answer, terms, mistakes = [] }, attempts) {
  const near = (/** @type {number} */ x, /** @type {number} */ y) => Math.abs(x - y) <= 5e-3 * Math.max(Math.abs(y), 0.1);
  if (given.some(Number.isNaN)) return { right: false, kind: "no number", text: "Write a number: 3, −0.5 or 1/2." };
  if (given.every((x, i) => near(x, answer[i]))) return { right: true, kind: "right", text: "Right." };
  if (answer.length > 1) {
    const swapped = given.every((x, i) => near(x, answer[answer.length - 1 - i]));
    return swapped
      ? { right: false, kind: "other column", text: "The 1 is in the column of the other token." }
      : { right: false, kind: "other", text: "One 1, in the column of the token; all others are 0." };
  }
  const known = mistakes.find(([, x]) => near(given[0], x));
  if (known) return { right: false, kind: known[0], text: known[2] };
  const parts = terms ?? [{ value: answer[0], factors: [], scale: 1 }];
  const name = (/** @type {number} */ k) => `${parts[k].factors.map((f) => number(f.value)).join(" · ")}`;
  const found = judgeSum(given[0], { terms: parts, rest: 0, sum: answer[0] }, attempts, name);
  return found.right || (!terms && found.kind !== "sign") ? { right: false, kind: "other", text: "Not yet." } : found;
}
