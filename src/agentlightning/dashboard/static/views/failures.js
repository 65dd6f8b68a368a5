// Failed rollouts by their cause.
import { useView } from "../api.js";
import { number, time } from "../format.js";
import { html } from "../lib.js";
import { Json, Loading, RunTabs, Stale, scrolls } from "../parts.js";
import { Link, runPath, withQuery } from "../router.js";

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
