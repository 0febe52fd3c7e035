// Starts the page and keeps its state: the sentence, the current view, the address bar, the keyboard.

import { get, offline, post, RequestError } from "./api.js";
import { paint } from "./colours.js";
import { el } from "./dom.js";
import { count, number, visible } from "./format.js";
import { drawFlow } from "./gradient_flow.js";
import { redrawHeatmaps } from "./heatmap.js";
import { drawMap } from "./network_map.js";
import { drawStation } from "./station.js";
import { drawStep, discardSteps, lastStep } from "./step.js";
import { endTour, seenTour, startTour } from "./tour.js";

const find = (id) => document.getElementById(id);
const state = { table: null, overview: null, proofs: null, view: "station", station: "a_1", direction: "forward", token: 0, head: 0, stop: 0, stops: 0 };
let newest = 0; // number of the newest sentence requested; older answers are ignored
let pending = 0; // open requests

// ── progress and status ────────────────────────────────────────────────────────────────────────────────────────────

async function busy(promise) {
  pending++;
  const late = setTimeout(() => (find("progress").hidden = false), 120);
  try {
    return await promise;
  } finally {
    clearTimeout(late);
    if (--pending === 0) find("progress").hidden = true;
  }
}

function setStatus(text, problem = false) {
  const status = find("status");
  status.textContent = text;
  status.className = problem ? "problem" : "";
}

// ── the current view ───────────────────────────────────────────────────────────────────────────────────────────────

// All stops in order: every station forward, then every station backward.
function allStops() {
  const ids = state.table.stations.map((s) => s.id);
  return [...ids.map((id) => [id, "forward"]), ...[...ids].reverse().map((id) => [id, "backward"])];
}

// Read the view from the address bar; return its sentence and a message if it names something that does not exist.
function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, station, direction] = path.split("/");
  const parameters = new URLSearchParams(query || "");
  state.view = ["station", "flow", "step"].includes(view) ? view : "station";
  const known = state.table.stations.some((s) => s.id === station);
  if (known) state.station = station;
  const wrong = view && view !== state.view ? `There is no view ‘${visible(view)}’.` : station && !known ? `There is no station ‘${visible(station)}’ in this model.` : "";
  state.direction = direction === "backward" ? "backward" : "forward";
  const within = (text, most) => Math.max(0, Math.min(most, Number.parseInt(text, 10) || 0));
  state.head = within(parameters.get("head"), state.table.heads - 1);
  state.token = within(parameters.get("token"), Math.max(0, (state.overview?.tokens.length ?? 1) - 1));
  return { text: parameters.get("text"), wrong };
}

function writeAddress(push) {
  const parameters = new URLSearchParams();
  if (state.token) parameters.set("token", state.token);
  if (state.head) parameters.set("head", state.head);
  if (!offline && state.overview.text !== state.table.text) parameters.set("text", state.overview.text);
  const query = parameters.toString() ? `?${parameters}` : "";
  const path = state.view === "station" ? `station/${state.station}/${state.direction}` : state.view;
  const hash = `#/${path}${query}`;
  if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
}

async function show({ push = true, focus = false } = {}) {
  if (push) setStatus("");
  const order = allStops();
  state.stops = order.length;
  state.stop = order.findIndex(([id, direction]) => id === state.station && direction === state.direction);
  writeAddress(push);
  for (const view of ["station", "flow", "step"]) {
    find(`view-${view}`).hidden = view !== state.view;
    find(`tab-${view}`).setAttribute("aria-selected", String(view === state.view));
    find(`tab-${view}`).tabIndex = view === state.view ? 0 : -1;
  }
  drawMap(find("map"), state, go);
  drawTokens();
  drawHeader();
  try {
    if (state.view === "station") await drawStation(find("view-station"), state, actions);
    if (state.view === "flow") drawFlow(find("view-flow"), state, go);
    if (state.view === "step") drawStep(find("view-step"), state, actions);
  } catch (reason) {
    if (!(reason instanceof RequestError)) throw reason;
    setStatus(reason.message, true);
  }
  if (focus) find("main").focus({ preventScroll: true });
}

function go(station, direction = state.direction, token = state.token) {
  Object.assign(state, { view: "station", station, direction, token });
  show();
}

