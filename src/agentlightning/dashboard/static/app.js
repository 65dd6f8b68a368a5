// The page: its header, its routes, the request for an access token.
import { setToken, takeTokenFromAddress } from "./api.js";
import { html, render, useEffect, useRef, useState } from "./lib.js";
import { Link, navigate, runPath, useLocation } from "./router.js";
import { ComparePage } from "./views/compare.js";
import { GroupPage } from "./views/group.js";
import { ResourcesPage, WeightsPage } from "./views/resources.js";
import { RolloutPage } from "./views/rollout.js";
import { RolloutsPage, TaskPage } from "./views/rollouts.js";
import { RunPage } from "./views/run.js";
import { RunsPage } from "./views/runs.js";
import { FailuresPage, ServerPage } from "./views/server.js";
import { StepPage } from "./views/step.js";
import { TasksPage } from "./views/tasks.js";
import { TokensPage } from "./views/tokens.js";

const RUN = "/runs/([^/]+)";
const ROUTES = [
  [/^\/(?:runs)?$/, RunsPage],
  [/^\/compare$/, ComparePage],
  [new RegExp(`^${RUN}$`), RunPage],
  [new RegExp(`^${RUN}/failures$`), FailuresPage],
  [new RegExp(`^${RUN}/steps/(\\d+)$`), StepPage],
  [new RegExp(`^${RUN}/tasks$`), TasksPage],
  [new RegExp(`^${RUN}/rollouts$`), RolloutsPage],
  [new RegExp(`^${RUN}/rollouts/([^/]+)$`), RolloutPage],
  [new RegExp(`^${RUN}/rollouts/([^/]+)/tokens$`), TokensPage],
  [new RegExp(`^${RUN}/rollouts/([^/]+)/group$`), GroupPage],
  [new RegExp(`^${RUN}/tasks/([^/]+)$`), TaskPage],
  [new RegExp(`^${RUN}/resources$`), ResourcesPage],
  [new RegExp(`^${RUN}/weights$`), WeightsPage],
  [new RegExp(`^${RUN}/server$`), ServerPage],
];
const THEME = "agl-theme";

function preferredTheme() {
  const chosen = localStorage.getItem(THEME);
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  dispatchEvent(new Event("agl-theme"));
}

function Crumbs({ path, of }) {
  const names = path.split("/").filter(Boolean).map(decodeURIComponent);
  if (names[0] === "compare") return html`<nav class="crumbs" aria-label="Where you are">${of && html`<${Link} to=${runPath(of)}>${of}<//><span aria-hidden="true">/</span>`}<span>compare</span></nav>`;
  if (names[0] !== "runs" || names.length < 2) return html`<span class="crumbs"></span>`;
  const [, run, ...rest] = names;
  return html`<nav class="crumbs" aria-label="Where you are"><${Link} to=${runPath(run)}>${run}<//>
    ${rest.map((name, place) => {
      const isPage = place === 0 && name === "steps";
      const to = runPath(run, ...rest.slice(0, place + 1));
      return html`<span aria-hidden="true">/</span>${isPage ? html`<span>${name}</span>` : html`<${Link} to=${to} title=${name}>${name}<//>`}`;
    })}
  </nav>`;
}

function Login({ onDone }) {
  const [token, change] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setToken(token.trim());
    onDone();
  };
  return html`<div class="login panel"><h1>Access token</h1>
    <p class="muted">This server shows nothing without its token: the value of AGL_TOKEN or --token. It stays in this tab.</p>
    <form onSubmit=${submit}><label>Token <input type="password" autocomplete="off" value=${token} onInput=${(event) => change(event.target.value)} /></label>
    <button class="primary" type="submit">Open</button></form></div>`;
}

function Help({ onClose }) {
  return html`<div class="notice" role="dialog" aria-label="Keyboard"><b>Keyboard</b>
    <p><code>g</code> <code>r</code> runs · <code>/</code> filter or search · <code>t</code> dark or light · <code>u</code> one level up · <code>j</code> <code>k</code> next and previous row · <code>n</code> <code>p</code> next and previous rollout · <code>?</code> this help</p>
    <p>In a chart: arrow keys move, Enter opens the step. In tokens: arrow keys move from token to token.</p>
    <button type="button" onClick=${onClose}>Close</button></div>`;
}

function moveRow(by) {
  const rows = [...document.querySelectorAll("main tbody tr")].filter((row) => row.querySelector("a"));
  const here = rows.findIndex((row) => row.contains(document.activeElement));
  rows[Math.max(0, Math.min(rows.length - 1, here + by))]?.querySelector("a").focus();
}

function useKeys({ toggleTheme, toggleHelp }) {
  const before = useRef("");
  useEffect(() => {
    const press = (event) => {
      if (event.metaKey || event.ctrlKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
      const keys = { t: toggleTheme, "?": toggleHelp, j: () => moveRow(1), k: () => moveRow(-1) };
      keys.u = () => navigate(location.pathname.replace(/^\/dashboard/, "").replace(/\/(steps\/)?[^/]+$/, "").replace(/^\/runs$/, "") || "/");
      keys["/"] = () => document.querySelector("form.filters input, form.find input")?.focus();
      keys.n = () => document.querySelector("a[rel=next]")?.click();
      keys.p = () => document.querySelector("a[rel=prev]")?.click();
      if (before.current === "g" && event.key === "r") navigate("/");
      else if (keys[event.key]) {
        event.preventDefault();
        keys[event.key]();
      }
      before.current = event.key;
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

function App() {
  const place = useLocation();
  const [locked, setLocked] = useState(false);
  const [help, setHelp] = useState(false);
  const [theme, setTheme] = useState(preferredTheme());
  const toggleTheme = () => setTheme((now) => {
    const next = now === "dark" ? "light" : "dark";
    localStorage.setItem(THEME, next);
    applyTheme(next);
    return next;
  });
  useKeys({ toggleTheme, toggleHelp: () => setHelp((now) => !now) });
  useEffect(() => {
    const lock = () => setLocked(true);
    addEventListener("agl-unauthorized", lock);
    return () => removeEventListener("agl-unauthorized", lock);
  }, []);
  useEffect(() => {
    document.title = ["Agent Lightning", ...place.path.split("/").slice(2).map(decodeURIComponent)].join(" · ");
  }, [place.path]);
  const [route, Page] = ROUTES.find(([pattern]) => pattern.test(place.path)) || [null, null];
  const parts = route ? route.exec(place.path).slice(1).map(decodeURIComponent) : [];
  return html`
    <a class="skip" href="#main">To the content</a>
    <header class="top">
      <${Link} to="/" class="brand"><img src="/dashboard/static/icon.svg" alt="" />Agent Lightning<//>
      <${Crumbs} path=${place.path} of=${place.query.of} />
      <div class="right">
        <button type="button" onClick=${() => setHelp(!help)} aria-label="Keyboard help">?</button>
        <button type="button" onClick=${toggleTheme}>${theme === "dark" ? "Light" : "Dark"}</button>
      </div>
    </header>
    <main id="main">
      ${help && html`<${Help} onClose=${() => setHelp(false)} />`}
      ${locked
        ? html`<${Login} onDone=${() => setLocked(false)} />`
        : Page
          ? html`<${Page} key=${place.path} parts=${parts} query=${place.query} search=${place.search} path=${place.path} />`
          : html`<p class="empty">There is no page at ${place.path}. <${Link} to="/">All runs<//></p>`}
    </main>`;
}

takeTokenFromAddress();
applyTheme(preferredTheme());
render(html`<${App} />`, document.getElementById("app"));
