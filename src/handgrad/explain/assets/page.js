// The page: what is looked at, where we stand, the address bar, the keyboard.

import { ask, offline, Refused, send } from "./data.js";
import { el, number, paint, redraw, visible } from "./drawing.js";
import { drawMap } from "./map.js";
import { drawStation } from "./station.js";
import { drawFlow } from "./flow.js";
import { drawStep, forgetSteps, lastStep } from "./step.js";
import { endTour, seenTour, startTour } from "./tour.js";

const find = (id) => document.getElementById(id);
const state = { table: null, look: null, proofs: null, view: "station", station: "a_1", face: "forward", token: 0, head: 0, stop: 0, stops: 0 };
let newest = 0; // of the sentences asked for
let working = 0;

// ── what is going on ────────────────────────────────────────────────────────────────────────────────────────────────

async function busy(promise) {
  working++;
  const late = setTimeout(() => (find("progress").hidden = false), 120);
  try {
    return await promise;
  } finally {
    clearTimeout(late);
    if (--working === 0) find("progress").hidden = true;
  }
}

function tell(text, problem = false) {
  const status = find("status");
  status.textContent = text;
  status.className = problem ? "problem" : "";
}

// ── where we stand ──────────────────────────────────────────────────────────────────────────────────────────────────

// The walk: down through all stations, and up again.
function walkOrder() {
  const ids = state.table.stations.map((s) => s.id);
  return [...ids.map((id) => [id, "forward"]), ...[...ids].reverse().map((id) => [id, "backward"])];
}

// Takes the place from the address; gives back its sentence, and what it names that is not there.
function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, station, face] = path.split("/");
  const about = new URLSearchParams(query || "");
  state.view = ["station", "flow", "step"].includes(view) ? view : "station";
  const known = state.table.stations.some((s) => s.id === station);
  if (known) state.station = station;
  const wrong = view && view !== state.view ? `there is no view ‘${visible(view)}’` : station && !known ? `there is no station ‘${visible(station)}’ in this model` : "";
  state.face = face === "backward" ? "backward" : "forward";
  const within = (text, most) => Math.max(0, Math.min(most, Number.parseInt(text, 10) || 0));
  state.head = within(about.get("head"), state.table.heads - 1);
  state.token = within(about.get("token"), Math.max(0, (state.look?.tokens.length ?? 1) - 1));
  return { text: about.get("text"), wrong };
}

function writeAddress(push) {
  const about = new URLSearchParams();
  if (state.token) about.set("token", state.token);
  if (state.head) about.set("head", state.head);
  if (!offline && state.look.text !== state.table.text) about.set("text", state.look.text);
  const query = about.toString() ? `?${about}` : "";
  const path = state.view === "station" ? `station/${state.station}/${state.face}` : state.view;
  const hash = `#/${path}${query}`;
  if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
}

async function show({ push = true, focus = false } = {}) {
  if (push) tell("");
  const order = walkOrder();
  state.stops = order.length;
  state.stop = order.findIndex(([id, face]) => id === state.station && face === state.face);
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
    if (state.view === "station") await drawStation(find("view-station"), state, tools);
    if (state.view === "flow") drawFlow(find("view-flow"), state, go);
    if (state.view === "step") drawStep(find("view-step"), state, tools);
  } catch (reason) {
    if (!(reason instanceof Refused)) throw reason;
    tell(reason.message, true);
  }
  if (focus) find("main").focus({ preventScroll: true });
}

function go(station, face = state.face, token = state.token) {
  Object.assign(state, { view: "station", station, face, token });
  show();
}

const tools = {
  busy,
  header: drawHeader,
  again() {
    tell("");
    return show({ push: false });
  },
  walk(by) {
    const order = walkOrder();
    const [station, face] = order[(state.stop + by + order.length) % order.length];
    const pressed = document.activeElement?.id;
    Object.assign(state, { view: "station", station, face });
    show().then(() => pressed && find(pressed)?.focus({ preventScroll: true }));
  },
  turn() {
    state.face = state.face === "forward" ? "backward" : "forward";
    show().then(() => find("walk-turn")?.focus({ preventScroll: true }));
  },
  choose(what) {
    const active = document.activeElement, label = active?.getAttribute?.("aria-label");
    Object.assign(state, what);
    show({ push: false }).then(() => {
      const same = label && [...find("main").querySelectorAll("[aria-label]")].find((n) => n.getAttribute("aria-label") === label);
      if (same && !same.isSameNode(document.activeElement)) same.focus({ preventScroll: true });
    });
  },
  async arrived(id) {
    await enter(() => ask("overview", id));
  },
  async reset() {
    await trace(state.look.text);
  },
};

// ── the sentence ────────────────────────────────────────────────────────────────────────────────────────────────────

async function enter(question, forget = false) {
  const mine = ++newest;
  const look = await busy(question());
  if (mine !== newest) return;
  if (forget) forgetSteps();
  tell("");
  state.look = look;
  state.proofs = null;
  state.token = Math.min(state.token, look.tokens.length - 1);
  await show({ push: false });
  followProofs(look.id);
}

// In a file only the view of the steps moves; the stations stay where they were.
function drawHeader() {
  const last = offline && state.view === "step" ? lastStep() : null;
  const loss = last ? last.measured : state.look.loss, steps = last ? last.steps : state.look.steps;
  find("loss").textContent = number(loss, 4);
  find("loss").dataset.value = loss;
  find("steps-taken").textContent = steps ? ` after ${steps} step${steps === 1 ? "" : "s"}` : "";
}

