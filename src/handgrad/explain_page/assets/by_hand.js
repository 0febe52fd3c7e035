// @ts-check
// “By hand”: an entry of what a station computes, with the row and the column that it comes from, and all products. The reader is
// asked for the sum, its sign or the shape, and is told which kind of mistake a wrong answer is.

import { has } from "./api.js";
import { judgeShape, judgeSign, judgeSum, typedNumber } from "./by_hand_check.js";
import { count, number, quote, shapeOf, signed, visible } from "./format.js";
import { entryOf, headingOf, operandsOf, unpack } from "./hand_terms.js";
import { blankPicture } from "./heat_geometry.js";
import { heat, numbered, positioned } from "./heatmap.js";
import { asked, numberName } from "./hand_task.js";
import { later } from "./later.js";
import { button, caption, choice, chips, field, figureCell, ofBlock, rowHead, select, soft, table, tr } from "./parts.js";
import { h } from "./render.js";
import { countAnswer, countShown } from "./result_file.js";
import { savedFigure } from "./save.js";

const CLOSED = { name: "", row: null, column: null, head: null };
const QUESTIONS = { sum: "the sum", sign: "its sign", shape: "the shape" };
const WAYS = { forward: "forward pass", backward: "backward pass", gradient: "gradient" };
const MOST_OPERANDS = 4;
const BETWEEN = ["rho", "score", "scaled", "delta_causal", "delta_raw"]; // tokens × tokens
const OVER_VOCABULARY = ["a_12", "y_pred", "delta_12", "delta_0", "grad_w_11", "w_11"];
const TABLES = ["w_tok", "grad_w_tok"]; // a row for every token of the vocabulary

let allDigits = false;
/** @typedef {{ given: string[], attempts: number, verdict: any, shown: boolean }} Work */
/** @type {Map<string, Work>} */
const works = new Map();

/** @param {any} view @param {any} state @param {any} actions */
export function handCard(view, state, actions) {
  if (!view.by_hand.length) return null;
  const open = Boolean(state.hand);
  const toggle = () => actions.select({ hand: open ? null : CLOSED });
  return h(
    "section.card.hand",
    { "aria-label": "By hand", key: "hand", id: "hand" },
    h(
      "div.follow-head",
      h("h3", "By hand"),
      button(open ? "close" : "Compute a number yourself", toggle, {
        id: "hand-toggle",
        class: open ? "small" : null,
        "aria-expanded": String(open),
      }),
    ),
    open
      ? opened(view, state, actions)
      : caption("Every number of this station is a sum of products. Choose one, see what is multiplied, and compute it."),
  );
}

function opened(view, state, actions) {
  const result = resultOf(view, state),
    cell = cellOf(result, state.hand);
  const choose = (hand) => actions.select({ hand: { ...CLOSED, ...hand } });
  const entry = entryAt(result, cell, state, actions);
  const key = JSON.stringify([state.overview.id, result.name, cell.row, cell.column, cell.head, asked.question]);
  if (!works.has(key)) works.set(key, { given: ["", ""], attempts: 0, verdict: null, shown: false });
  const work = /** @type {Work} */ (works.get(key));
  const hidden = asked.question === "shape" && !work.shown;
  return [
    chips({
      label: "What to compute",
      items: view.by_hand.map((r) => ({
        content: r.symbol,
        label: `${r.symbol}, ${WAYS[r.way]}`,
        class: `small ${r.way === "forward" ? "forward" : "backward"}`,
        data: { "data-result": r.name },
      })),
      chosen: view.by_hand.indexOf(result),
      choose: (i) => choose({ name: view.by_hand[i].name }),
      class: "walk hand-results",
    }),
    entryChips(result, cell, state, choose),
    !entry
      ? soft("Computing…")
      : entry.problem
        ? h("p.problem", entry.problem)
        : [
            h("h4", { id: "hand-title" }, titleOf(result, cell, state)),
            entry.formula ? caption(h("code", entry.formula)) : null,
            matrices(result, cell, entry, { hidden, choose }, state, actions),
            products(result, cell, entry, asked.question !== "shape" && work.shown, state, actions),
            questionOn(result, cell, entry, work, state, actions),
          ],
  ];
}

/** The chosen result, or the one that the reader's direction asks for first. */
function resultOf({ by_hand: results }, { hand, direction }) {
  const of = (/** @type {string} */ way) => results.filter((r) => r.way === way);
  const chosen = results.find((r) => r.name === hand.name);
  return chosen ?? (direction === "forward" ? of("forward").at(-1) : of("gradient")[0] ?? of("backward").at(-1)) ?? results[0];
}

