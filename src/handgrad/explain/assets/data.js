// Where the numbers come from: the server, or the answers embedded in an exported file. Nobody else asks for anything.

const island = document.getElementById("island");
const kept = island ? JSON.parse(island.textContent) : null;
export const offline = kept !== null;

export class Refused extends Error {}

async function fetched(path, options) {
  let response;
  try {
    response = await fetch(`/api/${path}`, options);
  } catch {
    throw new Refused("handgrad does not answer any more: is it still running?");
  }
  let body;
  try {
    body = await response.json();
  } catch {
    throw new Refused(`handgrad answered with status ${response.status}`);
  }
  if (!response.ok) throw new Refused(body.error || `handgrad answered with status ${response.status}`);
  return body;
}

// What was answered lately; only what cannot change: a look is what it is, its proof is still being made.
const lately = new Map();
const LATELY = 40;

// A question about a look: its name and what it depends on besides the sentence.
export async function ask(name, id, about = {}) {
  const rest = new URLSearchParams(about).toString();
  if (offline) {
    const key = rest ? `${name}?${decodeURIComponent(rest)}` : name;
    if (!(key in kept)) throw new Refused("this is not in the file: run handgrad explain for it");
    return kept[key];
  }
  const question = `${name}?${new URLSearchParams({ ...(id ? { id } : {}), ...about })}`;
  if (!["station", "head", "lens"].includes(name)) return fetched(question);
  if (!lately.has(question)) {
    const answer = fetched(question);
    lately.set(question, answer);
    answer.catch(() => lately.delete(question));
    if (lately.size > LATELY) lately.delete(lately.keys().next().value);
  }
  return lately.get(question);
}

export async function send(name, body) {
  if (offline) throw new Refused("this file shows one sentence: run handgrad explain to change it");
  return fetched(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

// Steps taken beforehand: by learning rate, a list of what each step answered.
export function stepsInFile() {
  return kept.steps;
}
