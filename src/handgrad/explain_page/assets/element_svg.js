// @ts-check
// A figure of the page as an SVG file: boxes, texts, canvases and drawings where the browser has put them.

const LEFT_OUT = ".save, .unseen, [hidden]";
const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family", "opacity"];

/** @typedef {{ left: number, top: number, width: number, height: number }} Box */

/** @param {string} text */
export const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** @param {Record<string, string | number>} attributes */
const written = (attributes) =>
  Object.entries(attributes)
    .map(([name, value]) => `${name}="${escape(String(typeof value === "number" ? +value.toFixed(2) : value))}"`)
    .join(" ");

/** @param {string} color */
const seen = (color) => color !== "transparent" && !/^rgba\(.*, 0\)$/.test(color);

/** @param {Element} figure */
export function elementSvg(figure) {
  figure.classList.add("whole"); // nothing scrolls: a file has no scroll bars
  try {
    const origin = figure.getBoundingClientRect();
    /** @type {string[]} */
    const parts = [];
    let [wide, high] = [origin.width, origin.height];
    /** Where a box is in the file. @param {Box} box */
    const place = ({ left, top, width, height }) => {
      const found = { x: left - origin.left, y: top - origin.top, width, height };
      [wide, high] = [Math.max(wide, found.x + width), Math.max(high, found.y + height)];
      return found;
    };
    for (const child of figure.children) draw(child, place, parts);
    const paper = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
    const size = { width: Math.ceil(wide), height: Math.ceil(high) };
    return [
      `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${size.width} ${size.height}" ${written(size)}>`,
      `<rect ${written({ ...size, fill: paper })}/>`,
      ...parts,
      "</svg>",
    ].join("\n");
  } finally {
    figure.classList.remove("whole");
  }
}

/** @param {Element} element @param {(box: Box) => any} place @param {string[]} parts */
function draw(element, place, parts) {
  const bounds = element.getBoundingClientRect();
  if (element.matches(LEFT_OUT) || !bounds.width || !bounds.height) return;
  const box = place(bounds);
  if (element instanceof HTMLCanvasElement) {
    const style = "image-rendering: pixelated";
    parts.push(`<image ${written({ ...box, preserveAspectRatio: "none", style, href: element.toDataURL() })}/>`);
  } else if (element instanceof SVGElement) parts.push(drawing(element, box));
  else {
    const style = getComputedStyle(element);
    parts.push(...boxes(element, box, style));
    for (const child of element.childNodes) {
      if (child instanceof Element) draw(child, place, parts);
      else if (child instanceof Text) parts.push(...texts(child, element, style, place));
    }
  }
}

/** The background, the frame and the mark of what is chosen.
 * @param {Element} element @param {any} box @param {CSSStyleDeclaration} style */
function boxes(element, box, style) {
  const found = [];
  const rx = Number.parseFloat(style.borderRadius) || 0;
  if (seen(style.backgroundColor)) found.push({ ...box, rx, fill: style.backgroundColor });
  const sides = ["Top", "Right", "Bottom", "Left"].map((side) => ({
    width: style[`border${side}Style`] === "none" ? 0 : Number.parseFloat(style[`border${side}Width`]),
    color: style[`border${side}Color`],
  }));
  const [top, right, bottom, left] = sides.map(({ width, color }) => (seen(color) ? width : 0));
  const frame = { ...box, rx, fill: "none", stroke: sides[0].color, "stroke-width": top };
  if (top && [right, bottom, left].every((width) => width === top)) found.push(frame);
  else {
    if (top) found.push({ ...box, height: top, fill: sides[0].color });
    if (left) found.push({ ...box, width: left, fill: sides[3].color });
  }
  if (element.getAttribute("aria-pressed") === "true")
    found.push({ ...frame, stroke: style.outlineColor, "stroke-width": 2 });
  return found.map((one) => `<rect ${written(one)}/>`);
}

/** The lines of a text, each where it is.
 * @param {Text} node @param {Element} element @param {CSSStyleDeclaration} style @param {(box: Box) => any} place */
function texts(node, element, style, place) {
  const size = Number.parseFloat(style.fontSize);
  /** @type {{ text: string, box: DOMRect }[]} */
  const lines = [];
  const range = document.createRange();
  const words = style.overflowWrap === "anywhere" ? /\S/g : /\S+/g; // a word may be broken
  for (const { 0: word, index } of node.data.matchAll(words)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const box = range.getBoundingClientRect(),
      last = lines.at(-1);
    const gap = last ? box.left - last.box.right : 0;
    if (last && Math.abs(last.box.top - box.top) < 2 && gap < 0.7 * size) {
      last.text += (gap > 0.1 * size ? " " : "") + word;
      last.box = new DOMRect(last.box.left, last.box.top, box.right - last.box.left, last.box.height);
    } else lines.push({ text: word, box });
  }
  const { clientWidth, scrollWidth } = element;
  const cut = style.textOverflow === "ellipsis" && scrollWidth > clientWidth; // as the page cuts it off
  const room = (/** @type {string} */ text) => Math.max(1, Math.floor((text.length * clientWidth) / scrollWidth) - 1);
  return lines.map(({ text, box }) => {
    const shown = cut ? `${text.slice(0, room(text))}…` : text;
    const { x, y } = place(cut ? new DOMRect(box.left, box.top, clientWidth, box.height) : box);
    const about = {
      x,
      y: y + box.height / 2,
      "dominant-baseline": "central",
      fill: style.color,
      "font-size": size,
      "font-family": style.fontFamily,
      "font-weight": style.fontWeight,
      "text-decoration": style.textDecorationLine,
    };
    return `<text ${written(about)}>${escape(shown)}</text>`;
  });
}

/** A drawing of the page, with the styles that the style sheet gives it.
 * @param {SVGElement} shown @param {any} box */
function drawing(shown, box) {
  const copy = /** @type {SVGElement} */ (shown.cloneNode(true));
  const from = [shown, ...shown.querySelectorAll("*")],
    to = [copy, ...copy.querySelectorAll("*")];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of DRAWN) to[i].setAttribute(name, style.getPropertyValue(name));
    to[i].removeAttribute("class");
  });
  for (const [name, value] of Object.entries(box)) copy.setAttribute(name, String(value));
  return new XMLSerializer().serializeToString(copy);
}
