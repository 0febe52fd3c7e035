// @ts-check
// “Save” on every picture: as PNG, SVG or CSV, or the line of Python that makes its data.

import { get, has } from "./api.js";
import { csvText } from "./csv.js";
import { elementSvg } from "./element_svg.js";
import { button } from "./parts.js";
import { h } from "./render.js";

/** Files of pictures that are drawn on a canvas, by that canvas. @type {WeakMap<Element, { svg: () => string }>} */
export const pictureFiles = new WeakMap();

/**
 * @typedef {object} Saved  what the menu of a picture offers
 * @property {string} title
 * @property {string} [python]    lines that make its data
 * @property {() => any[][] | Promise<any[][]>} [values]  its data, if the page has them or knows how to get them; else
 * @property {string | null} [name]  of the tensor, and
 * @property {number | null} [head]
 * @property {string} [sentence]  id of the traced sentence
 * @property {string[] | null} [rowLabels]
 * @property {string[] | null} [columnLabels]
 * @property {number[] | null} [rowIds]  the rows of the tensor that are shown, if not all are
 * @property {number[] | null} [columnIds]  the columns, likewise
 */

/** The menu of a picture; it is inside the picture's figure. @param {Saved} about */
export function saveMenu(about) {
  const { title, python, values, name } = about;
  const file = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "picture";
  return menu(`Save ${title}`, "save ▾", [
    python ? lines(python) : null,
    item("PNG", async (figure) => download(`${file}.png`, await pngOf(figure))),
    item("SVG", async (figure) => download(`${file}.svg`, address(svgOf(figure), "image/svg+xml"))),
    values || (name && has("matrix"))
      ? item("CSV", async () => download(`${file}.csv`, address(await csvOf(about), "text/csv")))
      : null,
  ]);
}

/** A menu with lines of Python alone. @param {string} label @param {string} python */
export const pythonMenu = (label, python) => menu(label, "as Python ▾", lines(python));

/** @param {string} label @param {string} text @param {any} items */
export const menu = (label, text, items) =>
  h(
    "details.save",
    { onkeydown: closeOnEscape, ontoggle: closeWhenLeft },
    h("summary", { "aria-label": label }, text),
    h("div.save-menu", items, h("output.saved", { "aria-live": "polite" })),
  );

/** @param {string} python */
const lines = (python) => [
  h("pre.python", { tabindex: "0" }, python),
  item("copy as Python", () => navigator.clipboard.writeText(python)),
];

/** @param {string} text @param {(figure: Element) => Promise<any>} act */
export const item = (text, act) => button(text, (event) => run(event, act), { class: "small" });

/** A picture with its title, a heading if `tag` is one, and its menu.
 * @param {Saved & { class?: string, key?: string, tag?: string, attributes?: any }} about @param {...any} content */
export const savedFigure = (about, ...content) =>
  h(
    "figure",
    { class: about.class, key: about.key ?? about.title, ...about.attributes },
    h("figcaption", h(about.tag ?? "span", about.title), saveMenu(about)),
    content,
  );

/** @param {any} event */
function closeOnEscape(event) {
  if (event.key !== "Escape" || !event.currentTarget.open) return;
  event.stopPropagation();
  event.currentTarget.open = false;
  event.currentTarget.querySelector("summary").focus();
}

/** Close an open menu as soon as something outside it is pressed or focused. @param {any} event */
function closeWhenLeft({ currentTarget: menu }) {
  const leave = (/** @type {any} */ { target }) => {
    if (menu.open && menu.contains(target)) return;
    menu.open = false;
    for (const name of ["pointerdown", "focusin"]) document.removeEventListener(name, leave, true);
  };
  if (menu.open) for (const name of ["pointerdown", "focusin"]) document.addEventListener(name, leave, true);
}

/** Save, and say that it was done or why not. @param {any} event @param {(figure: Element) => Promise<any>} act */
async function run(event, act) {
  const button = event.currentTarget;
  const said = button.closest(".save-menu").querySelector(".saved"),
    copies = button.textContent.startsWith("copy");
  try {
    await act(button.closest("figure"));
    said.textContent = copies ? "copied" : "saved";
  } catch (reason) {
    said.textContent = copies ? "the browser does not allow copying: select the line" : reason.message;
  }
}

/** @param {Saved} about */
async function csvOf({ values, name, head, sentence, rowLabels, columnLabels, rowIds, columnIds }) {
  if (values) return csvText(await values(), rowLabels, columnLabels);
  return csvText(await entriesOf(sentence ?? "", { name, head, rowIds, columnIds }), rowLabels, columnLabels);
}

/** The entries of a matrix, or of some of its rows and columns. @param {string} sentence
 * @param {Pick<Saved, "name" | "head" | "rowIds" | "columnIds">} which @returns {Promise<number[][]>} */
export async function entriesOf(sentence, { name, head, rowIds: rows, columnIds: columns }) {
  const given = Object.entries({ name, head, rows, columns }).filter(([, value]) => value !== null && value !== undefined);
  return (await get("matrix", sentence, Object.fromEntries(given))).values;
}

/** @param {string} text @param {string} type */
export const address = (text, type) => URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));

/** @param {string} name @param {string} href */
export function download(name, href) {
  const link = Object.assign(document.createElement("a"), { download: name, href });
  link.click();
  if (href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** The canvas of a heat map. @param {Element} figure */
const heatOf = (figure) => [...figure.querySelectorAll("canvas")].find((canvas) => pictureFiles.has(canvas));

/** @param {Element} figure */
function svgOf(figure) {
  const canvas = heatOf(figure);
  return canvas ? (pictureFiles.get(canvas)?.svg() ?? "") : elementSvg(figure);
}

/** @param {Element} figure @returns {Promise<string>} */
async function pngOf(figure) {
  const canvas = heatOf(figure);
  if (canvas) return canvas.toDataURL("image/png");
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgOf(figure))}`;
  await image.decode();
  const drawn = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
  drawn.getContext("2d")?.drawImage(image, 0, 0, drawn.width, drawn.height);
  return drawn.toDataURL("image/png");
}
