// @ts-check
// “Play the pass”, in place of the map: play, pause, step, and save as a GIF. Where the reader has asked for little motion,
// it is stepped through.

import { get, pause } from "./api.js";
import { gifOf, paletteOf } from "./gif.js";
import { button, select } from "./parts.js";
import { planOf, WIDE } from "./play_plan.js";
import { drawScene, stopAt, themeColors } from "./play_scene.js";
import { find, h, render } from "./render.js";

const FRAME = 0.1; // seconds of a frame of the file
const SAMPLES = 12; // frames of which the colors are taken

let open = false;
let block = 0; // shown with its layers
let t = 0; // seconds
let playing = false;
let saving = ""; // how far a file is
let problem = "";
let made = { key: "", /** @type {import("./play_plan.js").Plan | null} */ plan: null, ready: Promise.resolve() };

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Show the picture in place of the map, from the beginning. @param {any} state @param {any} actions */
export async function play(state, actions) {
  const { block: here } = state.table.stations.find((/** @type {any} */ s) => s.id === state.station);
  if (!open && here !== null && state.view === "station") block = here;
  [open, t, playing, problem] = [true, 0, false, ""];
  actions.redraw();
  await prepare(state, actions);
  find("play").scrollIntoView({ block: "nearest" });
  find("play-go").focus({ preventScroll: true });
  if (!still()) run(state, actions);
}

/** Have the plan of this sentence and this block. @param {any} state @param {any} actions */
function prepare(state, actions) {
  const key = `${state.overview.id} ${block}`;
  if (made.key !== key) {
    made = { key, plan: null, ready: Promise.resolve() };
    made.ready = makePlan(key, state, actions);
  }
  return made.ready;
}

/** The lengths of the heads come with a request. @param {string} key @param {any} state @param {any} actions */
async function makePlan(key, { overview, table }, actions) {
  const attends = table.stations.some((/** @type {any} */ s) => s.block === block && s.kind === "attention");
  const found = attends ? await actions.busy(get("head", overview.id, { block, head: 0 })).catch(() => null) : null;
  if (made.key !== key) return;
  made.plan = planOf(table, overview, block, found?.heads ?? null);
  actions.redraw();
}

/** Draw the picture with its controls, or none while it is closed. @param {any} state @param {any} actions */
export function drawPlay(state, actions) {
  const section = find("play");
  find("map").hidden = open;
  section.hidden = !open;
  if (!open) return;
  prepare(state, actions); // of another sentence
  const { plan } = made;
  const redraw = () => drawPlay(state, actions);
  const go = (/** @type {number} */ time) => {
    [playing, t] = [false, Math.max(0, Math.min(plan?.seconds ?? 0, time))];
    redraw();
  };
  const close = () => {
    [open, playing] = [false, false];
    actions.redraw();
    find("play-pass")?.focus();
  };
  const times = plan ? plan.stops.map(({ at }) => at) : [0];
  const choose = (/** @type {string} */ value) => {
    [block, t, playing] = [Number(value), 0, false];
    prepare(state, actions);
  };
  const blocks = [...Array(state.table.blocks).keys()].map((b) => /** @type {[string, string]} */ ([String(b), `block ${b + 1}`]));
  const moves = still()
    ? button("start again", () => go(0), { id: "play-go" })
    : button(playing ? "pause" : "play", () => (playing ? go(t) : run(state, actions)), { id: "play-go", class: "primary" });
  const content = [
    h("div.play-head", h("h2", "Play the pass"), button("close", close, { class: "small", id: "play-close" })),
    h("canvas", { id: "play-picture", role: "img", "aria-label": "The pass through the network; the text below says where it is" }),
    h("p.unseen", { id: "play-text", "aria-live": playing ? "off" : "polite" }, plan ? stopAt(plan, t).text : ""),
    h(
      "div.walk",
      { role: "group", "aria-label": "Movement" },
      moves,
      button("← step", () => go([...times].reverse().find((at) => at < t - 1e-6) ?? 0), { id: "play-back" }),
      button("step →", () => go(times.find((at) => at > t + 1e-6) ?? t), { id: "play-step" }),
      button(saving || "save as GIF", () => saving || save(state, redraw), { id: "play-save", "aria-disabled": saving ? "true" : null }),
    ),
    state.table.blocks > 1
      ? h("label.field.play-block", "with the layers of ", select({ id: "play-block", value: String(block) }, blocks, choose))
      : null,
    problem ? h("p.problem", { role: "alert" }, problem) : null,
    h("p.map-note", still() ? "Your system asks for little motion, so nothing moves by itself: step through it. " : "", NOTE),
  ];
  render(section, content.filter(Boolean));
  paint();
}

