// What the server of a run or store does now, and what went wrong.
import { useView } from "../api.js";
import { ago, bytes, duration, number, shortId, time } from "../format.js";
import { html } from "../lib.js";
import { Fact, Json, Loading, Pill, RunTabs, Stale, scrolls } from "../parts.js";
import { Link, runPath, withQuery } from "../router.js";

const Workers = ({ run, workers, now }) => html`<div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Worker</th><th>State</th><th>Last heartbeat</th><th class="num">Open attempts</th><th>Now on</th><th>Last error</th><th>What it reports</th></tr></thead><tbody>
    ${workers.map((each) => html`<tr key=${each.worker_id}><td class="mono whole">${each.worker_id}</td><td data-label="State"><${Pill} kind=${each.status} /></td><td class="nowrap" data-label="Last heartbeat">${ago(each.last_heartbeat_time, now)}</td><td class="num" data-label="Open attempts">${each.open_attempts}</td><td class="whole" data-label="Now on">${each.current_rollout_id ? html`<${Link} class="mono" to=${runPath(run, "rollouts", each.current_rollout_id)}>${each.current_rollout_id}<//>` : "–"}</td>
      <td class="task" data-label="Last error">${each.last_error ? html`<span class="error-text">${each.last_error.type}: ${each.last_error.message}</span>` : "–"}</td><td class="small muted mono whole" data-label="What it reports">${JSON.stringify(each.stats)}</td></tr>`)}</tbody></table>${!workers.length && html`<p class="empty">No worker has reported here.</p>`}</div>`;

function Queues({ queues }) {
  return html`<table><thead><tr><th>Queue</th><th class="num">Waiting</th><th class="num">Open</th><th class="num">Limit</th></tr></thead><tbody>${queues.map((each) => html`<tr key=${each.name}><td class="mono">${each.name}</td><td class="num">${number(each.waiting)}</td><td class="num">${number(each.open)}</td><td class="num">${each.limit === null ? "none" : each.limit === 0 ? "paused" : number(each.limit)}</td></tr>`)}</tbody></table>${!queues.length && html`<p class="empty">No queue was used yet.</p>`}`;
}

// What runs: by its attempt. Its spans are not read, as a long attempt has very many.
const Running = ({ run, rows, now }) => html`<div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Rollout</th><th>State</th><th>Task</th><th>Queue</th><th>Worker</th><th class="num">Attempt</th><th class="num">Runs for</th></tr></thead><tbody>
  ${rows.map((row) => html`<tr key=${row.rollout_id}><td class="nowrap whole"><${Link} class="mono" to=${runPath(run, "rollouts", row.rollout_id)} title=${row.rollout_id}>${shortId(row.rollout_id)}<//></td><td><${Pill} kind=${row.status} /></td><td class="task">${row.task}</td>
    <td class="mono" data-label="Queue">${row.queue}</td><td class="mono" data-label="Worker">${row.worker || "–"}</td><td class="num" data-label="Attempt">${row.attempts}</td><td class="num" data-label="Runs for">${row.attempt_start ? duration(Math.max(0, now - row.attempt_start)) : "–"}</td></tr>`)}</tbody></table>${!rows.length && html`<p class="empty">None.</p>`}</div>`;

// The model calls that ended last.
const Calls = ({ run, calls, now }) => html`<div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Ended</th><th>Rollout</th><th>Agent, model</th><th>Answer</th><th class="num">Sampled</th><th class="num">Prompt</th><th class="num">Time</th><th class="num">Weights</th></tr></thead><tbody>
  ${calls.map((each) => html`<tr key=${each.span_id}><td class="nowrap" data-label="Ended">${ago(each.end_time, now)}</td><td class="nowrap whole"><${Link} class="mono" to=${runPath(run, "rollouts", each.rollout_id)} title=${each.rollout_id}>${shortId(each.rollout_id)}<//></td><td data-label="Agent, model">${each.agent || "–"}<div class="muted small">${each.model}</div></td>
    <td class="task">${each.failed ? html`<span class="error-text">failed</span> ` : ""}${each.answer}</td><td class="num" data-label="Sampled">${number(each.sampled_tokens)}</td><td class="num" data-label="Prompt">${number(each.prompt_tokens)}</td><td class="num" data-label="Time">${duration(each.seconds)}</td><td class="num" data-label="Weights">${each.version ?? "–"}</td></tr>`)}</tbody></table>${!calls.length && html`<p class="empty">None.</p>`}</div>`;

export function ServerPage({ parts: [run], path }) {
  const view = useView(path, 2000);
  if (!view.data) return html`<${RunTabs} run=${run} here="server" /><${Loading} view=${view} />`;
  const { calls, statistics, running, queues, workers, now } = view.data;
  return html`<div class="head"><h1>Server</h1><div class="right"><${Json} path=${path} name="server.json" /></div></div><${RunTabs} run=${run} here="server" /><${Stale} view=${view} />
    <div class="panel"><dl class="facts">${Object.entries(statistics).map(([name, value]) => html`<${Fact} key=${name} name=${name.replace("rollouts.", "")}>${name === "bytes" ? bytes(value) : number(value)}<//>`)}</dl></div>
    <h2>Running</h2><${Running} run=${run} rows=${running} now=${now} />
    <h2>Queues</h2><div class="panel tight" ...${scrolls}><${Queues} queues=${queues} /></div><h2>Workers</h2><${Workers} run=${run} workers=${workers} now=${now} />
    <h2>Newest calls</h2><${Calls} run=${run} calls=${calls} now=${now} />`;
}

export function FailuresPage({ parts: [run], path }) {
  const view = useView(path, 10000);
  if (!view.data) return html`<${RunTabs} run=${run} here="failures" /><${Loading} view=${view} />`;
  const { causes, read, all } = view.data;
  const rollouts = (values) => withQuery(runPath(run, "rollouts"), values);
  return html`<div class="head"><h1>Failures by cause</h1><span class="muted">${number(read)} failed rollouts${all ? "" : ", the newest"}</span><div class="right"><${Link} class="button" to=${rollouts({ failure: "any" })}>All that failed or have no reward<//><${Json} path=${path} name="failures.json" /></div></div>
    <${RunTabs} run=${run} here="failures" /><${Stale} view=${view} />
    <div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Cause</th><th class="num">Rollouts</th><th>Message of the newest</th><th>Modes</th><th>Agents</th><th>First, last</th><th>Newest</th></tr></thead><tbody>
      ${causes.map((each) => html`<tr key=${each.cause || ""}><td class="whole"><${Link} to=${rollouts(each.cause ? { state: "failed", failure: each.cause } : { state: "failed" })}><b>${each.cause || "no error recorded"}</b><//></td><td class="num" data-label="Rollouts">${number(each.count)}</td>
        <td class="task"><span class="error-text">${each.message || "–"}</span>${each.messages > 1 && html`<div class="muted small">and ${number(each.messages - 1)} other messages</div>`}</td><td data-label="Modes">${each.modes.join(", ") || "–"}</td><td data-label="Agents">${each.agents.join(", ") || "–"}</td>
        <td class="nowrap small" data-label="First, last">${time(each.oldest_time)}<br />${time(each.newest_time)}</td><td data-label="Newest"><${Link} to=${runPath(run, "rollouts", each.newest)}>open<//></td></tr>`)}</tbody></table>${!causes.length && html`<p class="empty">No rollout has failed.</p>`}</div>`;
}
