// @ts-check
// The theme, light or dark: what the reader chose, as the browser has kept it, or else the browser's setting.

const KEY = "handgrad theme";

export const isDark = () => document.documentElement.dataset.theme === "dark";

/** Whether the page opens dark. */
export function opensDark() {
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch {
    // no storage: the browser's setting decides
  }
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @param {boolean} dark */
export function applyTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme")?.setAttribute("aria-pressed", String(dark));
}

/** @param {boolean} dark */
export function keepTheme(dark) {
  try {
    localStorage.setItem(KEY, dark ? "dark" : "light");
  } catch {
    // without storage the choice is not kept
  }
}
