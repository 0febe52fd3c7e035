// @ts-check
// The objective, the number that is differentiated: as the address holds it, and as a request holds it.

/** @typedef {{ kind: "position", position: number } | { kind: "difference", position: number, token?: number | string,
 * against: number | string }} Wanted */

/** {kind: "position", position: 5} → position-5; {kind: "difference", …} → difference-5-12-7; the whole sentence → null
 * @param {any} objective  of an overview: tokens have an id @returns {string | null} */
export function encodeObjective(objective) {
  if (!objective || objective.kind === "sentence") return null;
  if (objective.kind === "position") return `position-${objective.position}`;
  return `difference-${objective.position}-${objective.token.id}-${objective.against.id}`;
}

/** @param {string | null} text @returns {Wanted | null} */
export function decodeObjective(text) {
  const position = /^position-(\d+)$/.exec(text ?? "");
  if (position) return { kind: "position", position: Number(position[1]) };
  const difference = /^difference-(\d+)-(\d+)-(\d+)$/.exec(text ?? "");
  if (!difference) return null;
  const [at, token, against] = difference.slice(1).map(Number);
  return { kind: "difference", position: at, token, against };
}
