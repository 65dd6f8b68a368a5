// A step of a run: its groups, those with the largest spread first.
import { useView } from "../api.js";
import { interval, number } from "../format.js";
import { html } from "../lib.js";
import { Fact, Json, Loading, Rewards, Warnings, scrolls } from "../parts.js";
import { Link, runPath, withQuery } from "../router.js";

function Group({ run, group }) {
  const to = runPath(run, "rollouts", group.worst, "group");
  return html`<tr><td class="task"><${Link} to=${to}>${group.task}<//><div class="muted small mono">${group.group}</div></td>
    <td><${Rewards} values=${group.rewards} /></td><td class="nowrap">${interval(group.reward)}</td><td class="num">${number(group.spread)}</td>
    <td class="num">${group.tool_errors ? html`<span class="error-text">${group.tool_errors}</span>` : "0"}</td><td class="num">${group.failed || "0"}</td><td class="num">${group.versions.join(", ") || "–"}</td></tr>`;
}

export function StepPage({ parts: [run, text], path }) {
  const view = useView(path);
  const step = Number(text);
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { data } = view;
  const { metrics } = data;
  return html`<div class="head"><h1>Step ${step}</h1><div class="right">
      ${step > 1 && html`<${Link} class="button" to=${runPath(run, "steps", step - 1)}>← ${step - 1}<//>`}
      ${step < data.last && html`<${Link} class="button" to=${runPath(run, "steps", step + 1)}>${step + 1} →<//>`}
      <${Link} class="button" to=${withQuery(runPath(run, "rollouts"), { step, sort: "reward_number", order: "asc" })}>All ${data.rollouts} rollouts<//>
      <${Json} path=${path} name=${`step-${step}.json`} /></div></div>
    <${Warnings} warnings=${data.warnings} />
    <div class="panel"><dl class="facts">
      <${Fact} name="Reward" note=${metrics.reward_std !== undefined ? `± ${number(metrics.reward_std)} within a group` : ""}>${number(metrics.reward)}<//>
      <${Fact} name="Learned from" note=${`of ${number(data.rollouts)} rollouts`}>${data.learned === null ? "not recorded" : `${number(data.learned)} rollouts`}<//>
      <${Fact} name="Groups without spread">${number(metrics.groups_without_spread)} of ${number(metrics.groups)}<//>
      <${Fact} name="Entropy" note="nats a token">${number(metrics.entropy ?? metrics.sampling_entropy)}<//>
      <${Fact} name="Gradient norm">${number(metrics.grad_norm)}<//>
      <${Fact} name="Clipped tokens">${number(metrics.clip_fraction)}<//>
      <${Fact} name="Versions of weights">${data.versions.join(", ") || "–"}<//>
      <${Fact} name="Staleness" note="updates">${number(metrics.staleness)}<//>
    </dl></div>
    <h2>Groups, the largest spread first</h2>
    <div class="panel tight" ...${scrolls}><table><thead><tr><th>Task</th><th>Rewards</th><th>Mean, 95% interval</th><th class="num">Spread</th><th class="num">Tool errors</th><th class="num">Failed</th><th class="num">Weights</th></tr></thead>
      <tbody>${data.groups.map((group) => html`<${Group} key=${group.group} run=${run} group=${group} />`)}</tbody></table>
      ${!data.groups.length && html`<p class="empty">The store has no rollouts of this step any more.</p>`}</div>
    <details class="panel"><summary>All metrics of the step</summary><pre>${JSON.stringify(metrics, null, 2)}</pre></details>`;
}