// What the views may do to the page.
const actions = {
  busy, // show the progress bar until a promise settles
  drawHeader,
  retry() {
    setStatus("");
    return show({ push: false });
  },
  walk(by) { // to the next stop (1) or the previous one (−1)
    const order = allStops();
    const [station, direction] = order[(state.stop + by + order.length) % order.length];
    const pressed = document.activeElement?.id;
    Object.assign(state, { view: "station", station, direction });
    show().then(() => pressed && find(pressed)?.focus({ preventScroll: true }));
  },
  turn() { // between forward and backward
    state.direction = state.direction === "forward" ? "backward" : "forward";
    show().then(() => find("walk-turn")?.focus({ preventScroll: true }));
  },
  select(what) { // a token or a head
    const active = document.activeElement, label = active?.getAttribute?.("aria-label");
    Object.assign(state, what);
    show({ push: false }).then(() => {
      const same = label && [...find("main").querySelectorAll("[aria-label]")].find((n) => n.getAttribute("aria-label") === label);
      if (same && !same.isSameNode(document.activeElement)) same.focus({ preventScroll: true });
    });
  },
  async showSentence(id) {
    await load(() => get("overview", id));
  },
  async reset() {
    await trace(state.overview.text);
  },
};

// ── the sentence ───────────────────────────────────────────────────────────────────────────────────────────────────

// Show the sentence that `request` returns, unless another one was requested meanwhile.
async function load(request, discard = false) {
  const mine = ++newest;
  const overview = await busy(request());
  if (mine !== newest) return;
  if (discard) discardSteps();
  setStatus("");
  state.overview = overview;
  state.proofs = null;
  state.token = Math.min(state.token, overview.tokens.length - 1);
  await show({ push: false });
  followProofs(overview.id);
}

// In an exported file only the step view shows new weights; the stations show the original ones.
function drawHeader() {
  const last = offline && state.view === "step" ? lastStep() : null;
  const loss = last ? last.measured : state.overview.loss, steps = last ? last.steps : state.overview.steps;
  find("loss").textContent = number(loss, 4);
  find("loss").dataset.value = loss;
  find("steps-taken").textContent = steps ? ` after ${count(steps, "step")}` : "";
}

// Trace a sentence with the original weights; discards all steps. Returns an error message or "".
async function trace(text) {
  discardSteps();
  setStatus(state.table.large ? "Computing forward and backward pass…" : "");
  try {
    await load(() => (offline ? get("overview") : post("sentence", { text })), true);
    return "";
  } catch (reason) {
    if (!(reason instanceof RequestError)) throw reason;
    setStatus(reason.message, true);
    if (state.overview && state.view === "step") drawStep(find("view-step"), state, actions);
    return reason.message;
  }
}

// Update the marks on the map as results of the checks come in.
async function followProofs(id) {
  while (state.overview.id === id) {
    let proofs;
    try {
      proofs = await get("proofs", id);
    } catch {
      return;
    }
    if (state.overview.id !== id) return;
    const changed = JSON.stringify(proofs) !== JSON.stringify(state.proofs);
    state.proofs = proofs;
    if (changed) drawMap(find("map"), state, go);
    const open = Object.values(proofs).some((p) => p.state === "measuring" && (!state.table.large || p.passed === null));
    if (!open || offline) return;
    await new Promise((done) => setTimeout(done, 400));
  }
}

function drawTokens() {
  const { tokens, losses } = state.overview;
  const most = Math.max(...losses, 1e-9);
  const strip = find("tokens");
  const before = document.activeElement?.dataset?.token;
  strip.replaceChildren(
    ...tokens.map((t, i) => {
      const loss = i > 0 ? losses[i - 1] : null;
      const chip = el("button", {
        type: "button", "data-token": i, "aria-pressed": String(i === state.token), title: loss === null ? "the first token is not predicted" : `surprise −log p = ${number(loss)}`,
        "aria-label": `token ${i + 1}: ${visible(t.label)}`, onclick: () => actions.select({ token: i }),
      }, visible(t.label));
      if (loss !== null) paint(chip, "delta", 0.6 * (loss / most));
      return chip;
    }),
  );
  if (before !== undefined) strip.querySelector(`[data-token="${before}"]`)?.focus({ preventScroll: true });
}

// ── start ──────────────────────────────────────────────────────────────────────────────────────────────────────────

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  find("theme").setAttribute("aria-pressed", String(dark));
  if (state.overview) {
    drawTokens();
    redrawHeatmaps();
    if (state.view === "flow") drawFlow(find("view-flow"), state, go);
    if (state.view === "station" && state.station === "loss") show({ push: false });
  }
}

