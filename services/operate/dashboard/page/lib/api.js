// Fetches JSON, polls with back-off, and knows whether the server answers.
import { useCallback, useEffect, useRef, useState } from "../vendor/htm-preact.js";

const TIMEOUT_MS = 20_000;
const FILE_TIMEOUT_MS = 60_000;
const SLOWEST_MS = 30_000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// `goneSince` is when the server first did not answer, null while it answers.
export const connection = { goneSince: null, retryAt: null, answeredAt: null };
const watchers = new Set();
const pollers = new Set();

function report(gone, retryAt = null) {
  connection.goneSince = gone ? connection.goneSince ?? Date.now() : null;
  connection.retryAt = gone ? retryAt : null;
  if (!gone) connection.answeredAt = Date.now();
  for (const watcher of watchers) watcher({ ...connection });
}

export const retryNow = () => pollers.forEach((poll) => poll());

export function useConnection() {
  const [state, set] = useState({ ...connection });
  useEffect(() => {
    watchers.add(set);
    return () => watchers.delete(set);
  }, []);
  return state;
}

// The address has the token once. Pages of this host and port alone can read what is kept here. A
// cookie would be sent to the servers of all other ports, too.
const TOKEN = "headrace_token";
function takeToken() {
  const given = new URLSearchParams(location.search).get("token");
  if (given === null) return;
  localStorage.setItem(TOKEN, given);
  history.replaceState(null, "", location.pathname + location.hash);
}
takeToken();

const fetched = (path, options = {}) => fetch(path, {
  credentials: "omit",
  signal: AbortSignal.timeout(TIMEOUT_MS),
  ...options,
  headers: { Authorization: `Bearer ${localStorage.getItem(TOKEN) ?? ""}`, ...options.headers },
});

async function ask(path, options) {
  const answer = await fetched(path, options);
  const body = await answer.json().catch(() => null);
  if (answer.ok && body !== null) return body;
  throw refusal(answer, path, body);
}

const refusal = (answer, path, body) =>
  new Refused(answer.status, body?.error ?? `The server answered ${answer.status} to ${path}.`);

// Fetches a file and returns a URL of it for this page. Free it with URL.revokeObjectURL.
export async function getFile(path) {
  const answer = await fetched(path, { signal: AbortSignal.timeout(FILE_TIMEOUT_MS) });
  if (!answer.ok) throw refusal(answer, path, await answer.json().catch(() => null));
  return URL.createObjectURL(await answer.blob());
}

export const get = (path) => ask(path, {});

export async function post(action, body) {
  const session = await get("/api/session");
  return ask(`/api/actions/${action}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Headrace-Token": session.action_token },
    body: JSON.stringify(body),
  });
}

// A path with a query of those parameters that have a value.
export function query(path, params) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

// Milliseconds until the next question. A server that is gone is asked ever more seldom.
export function nextDelay(everyMs, failures) {
  return failures ? Math.min(SLOWEST_MS, 1000 * 2 ** (failures - 1)) : everyMs;
}

// Asks for `path` now and every `everyS` seconds (0: once). Keeps the last answer while it fails.
export function usePoll(path, everyS = 3) {
  const [state, set] = useState({ path, data: null, error: null });
  const again = useRef(() => {});
  useEffect(() => {
    if (path === null) return undefined;
    let [timer, ended, failures, running] = [0, false, 0, false];
    async function poll() {
      if (ended || running) return;
      clearTimeout(timer);
      running = true;
      let next = everyS * 1000;
      try {
        const data = await get(path);
        failures = 0;
        report(false);
        if (!ended) set({ path, data, error: null });
      } catch (error) {
        const refused = error instanceof Refused;
        failures += 1;
        next = refused && error.status < 500 ? everyS * 1000 : nextDelay(everyS * 1000, failures);
        if (refused) report(false);
        else if (!ended) report(true, Date.now() + next);
        if (!ended) set((old) => ({ path, data: old.path === path ? old.data : null, error }));
      }
      running = false;
      if (!ended && next && !document.hidden) timer = setTimeout(poll, next);
    }
    const shown = () => document.hidden || poll();
    document.addEventListener("visibilitychange", shown);
    pollers.add(poll);
    again.current = poll;
    poll();
    return () => {
      ended = true;
      clearTimeout(timer);
      pollers.delete(poll);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [path, everyS]);
  const reload = useCallback(() => again.current(), []);
  return state.path === path ? { ...state, reload } : { path, data: null, error: null, reload };
}
