// @ts-check
// The badge that says whether a station's formulas hold on this sentence, and the table of all checks.

import { number } from "./format.js";
import { figureCell, foldable, soft, table, tr } from "./parts.js";
import { h } from "./render.js";

const KINDS = {
  twin: "reference forward pass",
  autograd: "autograd",
  differences: "finite differences",
  identity: "identity",
  rounding: "model's precision",
};
const WAITING = "… checking on this sentence";
/** What the table of checks holds. @param {any} proof @param {boolean} autograd  whether they compare with it */
export const aboutChecks = (proof, autograd) =>
  autograd
    ? "Every formula is evaluated on this sentence in float64 and compared with torch's autograd" +
      (proof?.state === "autograd"
        ? ". Finite differences were not computed."
        : " and with finite differences of the explained number along random directions.") +
      " “Model's precision” compares what the model itself computed with the float64 result."
    : "This page computes in float64, and compares every error signal and gradient with finite differences of the explained " +
      "number along random directions. To compare with torch's autograd as well, run handgrad explain.";

/** What the checks that have passed so far amount to. */
const STATES = {
  measuring: { style: "wait", text: "autograd ✔, finite differences running" },
  autograd: { style: "good", text: "autograd ✔, finite differences not computed" },
  failed: { style: "wait", text: "autograd ✔, finite differences broke off" },
  done: { style: "good", text: "✔ Verified on this sentence" },
};
const FAULTS = {
  incoming: "The incoming error signal is already wrong: look for the fault in a later layer.",
  twin: "The forward pass is wrong here: the fault is in this layer or in an earlier one.",
  rounding: "The formulas hold in float64: what the model computed differs by more than rounding explains.",
  here: "The incoming error signal is correct: the fault is in this layer.",
};

/** @param {number | null} x */
const error = (x) => (x === null || x === Infinity ? "∞" : number(x, 1));

/** @param {any} proof  the report on the station, or null while there is none @param {boolean} autograd */
export function proofCard(proof, autograd) {
  const { style, text } = badge(proof);
  const checks = proof?.checks ?? [];
  const rows = checks.map((c) =>
    tr(
      { class: c.passed ? null : "failed" },
      c.passed ? "✔" : "✘",
      c.what,
      KINDS[c.kind],
      figureCell(error(c.error)),
      figureCell(error(c.limit)),
    ),
  );
  const head = [h("span.unseen", "result"), "quantity", "compared with", "relative error", "limit"];
  return h(
    "section.card.proof",
    { "aria-label": "Proof", key: "proof" },
    h("p", { class: `badge ${style}`, id: "badge", role: "status", "data-state": proof?.state ?? "waiting" }, text),
    foldable("Show all checks", {}, soft(aboutChecks(proof, autograd)), table("Checks", head, rows, { class: "checks" })),
  );
}

/** What the badge says. @param {any} proof */
export function badge(proof) {
  if (!proof || proof.passed === null)
    return { style: "wait", text: proof?.problem ? `Not checked: ${proof.problem}` : WAITING };
  const of = (kind) => proof.checks.filter((c) => c.kind === kind);
  const worst = (kind) => error(Math.max(...of(kind).map((c) => c.error ?? Infinity)));
  const failed = proof.checks.find((c) => !c.passed);
  if (failed) {
    const inherited = proof.checks.some((c) => !c.passed && c.what.endsWith(", incoming"));
    const fault = FAULTS[inherited ? "incoming" : failed.kind] ?? FAULTS.here;
    return { style: "bad", text: `✘ Check failed: ${failed.what} has error ${error(failed.error)}. ${fault}` };
  }
  const facts = [];
  if (of("autograd").length) facts.push(`error against autograd ${worst("autograd")}`);
  else if (of("twin").length) facts.push(`error against a reference forward pass ${worst("twin")}`);
  if (of("differences").length) facts.push(`against finite differences ${worst("differences")}`);
  const held = of("identity").length;
  if (held) facts.push(held === 1 ? "1 identity holds" : `${held} identities hold`);
  const { style, text } = STATES[proof.state] ?? STATES.done;
  if (proof.problem) facts.push(proof.problem);
  return { style, text: `${text}: ${facts.join(" · ")}` };
}