const NOTE =
  "The width and the brightness of a line show the length of what flows there, ‖a‖ or ‖Δ‖ over all tokens, on a logarithmic " +
  "scale. A ring: what arrives there is added.";

/** Move until the end, or until the reader pauses. @param {any} state @param {any} actions */
function run(state, actions) {
  const { plan } = made;
  if (!plan) return;
  if (t >= plan.seconds) t = 0;
  playing = true;
  drawPlay(state, actions);
  let before = 0;
  const move = (/** @type {number} */ now) => {
    if (made.plan !== plan || !open) playing = false; // of another sentence
    if (!playing) return;
    t = Math.min(plan.seconds, t + (before ? Math.min(0.1, (now - before) / 1000) : 0));
    before = now;
    paint();
    if (t < plan.seconds) return requestAnimationFrame(move);
    playing = false;
    drawPlay(state, actions);
  };
  requestAnimationFrame(move);
}

/** Paint this moment. */
function paint() {
  const { plan } = made,
    canvas = find("play-picture");
  if (!plan || !canvas) return;
  const ratio = 2; // sharp on most screens, also where the canvas is shown smaller
  if (canvas.height !== ratio * plan.high) Object.assign(canvas, { width: ratio * WIDE, height: ratio * plan.high });
  canvas.dataset.seconds = t.toFixed(3);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawScene(context, plan, t, themeColors());
}

// ── the file ───────────────────────────────────────────────────────────────────────────────────────────────────────

/** @param {any} state @param {() => void} redraw */
async function save({ table }, redraw) {
  const { plan } = made;
  if (!plan) return;
  const say = (/** @type {string} */ text) => {
    saving = text;
    redraw();
  };
  say("saving…");
  problem = "";
  try {
    const bytes = await animation(plan, (share) => say(`saving, ${Math.round(100 * share)} %`));
    const href = URL.createObjectURL(new Blob([bytes], { type: "image/gif" }));
    Object.assign(document.createElement("a"), { href, download: `${table.name.replace(/[^\p{L}\p{N}]+/gu, "-")}-pass.gif` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  } catch (reason) {
    problem = `The file was not saved: ${/** @type {Error} */ (reason).message}`;
  }
  say("");
}

/** Every frame, with pauses in which the page answers.
 * @param {import("./play_plan.js").Plan} plan @param {(share: number) => void} progress */
async function animation(plan, progress) {
  const size = { width: WIDE, height: Math.ceil(plan.high) };
  const canvas = Object.assign(document.createElement("canvas"), size);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", { willReadFrequently: true }));
  const colors = themeColors();
  const frame = (/** @type {number} */ time) => {
    drawScene(context, plan, time, colors);
    return new Uint32Array(context.getImageData(0, 0, size.width, size.height).data.buffer);
  };
  const samples = [...Array(SAMPLES).keys()].map((i) => frame((plan.seconds * (i + 1)) / SAMPLES));
  const gif = gifOf(size.width, size.height, paletteOf(samples));
  const frames = Math.ceil(plan.seconds / FRAME) + 1;
  for (let i = 0; i < frames; i++) {
    gif.add(frame(Math.min(plan.seconds, i * FRAME)), i < frames - 1 ? 100 * FRAME : 200);
    if (i % 8) continue;
    progress(i / frames);
    await pause(0);
  }
  return gif.bytes();
}
