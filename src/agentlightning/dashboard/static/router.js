// Every view is a URL below /dashboard; links change it without loading the page again.
import { html, useEffect, useState } from "./lib.js";

export const BASE = "/dashboard";
const CHANGED = "agl-navigated";

export const part = (text) => encodeURIComponent(text);
export const runPath = (run, ...rest) => ["/runs", part(run), ...rest.map(part)].join("/");

export function withQuery(path, values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

export function navigate(path, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", BASE + path);
  if (!replace) scrollTo(0, 0);
  dispatchEvent(new Event(CHANGED));
}

// Pages that had another address before.
const MOVED = { validation: "tasks", workers: "server", queues: "server", live: "server" };
const OLD = /^(\/runs\/[^/]+\/)(validation|workers|queues|live)$/;

function current() {
  const given = location.pathname.slice(BASE.length).replace(/\/$/, "") || "/";
  const path = given.replace(OLD, (_, run, name) => run + MOVED[name]);
  if (path !== given) history.replaceState(null, "", BASE + path + location.search);
  return { path, search: location.search };
}

export function useLocation() {
  const [place, setPlace] = useState(current());
  useEffect(() => {
    const update = () => setPlace(current());
    addEventListener("popstate", update);
    addEventListener(CHANGED, update);
    return () => {
      removeEventListener("popstate", update);
      removeEventListener(CHANGED, update);
    };
  }, []);
  return { ...place, query: Object.fromEntries(new URLSearchParams(place.search)) };
}

export function Link({ to, children, ...rest }) {
  const follow = (event) => {
    if (event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    navigate(to);
  };
  return html`<a href=${BASE + to} onClick=${follow} ...${rest}>${children}</a>`;
}
