// One station: formula, maps, parameters, proof, lens and code, for the sentence at hand.

import { ask, offline } from "./data.js";
import { el, heatmap, low, math, number, paint, percent, size, svg, visible } from "./drawing.js";

const KINDS = { twin: "forward, by a twin", autograd: "autograd", differences: "finite differences", identity: "identity", rounding: "in the model's own precision" };
let shown = 0; // which request is the newest

/* Fills `panel` with the station of `state`. `tools` = { walk(by), turn(), choose({token, head}), busy(promise), again() } */
export async function drawStation(panel, state, tools) {
  const mine = ++shown;
  const station = state.table.stations.find((s) => s.id === state.station);
  const { id } = state.look;
  let view, head, lens;
  try {
    [view, head, lens] = await tools.busy(
      Promise.all([
        ask("station", id, { station: station.id }),
        station.index === 3 ? ask("head", id, { block: station.block, head: state.head }) : null,
        station.stream ? ask("lens", id, { station: station.id }) : null,
      ]),
    );
  } catch (reason) {
    if (mine !== shown) return;
    // nothing of another station stays under this one's name
    const again = el("button", { type: "button", id: "again", onclick: () => tools.again() }, "try again");
    panel.replaceChildren(heading(station, state, tools), el("p", { class: "problem" }, reason.message), el("p", {}, again));
    delete panel.dataset.station;
    throw reason;
  }
  if (mine !== shown) return;
  const labels = state.look.tokens.map((t) => t.label);
  const parts = [
    heading(station, state, tools),
    el("p", { class: "plain" }, station.words),
    formulas(station, state, view),
    proofCard(station, state),
  ];
  if (station.id === "a_0") parts.push(tokenTable(state, view));
  if (station.id === "loss") parts.push(lossCard(view, state, tools));
  if (head) parts.push(headCard(head, station, state, tools, labels));
  parts.push(maps(view, station, state, tools, labels), statistics(view));
  if (lens) parts.push(lensCard(lens, station, state, tools, labels));
  if (view.parameters.length) parts.push(parameters(view, state));
  parts.push(code(station, state));
  const keep = panel.scrollHeight;
  panel.style.minHeight = `${keep}px`; // no jump while the new parts are measured
  panel.replaceChildren(...parts.filter(Boolean));
  requestAnimationFrame(() => (panel.style.minHeight = ""));
  panel.dataset.station = station.id;
  panel.dataset.look = id;
}

function heading(station, state, tools) {
  const where = station.block === null ? "" : `Block ${station.block + 1} · `;
  const symbol = station.id === "loss" ? "" : ` a${low(station.index)}`;
  const down = state.face === "forward";
  return el(
    "div",
    { class: `station-head ${state.face}` },
    el("div", {}, el("p", { class: "where" }, `${where}${down ? "on the way down" : "on the way up"} · stop ${state.stop + 1} of ${state.stops}`), el("h2", {}, station.title, el("span", {}, symbol))),
    el(
      "div",
      { class: "walk", role: "group", "aria-label": "Walk" },
      el("button", { type: "button", id: "walk-back", onclick: () => tools.walk(-1) }, "← back"),
      el("button", { type: "button", id: "walk-turn", onclick: () => tools.turn(), "aria-pressed": String(!down) }, down ? "turn: go up" : "turn: go down"),
      el("button", { type: "button", id: "walk-on", class: "primary", onclick: () => tools.walk(1) }, "next →"),
    ),
  );
}

function formulas(station, state, view) {
  const shape = (kind) => view.maps.find((m) => m.kind === kind)?.shape;
  const row = (way, list) =>
    el(
      "div",
      { class: `formula ${way}${state.face === way ? " lit" : ""}` },
      el("h3", {}, way === "forward" ? "forward ↓" : "backward ↑"),
      el("div", { class: "lines-of-math" }, list.map((f) => el("div", { class: "math" }, el("div", { class: "side" }, f.math.map(math)), el("span", { class: "equation" }, /^\d/.test(f.equation) ? `(${f.equation})` : f.equation)))),
      el("p", { class: "shape" }, shapeText(way, station, shape)),
    );
  const errata = station.errata.map((id) => el("li", {}, el("b", {}, id), ` ${state.table.errata[id]}`));
  return el(
    "section",
    { class: "formulas", "aria-label": "Formulas" },
    row("forward", station.forward),
    row("backward", station.backward),
    errata.length ? el("details", { class: "errata" }, el("summary", {}, `${errata.length === 1 ? "An erratum" : `${errata.length} errata`} to the paper here: ${station.errata.join(", ")}`), el("ul", {}, errata)) : null,
  );
}

