// Reads the JSON of views with the access token, which stays in this tab.
import { useEffect, useState } from "./lib.js";
import { BASE } from "./router.js";

const KEY = "agl-token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// A link may end with #token=...: a fragment is never sent to the server.
export function takeTokenFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    setToken(given);
    history.replaceState(null, "", location.pathname + location.search);
  }
}

export function setToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
}

const headers = () => {
  const token = sessionStorage.getItem(KEY);
  return token ? { authorization: `Bearer ${token}` } : {};
};

async function check(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not JSON: the status says all there is
  }
  throw new ApiError(response.status, message);
}

export async function get(path, signal) {
  const response = await fetch(`${BASE}/api${path}`, { headers: headers(), signal });
  return (await check(response)).json();
}

export async function post(path, body) {
  const response = await fetch(`${BASE}/api${path}`, {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  return check(response);
}

export async function download(path, name, body) {
  const response = body === undefined
    ? await check(await fetch(`${BASE}/api${path}`, { headers: headers() }))
    : await post(path, body);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  return response;
}

// The JSON of a view; read again every `every` milliseconds while the tab is visible.
export function useView(path, every = 0) {
  const [found, setFound] = useState({ path: null, data: null, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return undefined;
    const stop = new AbortController();
    let timer = 0;
    const read = async () => {
      try {
        const data = await get(path, stop.signal);
        setFound({ path, data, error: null });
      } catch (error) {
        if (error.name === "AbortError") return;
        setFound((before) => ({ path, data: before.path === path ? before.data : null, error }));
        if (error.status === 401) dispatchEvent(new Event("agl-unauthorized"));
      }
      if (every && !stop.signal.aborted) timer = setTimeout(waitThenRead, every);
    };
    const waitThenRead = () => (document.hidden ? (timer = setTimeout(waitThenRead, every)) : read());
    read();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, every, turn]);
  const reload = () => setTurn((before) => before + 1);
  return found.path === path ? { ...found, reload } : { path, data: null, error: null, reload };
}
