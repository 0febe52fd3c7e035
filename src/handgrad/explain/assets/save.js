// @ts-check
// “Save” on every picture: as PNG, SVG or CSV, or the line of Python that makes its data.

import { get, offline } from "./api.js";
import { csvText } from "./csv.js";
import { h } from "./render.js";

/** Files of pictures that are drawn on a canvas, by that canvas. @type {WeakMap<Element, { svg: () => string }>} */
export const pictureFiles = new WeakMap();

/**
 * The menu of a picture; it is inside the picture's figure.
 * @param {{ title: string, python?: string, name?: string | null, head?: number | null, sentence?: string,
 *   values?: () => any[][], text?: boolean, rowLabels?: string[] | null, columnLabels?: string[] | null }} about */
export function saveMenu(about) {
  const { title, python, values, name, text } = about; // a text has no picture
  const file = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "picture";
  const item = (text, act) =>
    h("button", { type: "button", class: "small", onclick: (event) => run(event, act) }, text);
  const numbers = values || (name && !offline);
  return h(
    "details",
    { class: "save" },
    h("summary", { "aria-label": `Save ${title}` }, "save ▾"),
    h(
      "div",
      { class: "save-menu" },
      python ? item("copy as Python", () => navigator.clipboard.writeText(python)) : null,
      python ? h("code", { class: "python" }, python) : null,
      text ? null : item("PNG", async (figure) => download(`${file}.png`, await pngOf(figure))),
      text ? null : item("SVG", async (figure) => download(`${file}.svg`, address(svgOf(figure), "image/svg+xml"))),
      numbers ? item("CSV", async () => download(`${file}.csv`, address(await csvOf(about), "text/csv"))) : null,
      h("output", { class: "saved", "aria-live": "polite" }),
    ),
  );
}

/** Save, and say that it was done or why not. @param {any} event @param {(figure: Element) => Promise<any>} act */
async function run(event, act) {
  const figure = event.currentTarget.closest("figure"),
    button = event.currentTarget;
  const said = button.closest(".save-menu").querySelector(".saved");
  try {
    await act(figure);
    said.textContent = button.textContent.startsWith("copy") ? "copied" : "saved";
  } catch (reason) {
    said.textContent = button.textContent.startsWith("copy")
      ? "the browser does not allow copying: select the line"
      : reason.message;
  }
}

/** @param {any} about */
async function csvOf({ values, name, head, sentence, rowLabels, columnLabels, columnIds }) {
  if (values) return csvText(values(), rowLabels, columnLabels);
  const found = await get("matrix", sentence, { name, ...(head === null || head === undefined ? {} : { head }) });
  const rows = columnIds ? found.values.map((row) => columnIds.map((j) => row[j])) : found.values;
  return csvText(rows, rowLabels, columnLabels);
}

/** @param {string} text @param {string} type */
const address = (text, type) => URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));

/** @param {string} name @param {string} href */
function download(name, href) {
  const link = Object.assign(document.createElement("a"), { download: name, href });
  link.click();
  if (href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** @param {Element} figure */
function svgOf(figure) {
  const canvas = figure.querySelector("canvas:not(.bar)");
  if (canvas) return pictureFiles.get(canvas)?.svg() ?? "";
  return withStyles(/** @type {SVGElement} */ (figure.querySelector("svg")));
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "opacity"];

/** An SVG of the page as a file: with the styles that the page's style sheet gives it. @param {SVGElement} shown */
function withStyles(shown) {
  const copy = /** @type {SVGElement} */ (shown.cloneNode(true));
  const from = [shown, ...shown.querySelectorAll("*")],
    to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of STYLES) to[i].setAttribute(name, style.getPropertyValue(name));
    to[i].removeAttribute("class");
  });
  const { width, height } = shown.getBoundingClientRect();
  for (const [name, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", width, height }))
    copy.setAttribute(name, String(value));
  return new XMLSerializer().serializeToString(copy);
}

/** @param {Element} figure @returns {Promise<string>} */
async function pngOf(figure) {
  const canvas = /** @type {HTMLCanvasElement | null} */ (figure.querySelector("canvas:not(.bar)"));
  if (canvas) return canvas.toDataURL("image/png");
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgOf(figure))}`;
  await image.decode();
  const drawn = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
  drawn.getContext("2d")?.drawImage(image, 0, 0, drawn.width, drawn.height);
  return drawn.toDataURL("image/png");
}
