// HTML, SVG and MathML elements. Text is always inserted as text, never parsed as HTML.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat(Infinity));
  return node;
}

// A formula of the station table as MathML.
export function math(formula) {
  const made = new DOMParser().parseFromString(formula.mathml, "application/xml").documentElement;
  const node = document.importNode(made, true);
  node.setAttribute("aria-label", formula.latex);
  return node;
}
