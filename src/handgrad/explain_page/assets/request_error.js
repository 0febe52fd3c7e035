// @ts-check
// What a request fails with: a message for the reader.

export class RequestError extends Error {}
