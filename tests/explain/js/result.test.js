// Unit tests of the result file, of links and of tokens in sentences. Run by tests/explain/test_assets.py.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { formatAddress, parseAddress } from "./address.js";
import { quote } from "./format.js";
import { canonical, countAnswer, countShown, numbersByHand, resultText } from "./result_file.js";
import { sha256 } from "./sha256.js";

test("SHA-256 is that of node, at every length of the last block", () => {
  for (const text of ["", "abc", "ā ␣ 𝄞", ...Array.from({ length: 70 }, (_, i) => "x".repeat(50 + i)), "y".repeat(5000)])
    assert.equal(sha256(text), createHash("sha256").update(text).digest("hex"), text);
});

test("equal contents are equal texts", () => {
  assert.equal(canonical({ b: [1, { d: "x", c: true }], a: "é\n" }), '{"a":"é\\n","b":[1,{"c":true,"d":"x"}]}');
});

test("numbers count: attempts, the first time they were right, and answers that were shown", () => {
  const wrong = { right: false, kind: "sign" },
    right = { right: true, kind: "right" };
  countAnswer("one", wrong, "-3");
  countAnswer("one", { right: false, kind: "no number" }, "x");
  countAnswer("one", right, "3");
  const { solved } = numbersByHand()[0];
  countAnswer("one", wrong, "4");
  countShown("one");
  countShown("two");
  const found = Object.fromEntries(numbersByHand().map((x) => [x.name, x]));
  assert.deepEqual(found.one, { name: "one", solved, attempts: 3, hints: 0, solution: false, answer: sha256("3") });
  assert.match(solved, /^20\d\d-\d\d-\d\dT[\d:]{8}\+00:00$/);
  assert.equal(found.two.solution, true);
  const { sha256: hash, ...content } = JSON.parse(resultText("Ada \ud800", []));
  assert.equal(hash, sha256(canonical(content)));
  assert.equal(content.student, "Ada �");
});

test("an address holds the exercise, and a complete one everything", () => {
  const here = { view: "exercises", station: "a_1", direction: "forward", token: 0, head: 0, text: "a #&?", objective: null };
  const hash = formatAddress({ ...here, exercise: "softmax" });
  const { exercise, text, token } = parseAddress(hash);
  assert.deepEqual([exercise, text, token], ["softmax", "a #&?", 0]);
  assert.equal(parseAddress(formatAddress(here)).exercise, "");
});

test("a token in a sentence is a plain word", () => {
  assert.deepEqual([" be", "to be, or", " ", "\n", "  "].map(quote), ["‘be’", "‘to be, or’", "a space", "a line break", "‘␣␣’"]);
});
