// Runs the engine on the cases that test_engine.py writes to standard input, and prints what it computed as JSON.

import { pathToFileURL } from "node:url";

const { folder, cases } = JSON.parse(await new Promise((done) => {
  let text = "";
  process.stdin.on("data", (part) => (text += part)).on("end", () => done(text));
}));

const plain = (x) => ({ rows: x.rows, cols: x.cols, data: [...x.data] });
const entries = (map) => Object.fromEntries([...map].map(([name, x]) => [name, plain(x)]));

/** Entries within these ranges of one head, or of every one, are multiplied by a factor. */
const edit = ({ head, rows, columns, factor }) => (x, h) => {
  if (head !== undefined && head !== h) return x;
  for (let i = rows[0]; i < rows[1]; i++) for (let j = columns[0]; j < columns[1]; j++) x.data[i * x.cols + j] *= factor;
  return x;
};

const TASKS = {
  pass(engine, model, { ids, objective, edits = {}, forwardOnly }) {
    const made = new Map(Object.entries(edits).map(([name, what]) => [name, edit(what)]));
    const trace = engine.run(model, ids, { objective, edits: made, forwardOnly });
    const values = trace.names().map((name) => {
      const heads = trace.heads(name);
      return [name, heads ? Array.from({ length: heads }, (_, h) => plain(trace.get(name, h))) : plain(trace.get(name))];
    });
    const { value, loss, losses } = trace;
    return { value, loss, losses, values: Object.fromEntries(values), grads: entries(trace.grads) };
  },
};

const answers = [];
for (const { version = "", task, model, ...given } of cases) {
  const load = (name) => import(pathToFileURL(`${folder}${version}/${name}.js`).href);
  const [matrices, models, transformer] = await Promise.all(["matrix", "model", "transformer"].map(load));
  const engine = { ...matrices, ...models, ...transformer };
  try {
    const weights = new Map(Object.entries(model.weights).map(([name, { rows, cols, data }]) => [name, engine.matrix(rows, cols, data)]));
    answers.push(TASKS[task](engine, engine.loadModel(model.config, weights), given));
  } catch (error) {
    answers.push({ error: error.message, kind: error.constructor.name });
  }
}
console.log(JSON.stringify(answers, (_, x) => (typeof x === "number" && !Number.isFinite(x) ? String(x) : x)));
