// @ts-check
// The card: a picture of 1200 × 630 with the story of the sentence, its tokens, the view that is open and the gradient flow.

import { get } from "./api.js";
import { color, css, inkOn } from "./colors.js";
import { logarithmic } from "./flow_rows.js";
import { chance, percent, quote, visible } from "./format.js";
import { find } from "./render.js";
import { contextOf } from "./story.js";

const [WIDE, HIGH, EDGE] = [1200, 630, 56];
const FONT = "system-ui, sans-serif";
const MOST_ROWS = 4; // of tokens
const FLOW = { least: 100, most: 230, end: 556 }; // its height, and where it ends

/** The story of the chosen token, as the first view tells it. @param {any} state */
export function storyOf({ overview: { tokens, losses }, token }) {
  const position = Math.min(token, losses.length - 1);
  const p = percent(chance(losses[position]));
  return `After ${quote(contextOf(tokens, position))} the model gave ${quote(tokens[position + 1].label)} ${p}.`;
}

/** @param {any} state @returns {Promise<string>}  the address of a PNG */
export async function cardPicture(state) {
  const { rows } = await get("flow", state.overview.id);
  const canvas = Object.assign(document.createElement("canvas"), { width: WIDE, height: HIGH });
  const c = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const style = getComputedStyle(document.documentElement);
  const paint = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  c.fillStyle = paint("page");
  c.fillRect(0, 0, WIDE, HIGH);
  c.fillStyle = paint("forward-line");
  c.fillRect(0, 0, WIDE / 2, 10);
  c.fillStyle = paint("backward-line");
  c.fillRect(WIDE / 2, 0, WIDE / 2, 10);
  c.textBaseline = "top";
  const story = lines(c, storyOf(state), `650 50px ${FONT}`, WIDE - 2 * EDGE).slice(0, 3);
  let y = 48;
  c.fillStyle = paint("ink");
  for (const line of story) {
    c.fillText(line, EDGE, y);
    y += 62;
  }
  y = tokensOf(c, state, y + 14, paint);
  c.font = `24px ${FONT}`;
  c.fillStyle = paint("soft");
  const top = Math.max(FLOW.end - FLOW.most, y + 60);
  c.fillText(fitted(c, viewTitle(state), WIDE - 2 * EDGE), EDGE, top - 40);
  flow(c, rows, top);
  mark(c, state, paint);
  return canvas.toDataURL("image/png");
}

/** @param {any} state */
function viewTitle(state) {
  const panel = find(`view-${state.view}`);
  if (state.view === "start") return "The error of every token, from the loss (below) back to the embeddings (above):";
  const [title, where] = ["h2", ".where"].map((name) => panel.querySelector(name)?.textContent ?? "");
  return `${title} · ${where}`;
}

/** The text in lines that fit. @param {CanvasRenderingContext2D} c @param {string} text @param {string} font @param {number} room */
function lines(c, text, font, room) {
  c.font = font;
  /** @type {string[]} */
  const found = [];
  for (const word of text.split(" ")) {
    const longer = found.length ? `${found[found.length - 1]} ${word}` : word;
    if (found.length && c.measureText(longer).width <= room) found[found.length - 1] = longer;
    else found.push(fitted(c, word, room));
  }
  return found;
}

/** @param {CanvasRenderingContext2D} c @param {string} text @param {number} room */
function fitted(c, text, room) {
  if (c.measureText(text).width <= room) return text;
  let letters = [...text];
  while (letters.length && c.measureText(`${letters.join("")}…`).width > room) letters = letters.slice(0, -1);
  return `${letters.join("")}…`;
}

/** The tokens, colored by the surprise of the model; returns where they end.
 * @param {CanvasRenderingContext2D} c @param {any} state @param {number} top @param {(name: string) => string} paint */
function tokensOf(c, { overview: { tokens, losses }, token }, top, paint) {
  const most = Math.max(...losses, 1e-9);
  const [high, gap] = [46, 7];
  c.font = `28px ${FONT}`;
  let [x, y, row] = [EDGE, top, 1];
  for (const [i, { label }] of tokens.entries()) {
    const text = fitted(c, visible(label), 400);
    const wide = c.measureText(text).width + 16;
    if (x + wide > WIDE - EDGE) {
      if (row === MOST_ROWS || y + 2 * high + gap > FLOW.end - FLOW.least - 60) {
        c.fillStyle = paint("soft");
        c.fillText("…", Math.min(x, WIDE - EDGE + 4), y + 6);
        break;
      }
      [x, y, row] = [EDGE, y + high + gap, row + 1];
    }
    const shade = color("size", i ? 0.6 * (losses[i - 1] / most) : 0);
    c.fillStyle = css(shade);
    c.fillRect(x, y, wide, high);
    c.fillStyle = inkOn(shade);
    c.fillText(text, x + 8, y + 7);
    if (i === token || i === token + 1) {
      c.lineWidth = 3;
      c.strokeStyle = i === token ? paint("ink") : paint("focus");
      c.strokeRect(x + 1.5, y + 1.5, wide - 3, high - 3);
    }
    x += wide + gap;
  }
  return y + high;
}

/** The lengths of the error signals, layers by tokens.
 * @param {CanvasRenderingContext2D} c @param {any[]} rows @param {number} top */
function flow(c, rows, top) {
  const { shares } = logarithmic(rows.map((row) => row.delta));
  shares.forEach((row, i) =>
    row.forEach((x, t) => {
      const at = (/** @type {number} */ k, /** @type {number} */ n, /** @type {number} */ size) => Math.round((k * size) / n);
      const [left, right] = [t, t + 1].map((k) => at(k, row.length, WIDE - 2 * EDGE));
      const [above, below] = [i, i + 1].map((k) => at(k, shares.length, FLOW.end - top));
      c.fillStyle = css(color("size", x));
      c.fillRect(EDGE + left, top + above, right - left, below - above);
    }),
  );
}

/** The project and the model. @param {CanvasRenderingContext2D} c @param {any} state @param {(name: string) => string} paint */
function mark(c, { table }, paint) {
  const y = HIGH - 54;
  c.font = `650 26px ${FONT}`;
  c.fillStyle = paint("forward");
  c.fillText("↓", EDGE, y);
  c.fillStyle = paint("backward");
  c.fillText("↑", EDGE + 20, y);
  c.fillStyle = paint("ink");
  c.fillText("handgrad", EDGE + 52, y);
  const from = EDGE + 52 + c.measureText("handgrad").width + 18;
  c.font = `22px ${FONT}`;
  c.fillStyle = paint("soft");
  c.fillText(fitted(c, `every gradient derived by hand · ${table.name}`, WIDE - EDGE - from), from, y + 3);
}
