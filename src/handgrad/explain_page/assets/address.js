// @ts-check
// The address bar: a link to a view holds the view, the station, the token, the head, the exercise, the objective and the
// sentence.

/** @param {string} hash */
export function parseAddress(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [view, station, direction] = path.split("/");
  const parameters = new URLSearchParams(query ?? "");
  const integer = (/** @type {string} */ name) => Math.max(0, Number.parseInt(parameters.get(name) ?? "", 10) || 0);
  return {
    view,
    station,
    direction: direction === "backward" ? "backward" : "forward",
    token: parameters.has("token") ? integer("token") : null, // the page chooses one
    head: integer("head"),
    text: parameters.get("text"),
    objective: parameters.get("objective"),
    exercise: parameters.get("exercise") ?? "",
    hand: decodeHand(parameters.get("hand")),
  };
}

/** What is computed by hand: blocks.0.grad_w_6:3:5, with a fourth number for a head. @param {string | null} text */
function decodeHand(text) {
  if (text === null) return null;
  const [name, row, column, head] = text.split(":");
  const index = (/** @type {string | undefined} */ x) => (/^\d+$/.test(x ?? "") ? Number(x) : null);
  return { name, row: index(row), column: index(column), head: index(head) };
}

/** @param {{ name: string, row: number | null, column: number | null, head: number | null }} hand */
const encodeHand = ({ name, row, column, head }) => [name, row, column, head].filter((x) => x !== null).join(":");

/** @param {{ view: string, station: string, direction: string, token: number | null, head: number, text: string | null,
 * objective: string | null, exercise?: string, hand?: any }} here */
export function formatAddress({ view, station, direction, token, head, text, objective, exercise = "", hand = null }) {
  const parameters = new URLSearchParams();
  if (token !== null) parameters.set("token", String(token));
  if (head) parameters.set("head", String(head));
  if (objective) parameters.set("objective", objective);
  if (exercise && view === "exercises") parameters.set("exercise", exercise);
  if (hand && view === "station") parameters.set("hand", encodeHand(hand));
  if (text !== null) parameters.set("text", text);
  const path = view === "station" ? `station/${station}/${direction}` : view;
  const query = parameters.toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

/** All stops in order: every station forward, then every station backward.
 * @param {string[]} ids
 * @returns {[string, string][]} */
export const allStops = (ids) => [
  ...ids.map((id) => /** @type {[string, string]} */ ([id, "forward"])),
  ...[...ids].reverse().map((id) => /** @type {[string, string]} */ ([id, "backward"])),
];
