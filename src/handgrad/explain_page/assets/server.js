// @ts-check
// Answers of the local server of handgrad explain.

import { RequestError } from "./request_error.js";

/** @param {string} key  that the server asks for; without it, it answers nothing */
export function server(key) {
  /** @param {string} path @param {RequestInit} [options] */
  async function request(path, options = {}) {
    let response, body;
    try {
      response = await fetch(`/api/${path}`, { ...options, headers: { ...options.headers, "X-Handgrad-Key": key } });
    } catch {
      throw new RequestError("No response from handgrad. Is it still running?");
    }
    try {
      body = JSON.parse(await response.text());
    } catch {
      throw new RequestError(`handgrad responded with status ${response.status}`);
    }
    if (!response.ok) throw new RequestError(body.error || `handgrad responded with status ${response.status}`);
    return body;
  }
  const headers = { "Content-Type": "application/json" };
  return {
    has: () => true,
    /** @type {import("./api.js").Provider["get"]} */
    get: (name, id, parameters) => request(`${name}?${new URLSearchParams({ ...(id ? { id } : {}), ...parameters })}`),
    /** @type {import("./api.js").Provider["post"]} */
    post: (name, body) => request(name, { method: "POST", headers, body: JSON.stringify(body) }),
  };
}
