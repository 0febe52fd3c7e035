// Answers the requests that test_live.py writes to standard input, by assets/live/, and prints the answers as JSON. "@3" in a
// request is the id in the answer to request 3.

import { pathToFileURL } from "node:url";

const { folder, models } = JSON.parse(await new Promise((done) => {
  let text = "";
  process.stdin.on("data", (part) => (text += part)).on("end", () => done(text));
}));
const load = (name) => import(pathToFileURL(`${folder}/live/${name}.js`).href);
const [{ Session }, { Prover }, { answer }, { RequestError }] = await Promise.all(
  ["session", "prover", "routes", "../request_error"].map(load),
);

const found = models.map(({ data, requests }) => {
  const session = new Session(data),
    prover = new Prover(session),
    answers = [];
  for (const [name, given] of requests) {
    const named = Object.entries(given).map(([key, x]) => [key, /^@\d+$/.test(x) ? answers[x.slice(1)].id : x]);
    if (name === "proof") while (prover.work());
    try {
      answers.push(answer(session, prover, name, Object.fromEntries(named)));
    } catch (reason) {
      if (!(reason instanceof RequestError)) throw reason;
      answers.push({ error: reason.message });
    }
  }
  return answers;
});
console.log(JSON.stringify(found));
