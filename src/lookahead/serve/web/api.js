// Talks to the server that this page came from: keys, errors, and streams of server-sent events.

import { askForKey, currentKey } from "./key.js";

/** An error of the server, with its HTTP status. */
export class ApiError extends Error {
  constructor(message, status, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server cannot be reached, or went away before it had finished. */
export class GoneError extends Error {}

/** Fetch a path. Prompts for a key if the server requires one. Raises an ApiError for every other error. */
export async function request(path, options = {}) {
  for (;;) {
    const key = currentKey();
    const headers = { ...options.headers };
    if (key) headers.Authorization = `Bearer ${key}`;
    const response = await reach(path, { ...options, headers });
    if (response.ok) return response;
    const error = await errorOf(response);
    const changed = currentKey() !== key; // another call has prompted for it meanwhile
    if (error.status !== 401 || !(changed || (await askForKey(key ? error.message : "")))) throw error;
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GoneError("The server cannot be reached.");
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ApiError(error.message, response.status, error.code);
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, response.status);
  }
}

/**
 * Stream a chat. Yields {text, steps, usage}: new text, what the steps behind it did, and at last the usage.
 * `lookahead` is the request's field of that name; step details are always requested.
 */
export async function* streamChat({ messages, settings, lookahead = {}, signal }) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      messages,
      ...settings,
      stream: true,
      separate_reasoning: false,
      stream_options: { include_usage: true },
      lookahead: { steps: true, ...lookahead },
    }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data.error) throw new ApiError(data.error.message, 500, data.error.code);
    yield {
      text: data.choices[0]?.delta.content ?? "",
      steps: data.lookahead?.steps ?? [],
      usage: data.usage ?? null,
    };
  }
}

/** The JSON objects of a stream of server-sent events. Raises a GoneError if it ends before its last event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await next(reader);
    if (done) throw new GoneError("The server went away before the answer was complete.");
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((one) => one.startsWith("data: "));
      if (line === "data: [DONE]") return;
      if (line) yield JSON.parse(line.slice(6));
    }
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GoneError("The server went away before the answer was complete.");
  }
}
