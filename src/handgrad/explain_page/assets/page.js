// @ts-check
// Starts the page and draws it: loads what the current view needs, and redraws what an action changes.

import { allStops, formatAddress, parseAddress } from "./address.js";
import { get, has, post, sentences, storedId } from "./api.js";
import { showBetter } from "./better.js";
import { count, quote } from "./format.js";
import { drawHeader } from "./header.js";
import { redrawHeatmaps } from "./heatmap.js";
import { listen, fitSentence } from "./input.js";
import { drawMap } from "./network_map.js";
import { decodeObjective, encodeObjective } from "./objective.js";
import { button } from "./parts.js";
import { drawPlay, play } from "./play.js";
import { withProgress } from "./progress.js";
import { follow as followProofs } from "./proofs.js";
import { find, h, keepFocus, render } from "./render.js";
import { RequestError } from "./request_error.js";
import { state } from "./state.js";
import { discardSteps, lastStep } from "./step.js";
import { firstToken } from "./story.js";
import { withStory } from "./story_band.js";
import { drawTabs } from "./tabs.js";
import { targetBar } from "./target.js";
import { scrollToToken, tokenStrip } from "./tokens.js";
import { busy, setStatus } from "./status.js";
import { applyTheme, opensDark } from "./theme.js";
import { startTour } from "./tour.js";
import { VIEWS } from "./views.js";
import { answersTo } from "./work.js";

let newest = 0; // number of the newest sentence requested; older answers are ignored
let tracing = /** @type {Promise<string> | null} */ (null); // the newest trace, until it ends
let shownView = ""; // the view that was drawn last
let loaded = { key: "", /** @type {any} */ data: {}, problem: "" }; // what the current view has been given

// ── drawing ────────────────────────────────────────────────────────────────────────────────────────────────────────

const currentView = () => VIEWS.find((view) => view.id === state.view) ?? VIEWS[0];
const keyOf = () => JSON.stringify([state.view, state.overview.id, state.station, currentView().needs(state)]);

/** Draw everything that can be drawn now. The panel waits for the data of a newly opened view. */
function redraw() {
  if (!state.overview) return;
  const restoreFocus = keepFocus();
  document.documentElement.dataset.view = state.view;
  drawHeader(state, actions);
  drawTabs(find("tabs"), state, actions);
  render(find("tokens"), tokenStrip(state, actions));
  scrollToToken(find("tokens"), state);
  render(find("target"), targetBar(state, actions));
  drawMap(find("map"), state, actions);
  drawPlay(state, actions);
  const view = currentView(),
    panel = find(`view-${view.id}`);
  if (loaded.key === keyOf()) {
    render(panel, (loaded.problem ? failed(view) : contentOf(view)).filter(Boolean));
    if (loaded.problem) delete panel.dataset.station;
    else Object.assign(panel.dataset, { station: state.station, sentence: state.overview.id });
  }
  restoreFocus();
}

/** A view with its sentence of the story. @param {any} view */
function contentOf(view) {
  const content = view.draw(state, loaded.data, actions),
    views = VIEWS.filter((one) => !one.absent).map(({ id }) => id);
  return view.absent ? content : withStory(content, view.id, views, state, loaded.data, actions);
}

/** @param {any} view */
const failed = (view) => [
  view.heading?.(state, actions), // never the previous station under this one's name
  h("p.problem", loaded.problem),
  h("p", button("try again", () => actions.retry(), { id: "retry" })),
];

/** Load what the view needs, then draw it. @param {{ push?: boolean }} options */
async function show({ push = true } = {}) {
  if (push) setStatus("");
  const order = allStops(state.table.stations.map((/** @type {any} */ s) => s.id));
  state.stops = order.length;
  state.stop = order.findIndex(([id, direction]) => id === state.station && direction === state.direction);
  writeAddress(push);
  const key = keyOf();
  if (loaded.key !== key || loaded.problem) await load(key);
  redraw();
  const main = find("main");
  if (push && shownView !== state.view && main.getBoundingClientRect().top < 0) main.scrollIntoView(); // opened from far below
  shownView = state.view;
  followProofs(redraw);
}

/** @param {string} key */
async function load(key) {
  redraw(); // the map and the tabs move at once
  const panel = find(`view-${state.view}`);
  panel.setAttribute("aria-busy", "true");
  try {
    const data = await answersTo(currentView().needs(state), state.overview.id);
    if (key === keyOf()) loaded = { key, data, problem: "" };
  } catch (reason) {
    if (!(reason instanceof RequestError)) throw reason;
    if (key !== keyOf()) return;
    loaded = { key, data: {}, problem: reason.message };
    setStatus(reason.message, true);
  } finally {
    if (key === keyOf()) panel.removeAttribute("aria-busy");
  }
}

// ── the address ────────────────────────────────────────────────────────────────────────────────────────────────────

const choosesSentence = has("sentence") || sentences !== null;

/** Read the view from the address bar; return its sentence, whether it leaves the token to the page, and a message if it
 * names something that does not exist. */
