// Versions of prompts with what changed, and of weights with what they learned from.
import { useView } from "../api.js";
import { number, time } from "../format.js";
import { html } from "../lib.js";
import { Json, Loading, Pill, RunTabs, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

const SIGN = { same: " ", added: "+", removed: "-" };

export function Diff({ change }) {
  return html`<div><h3>${change.name}</h3><div class="diff">${change.lines.map((line, place) => html`<pre key=${place} class=${line.kind}>${SIGN[line.kind]} ${line.text}</pre>`)}</div></div>`;
}

const promptsOf = (each) => Object.entries(each.resources).filter(([, value]) => value.template !== undefined);
const modelsOf = (each) => Object.entries(each.resources).filter(([, value]) => value.template === undefined);

// Versions without prompts: a line each.
function Models({ versions }) {
  return html`<div class="panel tight" ...${scrolls}><table><thead><tr><th class="num">Version</th><th>Resources</th><th>Models</th><th>Published</th></tr></thead><tbody>${versions.map((each) => html`<tr key=${each.resources_id}><td class="num">${each.version}</td><td class="mono">${each.resources_id}</td>
    <td>${modelsOf(each).map(([name, value]) => html`<div key=${name}><b>${name}</b> ${value.model}${value.policy_version !== null && value.policy_version !== undefined ? `, weights ${value.policy_version}` : ""} <span class="muted small">${JSON.stringify(value.sampling_parameters || {})}</span></div>`)}</td><td class="nowrap small">${time(each.create_time)}</td></tr>`)}</tbody></table></div>`;
}

function Version({ each }) {
  const [prompts, models] = [promptsOf(each), modelsOf(each)];
  return html`<div class="panel"><div class="head"><h2 class="mono">${each.resources_id}</h2><span class="muted small">version ${each.version}, ${time(each.create_time)}</span></div>
    ${models.map(([name, value]) => html`<p key=${name} class="small"><b>${name}</b> ${value.model}${value.policy_version !== null && value.policy_version !== undefined ? `, weights ${value.policy_version}` : ""} <span class="muted">${JSON.stringify(value.sampling_parameters || {})}</span></p>`)}
    ${each.changed.map((change) => html`<${Diff} key=${change.name} change=${change} />`)}
    ${prompts.map(([name, value]) => html`<details key=${name}><summary>${name}</summary><pre>${value.template}</pre></details>`)}
    ${each.before && !each.changed.length && html`<p class="muted small">Prompts as in ${each.before}.</p>`}</div>`;
}

export function ResourcesPage({ parts: [run], query, path }) {
  const address = withQuery(path, query);
  const view = useView(address);
  if (!view.data) return html`<${RunTabs} run=${run} here="resources" /><${Loading} view=${view} />`;
  return html`<div class="head"><h1>Prompts and models</h1><div class="right"><${Json} path=${address} name="resources.json" /></div></div><${RunTabs} run=${run} here="resources" />
    ${view.data.versions.length > 0 && (view.data.versions.some((each) => promptsOf(each).length) ? view.data.versions.map((each) => html`<${Version} key=${each.resources_id} each=${each} />`) : html`<${Models} versions=${view.data.versions} />`)}
    ${!view.data.versions.length && html`<p class="empty">No resources were published.</p>`}
    ${view.data.next && html`<button type="button" onClick=${() => navigate(withQuery(path, { ...query, after: view.data.next }))}>Older versions →</button>`}`;
}

export function WeightsPage({ parts: [run], query, path }) {
  const address = withQuery(path, query);
  const view = useView(address, 10000);
  if (!view.data) return html`<${RunTabs} run=${run} here="weights" /><${Loading} view=${view} />`;
  const { data } = view;
  const names = [...new Set(data.records.flatMap((each) => Object.keys(each.scores)))];
  return html`<div class="head"><h1>Weights</h1><div class="right"><${Json} path=${address} name="weights.json" /></div></div><${RunTabs} run=${run} here="weights" />
    ${!data.has_audit && html`<p class="empty">This run has no audit log: it was made by an earlier version, or has not finished a step.</p>`}
    ${data.has_audit && html`<div class="panel tight" ...${scrolls}><table><thead><tr><th class="num">Version</th><th class="num">From</th><th>Event</th><th>Step</th><th class="num">Rollouts</th>${names.map((name) => html`<th key=${name} class="num">${name.replaceAll("_", " ")}</th>`)}<th>Checkpoint</th><th>When</th></tr></thead><tbody>
      ${data.records.map((each) => html`<tr key=${`${each.step}${each.action}`}><td class="num"><b>${each.version ?? "–"}</b></td><td class="num">${each.parent ?? "–"}</td><td><${Pill} kind=${each.action} />${each.reason && html`<div class="small muted">${each.reason}</div>`}${each.returned_to !== null && html`<div class="small">returned to step ${each.returned_to}</div>`}</td>
        <td><${Link} to=${runPath(run, "steps", each.step)}>${each.step}<//></td><td class="num"><${Link} to=${withQuery(runPath(run, "rollouts"), { step: each.step })}>${number(each.rollouts)}<//></td>${names.map((name) => html`<td key=${name} class="num">${number(each.scores[name])}</td>`)}
        <td>${each.has_checkpoint && html`<${Pill} kind="finished">kept<//>`} ${each.step === data.best_step && html`<${Pill} kind="promoted">best<//>`}</td><td class="nowrap small">${time(each.time)}</td></tr>`)}</tbody></table></div>`}
    ${data.next && html`<button type="button" onClick=${() => navigate(withQuery(path, { ...query, after: data.next }))}>Older versions →</button>`}`;
}
