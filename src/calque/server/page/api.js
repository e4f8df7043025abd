/** Requests to the server: JSON, one-line errors, an optional token. */

const TOKEN = "calque-token";

/** An answer of the server that is not a result. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Keep the token until the browser tab is closed. */
export function saveToken(token) {
  sessionStorage.setItem(TOKEN, token.trim());
}

async function send(path, { body, signal } = {}) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { headers, signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is calque serve still running?");
  }
  if (!response.ok) throw await readError(response);
  return response;
}

async function readError(response) {
  const { status } = response;
  if (status === 401) document.dispatchEvent(new CustomEvent("token-needed"));
  let message = "";
  try {
    message = String((await response.json()).error ?? "");
  } catch {
    // Not JSON: the status says what is known.
  }
  message ||= `The server answered with status ${status}.`;
  const seconds = response.headers.get("Retry-After");
  return new ServerError(status, seconds ? `${message} Try again in ${seconds} s.` : message);
}

/** Return the JSON answer to a GET request, or to a POST request if there is a body. */
export async function call(path, options) {
  return (await send(path, options)).json();
}

/** Return the answer to a GET request as text. */
export async function callText(path, options) {
  return (await send(path, options)).text();
}

/** Return a query string of the values that are given. */
export function query(values) {
  const given = Object.entries(values).filter(([, value]) => value !== "" && value != null);
  return given.length ? `?${new URLSearchParams(given)}` : "";
}
