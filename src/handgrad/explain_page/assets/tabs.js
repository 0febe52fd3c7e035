// @ts-check
// The tabs of the views, of which one is selected.

import { find, h, render } from "./render.js";
import { VIEWS } from "./views.js";

/** @param {HTMLElement} tabs @param {any} state @param {any} actions */
export function drawTabs(tabs, state, actions) {
  const tab = (/** @type {any} */ view) =>
    h(
      "button",
      {
        type: "button",
        role: "tab",
        key: view.id,
        id: `tab-${view.id}`,
        "aria-controls": `view-${view.id}`,
        "aria-selected": String(view.id === state.view),
        tabindex: view.id === state.view ? 0 : -1,
        onclick: () => actions.open(view.id),
      },
      view.title,
    );
  render(tabs, VIEWS.map(tab));
  for (const { id } of VIEWS) find(`view-${id}`).hidden = id !== state.view;
  scrollTo(tabs, find(`tab-${state.view}`));
}

/** Bring a tab into view where the row of tabs is wider than the page. @param {HTMLElement} tabs @param {HTMLElement} tab */
function scrollTo(tabs, tab) {
  const row = tabs.getBoundingClientRect(),
    { left, right } = tab.getBoundingClientRect();
  if (left < row.left) tabs.scrollLeft -= row.left - left;
  else if (right > row.right) tabs.scrollLeft += right - row.right;
}
