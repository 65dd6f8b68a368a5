// Several runs: curves over one another, settings that differ, tasks won and lost.
import { useView } from "../api.js";
import { Chart, useTheme } from "../chart.js";
import { interval, number, signed } from "../format.js";
import { html } from "../lib.js";
import { Json, Loading, scrolls } from "../parts.js";
import { Link, runPath, withQuery } from "../router.js";

const SHOWN = ["reward", "validation_greedy", "validation_sampled", "entropy", "grad_norm", "approx_kl", "clip_fraction", "response_tokens", "groups_without_spread", "tokens_per_second"];

function overlaid(data, metric) {
  const steps = [...new Set(data.runs.flatMap((run) => data.curves[run].steps))].sort((a, b) => a - b);
  const series = data.runs.flatMap((run, index) => {
    const curves = data.curves[run];
    const found = [...curves.charts.flatMap((chart) => chart.series), ...curves.others].find((each) => each.metric === metric);
    if (!found) return [];
    const at = new Map(curves.steps.map((step, place) => [step, found.values[place]]));
    return [{ label: run, values: steps.map((step) => at.get(step) ?? null), color: index }];
  });
  return { steps, series };
}

function Tasks({ title, rows, first, second }) {
  if (!rows.length) return null;
  return html`<details class="panel"><summary>${title} (${rows.length})</summary><table><thead><tr><th>Task</th><th class="num">${first}</th><th class="num">${second}</th><th class="num">Difference</th></tr></thead><tbody>${rows.map((row, place) => html`<tr key=${place}><td class="task">${row.task}</td><td class="num">${number(row.first)}</td><td class="num">${number(row.second)}</td><td class="num">${signed(row.difference)}</td></tr>`)}</tbody></table></details>`;
}

export function ComparePage({ query, path }) {
  const address = withQuery(path, query);
  const view = useView(address);
  const theme = useTheme();
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { data } = view;
  const show = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  return html`<div class="head"><h1>Compare</h1><div class="right"><${Json} path=${address} name="comparison.json" /></div></div>
    <div class="panel tight" ...${scrolls}><table><thead><tr><th>Run</th><th>State</th><th>Steps</th><th>Reward, first 5 steps</th><th>Reward, last 5 steps</th><th>Held out, after</th></tr></thead><tbody>${data.summaries.map((each) => html`<tr key=${each.name}><td><${Link} to=${runPath(each.name)}>${each.name}<//></td><td>${each.state}</td><td>${number(each.step)}</td><td>${interval(each.reward_start)}</td><td>${interval(each.reward_now)}</td>
      <td>${Object.entries(each.held_out || {}).map(([mode, found]) => html`<div key=${mode}>${mode} ${interval(found.after)}</div>`)}</td></tr>`)}</tbody></table></div>
    <h2>Curves</h2><div class="grid">${SHOWN.map((metric) => ({ metric, ...overlaid(data, metric) })).filter((each) => each.series.some((one) => one.values.some(Boolean))).map((each) => html`<${Chart} key=${each.metric} title=${each.metric.replaceAll("_", " ")} steps=${each.steps} series=${each.series} theme=${theme} />`)}</div>
    <h2>Settings that differ</h2><div class="panel tight" ...${scrolls}><table><thead><tr><th>Setting</th>${data.runs.map((run) => html`<th key=${run}>${run}</th>`)}</tr></thead><tbody>${data.settings.map((each) => html`<tr key=${each.setting}><td><code>${each.setting}</code></td>${data.runs.map((run) => html`<td key=${run} class="task">${show(each.values[run])}</td>`)}</tr>`)}</tbody></table>${!data.settings.length && html`<p class="empty">None.</p>`}</div>
    <h2>Tasks won and lost</h2>${data.tasks.map((pair) => html`<div class="panel" key=${pair.second}><h3>${pair.second} against ${pair.first}</h3>${pair.error && html`<p class="muted">${pair.error}</p>`}
      ${Object.entries(pair.modes).map(([mode, found]) => html`<div key=${mode}><p><b>${mode}</b> ${found.result ? html`${signed(found.result.gain)} (${signed(found.result.interval[0])} to ${signed(found.result.interval[1])}, p ${number(found.result.p_value)}), ${found.result.better} won, ${found.result.worse} lost of ${found.result.tasks} tasks` : found.error}</p>
        <${Tasks} title="Won" rows=${found.won} first=${pair.first} second=${pair.second} /><${Tasks} title="Lost" rows=${found.lost} first=${pair.first} second=${pair.second} /></div>`)}</div>`)}`;
}
