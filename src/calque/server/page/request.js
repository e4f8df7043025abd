/** One request of a view at a time: the newest wins, waiting is shown, errors fit in one line. */

import { h } from "./dom.js";

const BUSY_AFTER = 300; // milliseconds

/** Return the line for waiting and errors, and a function that sends a request. */
export function createRequests(output) {
  const busy = h("p", { class: "busy", role: "status" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const node = h("div", { class: "state" }, busy, error);
  let current = null;

  function fail(message) {
    error.textContent = message;
    error.hidden = !message;
    output.classList.toggle("stale", Boolean(message));
  }

  /** Send a request and show its answer, unless a newer request was sent meanwhile. */
  async function run(request, show, waiting = "Computing…") {
    current?.abort();
    const own = new AbortController();
    current = own;
    const timer = setTimeout(() => {
      busy.textContent = waiting;
      output.setAttribute("aria-busy", "true");
    }, BUSY_AFTER);
    try {
      const answer = await request(own.signal);
      if (own.signal.aborted) return;
      fail("");
      show(answer);
    } catch (problem) {
      if (own.signal.aborted) return;
      fail(problem.message);
      if (problem.status === undefined) console.error(problem);
    } finally {
      clearTimeout(timer);
      if (current === own) {
        busy.textContent = "";
        output.removeAttribute("aria-busy");
      }
    }
  }

  /** Forget the request that is under way. */
  function cancel() {
    current?.abort();
    current = null;
    busy.textContent = "";
    output.removeAttribute("aria-busy");
  }

  return { node, run, fail, cancel };
}
