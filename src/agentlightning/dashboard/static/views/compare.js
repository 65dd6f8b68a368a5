// Several runs, those that differ in the seed alone as one: curves over one another, settings that differ, tasks won and lost.
import { useView } from "../api.js";
import { Chart, useTheme } from "../chart.js";
import { interval, number, signed, words } from "../format.js";
import { html } from "../lib.js";
import { Json, Loading, Pill, RunTabs, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

const titleOf = (group) => (group.length > 1 ? `${group[0]} and ${group.length - 1} more` : group[0]);

// The curves of a metric on one axis of steps.
function overlaid({ metric, series }, groups) {
  const steps = [...new Set(series.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const on = (each, name) => {
    const at = new Map(each.steps.map((step, place) => [step, each[name][place]]));
    return steps.map((step) => at.get(step) ?? null);
  };
  const lines = series.map((each, index) => ({ label: titleOf(groups[index]), color: index, values: on(each, "values"), low: on(each, "low"), high: on(each, "high") }));
  return { metric, steps, series: lines.filter((each) => each.values.some((value) => value !== null)) };
}

const valuesOf = (chart) => new Set(chart.series.flatMap((each) => each.values.filter((value) => value !== null)));

function Tasks({ title, rows, first, second }) {
  if (!rows.length) return null;
  return html`<details class="panel"><summary>${title} (${rows.length})</summary><table class="stack"><thead><tr><th>Task</th><th class="num">${first}</th><th class="num">${second}</th><th class="num">Difference</th></tr></thead><tbody>${rows.map((row, place) => html`<tr key=${place}><td class="task">${row.task}</td><td class="num" data-label=${first}>${number(row.first)}</td><td class="num" data-label=${second}>${number(row.second)}</td><td class="num" data-label="Difference">${signed(row.difference)}</td></tr>`)}</tbody></table></details>`;
}

const range = (low, high, show = signed) => html`<span class="nowrap">(${show(low)} to ${show(high)})</span>`;

// A mean over seeds with its interval.
function OverSeeds({ found, show = signed }) {
  if (!found || found.mean === null) return html`<span class="muted">–</span>`;
  return html`<b>${show(found.mean)}</b> ${found.interval ? range(...found.interval, show) : html`<span class="muted small">one seed</span>`}`;
}

// A configuration in one line: over its seeds, or over the tasks of its only run.
function Configuration({ group, runs, row, pair }) {
  const modes = [...new Set(runs.flatMap((run) => Object.keys(run.held_out || {})))];
  const one = group.length === 1;
  const cell = (label, show) => html`<td class="whole" data-label=${label}>${modes.map((mode) => html`<div key=${mode}>${modes.length > 1 && html`<span class="muted small">${mode} </span>`}${show(mode)}</div>`)}${!modes.length && html`<span class="muted">–</span>`}</td>`;
  const gainOf = (gain) => (gain ? html`<b>${signed(gain.gain)}</b> ${range(...gain.interval)}` : html`<span class="muted">–</span>`);
  return html`<tr><td class="whole">${runs.map((run) => html`<div key=${run.name}><${Link} to=${runPath(run.name)}>${run.name}<//> <${Pill} kind=${run.state} /> <span class="muted small">${number(run.step)} steps</span></div>`)}</td>
    ${cell("Held-out reward", (mode) => (one ? interval(runs[0].held_out[mode]?.after) : html`<${OverSeeds} found=${row?.after[mode]} show=${number} />`))}
    ${cell("Gain", (mode) => (one ? gainOf(runs[0].held_out[mode]?.gain) : html`<${OverSeeds} found=${row?.gain[mode]} />`))}
    ${cell("Against the first", (mode) => (pair ? gainOf(pair.modes[mode]?.result) : row?.difference ? html`<${OverSeeds} found=${row.difference[mode]} />` : html`<span class="muted">–</span>`))}
    <td data-label="Intervals">${one ? "over tasks" : `over ${group.length} seeds`}</td></tr>`;
}

// Chooses the runs.
function Choice({ query, names }) {
  const view = useView("/runs");
  const known = (view.data?.runs || []).filter((run) => run.kind === "run" && !run.error).map((run) => run.name);
  const toggle = (name) => navigate(withQuery("/compare", { ...query, runs: (names.includes(name) ? names.filter((each) => each !== name) : [...names, name]).join(",") }));
  return html`<details class="panel" open=${names.length < 2}><summary>Runs (${names.length} chosen)</summary><div class="choice">${known.map((name) => html`<label key=${name}><input type="checkbox" checked=${names.includes(name)} onChange=${() => toggle(name)} /> ${name}</label>`)}</div>
    <p class="muted small">Runs whose settings differ in the seed alone are one line. The first one chosen is what the others are compared with.</p></details>`;
}

function Comparison({ data }) {
  const theme = useTheme();
  const { groups } = data;
  const heads = groups.map((group) => group[0]);
  const charts = data.curves.map((each) => overlaid(each, groups)).filter((each) => each.series.length);
  const [drawn, same] = [charts.filter((each) => valuesOf(each).size > 1), charts.filter((each) => valuesOf(each).size === 1)];
  const show = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const runs = new Map(data.summaries.map((each) => [each.name, each]));
  return html`${data.ungrouped && html`<div class="notice">Runs are not joined by seed: ${data.ungrouped}</div>`}
    <div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Runs</th><th>Held-out reward, 95% interval</th><th>Gain</th><th>Against the first</th><th>Intervals</th></tr></thead><tbody>${groups.map((group, place) => html`<${Configuration} key=${group[0]} group=${group} runs=${group.map((name) => runs.get(name))} row=${data.configurations[place]} pair=${group.length === 1 && groups[0].length === 1 ? data.tasks[place - 1] : undefined} />`)}</tbody></table></div>
    <h2>Curves</h2><div class="grid">${drawn.map((each) => html`<${Chart} key=${each.metric} title=${words(each.metric)} steps=${each.steps} series=${each.series} theme=${theme} note=${groups.some((group) => group.length > 1) ? "bands: 95% interval over seeds" : ""} />`)}</div>
    ${same.length > 0 && html`<p class="muted small">The same at every step: ${same.map((each) => `${words(each.metric)} (${number([...valuesOf(each)][0])})`).join("; ")}</p>`}
    <h2>Settings that differ</h2><div class="panel tight" ...${scrolls}><table><thead><tr><th>Setting</th>${groups.map((group) => html`<th key=${group[0]}>${titleOf(group)}</th>`)}</tr></thead><tbody>${data.settings.map((each) => html`<tr key=${each.setting}><td><code>${each.setting}</code></td>${heads.map((run) => html`<td key=${run} class="task">${show(each.values[run])}</td>`)}</tr>`)}</tbody></table>${!data.settings.length && html`<p class="empty">None.</p>`}</div>
    ${data.tasks.length > 0 && html`<h2>Tasks won and lost</h2>`}${data.tasks.map((pair) => html`<div class="panel" key=${pair.second}><h3>${pair.second} against ${pair.first}</h3>${pair.error && html`<p class="muted">${pair.error}</p>`}
      ${Object.entries(pair.modes).map(([mode, found]) => html`<div key=${mode}><p><b>${mode}</b> ${found.result ? html`${signed(found.result.gain)} (${signed(found.result.interval[0])} to ${signed(found.result.interval[1])}, p ${number(found.result.p_value)}), ${found.result.better} won, ${found.result.worse} lost of ${found.result.tasks} tasks` : found.error}</p>
        <${Tasks} title="Won" rows=${found.won} first=${pair.first} second=${pair.second} /><${Tasks} title="Lost" rows=${found.lost} first=${pair.first} second=${pair.second} /></div>`)}</div>`)}`;
}

export function ComparePage({ query, path }) {
  const names = (query.runs || "").split(",").filter(Boolean);
  const address = names.length > 1 ? withQuery(path, { runs: names.join(",") }) : null;
  const view = useView(address);
  return html`<div class="head"><h1>Compare</h1><div class="right">${address && html`<${Json} path=${address} name="comparison.json" />`}</div></div>
    ${query.of && html`<${RunTabs} run=${query.of} here="compare" />`}<${Choice} query=${query} names=${names} />
    ${address && (view.data ? html`<${Comparison} data=${view.data} />` : html`<${Loading} view=${view} />`)}
    ${!address && html`<p class="empty">Choose two runs or more.</p>`}`;
}
