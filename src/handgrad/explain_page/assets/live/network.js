// @ts-check
// The network as a list of steps under the names of a trace, and the stations: data that Python has written, as
// stations/network.py reads them.

import { RequestError } from "../request_error.js";
import { signal, split } from "./notation.js";

/**
 * @typedef {object} Step
 * @property {number | null} block
 * @property {string} name
 * @property {string} kind
 * @property {string[]} inputs
 * @property {string[]} outputs
 * @property {string[]} layers  the numbers of its parameters
 * @typedef {{ symbol: string, gradient: string, shared: boolean }} Parameter
 * @typedef {object} Station
 * @property {string} id
 * @property {string} kind
 * @property {number | null} block
 * @property {string[]} inputs
 * @property {string[]} a
 * @property {string[]} incoming
 * @property {string[]} outgoing
 * @property {Parameter[]} parameters
 */

/** The prefix of a step's names: blocks.0. @param {{ block: number | null }} step */
export const hereOf = ({ block }) => (block === null ? "" : `blocks.${block}.`);

/** Whether a station's output is the residual stream. @param {Station} station */
export const isStream = ({ kind }) => kind === "embedding" || kind === "add";

/** Whether a station's output has a column for every token of the vocabulary. @param {Station} station */
export const isOverVocabulary = ({ id }) => id === "a_12" || id === "loss";

export class Network {
  /** @param {Step[]} steps */
  constructor(steps) {
    this.steps = steps;
    this.start = steps[0].outputs[0];
    /** @type {Map<string, Step>} */ this.makers = new Map(steps.flatMap((step) => step.outputs.map((name) => [name, step])));
  }

  /** The step that computes an activation. @param {string} name */
  maker(name) {
    return this.makers.get(name);
  }

  /** The steps that read an activation. Its error signal is the sum of what they send back. @param {string} name */
  readers(name) {
    return this.steps.filter((step) => step.inputs.includes(name));
  }

  /** The addition that alone reads an activation, and so passes its own error signal on to it. @param {string} name */
  added(name) {
    const readers = this.readers(name);
    return readers.length === 1 && readers[0].kind === "add" ? readers[0] : null;
  }

  /** The first step of a block of this kind. @param {number} block @param {string} kind @returns {Step} */
  find(block, kind) {
    const found = this.steps.find((step) => step.block === block && step.kind === kind);
    if (!found) throw new RequestError(`block ${block} has no step of kind ${kind}`);
    return found;
  }

  /** The additions of a block. @param {number} block */
  additions(block) {
    return this.steps.filter((step) => step.block === block && step.kind === "add");
  }

  /** The step that holds w_letter; w_q is a part of w_2. @param {string} here @param {string} letter @returns {Step} */
  holder(here, letter) {
    const number = "qkv".includes(letter) ? "2" : letter;
    const found = this.steps.find((step) => hereOf(step) === here && step.layers.includes(number));
    if (!found) throw new RequestError(`no layer ${here}${letter}`);
    return found;
  }
}

/** The error signals of a step's outputs. @param {Step} step */
export const signalsOf = ({ outputs }) => outputs.map(signal);

/** The number of a block, from a name: blocks.3.a_5 → 3 @param {string} name */
export const blockOf = (name) => (split(name)[0] ? Number(name.split(".")[1]) : null);