function shapeText(way, station, shape) {
  if (way === "forward") return shape("a") ? `${station.id === "loss" ? "y_pred" : `a${low(station.index)}`} is ${size(shape("a"))}` : "";
  const arriving = shape("delta");
  if (!arriving) return "";
  const sends = station.leaves.map((x) => x.replace(/^delta_/, "")).map((x) => (/^\d+$/.test(x) ? `Δ${low(x)}` : `Δ_${x}`));
  const name = station.id === "loss" ? "Δ₁₂" : `Δ${low(station.index)}`;
  if (station.id === "loss") return `Δ₁₂ is ${size(arriving)}; it is sent up`;
  return `${name} is ${size(arriving)}${sends.length ? `; sent further up: ${sends.join(", ")}` : station.id === "a_0" ? "" : "; here the way up ends"}`;
}

// ── proof ───────────────────────────────────────────────────────────────────────────────────────────────────────────

function proofCard(station, state) {
  const badge = el("p", { class: "badge wait", id: "badge", role: "status" }, "… being proven on this sentence");
  const body = el("div", {});
  const card = el("section", { class: "card proof", "aria-label": "Proof" }, badge, el("details", {}, el("summary", {}, "every check"), body));
  const { id } = state.look;
  const poll = async () => {
    let proof;
    try {
      proof = await ask("proof", id, { station: station.id });
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
    badge.textContent = proof.problem ? `no proof: ${proof.problem}` : "… being proven on this sentence";
  } else {
    const failed = proof.checks.filter((c) => !c.passed);
    const facts = [];
    if (count("autograd")) facts.push(`autograd ${error(worst("autograd"))}`);
    else if (count("twin")) facts.push(`a twin's forward pass ${error(worst("twin"))}`);
    if (count("differences")) facts.push(`finite differences ${error(worst("differences"))}`);
    else if (proof.state === "measuring") facts.push("finite differences …");
    if (count("identity")) facts.push(`${count("identity")} identit${count("identity") === 1 ? "y" : "ies"}`);
    badge.className = `badge ${failed.length ? "bad" : "good"}`;
    const arriving = failed.some((c) => c.what.endsWith("which arrives"));
    badge.textContent = failed.length
      ? `✘ wrong: ${failed[0].what} is off by ${error(failed[0].error)}. ${arriving ? "A wrong signal arrives here: the fault is further down the table." : "What arrives is right: the fault is here."}`
      : `✔ proven on this sentence: ${facts.join(" · ")}`;
  }
  badge.dataset.state = proof.state;
  const rows = proof.checks.map((c) =>
    el("tr", { class: c.passed ? "" : "failed" }, el("td", {}, c.passed ? "✔" : "✘"), el("td", {}, c.what), el("td", {}, KINDS[c.kind]), el("td", { class: "figure" }, error(c.error)), el("td", { class: "figure" }, error(c.limit))),
  );
  const head = el("tr", {}, ["", "what", "judge", "error", "limit"].map((t) => el("th", { scope: "col" }, t || el("span", { class: "unseen" }, "verdict"))));
  body.replaceChildren(
    el("p", { class: "soft" }, "Relative errors in float64: of the formula, on this sentence, against torch's autograd and against finite differences of the loss; and what the model has computed in its own precision."),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Checks" }, el("table", { class: "checks" }, el("thead", {}, head), el("tbody", {}, rows))),
  );
}

const error = (x) => (x === null || x === Infinity ? "∞" : x === 0 ? "0" : number(x, 1));

// ── maps and numbers ────────────────────────────────────────────────────────────────────────────────────────────────

function maps(view, station, state, tools, labels) {
  const says = { a: station.id === "loss" ? "probabilities" : "what flows down", delta: "the error that flows up" };
  const columnName = station.index >= 12 || station.id === "a_0" ? "word" : "feature";
  return el(
    "section",
    { class: "maps", "aria-label": "Maps" },
    view.maps.map((m) =>
      heatmap({
        title: `${m.symbol} · ${says[m.kind]}`, words: m.words, picture: m.picture, kind: m.kind, name: m.name, look: state.look.id,
        rowLabels: labels, columnName, chosen: state.token, positive: station.id === "loss" && m.kind === "a",
        choose: (row) => tools.choose({ token: row }),
      }),
    ),
  );
}

function statistics(view) {
  if (!view.maps.length) return null;
  const names = { norm: "length ‖·‖", mean: "mean", spread: "spread", least: "least", most: "most" };
  const head = el("tr", {}, el("td", {}), Object.values(names).map((n) => el("th", { scope: "col" }, n)));
  const rows = view.maps.map((m) =>
    el("tr", {}, el("th", { scope: "row", class: m.kind === "a" ? "forward" : "backward" }, m.symbol), Object.keys(names).map((k) => el("td", { class: "figure", title: m.statistics[k], "data-stat": `${m.kind} ${k}`, "data-value": m.statistics[k] }, number(m.statistics[k])))),
  );
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Statistics" }, el("table", { class: "statistics" }, el("thead", {}, head), el("tbody", {}, rows)));
}

function parameters(view, state) {
  const cards = view.parameters.map((p) => {
    const figures = el("p", { class: "figures" }, `${size(p.shape)} · length ${number(p.norm)}`, p.frozen ? el("span", { class: "soft" }, " · frozen") : el("span", { class: "backward", "data-grad": p.name, "data-value": p.grad_norm }, ` · ‖∂‖ ${number(p.grad_norm)}`));
    return el(
      "div",
      { class: "parameter" },
      el("h4", {}, p.symbol),
      figures,
      p.picture ? heatmap({ title: `∂${p.symbol.split(" ")[0]}`, picture: p.picture, kind: "delta", name: p.name, look: state.look.id, rowName: "row", columnName: "column", words: "" }) : null,
    );
  });
  return el("section", { class: "card", "aria-label": "Parameters" }, el("h3", {}, "Parameters here, and their gradients"), el("p", { class: "words" }, view.parameters_words), el("div", { class: "parameters" }, cards));
}

function code(station, state) {
  const block = (way) => {
    const names = station.sources.filter(([w]) => w === way).map(([, name]) => name);
    return el("div", {}, el("h4", { class: way }, way), names.map((name) => el("figure", { class: "code" }, el("figcaption", {}, `handgrad/${name}`), el("pre", { tabindex: "0" }, state.table.code[name]))));
  };
  return el("details", { class: "card" }, el("summary", {}, "The code that did exactly this"), el("div", { class: "codes" }, block("forward"), block("backward")));
}

// ── the lens ────────────────────────────────────────────────────────────────────────────────────────────────────────

function lensCard(lens, station, state, tools, labels) {
  const row = lens.rows[state.token];
  const strip = el(
    "div",
    { class: "strip", role: "group", "aria-label": "What each token would say here" },
    lens.rows.map((r, t) => {
      const right = r.target !== null && r.says[0].word === r.target;
      return el("button", { type: "button", "aria-pressed": String(t === state.token), class: right ? "right" : "", onclick: () => tools.choose({ token: t }), "aria-label": `after ${visible(labels[t])}: ${visible(r.says[0].word)}, ${percent(r.says[0].p)}${right ? ", which is right" : ""}` }, el("small", {}, visible(labels[t])), el("b", {}, visible(r.says[0].word)));
    }),
  );
  const bars = (list, kind, key, most, sign = 1) => el("ul", { class: `bars ${kind}` }, list.map((x) => bar(x.word, x[key], most, sign > 0 ? kind : `${kind} minus`, key === "p" ? percent(x[key]) : number(x[key]))));
  const most = Math.max(...[...row.towards, ...row.away].map((x) => Math.abs(x.change)), 1e-300);
  const pushed = row.towards.length
    ? [el("div", {}, el("h4", {}, "the correction pushes towards"), bars(row.towards, "delta", "change", most)), el("div", {}, el("h4", {}, "and away from"), bars(row.away, "delta", "change", most, -1))]
    : [el("p", { class: "soft" }, "No correction reaches this place: nothing with a target depends on it.")];
  return el(
    "section",
    { class: "card lens", "aria-label": "Lens" },
    el("h3", {}, `The lens: this stream in words, at ‘${visible(labels[state.token])}’`),
    el("p", { class: "words" }, row.words),
    strip,
    el("div", { class: "lens-columns" }, el("div", {}, el("h4", {}, "it would say already"), bars(row.says, "a", "p", 1)), pushed),
    el("p", { class: "soft" }, "Read through the last norm and the head. The push is the change of the logits along −Δ, to first order."),
  );
}

function bar(word, value, most, kind, text, target = false) {
  const fill = el("i", { class: `fill ${kind}` });
  fill.style.width = `${Math.max(1, (100 * Math.abs(value)) / most)}%`;
  return el("li", { class: target ? "target" : "" }, el("span", { class: "word" }, visible(word)), el("span", { class: "track" }, fill), el("span", { class: "figure" }, text));
}

// ── tokens and loss ─────────────────────────────────────────────────────────────────────────────────────────────────

function tokenTable(state, view) {
  const rows = view.swaps.map((s, t) => el("tr", {}, el("td", { class: "figure" }, t + 1), el("td", {}, el("b", {}, visible(state.look.tokens[t].label))), el("td", { class: "figure" }, s.id), el("td", {}, s.swaps.map((x) => `${visible(x.word)} ${number(x.change, 2)}`).join("   "))));
  const head = el("tr", {}, ["place", "token", "id", "words that would lower the loss here, to first order"].map((t) => el("th", { scope: "col" }, t)));
  return el("section", { class: "card", "aria-label": "Tokens" }, el("h3", {}, "The sentence as numbers"), el("p", { class: "words" }, view.swaps_words), el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Tokens and words in their place" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

function lossCard(view, state, tools) {
  const row = view.positions[state.token];
  const most = Math.max(...row.push.map((p) => Math.abs(p.delta)), 1e-300);
  const places = el(
    "div",
    { class: "strip", role: "group", "aria-label": "Places" },
    view.positions.map((p, t) => {
      const button = el("button", { type: "button", "aria-pressed": String(t === state.token), onclick: () => tools.choose({ token: t }), "aria-label": p.target === null ? `place ${t + 1}, no target` : `after ${visible(p.token)} the target ${visible(p.target)}, probability ${number(p.probability)}` }, el("small", {}, visible(p.token)), el("b", {}, p.target === null ? "–" : visible(p.target)));
      if (p.probability !== null) paint(button, "delta", 0.75 * (1 - p.probability));
      return button;
    }),
  );
  const detail =
    row.target === null
      ? el("p", { class: "soft" }, "The last token has no target here, so its row of Δ₁₂ is 0.")
      : el(
          "div",
          { class: "lens-columns" },
          el("div", {}, el("h4", {}, "what it would say"), el("ul", { class: "bars a" }, row.top.map((x) => bar(x.word, x.p, 1, "a", percent(x.p), x.word === row.target)))),
          el("div", {}, el("h4", {}, "Δ₁₂: the push it receives"), el("ul", { class: "bars signed" }, row.push.map((x) => signedBar(x, most))), el("p", { class: "soft" }, "Left of the middle: too improbable, pulled up. Right: too probable, pushed down.")),
        );
  return el(
    "section",
    { class: "card loss-card", "aria-label": "Targets and predictions" },
    el("h3", {}, "Where the way back begins"),
    el("p", { class: "words" }, view.loss_words),
    places,
    el("p", { class: "words", id: "push-words" }, row.words),
    detail,
  );
}

function signedBar(x, most) {
  const fill = el("i", { class: `fill delta ${x.delta < 0 ? "minus" : "plus"}` });
  fill.style.width = `${Math.max(0.5, (50 * Math.abs(x.delta)) / most)}%`;
  return el("li", { class: x.target ? "target" : "" }, el("span", { class: "word" }, visible(x.word)), el("span", { class: "track middle" }, fill), el("span", { class: "figure", "data-value": x.delta }, number(x.delta)));
}

// ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────

function headCard(head, station, state, tools, labels) {
  const most = Math.max(...head.heads.map((h) => h.arrives), 1e-300);
  const picker = el(
    "div",
    { class: "heads", role: "group", "aria-label": "Heads" },
    head.heads.map((h, i) => {
      const fill = el("i", {});
      fill.style.height = `${Math.max(4, (100 * h.arrives) / most)}%`;
      return el("button", { type: "button", "aria-pressed": String(i === head.head), "data-head-button": i, onclick: () => tools.choose({ head: i }), "aria-label": `Head ${i + 1}, error that arrives ${number(h.arrives)}` }, el("span", { class: "gauge", "aria-hidden": "true" }, fill), String(i + 1));
    }),
  );
  const square = (key, title, kind, positive, words) =>
    heatmap({ title, kind, positive, words, picture: head.maps[key].picture, name: key === "sent" ? null : head.maps[key].name, head: head.head, look: state.look.id, rowLabels: labels, columnLabels: labels, square: true, chosen: state.token, choose: (row) => tools.choose({ token: row }) });
  const vector = (key) => heatmap({ title: key, kind: "a", picture: head.vectors[key].picture, name: head.vectors[key].name, head: head.head, look: state.look.id, rowLabels: labels, chosen: state.token, words: "" });
  return el(
    "section",
    { class: "card attention", "aria-label": "Attention", "data-shown-head": head.head },
    el("h3", {}, `Head ${head.head + 1} of ${head.heads.length}`),
    el("p", { class: "soft" }, "Choose a head; the gauge is the error that arrives at it."),
    picker,
    el("p", { class: "words", id: "head-words" }, head.words),
    el(
      "div",
      { class: "squares" },
      square("rho", "ρ · who takes from whom", "a", true, "Rows look, columns are looked at. Each row sums to 1."),
      square("delta_raw", "Δ_raw · what the loss says to each pair", "delta", false, "Below 0: look there more. Above: look there less. Rows sum to 0."),
      square("sent", "error sent back, token to token", "delta", true, "From each row's token to each column's: length of ρ Δ wᵥᵗ + Δ_raw q wₖᵗ, through values and keys."),
    ),
    branches(head),
    el("details", {}, el("summary", {}, "queries, keys and values"), el("div", { class: "vectors" }, ["q", "k", "v"].map(vector))),
  );
}

// Δ_3 of the head parts into two branches, the second again into two, and all meet in Δ_2.
function branches(head) {
  const { value, query, key } = head.branches;
  const lengths = [head.arrives, value, query, key, head.joined].filter((x) => x > 0).map(Math.log);
  const [least, most] = [Math.min(...lengths), Math.max(...lengths)];
  const width = (x) => (x > 0 ? (2 + (most > least ? (10 * (Math.log(x) - least)) / (most - least) : 4)).toFixed(1) : "0");
  const line = (d, x) => svg("path", { d, class: "flow backward", "stroke-width": width(x), fill: "none" });
  const text = (x, y, content, anchor = "middle") => {
    const node = svg("text", { x, y, "text-anchor": anchor });
    node.textContent = content;
    return node;
  };
  const drawing = svg(
    "svg", { viewBox: "0 0 640 190", role: "img", "aria-label": `The error of this head: ${number(head.arrives)} arrives, ${number(value)} comes back through the values, ${number(query)} through the queries, ${number(key)} through the keys, together ${number(head.joined)}` },
    line("M70 95C130 95 130 35 190 35H450C510 35 510 95 570 95", value),
    line("M70 95C130 95 130 130 190 130H300", Math.max(query, key)),
    line("M300 130C350 130 340 100 390 100H450C510 100 510 95 570 95", query),
    line("M300 130C350 130 340 160 390 160H450C510 160 510 95 570 95", key),
    [[62, 95], [578, 95]].map(([cx, cy]) => svg("circle", { cx, cy, r: 8, class: "joint backward" })),
    text(62, 75, "Δ₃ʰ"), text(62, 122, number(head.arrives)),
    text(320, 22, `values: ρᵗ Δ wᵥᵗ  (22) · ${number(value)}`),
    text(222, 118, "scores: Δ_raw (25, 28)"),
    text(425, 88, `queries (30.a) · ${number(query)}`), text(425, 182, `keys (30.b) · ${number(key)}`),
    text(578, 75, "to Δ₂"), text(578, 122, number(head.joined)),
  );
  return el("figure", { class: "branches" }, el("figcaption", {}, "Two branches, and where they merge (33)"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Branches" }, drawing), el("p", { class: "words" }, `${head.branches_words} With all heads, Δ₂ has length ${number(head.all_heads)} (35).`));
}
