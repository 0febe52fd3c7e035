// @ts-check
// Models that know more than that of the page: one that is being trained or downloaded, with a link when it is there, and one
// that can be downloaded.

import { get, post } from "./api.js";
import { button } from "./parts.js";
import { find, h, render } from "./render.js";
import { setStatus } from "./status.js";

const INTERVAL = 2000; // milliseconds
let waiting = 0;

/** @typedef {{ text: string, url: string | null, download: boolean }} Better */

/** @param {Better[]} found */
export function showBetter(found) {
  const box = find("better");
  box.hidden = !found.length;
  render(box, found.map(line));
  clearTimeout(waiting);
  if (found.some(({ url }) => url === null)) waiting = setTimeout(look, INTERVAL);
}

/** @param {Better} one @param {number} i */
const line = ({ text, url, download }, i) =>
  h(
    "p",
    { key: i },
    text,
    " ",
    url ? h("a", { href: url, class: "better-link" }, "Open it.") : null,
    download ? button("Download it", ask, { id: "download", class: "small" }) : null,
  );

async function ask() {
  try {
    showBetter((await post("download", {})).better);
  } catch (reason) {
    setStatus(/** @type {Error} */ (reason).message, true);
  }
}

async function look() {
  const found = await get("progress").catch(() => null);
  if (found) showBetter(found.better); // the server has ended otherwise
}
