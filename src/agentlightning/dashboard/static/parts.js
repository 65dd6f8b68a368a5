// What several pages use.
import { download } from "./api.js";
import { interval, number, reward as rewardText } from "./format.js";
import { html, useState } from "./lib.js";
import { Link, runPath, withQuery } from "./router.js";

// A table that may be wider than the window scrolls by itself, with the keyboard, too.
export const scrolls = { tabindex: 0, role: "group", "aria-label": "Table" };

export const Pill = ({ kind, children }) => html`<span class=${`pill ${kind || ""}`}>${children ?? kind}</span>`;

export function Fact({ name, children, note }) {
  return html`<div><dt>${name}</dt><dd>${children}${note && html`<small>${note}</small>`}</dd></div>`;
}

export function Loading({ view }) {
  if (view.error) return html`<div class="notice bad" role="alert"><b>Cannot be shown</b><p>${view.error.message}</p></div>`;
  return html`<p class="empty" aria-busy="true">Loading …</p>`;
}

// A view that failed to refresh keeps what it had, and says so.
export function Stale({ view }) {
  return view.error && view.data ? html`<div class="notice warn" role="status">Not up to date: ${view.error.message}</div>` : null;
}

const TABS = [["", "Overview"], ["rollouts", "Rollouts"], ["tasks", "Tasks"], ["compare", "Compare"], ["server", "Server"]];
const SERVER = [["server", "Now"], ["failures", "Failures"], ["resources", "Prompts and models"], ["weights", "Weights"]];
const ONLY_RUNS = new Set(["tasks", "compare", "weights"]);

function Tabs({ run, tabs, here, label, isStore }) {
  const to = (name) => (name === "compare" ? withQuery("/compare", { of: run, runs: run }) : name ? runPath(run, name) : runPath(run));
  return html`<nav class="tabs" aria-label=${label}>${tabs.filter(([name]) => !isStore || !ONLY_RUNS.has(name)).map(([name, title]) => html`<${Link} key=${name} to=${to(name)} aria-current=${name === here ? "page" : undefined}>${title}<//>`)}</nav>`;
}

export function RunTabs({ run, here, isStore = run === "store" }) {
  const isServer = SERVER.some(([name]) => name === here);
  return html`<${Tabs} run=${run} tabs=${TABS} here=${isServer ? "server" : here} label="Pages of this run" isStore=${isStore} />
    ${isServer && html`<${Tabs} run=${run} tabs=${SERVER} here=${here} label="Pages of its server" isStore=${isStore} />`}`;
}

// Puts a text on the clipboard, which browsers offer to pages of this machine and of https alone; elsewhere through a selection.
async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not allow it");
}

export function Copy({ text, what }) {
  const [said, say] = useState("Copy");
  const copy = () => toClipboard(text).then(() => say("Copied"), (error) => say(`Not copied: ${error.message}`));
  return html`<button type="button" class="quiet" aria-label=${`Copy the ${what}`} onClick=${copy}>${said}</button><span class="skip" role="status">${said === "Copy" ? "" : `${what}: ${said}`}</span>`;
}

export function Json({ path, name = "view.json" }) {
  const [error, setError] = useState("");
  const save = () => download(path, name).then(() => setError(""), (problem) => setError(problem.message));
  return html`<button type="button" onClick=${save} title=${`Save the JSON of this view: /dashboard/api${path}`}>JSON</button>${error && html`<span class="error-text">${error}</span>`}`;
}

// An interval as a whisker between the lowest and highest value of its axis.
export function Range({ found, low = 0, high = 1 }) {
  if (!found) return html`<span class="muted">–</span>`;
  const at = (value) => 5 + (120 * (Math.min(high, Math.max(low, value)) - low)) / (high - low || 1);
  const bounded = found.low !== null && found.low !== undefined;
  return html`<svg class="range" viewBox="0 0 130 16" role="img" aria-label=${interval(found)}>
    <line class="track" x1="5" x2="125" y1="8" y2="8" />
    ${bounded && html`<line class="whisker" x1=${at(found.low)} x2=${at(found.high)} y1="8" y2="8" />`}
    <circle cx=${at(found.mean)} cy="8" r="4" />
  </svg>`;
}

export function Sparkline({ values }) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return html`<span class="muted">–</span>`;
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = values.map((value, place) => `${((120 * place) / (values.length - 1)).toFixed(1)},${(26 - (24 * (value - low)) / span).toFixed(1)}`);
  return html`<svg class="sparkline" viewBox="0 0 120 28" role="img" aria-label=${`Reward from ${number(values[0])} to ${number(values.at(-1))}`}><path d=${`M${points.join("L")}`} /></svg>`;
}

export function Progress({ done, total }) {
  const share = total ? Math.min(1, done / total) : 0;
  return html`<div>${number(done)}${total ? ` / ${number(total)}` : ""}${total && html`<div class="bar"><svg viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect width=${100 * share} height="6" /></svg></div>`}</div>`;
}

// A long name may be broken after its parts.
export const breakable = (name) => (name || "–").split(/(?<=[/:.])/).map((part, place) => html`${place > 0 && html`<wbr />`}${part}`);

export function Warnings({ warnings, onPick }) {
  return warnings.map((each) => html`<div class="notice warn" key=${each.name}>
    <b>${each.name.replaceAll("_", " ")}</b>${" "}
    <span class="muted">${each.since ? `since step ${each.since}${each.until && each.until !== each.since ? ` until ${each.until}` : ""}, ${each.count} step${each.count === 1 ? "" : "s"}` : "of the whole run"}</span>
    ${each.since && onPick && html`${" "}<button type="button" onClick=${() => onPick(each.since)}>Show step ${each.since}</button>`}
    <p>${onPick && each.until ? `Step ${each.until}: ` : ""}${each.what}</p>${each.advice && html`<p class="muted">Try: ${each.advice}</p>`}
  </div>`);
}

const level = (value) => (value === null ? "" : `r${Math.max(0, Math.min(4, Math.floor(value * 4.999)))}`);

// The rewards of a group, a square each.
export function Rewards({ values }) {
  const known = values.filter((value) => value !== null);
  const low = Math.min(0, ...known);
  const high = Math.max(1, ...known);
  const place = (value) => (value === null ? null : (value - low) / (high - low));
  const text = values.map((value) => (value === null ? "missing" : number(value))).join(", ");
  return html`<div class="dots" role="img" aria-label=${`Rewards: ${text}`} title=${text}>${values.map((value, index) => html`<span key=${index} class=${`dot ${level(place(value))}`}></span>`)}</div>`;
}

export const RewardChip = ({ value }) => html`<span class="reward">reward ${rewardText(value)}</span>`;
