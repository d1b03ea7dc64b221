// Hash routes: `#/episode/17/2?tab=tokens`. Everything a page shows can be shared as a link.
import { useEffect, useState } from "../vendor/htm-preact.js";
import { query } from "./api.js";

export function parse(hash) {
  const [path, text = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decode);
  return { name: parts[0] ?? "run", parts: parts.slice(1), params: Object.fromEntries(new URLSearchParams(text)) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(parts, params = {}) {
  return query(`#/${parts.map((part) => encodeURIComponent(part)).join("/")}`, params);
}

export const go = (hash) => {
  location.hash = hash;
};

// Changes parameters of the current link. `replace` leaves no entry in the history.
export function change(params, replace = false) {
  const now = parse(location.hash);
  const hash = link([now.name, ...now.parts], { ...now.params, ...params });
  if (replace) {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else go(hash);
}

export function useRoute() {
  const [route, set] = useState(() => parse(location.hash));
  useEffect(() => {
    const moved = () => set(parse(location.hash));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return route;
}