function readAddress(hash = location.hash) {
  const here = parseAddress(hash);
  const knownView = VIEWS.some((view) => view.id === here.view);
  const knownStation = state.table.stations.some((/** @type {any} */ s) => s.id === here.station);
  state.view = knownView ? here.view : "start";
  if (knownStation) state.station = here.station;
  Object.assign(state, {
    direction: here.direction,
    head: Math.min(here.head, state.table.heads - 1),
    objective: here.objective, exercise: here.exercise, hand: here.hand,
  });
  const token = here.token ?? (state.overview ? firstToken(state.overview) : 0);
  state.token = Math.min(token, Math.max(0, (state.overview?.tokens.length ?? Infinity) - 1));
  let wrong = "";
  if (here.view && !knownView) wrong = `There is no view ${quote(here.view)}.`;
  else if (here.station && !knownStation) wrong = `There is no station ${quote(here.station)} in this model.`;
  return { text: here.text, fresh: here.token === null, wrong };
}

/** @param {boolean} push */
function writeAddress(push) {
  const text = choosesSentence && state.overview.text !== state.table.text ? state.overview.text : null;
  const token = !state.objective && state.token === firstToken(state.overview) ? null : state.token;
  const hash = formatAddress({ ...state, token, text });
  if (hash === location.hash) return;
  try {
    history[push ? "pushState" : "replaceState"](null, "", hash);
  } catch {
    // a notebook shows the page in a frame that has no address
  }
}

// ── the sentence ───────────────────────────────────────────────────────────────────────────────────────────────────

/** Show the sentence that `request` returns, unless another one was requested meanwhile.
 * @param {() => Promise<any>} request @param {boolean} push @param {boolean} fresh  whether the page chooses the token */
async function showTraced(request, push = false, fresh = false) {
  const mine = ++newest;
  const overview = await busy(withProgress(request()));
  if (mine !== newest) return;
  setStatus("");
  Object.assign(state, {
    overview,
    preview: null,
    proofs: null,
    proof: null,
    followed: [],
    objective: encodeObjective(overview.objective),
  });
  state.token = fresh ? firstToken(overview) : Math.min(state.token, overview.tokens.length - 1);
  await show({ push });
}

/** The version of the weights that the reader sees: those after the last step. */
const weights = () => lastStep()?.version ?? state.overview?.version ?? 0;

/** Show the predictions for the text in the box, without a trace. */
async function preview() {
  const text = find("sentence").value;
  try {
    const found = await post("predict", { text, version: weights() });
    if (text !== find("sentence").value) return;
    const known = text === state.overview?.text; // typed back to the traced sentence
    if (known) setStatus("");
    state.preview = known ? null : found;
    redraw();
  } catch (reason) {
    if (!(reason instanceof RequestError)) throw reason; // the trace will report what is wrong with the sentence
  }
}

/** Trace a sentence on the current weights. Returns an error message or "".
 * @param {string} text
 * @param {{ push?: boolean, fresh?: boolean, version?: number, wanted?: import("./objective.js").Wanted | null }} options */
async function computeTrace(text, { push = false, fresh = false, version = weights(), wanted = null } = {}) {
  discardSteps();
  if (state.table.large && state.overview) setStatus("Computing forward and backward pass…");
  const objective = wanted ?? decodeObjective(state.objective);
  const body = { text, version, ...(objective ? { objective } : {}) };
  const mine = newest + 1;
  try {
    await showTraced(() => (has("sentence") ? post("sentence", body) : get("overview", storedId(text))), push, fresh);
    return "";
  } catch (reason) {
    if (!(reason instanceof RequestError)) throw reason;
    if (mine !== newest) return ""; // another sentence was asked for meanwhile
    setStatus(reason.message, true);
    if (state.overview) state.objective = encodeObjective(state.overview.objective); // what is shown stays
    redraw();
    return reason.message;
  }
}

/** @type {typeof computeTrace} */
function trace(...given) {
  const mine = computeTrace(...given).finally(() => tracing === mine && (tracing = null));
  return (tracing = mine);
}

function showFollowed() {
  const card = find("follow");
  card?.scrollIntoView({ block: "nearest" });
  card?.querySelector("h3").focus({ preventScroll: true });
}

// ── what the views may do to the page ──────────────────────────────────────────────────────────────────────────────

