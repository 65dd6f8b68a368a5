// The held-out and validation tasks of a run: each through its measurements, won and lost, with its rollouts.
import { useView } from "../api.js";
import { interval, number, signed } from "../format.js";
import { html } from "../lib.js";
import { Json, Loading, Range, RunTabs, Stale, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

const SETS = [["held_out", "Held-out tasks"], ["validation", "Validation tasks"]];
const title = (label) => (/^\d+$/.test(label) ? `Step ${label}` : label);

function Cell({ run, cell, label }) {
  if (!cell.rollouts.length) return html`<td class="num muted" data-label=${label}>–</td>`;
  return html`<td class="num" data-label=${label}><${Link} to=${runPath(run, "rollouts", cell.rollouts[0])}>${cell.mean === null ? "missing" : number(cell.mean)}<//></td>`;
}

function Result({ data }) {
  if (!data.result) return html`<p class="muted">${data.error}</p>`;
  const { result, measurements } = data;
  return html`<p><b>${signed(result.gain)}</b> from ${title(measurements[0].label)} to ${title(measurements.at(-1).label)} (95% interval ${signed(result.interval[0])} to ${signed(result.interval[1])}):
    ${" "}<b>${result.better}</b> tasks won, <b>${result.worse}</b> lost, ${result.tasks - result.better - result.worse} equal, of ${result.tasks}. ${result.left_out > 0 && `${result.left_out} without both rewards are left out.`}</p>`;
}

export function TasksPage({ parts: [run], query, path }) {
  const wanted = { set: "held_out", ...query };
  const address = withQuery(path, wanted);
  const view = useView(address);
  const { data } = view;
  const choose = (values) => navigate(withQuery(path, { ...wanted, ...values }));
  if (!data) return html`<${Loading} view=${view} />`;
  return html`<div class="head"><h1>Tasks</h1><div class="right"><${Json} path=${address} name="tasks.json" /></div></div>
    <${RunTabs} run=${run} here="tasks" /><${Stale} view=${view} />
    <div class="legend-row" role="group" aria-label="Tasks and decoding">
      ${SETS.map(([name, text]) => html`<button key=${name} type="button" aria-pressed=${data.set === name ? "true" : "false"} onClick=${() => choose({ set: name })}>${text}</button>`)}
      ${data.names.map((name) => html`<button key=${name} type="button" aria-pressed=${data.mode === name ? "true" : "false"} onClick=${() => choose({ mode: name })}>${name}</button>`)}</div>
    <div class="panel"><${Result} data=${data} />
      <div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Measurement</th><th>Mean, 95% interval over tasks</th><th><span class="skip">Interval</span></th><th class="num">Tasks</th><th class="num">Without a reward</th></tr></thead><tbody>
        ${data.measurements.map((each) => html`<tr key=${each.label}><td class="whole"><b>${title(each.label)}</b></td><td class="whole" data-label="Mean, 95% interval over tasks">${interval(each.reward)}</td><td class="whole"><${Range} found=${each.reward} /></td><td class="num" data-label="Tasks">${each.reward?.tasks ?? "–"}</td><td class="num" data-label="Without a reward">${each.reward?.missing ?? "all"}</td></tr>`)}</tbody></table></div></div>
    <h2>Tasks, the largest change first</h2>
    <div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Task</th>${data.measurements.map((each) => html`<th class="num" key=${each.label}>${title(each.label)}</th>`)}<th class="num">Change</th></tr></thead><tbody>
      ${data.tasks.map((each) => html`<tr key=${each.task_key}><td class="task"><${Link} to=${runPath(run, "tasks", each.task_key)}>${each.task}<//></td>${each.cells.map((cell, place) => html`<${Cell} key=${place} run=${run} cell=${cell} label=${title(data.measurements[place].label)} />`)}
        <td class="num" data-label="Change">${each.change === null ? "–" : html`<span class=${each.change < 0 ? "error-text" : ""}>${signed(each.change)}</span>`}</td></tr>`)}</tbody></table>
      ${!data.tasks.length && html`<p class="empty">The store has no rollouts of such a measurement.</p>`}</div>
    ${data.all_tasks > data.tasks.length && html`<p class="muted">The ${data.tasks.length} of ${number(data.all_tasks)} tasks that changed most.</p>`}`;
}
