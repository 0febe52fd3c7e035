// @ts-check
// One id for each character of the text that the model was trained on. As text/tokenizer.py for --tokenizer chars.

import { EngineError } from "./errors.js";

export class Tokenizer {
  /** @param {string[]} vocabulary  the character of every id */
  constructor(vocabulary) {
    this.vocabulary = vocabulary;
    this.ids = new Map(vocabulary.map((character, id) => [character, id]));
  }

  /** The ids of a text. @param {string} text @returns {number[]} */
  encode(text) {
    return [...text].map((character) => {
      const id = this.ids.get(character);
      if (id !== undefined) return id;
      const known = `the tokenizer knows ${this.ids.size} characters, and ${quoted(character)} is not one of them`;
      throw new EngineError(`${known}: use other text, or train with tokenizer='bytes'`);
    });
  }

  /** The text of ids. @param {number[]} ids */
  decode(ids) {
    return ids.map((id) => this.vocabulary[id] ?? "").join("");
  }
}

/** A character as Python writes it in a message. @param {string} character */
function quoted(character) {
  const named = { "\t": "\\t", "\n": "\\n", "\r": "\\r", "\\": "\\\\" }[character];
  if (character === "'") return `"'"`;
  if (named || character === " " || !/[\p{C}\p{Z}]/u.test(character)) return `'${named ?? character}'`;
  const code = character.codePointAt(0) ?? 0;
  const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `'\\${letter}${code.toString(16).padStart(/** @type {number} */ (digits), "0")}'`;
}
