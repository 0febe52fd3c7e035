// @ts-check
// What the prover says about an answer: right, or what is wrong and where.

import { count, number } from "./format.js";
import { figureCell, soft, table, tr } from "./parts.js";
import { h } from "./render.js";

const MARKS = { right: "✔", wrong: "✘", unwritten: "…" };
const error = (/** @type {number | null} */ x) => (x === null ? "–" : number(x, 2));

/** @param {any} result @param {boolean} exactly whether the missing term is named @param {number} hints after which it is
 * @param {any} next what follows a right answer */
export function judgment(result, exactly, hints, next) {
  const { problem, passed } = result;
  const style = passed ? "good" : result.unfinished ? "wait" : "bad";
  const wrong = result.outputs.filter((o) => o.state === "wrong");
  const more = !exactly && wrong.some((o) => o.general !== o.sentence);
  const cases = result.cases.length && !problem ? `Judged on: ${result.cases.join("; ")}.` : "";
  return h(
    "div.judgment",
    { "aria-live": "polite", key: "judgment" },
    h(
      "p",
      { class: `badge ${style}`, id: "judgment" },
      passed
        ? "✔ Right, against autograd and finite differences."
        : `${result.unfinished ? "…" : "✘"} ${problem ? problem.message : result.summary}`,
    ),
    passed ? next : null,
    problem?.line ? h("pre", { tabindex: "0" }, `line ${problem.line}: ${problem.source}`) : null,
    wrong.map((o) => fault(o, exactly)),
    more ? h("p.soft", { id: "exactly" }, `Which one is named after ${count(hints, "hint")}.`) : null,
    problem ? null : outputs(result.outputs),
    [...result.notes, result.note_on_case]
      .filter(Boolean)
      .map((note, i) => h("p.caption", { key: `note ${i}` }, note)),
    result.printed ? h("pre", { tabindex: "0", key: "printed" }, result.printed) : null,
    cases ? soft(cases) : null,
  );
}

function fault(output, exactly) {
  const said = `${output.name} ${(exactly ? output.sentence : output.general) || "is wrong"}.`;
  const place = output.place
    ? ` At [${output.place.join(", ")}] it is ${number(output.yours)}; right is ${number(output.right)}.`
    : "";
  return h(
    "p.fault",
    { key: output.name, "data-fault": output.kind },
    output.start ? h("b", "Begin here: ") : null,
    output.kind ? h("b", `${output.kind}. `) : null,
    `${said}${place}`,
  );
}

function outputs(list) {
  const rows = list.map((o) =>
    tr(
      { key: o.name, class: o.state === "wrong" ? "failed" : null },
      MARKS[o.state],
      h("code", o.name),
      figureCell(error(o.error)),
      figureCell(error(o.difference)),
      o.case,
    ),
  );
  const unseen = h("span.unseen", "result");
  return table(
    "Results",
    [unseen, "result", "error against autograd", "against finite differences", "worst case"],
    rows,
    { class: "checks" },
  );
}