const actions = {
  busy,
  redraw,
  setStatus,
  trace,
  traced: () => tracing,
  show,
  preview,

  play: () => play(state, actions),

  /** Open a view. @param {string} view */
  open(view) {
    state.view = view;
    return show();
  },

  /** Open a station. @param {string} station @param {string} direction @param {number} token */
  go(station, direction = state.direction, token = state.token) {
    const hand = state.hand && { name: "", row: null, column: null, head: null }; // stays open
    Object.assign(state, { view: "station", station, direction, token, hand, followed: [] });
    return show();
  },

  /** After a failed request. A number that cannot be followed is left. */
  retry() {
    setStatus("");
    state.followed = state.followed.slice(0, -1);
    return show({ push: false });
  },

  /** To the next stop (1) or the previous one (−1). @param {number} by */
  walk(by) {
    const order = allStops(state.table.stations.map((/** @type {any} */ s) => s.id));
    const [station, direction] = order[(state.stop + by + order.length) % order.length];
    return actions.go(station, direction);
  },

  /** To the station below (1) or above (−1) in the map. @param {number} by */
  step(by) {
    const ids = state.table.stations.map((/** @type {any} */ s) => s.id);
    return actions.go(ids[Math.max(0, Math.min(ids.length - 1, ids.indexOf(state.station) + by))]);
  },

  /** Between forward and backward. */
  turn() {
    state.direction = state.direction === "forward" ? "backward" : "forward";
    return show();
  },

  /** Select a token or a head. @param {{ token?: number, head?: number }} what */
  select(what) {
    Object.assign(state, what);
    return show({ push: false });
  },

  /** Follow one number of a matrix.
   * @param {string} name
   * @param {number} row
   * @param {number} column
   * @param {number | null} head */
  async follow(name, row, column, head) {
    if (!has("follow")) return actions.select({ token: row });
    const symbol = /** @type {string} */ (name.split(".").at(-1)).replace("grad_", "∂").replace("delta_", "Δ_");
    state.followed = [{ name, row, column, head, label: `${symbol} [${row}, ${column}]` }];
    await show({ push: false });
    showFollowed();
  },

  /** Follow a factor of the number that is being followed. @param {any} cell */
  async followInto(cell) {
    state.followed = [...state.followed, { ...cell, label: `${cell.symbol} [${cell.row}, ${cell.column}]` }];
    await show({ push: false });
    showFollowed();
  },

  /** Back to an earlier number, or to none. @param {number} length */
  followBack(length) {
    state.followed = state.followed.slice(0, length);
    return show({ push: false });
  },

  /** Change what is differentiated; null means the loss of the whole sentence. @param {any} wanted */
  async explain(wanted) {
    state.objective = null;
    return trace(state.overview.text, { push: true, fresh: Boolean(wanted), wanted });
  },

  /** From the story: to the loss, with the error of one position. @param {number} position */
  async followError(position) {
    Object.assign(state, { view: "station", station: "loss", direction: "backward", token: position });
    if (has("sentence")) await actions.explainWord(position);
    else await show();
  },

  /** Explain the loss of one word of the sentence in the box. @param {number} position */
  explainWord(position) {
    state.objective = null;
    return trace(find("sentence").value, { push: true, fresh: true, wanted: { kind: "position", position } });
  },

  /** Show a traced sentence by its id. @param {string} id */
  showSentence: (id) => showTraced(() => get("overview", id)),

  /** Show the sentence on the weights that the model was loaded with. */
  async resetWeights() {
    await trace(state.overview.text, { version: 0 });
  },
};

// ── start ──────────────────────────────────────────────────────────────────────────────────────────────────────────

/** @param {boolean} dark */
function setTheme(dark) {
  applyTheme(dark);
  redraw();
  redrawHeatmaps();
}

async function start() {
  find("opening").hidden = false;
  applyTheme(opensDark());
  try {
    state.table = await busy(get("table"));
    state.predicts = has("predict");
  } catch (reason) {
    find("opening").hidden = true;
    setStatus(/** @type {Error} */ (reason).message, true);
    return;
  }
  const t = state.table,
    address = location.hash;
  document.title = `${t.name} · handgrad explain`;
  showBetter(t.better);
  find("model").textContent =
    `${t.name} · ${count(t.blocks, "block")} · d = ${t.d} · ${count(t.parameters, "parameter")} · ${t.note}`;
  render(
    find("views"),
    VIEWS.map(({ id }) =>
      h("section", { role: "tabpanel", key: id, id: `view-${id}`, "aria-labelledby": `tab-${id}`, hidden: true }),
    ),
  );
  const wanted = readAddress(address);
  const text = (choosesSentence ? wanted.text : null) ?? t.text;
  find("sentence").value = text;
  find("sentence").readOnly = !has("sentence");
  if (!has("sentence")) find("sentence-form").querySelector("button").hidden = true;
  fitSentence();
  listen(state, actions, { readAddress, setTheme, tour: () => startTour(find("tour"), state, visit) });
  let problem = await trace(text, { fresh: wanted.fresh });
  if (!state.overview) {
    state.objective = null;
    find("sentence").value = t.text;
    fitSentence();
    const failed = await trace(t.text, { fresh: true });
    find("opening").hidden = true;
    if (failed) return;
    problem += ". Showing the default sentence instead.";
  }
  find("opening").hidden = true;
  problem = [problem, wanted.wrong].filter(Boolean).join(" ");
  if (problem) setStatus(problem, true);
  document.documentElement.dataset.ready = "yes";
}

/** @param {any} stop */
function visit(stop) {
  Object.assign(state, stop);
  return show();
}

start();
