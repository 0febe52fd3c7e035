// Runs the engine on the cases that test_engine.py writes to standard input, and prints what it computed as JSON.

import { pathToFileURL } from "node:url";

const plain = (x) => ({ rows: x.rows, cols: x.cols, data: [...x.data] });
const entries = (map) => Object.fromEntries([...map].map(([name, x]) => [name, plain(x)]));

/** Entries within these ranges of one head, or of every one, are multiplied by a factor. */
const edit = ({ head, rows, columns, factor }) => (x, h) => {
  if (head !== undefined && head !== h) return x;
  for (let i = rows[0]; i < rows[1]; i++) for (let j = columns[0]; j < columns[1]; j++) x.data[i * x.cols + j] *= factor;
  return x;
};

const TASKS = {
  pass({ run }, { model, ids, objective, edits = {}, forwardOnly }) {
    const made = new Map(Object.entries(edits).map(([name, what]) => [name, edit(what)]));
    const trace = run(model, ids, { objective, edits: made, forwardOnly });
    const values = trace.names().map((name) => {
      const heads = trace.heads(name);
      return [name, heads ? Array.from({ length: heads }, (_, h) => plain(trace.get(name, h))) : plain(trace.get(name))];
    });
    const { value, loss, losses } = trace;
    return { value, loss, losses, values: Object.fromEntries(values), grads: entries(trace.grads) };
  },
  round_trip: ({ named }, { model }) => entries(named(model.network)),
  wrong_edit: ({ run, matrix }, { model, ids }) => run(model, ids, { edits: new Map([["blocks.0.a_3", () => matrix(1, 2)]]) }),
  asked({ run }, { model, ids, name, head, forwardOnly }) {
    return plain(run(model, ids, { forwardOnly }).get(name, head));
  },
  tokens({ Tokenizer }, { vocabulary, text }) {
    const tokenizer = new Tokenizer(vocabulary);
    const ids = tokenizer.encode(text);
    return { ids, text: tokenizer.decode(ids) };
  },
  steps({ run, takeStep }, { model, ids, steps, objective }) {
    let state = null;
    const taken = steps.map(([optimizer, lr]) => {
      const trace = run(model, ids, { objective });
      const step = takeStep(trace, lr, optimizer, state);
      ({ model, state } = step);
      return { loss: trace.value, predicted: trace.value + step.expected, measured: run(model, ids, { objective, forwardOnly: true }).value };
    });
    return { taken, weights: entries(model.weights) };
  },
  async docs(engine, { data }) {
    globalThis.fetch = async () => ({ json: async () => data });
    const { shown } = await import(pathToFileURL(`${folder}/example.js`).href);
    return shown.map((x) => (x.data ? plain(x) : x));
  },
  step_of_forward: ({ run, takeStep }, { model, ids }) => takeStep(run(model, ids, { forwardOnly: true }), 0.1),
  checks({ run, normal, signals, check_signal, check_parameters, identities }, { model, ids, objective, only }) {
    const trace = run(model, ids, { objective });
    const random = normal(1);
    const wanted = (name) => !only || only.includes(name);
    const names = [...trace.grads.keys()];
    return {
      signals: signals(trace).filter(wanted).map((name) => check_signal(trace, name, random)),
      parameters: names.filter(wanted).map((name) => check_parameters(trace, [name], random)),
      together: check_parameters(trace, names.slice(-3), random),
      identities: identities(trace),
    };
  },
};

const { folder, models, cases } = JSON.parse(await new Promise((done) => {
  let text = "";
  process.stdin.on("data", (part) => (text += part)).on("end", () => done(text));
}));
const FILES = ["matrix", "model", "transformer", "optimizers", "differences", "tokenizer", "weights"];
const load = async (version) =>
  Object.assign({}, ...(await Promise.all(FILES.map((name) => import(pathToFileURL(`${folder}/${version}/${name}.js`).href)))));

const answers = {};
for (const [key, { version = "engine", task, model, ...given }] of Object.entries(cases)) {
  try {
    const engine = version === "bundle" ? (await import(pathToFileURL(`${folder}/bundle.js`).href)).default : await load(version);
    const made = model === undefined ? {} : engine.readModel(models[model]);
    if (given.text !== undefined && made.tokenizer) given.ids = made.tokenizer.encode(given.text);
    answers[key] = await TASKS[task](engine, { ...given, model: made.model, data: models[model] });
  } catch (error) {
    answers[key] = { error: error.message, kind: error.constructor.name };
  }
}
console.log(JSON.stringify(answers, (_, x) => (typeof x === "number" && !Number.isFinite(x) ? String(x) : x)));
