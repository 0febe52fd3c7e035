// @ts-check
// The views of the page, in the order of their tabs.

import { flowView } from "./gradient_flow.js";
import { stationView } from "./station.js";
import { stepView } from "./step.js";
import { storyView } from "./story.js";

/** @type {any[]} */
export const VIEWS = [storyView, stationView, flowView, stepView];
