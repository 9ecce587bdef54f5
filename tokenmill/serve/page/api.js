/* Talks to the server: the API key, requests, server-sent events, and errors as the server's own sentences. */

export class ServerError extends Error {
  constructor(message, status = 0, retryAfter = 0) {
    super(message);
    this.status = status; // 0: the server was not reached, or broke off
    this.retryAfter = retryAfter; // seconds
  }
}

export const store = {
  get(name) {
    try {
      return JSON.parse(sessionStorage.getItem(name));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      sessionStorage.setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false; // full, or switched off
    }
  },
};

let key = store.get("key") || "";
let onKeyWanted = () => {};

export const hasKey = () => key !== "";

export function useKey(value) {
  key = value;
  store.set("key", value);
}

/** `listener` is called with the server's sentence whenever it asks for a key. */
export function whenKeyWanted(listener) {
  onKeyWanted = listener;
}

/** A successful response, or a ServerError. */
export async function ask(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const error = await refusal(response);
  if (error.status === 401) onKeyWanted(error.message);
  throw error;
}

async function refusal(response) {
  let message = `The server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    /* not in the shape of an API error: the status has to do */
  }
  return new ServerError(message, response.status, Number(response.headers.get("retry-after")) || 0);
}

/** The data of each server-sent event of a response, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      kept += value;
      const parts = kept.split("\n\n");
      kept = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ServerError("The connection to the server broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
