// @ts-check
// The views of the page, in the order of their tabs: the prologue, then the order of the story.

import { absentView } from "./absent_view.js";
import { attributionView } from "./attribution.js";
import { compareView } from "./compare.js";
import { exercisesView } from "./exercises.js";
import { flowView } from "./gradient_flow.js";
import { headsView } from "./heads.js";
import { prologueView } from "./prologue.js";
import { stationView } from "./station.js";
import { stepView } from "./step.js";
import { storyView } from "./story.js";
import { whatIfView } from "./what_if.js";

/** @type {any[]} */
const ALL = [
  prologueView,
  storyView,
  stationView,
  attributionView,
  flowView,
  headsView,
  whatIfView,
  stepView,
  compareView,
  exercisesView,
];

/** A stored page says of the views whose answers it does not contain how to see them. */
export const VIEWS = ALL.map((view) => ((view.available?.() ?? true) ? view : absentView(view)));
