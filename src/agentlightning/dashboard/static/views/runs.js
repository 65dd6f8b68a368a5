// The list of runs.
import { useView } from "../api.js";
import { ago, duration, interval, number, signed, tokens } from "../format.js";
import { html, useState } from "../lib.js";
import { Json, Loading, Pill, Progress, Sparkline, Stale, breakable, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

function Gain({ run }) {
  const [mode, found] = Object.entries(run.held_out || {})[0] || [];
  if (!found) return html`<span class="muted">–</span>`;
  if (found.gain) return html`<div><b>${signed(found.gain.gain)}</b> <span class="muted small">${mode}${run.names && `, mean of ${found.gain.seeds}`}</span></div>${found.gain.interval && html`<div class="muted small nowrap">${signed(found.gain.interval[0])} to ${signed(found.gain.interval[1])}</div>`}`;
  return found.before ? html`<div>${number(found.before.mean)} <span class="muted small">before, ${mode}</span></div>` : html`<span class="muted">–</span>`;
}

function Reward({ found }) {
  if (!found) return html`<span class="muted">–</span>`;
  return html`<div>${number(found.mean)}</div>${found.low !== null && html`<div class="muted small nowrap" title=${interval(found)}>${number(found.low)} to ${number(found.high)}</div>`}`;
}

const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);
const sum = (values) => values.reduce((total, each) => total + each, 0);
const known = (runs, name) => runs.map((run) => run[name]).filter((each) => each !== null && each !== undefined);

// The runs of one configuration as one: means over its seeds, sums of what they cost.
function joinedRun(runs, gain) {
  const figure = (name) => (known(runs, name).length ? { mean: mean(known(runs, name).map((each) => each.mean)), low: null } : null);
  const steps = Math.min(...runs.map((run) => run.rewards.length));
  const states = [...new Set(runs.map((run) => run.state))];
  return {
    ...runs[0],
    names: runs.map((run) => run.name),
    states,
    changed: Math.max(...runs.map((run) => run.changed)),
    step: sum(known(runs, "step")),
    steps: runs.every((run) => run.steps) ? sum(known(runs, "steps")) : null,
    seconds: sum(known(runs, "seconds")),
    time_left: null,
    rewards: Array.from({ length: steps }, (_, place) => mean(runs.map((run) => run.rewards[place]))),
    reward_start: figure("reward_start"),
    reward_now: figure("reward_now"),
    tokens_per_second: mean(known(runs, "tokens_per_second")),
    cost: { tokens: sum(runs.map((run) => run.cost.tokens)), dollars: runs.every((run) => run.cost.dollars !== null) ? sum(runs.map((run) => run.cost.dollars)) : null },
    warnings: sum(known(runs, "warnings")),
    warning_names: [...new Set(runs.flatMap((run) => run.warning_names))],
    held_out: Object.fromEntries(Object.entries(gain).map(([mode, each]) => [mode, { gain: each.mean === null ? null : { ...each, gain: each.mean } }])),
  };
}

// The lines of the list: each run, and runs of one configuration as one at the place of the newest, above its own when it is open.
function linesOf({ runs, joined }, open) {
  const byName = new Map(runs.map((run) => [run.name, run]));
  const groups = joined.map((each) => ({ ...each, runs: each.runs.map((name) => byName.get(name)) }));
  const groupOf = new Map(groups.flatMap((group) => group.runs.map((run) => [run.name, group])));
  return runs.flatMap((run) => {
    const group = groupOf.get(run.name);
    if (!group) return [run];
    if (group.runs[0] !== run) return [];
    return [joinedRun(group.runs, group.gain), ...(open.includes(run.name) ? group.runs.map((each) => ({ ...each, below: true })) : [])];
  });
}

function Row({ run, chosen, toggle, isOpen, unfold }) {
  if (run.kind === "store" || run.error) {
    return html`<tr><td></td><td><${Link} to=${runPath(run.name)}>${run.name}<//></td><td><${Pill} kind=${run.state} /></td>
      <td colspan="8" class=${run.error ? "error-text" : "muted"}>${run.error || "rollouts of this server, of all runs and none"}</td></tr>`;
  }
  return html`<tr>
    <td class="check"><input type="checkbox" checked=${chosen} onChange=${toggle} aria-label=${`Compare ${run.names ? run.names.join(", ") : run.name}`} /></td>
    <td class=${run.below ? "whole below" : "whole"}>${run.names ? html`<button type="button" aria-expanded=${isOpen ? "true" : "false"} onClick=${unfold}>${run.name} and ${run.names.length - 1} more</button>` : html`<${Link} to=${runPath(run.name)}><b>${run.name}</b><//>`}<div class="muted small">${run.agent && breakable(run.agent)}</div></td>
    <td>${(run.states || [run.state]).map((state) => html`<${Pill} key=${state} kind=${state} />`)}<div class="muted small">${ago(run.changed)}</div></td>
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
  const [open, setOpen] = useState([]);
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { runs } = view.data;
  const flip = (names, name) => (names.includes(name) ? names.filter((each) => each !== name) : [...names, name]);
  const namesOf = (run) => run.names || [run.name];
  const isChosen = (run) => namesOf(run).every((name) => chosen.includes(name));
  const toggle = (run) => setChosen([...chosen.filter((name) => !namesOf(run).includes(name)), ...(isChosen(run) ? [] : namesOf(run))]);
  return html`<${Stale} view=${view} /><div class="head"><h1>Runs</h1><div class="right">
      <button class="primary" type="button" disabled=${chosen.length < 2} onClick=${() => navigate(withQuery("/compare", { runs: chosen.join(",") }))}>Compare ${chosen.length || ""}</button>
      <${Json} path="/runs" name="runs.json" /></div></div>
    <div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th><span class="skip">Compare</span></th><th>Run</th><th>State</th><th>Algorithm, model</th><th>Steps, time left</th><th>Reward</th>
      <th class="num" title="Mean of the first five steps, with its 95% interval over steps">First steps</th><th class="num" title="Mean of the last five steps, with its 95% interval over steps">Last steps</th><th title="Held-out reward after less before, with its 95% interval">Held-out gain</th><th class="num" title="Cost: tokens of the policy, of searches and of providers; dollars where prices are set">Tokens/s, cost</th><th>Warnings</th></tr></thead>
      <tbody>${linesOf(view.data, open).map((run) => html`<${Row} key=${`${run.name}${run.names ? "+" : ""}`} run=${run} chosen=${isChosen(run)} toggle=${() => toggle(run)} isOpen=${open.includes(run.name)} unfold=${() => setOpen(flip(open, run.name))} />`)}</tbody></table>
      ${!runs.length && html`<p class="empty">No runs here yet. <code>agl demo</code> makes one in a few minutes; <code>agl dashboard --demo</code> shows recorded ones.</p>`}</div>
    <p class="muted small">First and last steps: the mean training reward of the first and the last five steps with its 95% interval over steps. Held-out gain: the paired difference on tasks that nothing was learned from. Runs whose settings differ in the seed alone are one line: means over them, the gain with its interval over seeds; steps, time, cost and warnings are sums.</p>`;
}
