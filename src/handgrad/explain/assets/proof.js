// The badge that says whether a station's formulas hold on this sentence, and the table of all checks.

import { get, offline } from "./api.js";
import { el } from "./dom.js";
import { number } from "./format.js";

const KINDS = { twin: "reference forward pass", autograd: "autograd", differences: "finite differences", identity: "identity", rounding: "model's precision" };
const WAITING = "… checking on this sentence";

export function proofCard(station, state) {
  const badge = el("p", { class: "badge wait", id: "badge", role: "status" }, WAITING);
  const body = el("div", {});
  const card = el("section", { class: "card proof", "aria-label": "Proof" }, badge, el("details", {}, el("summary", {}, "Show all checks"), body));
  const { id } = state.overview;
  const poll = async () => {
    let proof;
    try {
      proof = await get("proof", id, { station: station.id });
    } catch (reason) {
      badge.className = "badge wait";
      badge.textContent = reason.message;
      return;
    }
    showProof(badge, body, proof);
    if (proof.state === "measuring" && !offline && (card.isConnected || !card.dataset.seen)) setTimeout(poll, 250);
    card.dataset.seen = "yes";
  };
  poll();
  return card;
}

function showProof(badge, body, proof) {
  const worst = (kind) => Math.max(...proof.checks.filter((c) => c.kind === kind).map((c) => c.error ?? Infinity));
  const count = (kind) => proof.checks.filter((c) => c.kind === kind).length;
  if (proof.passed === null) {
    badge.className = "badge wait";
    badge.textContent = proof.problem ? `Not checked: ${proof.problem}` : WAITING;
  } else {
    const failed = proof.checks.filter((c) => !c.passed);
    const facts = [];
    if (count("autograd")) facts.push(`error against autograd ${error(worst("autograd"))}`);
    else if (count("twin")) facts.push(`error against a reference forward pass ${error(worst("twin"))}`);
    if (count("differences")) facts.push(`against finite differences ${error(worst("differences"))}`);
    else if (proof.state === "measuring") facts.push("against finite differences …");
    if (count("identity")) facts.push(`${count("identity")} ${count("identity") === 1 ? "identity holds" : "identities hold"}`);
    badge.className = `badge ${failed.length ? "bad" : "good"}`;
    const inherited = failed.some((c) => c.what.endsWith(", incoming"));
    badge.textContent = failed.length
      ? `✘ Check failed: ${failed[0].what} has error ${error(failed[0].error)}. ${inherited ? "The incoming error signal is already wrong: look for the fault in a later layer." : "The incoming error signal is correct: the fault is in this layer."}`
      : `✔ Verified on this sentence: ${facts.join(" · ")}`;
  }
  badge.dataset.state = proof.state;
  const rows = proof.checks.map((c) =>
    el("tr", { class: c.passed ? "" : "failed" }, el("td", {}, c.passed ? "✔" : "✘"), el("td", {}, c.what), el("td", {}, KINDS[c.kind]), el("td", { class: "figure" }, error(c.error)), el("td", { class: "figure" }, error(c.limit))),
  );
  const head = el("tr", {}, ["", "quantity", "compared with", "relative error", "limit"].map((t) => el("th", { scope: "col" }, t || el("span", { class: "unseen" }, "result"))));
  body.replaceChildren(
    el("p", { class: "soft" }, "Every formula is evaluated on this sentence in float64 and compared with torch's autograd and with finite differences of the loss. “Model's precision” compares what the model itself computed with the float64 result."),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Checks" }, el("table", { class: "checks" }, el("thead", {}, head), el("tbody", {}, rows))),
  );
}

const error = (x) => (x === null || x === Infinity ? "∞" : x === 0 ? "0" : number(x, 1));
