// The list of runs.
import { useView } from "../api.js";
import { ago, duration, interval, number, signed, tokens } from "../format.js";
import { html, useState } from "../lib.js";
import { Json, Loading, Pill, Progress, Sparkline, Stale, breakable, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

function Gain({ run }) {
  const [mode, found] = Object.entries(run.held_out || {})[0] || [];
  if (!found) return html`<span class="muted">–</span>`;
  if (found.gain) return html`<div><b>${signed(found.gain.gain)}</b> <span class="muted small">${mode}</span></div><div class="muted small nowrap">${signed(found.gain.interval[0])} to ${signed(found.gain.interval[1])}</div>`;
  return found.before ? html`<div>${number(found.before.mean)} <span class="muted small">before, ${mode}</span></div>` : html`<span class="muted">–</span>`;
}

function Reward({ found }) {
  if (!found) return html`<span class="muted">–</span>`;
  return html`<div>${number(found.mean)}</div>${found.low !== null && html`<div class="muted small nowrap" title=${interval(found)}>${number(found.low)} to ${number(found.high)}</div>`}`;
}

function Row({ run, chosen, toggle }) {
  if (run.kind === "store" || run.error) {
    return html`<tr><td></td><td><${Link} to=${runPath(run.name)}>${run.name}<//></td><td><${Pill} kind=${run.state} /></td>
      <td colspan="8" class=${run.error ? "error-text" : "muted"}>${run.error || "rollouts of this server, of all runs and none"}</td></tr>`;
  }
  return html`<tr>
    <td class="check"><input type="checkbox" checked=${chosen} onChange=${toggle} aria-label=${`Compare ${run.name}`} /></td>
    <td class="whole"><${Link} to=${runPath(run.name)}><b>${run.name}</b><//><div class="muted small">${run.agent && breakable(run.agent)}</div></td>
    <td><${Pill} kind=${run.state} /><div class="muted small">${ago(run.changed)}</div></td>
    <td data-label="Algorithm, model">${run.algorithm}<div class="muted small">${run.model}</div></td>
    <td data-label="Steps"><${Progress} done=${run.step} total=${run.steps} /><div class="muted small nowrap">${run.time_left !== null ? `${duration(run.time_left)} left` : duration(run.seconds)}</div></td>
    <td data-label="Reward"><${Sparkline} values=${run.rewards} /></td>
    <td class="num" data-label="First steps"><${Reward} found=${run.reward_start} /></td>
    <td class="num" data-label="Last steps"><${Reward} found=${run.reward_now} /></td>
    <td class="nowrap" data-label="Held-out gain"><${Gain} run=${run} /></td>
    <td class="num" data-label="Tokens/s, cost">${number(run.tokens_per_second)}<div class="muted small nowrap">${tokens(run.cost.tokens)}${run.cost.dollars !== null && `, $${run.cost.dollars.toFixed(2)}`}</div></td>
    <td data-label="Warnings">${run.warnings ? html`<span class="pill warn" title=${run.warning_names.join(", ")}>${run.warnings}<span class="skip"> warnings</span></span>` : html`<span class="muted">none</span>`}</td>
  </tr>`;
}

export function RunsPage({ path }) {
  const view = useView("/runs", 5000);
  const [chosen, setChosen] = useState([]);
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { runs } = view.data;
  const toggle = (name) => setChosen(chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name]);
  return html`<${Stale} view=${view} /><div class="head"><h1>Runs</h1><div class="right">
      <button class="primary" type="button" disabled=${chosen.length < 2} onClick=${() => navigate(withQuery("/compare", { runs: chosen.join(",") }))}>Compare ${chosen.length || ""}</button>
      <${Json} path="/runs" name="runs.json" /></div></div>
    <div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th><span class="skip">Compare</span></th><th>Run</th><th>State</th><th>Algorithm, model</th><th>Steps, time left</th><th>Reward</th>
      <th class="num" title="Mean of the first five steps, with its 95% interval over steps">First steps</th><th class="num" title="Mean of the last five steps, with its 95% interval over steps">Last steps</th><th title="Held-out reward after less before, with its 95% interval">Held-out gain</th><th class="num" title="Cost: tokens of the policy, of searches and of providers; dollars where prices are set">Tokens/s, cost</th><th>Warnings</th></tr></thead>
      <tbody>${runs.map((run) => html`<${Row} key=${run.name} run=${run} chosen=${chosen.includes(run.name)} toggle=${() => toggle(run.name)} />`)}</tbody></table>
      ${!runs.length && html`<p class="empty">No runs here yet. <code>agl demo</code> makes one in a few minutes; <code>agl dashboard --demo</code> shows recorded ones.</p>`}</div>
    <p class="muted small">First and last steps: the mean training reward of the first and the last five steps with its 95% interval over steps. Held-out gain: the paired difference on tasks that nothing was learned from.</p>`;
}
