// @ts-check
// Input that does not belong to one view: the sentence, the keyboard, the browser's Back button, the theme, the window.

import { has, sentences } from "./api.js";
import { listenToLinks } from "./linked.js";
import { find } from "./render.js";
import { listenToSymbols } from "./symbols.js";
import { isDark, keepTheme } from "./theme.js";
import { endTour } from "./tour.js";
import { VIEWS } from "./views.js";


export function fitSentence() {
  const box = find("sentence");
  box.style.height = "auto";
  box.style.height = `${Math.min(160, box.scrollHeight + 2)}px`;
}

/** @param {any} state
 * @param {any} actions
 * @param {{ readAddress: () => any, setTheme: (dark: boolean) => void, tour: () => void }} page */
export function listen(state, actions, page) {
  listenToSymbols(state.table.symbols);
  listenToSentence(state, actions);
  listenToKeys(state, actions);
  listenToLinks();
  addEventListener("popstate", () => showAddress(state, actions, page.readAddress));
  find("skip").onclick = (event) => {
    event.preventDefault(); // the address belongs to the view
    find("main").focus();
  };
  find("tour-button").onclick = page.tour;
  find("reset-weights").onclick = () => actions.resetWeights();
  find("theme").onclick = () => {
    const dark = !isDark();
    page.setTheme(dark);
    keepTheme(dark);
  };
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(actions.redraw, 120);
  });
}

/** @param {any} state @param {any} actions */
function listenToSentence(state, actions) {
  const box = find("sentence");
  let wide = 0;
  new ResizeObserver(() => {
    if (box.clientWidth === wide) return;
    wide = box.clientWidth;
    requestAnimationFrame(fitSentence); // another width, another number of lines
  }).observe(box);
  let waiting = 0;
  let typing = false; // one entry in the browser's history for all edits until the box is left or Enter is pressed
  const submit = async () => {
    clearTimeout(waiting);
    if (box.value === state.overview?.text) return;
    const push = !typing;
    typing = true;
    state.objective = null; // its position belongs to the sentence before
    await actions.trace(box.value, { push, fresh: true }); // so does the token
  };
  const finish = () => {
    submit();
    typing = false;
  };
  find("sentence-form").onsubmit = (event) => {
    event.preventDefault();
    finish();
  };
  box.onblur = () => (typing = false);
  box.onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    finish();
  };
  box.oninput = () => {
    fitSentence();
    clearTimeout(waiting);
    waiting = setTimeout(state.table.large ? actions.preview : submit, state.table.large ? 150 : 350);
    if (state.table.large) actions.setStatus("Press Enter to trace this sentence.");
  };
}

/** @param {any} state @param {any} actions */
function listenToKeys(state, actions) {
  find("tabs").onkeydown = (event) => {
    const ids = VIEWS.map((view) => view.id),
      at = ids.indexOf(state.view);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = ids[(to + ids.length) % ids.length];
    actions.open(next);
    find(`tab-${next}`).focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
    if (event.key === "Escape" && !find("tour").hidden) endTour(find("tour"));
    const target = /** @type {Element} */ (event.target);
    const inMap = target.closest("#map") && !target.closest(".map-choice");
    // arrow keys inside a control belong to that control
    const free = inMap || target.closest(".station-head .walk") || target.matches("body, main, #views, [role=tabpanel]");
    if (!free) return;
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key],
      rows = inMap && { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by && !rows) return;
    event.preventDefault();
    const moved = by ? actions.walk(by) : actions.step(rows);
    moved.then(() => inMap && find("map").querySelector(".here")?.focus({ preventScroll: true }));
  });
}

/** After Back or Forward, or a changed address. */
async function showAddress(state, actions, readAddress) {
  if (!state.overview) return;
  const { objective } = state;
  const { text, fresh, wrong } = readAddress();
  const wanted = text ?? state.table.text;
  actions.setStatus("");
  if ((has("sentence") || sentences) && (wanted !== state.overview.text || objective !== state.objective)) {
    find("sentence").value = wanted;
    fitSentence();
    if (await actions.trace(wanted, { fresh })) return actions.show({ push: false });
  } else await actions.show({ push: false });
  if (wrong) actions.setStatus(wrong, true);
}