function fitSentence() {
  const box = find("sentence");
  box.style.height = "auto";
  box.style.height = `${Math.min(160, box.scrollHeight + 2)}px`;
}

function listen() {
  const box = find("sentence");
  let waiting = 0;
  const submit = () => {
    clearTimeout(waiting);
    trace(box.value);
  };
  find("sentence-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      submit();
    }
  });
  box.addEventListener("input", () => {
    fitSentence();
    clearTimeout(waiting);
    if (state.table.large) setStatus("Press Enter to trace this sentence.");
    else waiting = setTimeout(submit, 350);
  });
  for (const view of ["station", "flow", "step"]) {
    find(`tab-${view}`).addEventListener("click", () => {
      state.view = view;
      show();
    });
  }
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const views = ["station", "flow", "step"];
    state.view = views[(views.indexOf(state.view) + by + 3) % 3];
    event.preventDefault();
    event.stopPropagation();
    show().then(() => find(`tab-${state.view}`).focus());
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape" && !find("tour").hidden) endTour(find("tour"));
    if (event.target.closest("input, textarea, select, canvas")) return;
    const inMap = event.target.closest("#map");
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const rows = inMap && { ArrowDown: 1, ArrowUp: -1 }[event.key]; // the row below or above in the map
    if (!by && !rows) return;
    event.preventDefault();
    const order = allStops(), ids = state.table.stations.map((s) => s.id);
    const row = Math.max(0, Math.min(ids.length - 1, ids.indexOf(state.station) + rows));
    const [station, direction] = by ? order[(state.stop + by + order.length) % order.length] : [ids[row], state.direction];
    Object.assign(state, { view: "station", station, direction });
    show().then(() => inMap && find("map").querySelector(".here")?.focus({ preventScroll: true }));
  });
  window.addEventListener("popstate", async () => {
    if (!state.overview) return;
    if (location.hash === "#main") return writeAddress(false); // the link “Skip to the station”
    const { text, wrong } = readAddress();
    setStatus("");
    if (!offline && (text ?? state.table.text) !== state.overview.text) {
      box.value = text ?? state.table.text;
      fitSentence();
      if (await trace(box.value)) return show({ push: false });
    } else await show({ push: false });
    if (wrong) setStatus(wrong, true);
  });
  find("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme !== "dark";
    setTheme(dark);
    try {
      localStorage.setItem("handgrad theme", dark ? "dark" : "light");
    } catch {
      // without storage the choice is not savedTheme
    }
  });
  find("tour-button").addEventListener("click", () => startTour(find("tour"), state, visit));
  let resizing = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => state.overview && drawMap(find("map"), state, go), 120);
  });
}

function visit(stop) {
  Object.assign(state, stop);
  return show();
}

async function start() {
  let savedTheme = null;
  try {
    savedTheme = localStorage.getItem("handgrad theme");
  } catch {
    // no storage: use the browser's setting
  }
  setTheme(savedTheme ? savedTheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  try {
    state.table = await busy(get("table"));
  } catch (reason) {
    setStatus(reason.message, true);
    return;
  }
  const t = state.table;
  find("model").textContent = `${t.name} · ${count(t.blocks, "block")} · d = ${t.d} · ${count(t.parameters, "parameter")} · ${t.note}`;
  state.station = "a_1";
  const text = (offline ? null : readAddress().text) ?? t.text;
  const address = location.hash;
  find("sentence").value = text;
  find("sentence").readOnly = offline;
  if (offline) find("sentence-form").querySelector("button").hidden = true;
  fitSentence();
  listen();
  readAddress();
  let problem = await trace(text);
  if (!state.overview) {
    find("sentence").value = t.text;
    fitSentence();
    if (await trace(t.text)) return;
    problem += ". Showing the default sentence instead.";
  }
  if (address) {
    const { wrong } = readAddressFrom(address);
    problem = [problem, wrong].filter(Boolean).join(" ");
    await show({ push: false });
  }
  if (problem) setStatus(problem, true);
  document.documentElement.dataset.ready = "yes";
  if (!seenTour() && !address) startTour(find("tour"), state, visit);
}

// Read the address again when the sentence is known, because the token index depends on it.
function readAddressFrom(hash) {
  if (location.hash !== hash) history.replaceState(null, "", hash);
  return readAddress();
}

start();