/** The chosen entry, or the first that is offered. */
function cellOf(result, { name, row, column, head }) {
  const given = name === result.name && row !== null && column !== null;
  if (!given) return result.cells[0];
  const stored = result.cells.find((c) => c.row === row && c.column === column && c.head === head);
  return stored ?? (!has("follow") ? result.cells[0] : { row, column, head: result.heads === null ? null : (head ?? 0), terms: null });
}

/** The terms: those that the page has, or those that the server computes. */
function entryAt({ name }, { row, column, head, terms }, state, actions) {
  if (terms) return unpack(terms);
  const found = later(state, actions, "follow", { name, row, column, ...(head === null ? {} : { head }) });
  return found && (found.problem ? { problem: found.problem } : entryOf(found.data));
}

const last = (/** @type {string} */ name) => name.split(".").at(-1) ?? "";
const isParameter = (/** @type {string} */ name) => /^(grad_)?[wbdum]_/.test(last(name));
const hasTokenRows = (/** @type {string} */ name) => !isParameter(name);

/** How an entry is called: row and column by their tokens, where they have one. */
function nameOf({ name }, { row, column }, { overview }) {
  const token = (/** @type {number} */ i) => `${quote(overview.tokens[i]?.label ?? "")} (${i + 1})`;
  const r = hasTokenRows(name) ? token(row) : row;
  return `[${r}, ${BETWEEN.includes(last(name)) ? token(column) : column}]`;
}

const headText = (/** @type {number | null} */ head) => (head === null ? "" : `, head ${head + 1}`);

function titleOf(result, cell, state) {
  const block = /^blocks\.(\d+)/.exec(result.name);
  return `${result.symbol}${ofBlock(block && Number(block[1]))}${headText(cell.head)} ${nameOf(result, cell, state)} = ?`;
}

function entryChips(result, cell, state, choose) {
  const items = result.cells.map((c) => ({
    content: `${nameOf(result, c, state)}${headText(c.head)}`,
    label: `entry ${nameOf(result, c, state)}${headText(c.head)}`,
    class: "small",
  }));
  const chosen = result.cells.findIndex((c) => c.row === cell.row && c.column === cell.column && c.head === cell.head);
  const heads = (/** @type {number} */ n) => Array.from({ length: n }, (_, i) => /** @type {[any, string]} */ ([i, `head ${i + 1}`]));
  return h(
    "div.walk.hand-entries",
    chips({ label: "Entries to compute", items, chosen, choose: (i) => choose({ name: result.name, ...result.cells[i] }), class: "walk" }),
    result.heads !== null && has("follow")
      ? select({ "aria-label": "Head", id: "hand-head", value: cell.head }, heads(result.heads), (head) =>
          choose({ name: result.name, ...cell, head: Number(head) }),
        )
      : null,
    soft(
      !has("follow")
        ? "This file has the terms of these entries; handgrad explain has those of every entry."
        : "Or choose any entry in the matrix of the result.",
    ),
  );
}

// ── the matrices ───────────────────────────────────────────────────────────────────────────────────────────────────

/** The matrices that are multiplied, with the row and the column of this entry, and the result. */
function matrices(result, cell, entry, { hidden, choose }, state, actions) {
  const operands = operandsOf(entry),
    shown = operands.slice(0, MOST_OPERANDS);
  const figures = shown.map((operand) => figure(operand, entry.shapes[operand.name], null, state, actions));
  const chosen = !has("follow") ? null : (row, column) => choose({ name: result.name, row, column, head: cell.head });
  const target = { ...result, ...cell };
  return [
    h(
      "div.hand-matrices",
      { key: "matrices", role: "group", "aria-label": "What is multiplied, and the result" },
      figures,
      figure(target, hidden ? null : result.shape, { choose: chosen, hidden }, state, actions),
    ),
    operands.length > shown.length
      ? soft(`Matrices with smaller terms that take part, and are not shown: ${count(operands.length - shown.length)}.`)
      : null,
  ];
}

function figure({ name, symbol, head, row, column }, shape, target, state, actions) {
  const labels = state.overview.tokens.map((t) => t.label),
    short = last(name);
  const found = pictureOf(name, head, state, actions);
  const known = found ?? (shape ? blankPicture(shape) : null);
  const lines = row !== null && column === null ? `row ${row}` : column !== null && row === null ? `column ${column}` : "";
  const title = `${symbol}${headText(head)}${lines && !target ? ` · ${lines}` : ""}`;
  if (!known || target?.hidden)
    return h(
      "figure.heat",
      { key: `${name} ${head}` },
      h("figcaption", h("span.heat-title", title)),
      soft(target?.hidden ? "? × ?" : "…"),
    );
  const words = OVER_VOCABULARY.includes(short) ? "token id" : "feature";
  const drawn = heat({
    key: `${name} ${head}`,
    title,
    caption: found ? "" : "Its colors are not in this file.",
    picture: known,
    shape: known.shape,
    kind: /^(delta|grad|G|mean_G)/.test(short) ? "delta" : "a",
    name: found ? name : null,
    head,
    sentence: state.overview.id,
    lit: { row, column },
    ...(hasTokenRows(name) && known.shape[0] === labels.length ? { rowLabels: labels, nameRow: positioned(labels) } : {}),
    ...(TABLES.includes(short) ? { nameRow: numbered("token id") } : {}),
    nameColumn: BETWEEN.includes(short) ? positioned(labels) : numbered(isParameter(name) ? "column" : words),
    ...(found ? {} : { scale: ["", ""] }),
    ...(target?.choose ? { choose: target.choose, chooses: "computes this entry" } : {}),
  });
  return h("div", { key: `of ${name} ${head}`, class: found ? null : "blank" }, drawn);
}

