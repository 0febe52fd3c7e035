// @ts-check
// A page that opened with a model of random weights says that a trained one is coming, and links to it when it is there.

import { get } from "./api.js";
import { find, h, render } from "./render.js";

const INTERVAL = 2000; // milliseconds

/** @param {{ text: string, url: string | null } | null} found */
export function showBetter(found) {
  if (!found) return;
  const line = find("better");
  line.hidden = false;
  render(line, [found.text, found.url ? h("a", { href: found.url, id: "better-link" }, "Open it.") : null].filter(Boolean));
  if (found.url === null) setTimeout(look, INTERVAL);
}

async function look() {
  const found = await get("progress").catch(() => null);
  if (found) showBetter(found.better); // the server has ended otherwise
}
