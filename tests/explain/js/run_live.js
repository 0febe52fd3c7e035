// Behind the program that a live page contains: sends it the requests that test_live.py writes to standard input, and prints
// its answers as JSON. "@3" in a request is the id in the answer to request 3.

import { readFileSync } from "node:fs";

const { models } = JSON.parse(readFileSync(0, "utf8"));

const found = [];
for (const { data, requests } of models) {
  let sent;
  const port = { postMessage: (message) => (sent = message) };
  const send = (message) => {
    port.onmessage({ data: message });
    return sent;
  };
  live_serveModule.serve(port);
  send({ data: JSON.stringify(data) });
  const answers = [];
  for (const [number, [name, given]] of requests.entries()) {
    const named = Object.entries(given).map(([key, x]) => [key, /^@\d+$/.test(x) ? answers[x.slice(1)].id : x]);
    const ask = () => {
      const { error, known, text } = send({ number, name, given: Object.fromEntries(named) });
      if (error !== undefined && !known) throw new Error(`${name} ${JSON.stringify(given)}: ${error}`);
      return error === undefined ? JSON.parse(text) : { error };
    };
    let answer = ask();
    for (; answer.state === "measuring"; answer = ask()) await new Promise((done) => setTimeout(done, 250)); // as the page does
    answers.push(answer);
  }
  found.push(answers);
}
console.log(JSON.stringify(found));
