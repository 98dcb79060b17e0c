// Requests to the server, and its live stream.

const TOKEN = "atoll-token";
let token = sessionStorage.getItem(TOKEN) || "";
let asking = null;
/** Whether the user closed the question for a token without one. */
let declined = false;

/** An error of the server, with the status of its response. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Throws that the server is not there, unless the request was given up by the page. */
function unreachable(error) {
  if (error.name === "AbortError") throw error;
  throw new ServerError("the server does not reply: it has stopped, or cannot be reached", 0);
}

function headers(given) {
  return token ? { ...given, authorization: `Bearer ${token}` } : { ...given };
}

/** Asks for a token, once for all requests that wait for one. */
export function askToken(message) {
  if (asking) return asking;
  declined = false;
  const dialog = document.getElementById("token-dialog");
  const field = document.getElementById("token");
  document.getElementById("token-error").textContent = token ? message : "";
  const decline = () => {
    declined = true;
  };
  asking = new Promise((resolve) => {
    const done = () => {
      dialog.removeEventListener("close", done);
      dialog.removeEventListener("cancel", decline);
      if (!declined) {
        token = field.value.trim();
        sessionStorage.setItem(TOKEN, token);
      }
      field.value = "";
      asking = null;
      resolve();
    };
    dialog.addEventListener("close", done);
    dialog.addEventListener("cancel", decline);
    dialog.showModal();
  });
  return asking;
}

/** Sends a request; asks for a token where the server needs one. */
export async function send(path, options = {}) {
  for (;;) {
    const used = token;
    const response = await fetch(path, {
      credentials: "omit",
      ...options,
      headers: headers(options.headers),
    }).catch(unreachable);
    if (response.ok) return response;
    const text = await response.text().catch(unreachable);
    let message = text;
    try {
      message = JSON.parse(text).error || text;
    } catch {
      // The text is the message.
    }
    if (response.status !== 401)
      throw new ServerError(message || response.statusText, response.status);
    if (used !== token) continue;
    if (declined) throw new ServerError("this server needs a token", 401);
    await askToken(message);
  }
}

export async function getJson(path) {
  const response = await send(path);
  // A server that stops can end in the middle of its reply.
  return JSON.parse(await response.text().catch(unreachable));
}

export const postJson = (path, value) => sendJson("POST", path, value);

export const patchJson = (path, value) => sendJson("PATCH", path, value);

async function sendJson(method, path, value) {
  const body = JSON.stringify(value ?? {});
  const response = await send(path, {
    method,
    body,
    headers: { "content-type": "application/json" },
  });
  const text = await response.text().catch(unreachable);
  return text ? JSON.parse(text) : null;
}

/** Splits a stream into frames: length, kind and content. */
export class FrameReader {
  #rest = new Uint8Array(0);

  /** Calls `frame(kind, bytes)` for each complete frame; keeps the rest. */
  push(chunk, frame) {
    let data = chunk;
    if (this.#rest.length) {
      data = new Uint8Array(this.#rest.length + chunk.length);
      data.set(this.#rest);
      data.set(chunk, this.#rest.length);
    }
    let at = 0;
    while (data.length - at >= 8) {
      const length = new DataView(data.buffer, data.byteOffset + at, 4).getUint32(0, true);
      if (data.length - at - 8 < length) break;
      const kind = String.fromCharCode(data[at + 4]);
      frame(kind, data.slice(at + 8, at + 8 + length));
      at += 8 + length;
    }
    this.#rest = data.slice(at);
  }
}

/** Time between two frames for a tab that nobody sees. */
const HIDDEN_INTERVAL_MS = 5000;

/**
 * The live stream: one connection, opened again when it breaks, when spans are wanted, and when the
 * tab is hidden or shown. Spans go on where the last connection ended.
 */
export class Live {
  #listeners = new Set();
  #abort = null;
  #wantSpans = false;
  #status;
  /** Where the spans that arrived end, as the server calls it. */
  #position = null;

  constructor(status) {
    this.#status = status;
    document.addEventListener("visibilitychange", () => this.#again());
  }

  listen(listener) {
    this.#listeners.add(listener);
  }

  /** Whether spans are sent. */
  wantSpans(wanted) {
    if (wanted === this.#wantSpans && this.#abort) return;
    this.#wantSpans = wanted;
    this.#again();
  }

  #again() {
    this.#abort?.abort();
    this.#open();
  }

  async #open() {
    const abort = new AbortController();
    this.#abort = abort;
    let pause = 500;
    while (!abort.signal.aborted) {
      try {
        await this.#read(abort.signal, () => {
          pause = 500;
        });
        if (abort.signal.aborted) return;
        this.#status("lost", "Connection closed");
      } catch (error) {
        if (abort.signal.aborted) return;
        if (error.status === 501) {
          this.#status("none", "No devices here");
          return;
        }
        const text = { 401: "Token needed", 403: "Not allowed", 429: "Busy" }[error.status];
        this.#status("lost", text || "No connection", error);
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
      pause = Math.min(pause * 2, 10000);
    }
  }

  async #read(signal, opened) {
    const spans = this.#wantSpans && !document.hidden;
    const query = new URLSearchParams({ spans });
    if (document.hidden) query.set("interval_ms", HIDDEN_INTERVAL_MS);
    if (spans && this.#position) query.set("position", this.#position);
    const response = await send(`/v2/atoll/live?${query}`, { signal });
    opened();
    const reader = response.body.getReader();
    const frames = new FrameReader();
    let position = null;
    let first = true;
    for (;;) {
      const { done, value } = await reader.read();
      if (done || signal.aborted) return;
      frames.push(value, (kind, content) => {
        if (kind === "J") {
          const figures = JSON.parse(new TextDecoder().decode(content));
          if (first && spans && !figures.resumed) this.#tell("restart");
          first = false;
          ({ position } = figures);
          this.#tell("figures", figures);
        } else if (kind === "S") {
          this.#tell("spans", new Float64Array(content.buffer, 0, content.byteLength / 8));
          this.#position = position;
        }
      });
    }
  }

  #tell(what, content) {
    this.#listeners.forEach((listener) => listener[what]?.(content));
  }
}

/** Calls `work` now and every `ms`, but not while the tab is hidden. Returns what ends it. */
export function repeat(ms, work) {
  let late = false;
  const turn = () => {
    late = document.hidden;
    if (!late) work();
  };
  const shown = () => {
    if (late) turn();
  };
  const timer = setInterval(turn, ms);
  document.addEventListener("visibilitychange", shown);
  turn();
  return () => {
    clearInterval(timer);
    document.removeEventListener("visibilitychange", shown);
  };
}
