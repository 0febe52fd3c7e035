// @ts-check
// Answers that a folder contains, as folder.py writes it: for each model some sentences, in parts that are loaded when they
// are needed. A part is a script, because a page from the disk may not fetch.

import { count } from "./format.js";
import { live } from "./live.js";
import { RequestError } from "./request_error.js";
import { absent, keyOf } from "./stored.js";

/**
 * @typedef {{ id: string, text: string }} Sentence
 * @typedef {object} Model
 * @property {string} name
 * @property {string} folder  with its parts
 * @property {string} command  that serves its page
 * @property {boolean} live  whether the folder contains the model instead of answers
 * @property {Record<string, string[]>} requests  those that are answered, with the names of their parameters
 * @property {Sentence[]} sentences
 */

const OF_MODEL = ["table", "learn"]; // answers that do not depend on the sentence

/** The answers of every part that was asked for, by its path. @type {Map<string, Promise<Record<string, any>>>} */
const parts = new Map();
/** @type {Map<string, (answers: any) => void>} */
const awaited = new Map();
Object.assign(globalThis, {
  /** What a part calls. @param {string} path @param {string | object} answers  compressed, or as they are */
  handgradAnswers: (path, answers) => awaited.get(path)?.(typeof answers === "string" ? unpacked(answers) : answers),
});

/** Undo `compressed` of folder.py. @param {string} text @returns {Promise<any>} */
async function unpacked(text) {
  if (!("DecompressionStream" in globalThis)) throw new RequestError("This page needs a newer browser: one of 2023 or later.");
  const bytes = Uint8Array.from(atob(text), (x) => x.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** @param {string} path @returns {Promise<Record<string, any>>} */
function load(path) {
  const found = new Promise((resolve, reject) => {
    awaited.set(path, resolve);
    const script = document.createElement("script");
    script.src = `data/${path}.js`;
    script.onload = () => script.remove();
    script.onerror = () => {
      parts.delete(path); // the next request tries again
      script.remove();
      reject(new RequestError(`The file data/${path}.js could not be loaded.`));
    };
    document.head.append(script);
  });
  parts.set(path, found);
  return found;
}

/** @param {Model[]} models @param {string | null} name  of the model that the address asks for */
export function folder(models, name) {
  const model = models.find((one) => one.name === name) ?? models[0];
  const { requests, sentences, command } = model;
  const about = (/** @type {Model} */ one) =>
    `${one.name}, ${one.live ? "any sentence" : count(one.sentences.length, "sentence")}`;
  const choice = { models: models.map((one) => ({ name: one.name, text: about(one), live: one.live })), model: model.name };
  if (model.live) {
    const loaded = Promise.all([load("program"), load(`${model.folder}/model`)]);
    return { ...live(loaded.then((found) => Object.assign({}, ...found))), ...choice };
  }
  /** @param {string | null} id */
  const numberOf = (id) => Math.max(0, sentences.findIndex((sentence) => sentence.id === id));
  return {
    /** @type {import("./api.js").Provider["has"]} */
    has: (name, parameters) => name in requests && Object.keys(parameters).join() === requests[name].join(),

    /** @type {import("./api.js").Provider["get"]} */
    async get(name, id, parameters) {
      const { station, block } = parameters,
        number = numberOf(id);
      const part = station ?? (block === undefined ? name : `block.${block}`);
      if (!(name in requests)) throw absent(command, sentences[number].text);
      const path = OF_MODEL.includes(name) ? `${model.folder}/${part}` : `${model.folder}/${number + 1}/${part}`;
      const answers = await (parts.get(path) ?? load(path)),
        key = keyOf(name, parameters);
      if (!(key in answers)) throw absent(command, sentences[number].text);
      return answers[key];
    },

    /** @type {import("./api.js").Provider["post"]} */
    async post() {
      throw absent(command, sentences[0].text);
    },

    sentences,
    command,
    ...choice,
  };
}