// Another sentence ends a run and forgets the steps. Gives back why it cannot be shown, or nothing.
async function trace(text) {
  forgetSteps();
  tell(state.table.large ? "tracing: forward, backward, every gradient…" : "");
  try {
    await enter(() => (offline ? ask("overview") : send("sentence", { text })), true);
    return "";
  } catch (reason) {
    if (!(reason instanceof Refused)) throw reason;
    tell(reason.message, true);
    if (state.look && state.view === "step") drawStep(find("view-step"), state, tools);
    return reason.message;
  }
}

// The marks on the map, as the proofs come in.
async function followProofs(id) {
  while (state.look.id === id) {
    let proofs;
    try {
      proofs = await ask("proofs", id);
    } catch {
      return;
    }
    if (state.look.id !== id) return;
    const changed = JSON.stringify(proofs) !== JSON.stringify(state.proofs);
    state.proofs = proofs;
    if (changed) drawMap(find("map"), state, go);
    const open = Object.values(proofs).some((p) => p.state === "measuring" && (!state.table.large || p.passed === null));
    if (!open || offline) return;
    await new Promise((done) => setTimeout(done, 400));
  }
}

function drawTokens() {
  const { tokens, losses } = state.look;
  const most = Math.max(...losses, 1e-9);
  const strip = find("tokens");
  const before = document.activeElement?.dataset?.token;
  strip.replaceChildren(
    ...tokens.map((t, i) => {
      const loss = i > 0 ? losses[i - 1] : null;
      const chip = el("button", {
        type: "button", "data-token": i, "aria-pressed": String(i === state.token), title: loss === null ? "the first token is predicted by nobody" : `surprise ${number(loss)}`,
        "aria-label": `token ${i + 1}: ${visible(t.label)}`, onclick: () => tools.choose({ token: i }),
      }, visible(t.label));
      if (loss !== null) paint(chip, "delta", 0.6 * (loss / most));
      return chip;
    }),
  );
  if (before !== undefined) strip.querySelector(`[data-token="${before}"]`)?.focus({ preventScroll: true });
}

// ── beginning ───────────────────────────────────────────────────────────────────────────────────────────────────────

function setTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  find("theme").setAttribute("aria-pressed", String(dark));
  if (state.look) {
    drawTokens();
    redraw();
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
    if (state.table.large) tell("Enter traces it");
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
    const rows = inMap && { ArrowDown: 1, ArrowUp: -1 }[event.key]; // up and down as in the picture, on the same face
    if (!by && !rows) return;
    event.preventDefault();
    const order = walkOrder(), ids = state.table.stations.map((s) => s.id);
    const row = Math.max(0, Math.min(ids.length - 1, ids.indexOf(state.station) + rows));
    const [station, face] = by ? order[(state.stop + by + order.length) % order.length] : [ids[row], state.face];
    Object.assign(state, { view: "station", station, face });
    show().then(() => inMap && find("map").querySelector(".here")?.focus({ preventScroll: true }));
  });
  window.addEventListener("popstate", async () => {
    if (!state.look) return;
    if (location.hash === "#main") return writeAddress(false); // the link that skips
    const { text, wrong } = readAddress();
    tell("");
    if (!offline && (text ?? state.table.text) !== state.look.text) {
      box.value = text ?? state.table.text;
      fitSentence();
      if (await trace(box.value)) return show({ push: false });
    } else await show({ push: false });
    if (wrong) tell(wrong, true);
  });
  find("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme !== "dark";
    setTheme(dark);
    try {
      localStorage.setItem("handgrad theme", dark ? "dark" : "light");
    } catch {
      // not remembered, but shown
    }
  });
  find("tour-button").addEventListener("click", () => startTour(find("tour"), state, visit));
  let settled = 0;
  window.addEventListener("resize", () => {
    clearTimeout(settled);
    settled = setTimeout(() => state.look && drawMap(find("map"), state, go), 120);
  });
}

function visit(place) {
  Object.assign(state, place);
  return show();
}

async function begin() {
  let remembered = null;
  try {
    remembered = localStorage.getItem("handgrad theme");
  } catch {
    // nothing is remembered here
  }
  setTheme(remembered ? remembered === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  try {
    state.table = await busy(ask("table"));
  } catch (reason) {
    tell(reason.message, true);
    return;
  }
  const t = state.table;
  find("model").textContent = `${t.name} · ${t.blocks} block${t.blocks === 1 ? "" : "s"} · d = ${t.d} · ${t.parameters.toLocaleString("en")} parameters · ${t.note}`;
  state.station = "a_1";
  const text = (offline ? null : readAddress().text) ?? t.text;
  const wanted = location.hash;
  find("sentence").value = text;
  find("sentence").readOnly = offline;
  if (offline) find("sentence-form").querySelector("button").hidden = true;
  fitSentence();
  listen();
  readAddress();
  let problem = await trace(text);
  if (!state.look) {
    find("sentence").value = t.text;
    fitSentence();
    if (await trace(t.text)) return;
    problem += "; shown instead is the sentence handgrad was started with";
  }
  if (wanted) {
    const { wrong } = readAddressFrom(wanted);
    problem = [problem, wrong].filter(Boolean).join("; ");
    await show({ push: false });
  }
  if (problem) tell(problem, true);
  document.documentElement.dataset.ready = "yes";
  if (!seenTour() && !wanted) startTour(find("tour"), state, visit);
}

// Tokens could not be checked before the sentence was there.
function readAddressFrom(hash) {
  if (location.hash !== hash) history.replaceState(null, "", hash);
  return readAddress();
}

begin();
