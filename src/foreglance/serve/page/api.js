/** The server's API as the page uses it: fetch, server-sent events, the key. Knows nothing of the page's elements. */

const KEY = "foreglance.key";

/** What the server said instead of an answer; status 0 when it could not be reached. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** The key lives as long as the tab and is sent to this server alone. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function request(path, { body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  let said = null;
  try {
    said = (await response.json()).error;
  } catch {
    // not JSON: a proxy's page, or nothing; the status is what there is to tell
  }
  const message = said?.message ?? `The server answered ${response.status} ${response.statusText}`.trim();
  return new ApiError(message, { status: response.status, param: said?.param, retryAfter });
}

export const getJson = async (path) => (await request(path)).json();
export const postJson = async (path, body, signal) => (await request(path, { body, signal })).json();

/** The chunks of a streamed chat completion, as they come. Ends with the stream; aborting `signal` makes the server
 * free everything that the request holds. */
export async function* stream(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  let whole = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      whole = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { status: 500, param: chunk.error.param });
    yield chunk;
  }
  if (!whole) throw new ApiError("The connection ended before the answer did.");
}

/** The `data` of each server-sent event. Bytes may be cut anywhere: inside a line, and inside a character. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke off.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
