// @ts-check
// The result of a student as a file for the teacher, as learn/result_file.py writes and reads it; and the numbers that were
// computed by hand, which only the browser knows.

import { fit } from "./format.js";
import { sha256 } from "./sha256.js";

const KEY = "handgrad numbers";
const MOST = 200; // characters of a name
const MOST_NUMBERS = 1000;

/** @typedef {{ name: string, solved: string, attempts: number, hints: number, solution: boolean, answer: string }} Item */

/** @type {Map<string, Item>} */
const numbers = new Map();

const now = () => new Date().toISOString().replace(/\.\d+Z$/, "+00:00");
const named = (/** @type {string} */ text) => fit(text.replace(/\p{Cs}/gu, "�"), MOST);

function keep() {
  try {
    localStorage.setItem(KEY, JSON.stringify([...numbers.values()]));
  } catch {
    // without storage they are known until the page is closed
  }
}

const isItem = (/** @type {any} */ x) =>
  ["name", "solved", "answer"].every((key) => typeof x?.[key] === "string") &&
  ["attempts", "hints"].every((key) => Number.isInteger(x[key])) &&
  typeof x.solution === "boolean";

function remember() {
  if (numbers.size) return;
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    for (const item of Array.isArray(kept) ? kept : []) if (isItem(item)) numbers.set(item.name, item);
  } catch {
    // no storage, or not ours
  }
}

/** @param {string} name */
function itemOf(name) {
  remember();
  const key = named(name);
  if (!numbers.has(key)) numbers.set(key, { name: key, solved: "", attempts: 0, hints: 0, solution: false, answer: "" });
  if (numbers.size > MOST_NUMBERS) numbers.delete(numbers.keys().next().value ?? "");
  return /** @type {Item} */ (numbers.get(key));
}

/** Count an answer. One that is no number is not counted. @param {string} name @param {{ right: boolean, kind: string }} verdict
 * @param {string} given */
export function countAnswer(name, { right, kind }, given) {
  if (kind === "no number") return;
  const item = itemOf(name);
  item.attempts += 1;
  if (right || !item.solved) item.answer = sha256(given);
  if (right) item.solved ||= now();
  keep();
}

/** Note that an answer was shown before it was found. @param {string} name */
export function countShown(name) {
  const item = itemOf(name);
  if (item.solved) return;
  item.solution = true;
  keep();
}

/** What was computed by hand. @returns {Item[]} */
export function numbersByHand() {
  remember();
  return [...numbers.values()];
}

/** JSON with sorted names and without spaces. @param {any} x @returns {string} */
export function canonical(x) {
  if (Array.isArray(x)) return `[${x.map(canonical).join(",")}]`;
  if (x === null || typeof x !== "object") return JSON.stringify(x);
  return `{${Object.keys(x).sort().map((key) => `${JSON.stringify(key)}:${canonical(x[key])}`).join(",")}}`;
}

/** The file. @param {string} student @param {{ name: string, progress: any }[]} exercises */
export function resultText(student, exercises) {
  const one = ({ name, progress: { solved, attempts, hints, solution, code, answer } }) => ({
    name, solved, attempts, hints, solution, answer: answer || (code ? sha256(code) : ""),
  });
  const content = {
    format: "handgrad learn", version: 1, student: named(student), written: now(), exercises: exercises.map(one),
    numbers: numbersByHand(),
  };
  return `${JSON.stringify({ ...content, sha256: sha256(canonical(content)) }, null, 1)}\n`;
}