/** The colors of a matrix: from the server, or from the stations that the file has; null while they are not there. */
function pictureOf(name, head, state, actions) {
  if (has("slice")) {
    const found = later(state, actions, "slice", { name, ...(head === null ? {} : { head }) });
    return found?.data ?? null;
  }
  const { stations } = state.table,
    at = stations.findIndex((s) => s.id === state.station),
    here = stations[at];
  const first = here.block === null ? at : stations.findIndex((s) => s.block === here.block); // reads what comes before it
  const before = here.reads.map((id) => id ?? stations[first - 1]?.id);
  for (const station of new Set([here.id, ...before].filter(Boolean))) {
    const view = later(state, actions, "station", { station })?.data;
    const map = [...(view?.maps ?? []), ...(view?.parameters ?? [])].find((m) => m.name === name && !m.vocabulary);
    if (map?.picture) return map.picture;
  }
  if (head === null || !here.more.includes("head")) return null;
  const maps = later(state, actions, "head", { block: here.block, head })?.data;
  return maps ? ({ ...maps.maps, ...maps.vectors }[last(name)]?.picture ?? null) : null;
}

// ── the products ───────────────────────────────────────────────────────────────────────────────────────────────────

const typeset = (/** @type {string} */ digits) =>
  allDigits ? (digits.includes("e") ? number(Number(digits), 9) : digits.replace("-", "−")) : number(Number(digits), 3);

/** What a term belongs to. */
function placeOf({ place, factors }, { overview }) {
  if (typeof place === "number") return `${quote(overview.tokens[place].label)} (position ${place + 1})`;
  if (typeof place === "string") return quote(place);
  return place === null ? factors.map((f) => f.symbol).join(" · ") : `feature ${place[0]}`;
}

function products(result, cell, entry, shown, state, actions) {
  const width = Math.max(...entry.terms.map((t) => t.factors.length)),
    scaled = entry.terms.some((t) => t.scale !== 1);
  const headings = Array.from({ length: width }, (_, k) => headingOf(entry, k));
  const factorCell = (/** @type {any} */ f, /** @type {number} */ k) =>
    f ? figureCell(`${headings[k] === null ? `${f.symbol} ` : ""}${typeset(f.digits)}`, { "data-value": f.digits }) : h("td", "");
  const rows = entry.terms.map((term, i) =>
    tr(
      { key: i },
      rowHead(placeOf(term, state)),
      headings.map((_, k) => factorCell(term.factors[k], k)),
      scaled ? figureCell(number(term.scale), { "data-scale": term.scale }) : [],
      shown ? figureCell(signed(term.value), { "data-term": term.value }) : [],
    ),
  );
  const others = entry.count - entry.terms.length;
  if (others)
    rows.push(
      tr(
        { key: "rest" },
        rowHead(`${count(others)} smaller products, added up`),
        h("td", { colspan: String(width + (scaled ? 1 : 0)) }, shown ? "" : number(entry.rest, allDigits ? 9 : 3)),
        shown ? figureCell(signed(entry.rest), { "data-term": entry.rest }) : [],
      ),
    );
  const head = ["of", ...headings.map((x, k) => x ?? `factor ${k + 1}`), ...(scaled ? ["× "] : []), ...(shown ? ["product"] : [])];
  const title = `The factors of ${result.symbol} ${nameOf(result, cell, state)}`;
  return savedFigure(
    {
      key: "products",
      title,
      values: () => [
        ...entry.terms.map((t) => [...headings.map((_, k) => t.factors[k]?.digits ?? ""), ...(scaled ? [t.scale] : [])]),
        ...(others ? [[entry.rest]] : []),
      ],
      rowLabels: [...entry.terms.map((t) => visible(placeOf(t, state))), ...(others ? [`${others} smaller products, added up`] : [])],
      columnLabels: head.slice(1, 1 + width + (scaled ? 1 : 0)),
    },
    soft(
      width > 1 ? "Multiply the numbers of every row; the sum of the products is the entry. " : "The entry is their sum. ",
      button(allDigits ? "three digits" : "all digits", () => ((allDigits = !allDigits), actions.redraw()), {
        class: "small",
        id: "hand-digits",
      }),
    ),
    table(title, head, rows, { class: "digits", tall: true }),
  );
}

