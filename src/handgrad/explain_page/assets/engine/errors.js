// @ts-check
// A mistake in what was asked for, in words for the reader; every other error is a mistake of the program.

export class EngineError extends Error {}
