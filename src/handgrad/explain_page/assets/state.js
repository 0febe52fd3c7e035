// @ts-check
// The state of the page: everything that a redraw needs, and that an address or an action changes.

export const state = {
  /** @type {any} */ table: null, // the model and its stations: does not depend on the sentence
  /** @type {any} */ overview: null, // the traced sentence
  /** @type {any} */ proofs: null, // short results of the checks, by station
  /** @type {any} */ proof: null, // all checks of the station that is open
  /** @type {any} */ preview: null, // predictions for a sentence that is being typed and not traced yet
  view: "start",
  station: "a_1",
  direction: "forward",
  token: 0,
  head: 0,
  stop: 0, // index of the station among all stops
  stops: 0,
  /** @type {string | null} */ objective: null, // what is differentiated: null for the loss of the whole sentence
  exercise: "", // the name of the exercise that is open; "" for the first one that is not solved
  /** @type {any} */ hand: null, // what is computed by hand: name, row, column and head of an entry; null while that is closed
  predicts: true, // whether other texts can be predicted, and so steps be taken until they say something
  /** @type {any[]} */ followed: [], // the numbers being followed, the newest last
};