// ── the question ───────────────────────────────────────────────────────────────────────────────────────────────────

function questionOn(result, cell, entry, work, state, actions) {
  const { question } = asked,
    name = numberName(result.way, titleOf(result, cell, state), state);
  const check = (/** @type {any} */ verdict, given = work.given.join(" ").trim()) => {
    Object.assign(work, { verdict, attempts: work.attempts + 1 });
    countAnswer(name, verdict, given);
    if (verdict.right) work.shown = true;
    actions.redraw();
  };
  const place = (/** @type {number} */ k) => placeOf(entry.terms[k], state);
  return h(
    "div.hand-question",
    { key: `question ${question}` },
    choice("What to ask for", QUESTIONS, question, (key) => {
      asked.question = key;
      actions.redraw();
    }),
    { sum: sumForm, sign: signForm, shape: shapeForm }[question](result, entry, work, check, place),
    h(
      "p.verdict",
      { role: "status", id: "hand-verdict", class: styleOf(work.verdict), "data-kind": work.verdict?.kind },
      work.verdict?.text ?? "",
    ),
    work.shown
      ? answer(result, entry)
      : button("Show the answer", () => ((work.shown = true), countShown(name), actions.redraw()), { class: "small", id: "hand-show" }),
  );
}

/** @param {any} verdict */
const styleOf = (verdict) => `verdict ${verdict ? (verdict.right ? "good" : "problem") : ""}`;

/** @param {any} work @param {number} i @param {string} label @param {Record<string, any>} [attributes] */
const typed = (work, i, label, attributes) =>
  field(
    label,
    h("input", {
      type: "text",
      inputmode: "decimal",
      autocomplete: "off",
      value: work.given[i],
      oninput: (/** @type {any} */ event) => (work.given[i] = event.target.value),
      ...attributes,
    }),
  );

const form = (/** @type {() => void} */ submit, ...content) =>
  h(
    "form.controls",
    { onsubmit: (/** @type {Event} */ event) => (event.preventDefault(), submit()) },
    content,
    h("button.primary", { type: "submit", id: "hand-check" }, "Check"),
  );

function sumForm(result, entry, work, check, place) {
  const submit = () => check(judgeSum(typedNumber(work.given[0]), entry, work.attempts + 1, place));
  const label = `The sum of ${count(entry.count, "product")}`;
  return form(submit, typed(work, 0, label, { id: "hand-sum", placeholder: "−0.012 or 1.2e-5" }));
}

function signForm(result, entry, work, check) {
  const sign = (/** @type {string} */ text, /** @type {number} */ x) =>
    button(text, () => check(judgeSign(x, entry), text), { "data-sign": x });
  return h("div.walk", { role: "group", "aria-label": "The sign of the sum" }, sign("above 0", 1), sign("below 0", -1));
}

function shapeForm(result, entry, work, check) {
  const submit = () => {
    const given = work.given.map(typedNumber);
    check(judgeShape(given, result.shape, ...meaningOf(result)));
  };
  const rows = typed(work, 0, `Rows of ${result.symbol}`, { id: "hand-rows" });
  return form(submit, rows, typed(work, 1, "Columns", { id: "hand-columns" }));
}

/** What a row and a column of a result are. @returns {[string, string]} */
function meaningOf({ name, way, shape }) {
  const short = last(name);
  const word = "token of the vocabulary",
    over = OVER_VOCABULARY.includes(short);
  if (way !== "gradient") return ["token", BETWEEN.includes(short) ? "token" : over ? word : "feature"];
  if (shape[0] === 1) return ["vector", "number of it"];
  const input = TABLES.includes(short) ? word : short === "grad_w_pos" ? "position" : "input feature";
  return [input, over ? word : "output feature"];
}

function answer({ symbol, shape }, { sum, value, count: n }) {
  const same = Math.abs(sum - value) <= 1e-4 * Math.max(Math.abs(value), 1e-30);
  return asked.question === "shape"
    ? soft(`${symbol} is ${shapeOf(shape)}.`)
    : soft(
        `Sum of ${count(n, "product")}: `,
        h("b.sum", { "data-value": sum }, number(sum, allDigits ? 9 : 4)),
        "; the model has ",
        h("b", { id: "hand-value", "data-value": value }, number(value, allDigits ? 9 : 4)),
        same ? "." : ": it computes in lower precision.",
      );
}
