// The overview of a run: result, warnings, curves, settings, checkpoints.
import { useView } from "../api.js";
import { Chart, useTheme } from "../chart.js";
import { bytes, duration, interval, number, signed } from "../format.js";
import { html, useMemo, useState } from "../lib.js";
import { Fact, Json, Loading, Pill, Range, RunTabs, Stale, Warnings, breakable, scrolls } from "../parts.js";
import { navigate, runPath } from "../router.js";
import { Search, spendingOf } from "./search.js";

function HeldOut({ found }) {
  const modes = Object.entries(found).filter(([, each]) => each.before || each.after);
  if (!modes.length) return null;
  return html`<div class="panel"><h2>Held-out reward</h2><div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Decoding</th><th>Gain, 95% interval</th><th>Before</th><th>After</th><th class="num">Tasks</th></tr></thead><tbody>
    ${modes.map(([mode, each]) => html`<tr key=${mode}><td data-label="Decoding">${mode}</td>
      <td class="whole" data-label="Gain, 95% interval">${each.gain ? html`<b class="gain">${signed(each.gain.gain)}</b> <span class="nowrap">(${signed(each.gain.interval[0])} to ${signed(each.gain.interval[1])})</span>` : html`<span class="muted">not measured yet</span>`}</td>
      <td class="whole" data-label="Before">${interval(each.before)} <${Range} found=${each.before} /></td><td class="whole" data-label="After">${interval(each.after)} <${Range} found=${each.after} /></td><td class="num" data-label="Tasks">${each.before?.tasks ?? each.after?.tasks}</td></tr>`)}
  </tbody></table></div></div>`;
}

function Settings({ settings, error }) {
  const [text, setText] = useState("");
  const shown = Object.entries(settings).filter(([name, value]) => `${name} ${JSON.stringify(value)}`.toLowerCase().includes(text.toLowerCase()));
  return html`<details class="panel"><summary>Settings (${Object.keys(settings).length})</summary>
    ${error && html`<p class="error-text">${error}</p>`}
    <form class="filters" onSubmit=${(event) => event.preventDefault()}><label>Filter <input value=${text} onInput=${(event) => setText(event.target.value)} /></label></form>
    <table><tbody>${shown.map(([name, value]) => html`<tr key=${name}><td><code>${name}</code></td><td class="task">${typeof value === "string" ? value : JSON.stringify(value)}</td></tr>`)}</tbody></table></details>`;
}

function Checkpoints({ checkpoints }) {
  return html`<details class="panel"><summary>Checkpoints (${checkpoints.length})</summary><table><thead><tr><th>Step</th><th>Directory</th><th>Roles</th><th class="num">Size</th></tr></thead><tbody>
    ${checkpoints.map((each) => html`<tr key=${each.directory}><td>${each.step}</td><td><code>${each.directory}</code></td><td>${each.roles.map((role) => html`<${Pill} key=${role} kind="finished">${role}<//> `)}</td><td class="num">${bytes(each.bytes)}</td></tr>`)}</tbody></table></details>`;
}

function Others({ steps, others, onPick, theme }) {
  const [name, choose] = useState("");
  const found = others.find((each) => each.metric === name);
  return html`<div class="panel chart"><h3>Any other metric</h3>
    <select aria-label="Metric" value=${name} onChange=${(event) => choose(event.target.value)}><option value="">choose one of ${others.length}</option>${others.map((each) => html`<option key=${each.metric} value=${each.metric}>${each.metric}</option>`)}</select>
    ${found && html`<${Chart} key=${name} title=${found.metric} steps=${steps} series=${[found]} onPick=${onPick} theme=${theme} />`}</div>`;
}

function withIntervals(chart, validation, steps) {
  const extra = Object.entries(validation || {});
  return chart.series.map((series) => {
    const mode = series.metric.replace(/^validation_/, "");
    const found = extra.find(([name]) => name === mode);
    return found ? { ...series, intervals: found[1].filter((each) => steps.includes(each.step)) } : series;
  });
}

const valuesOf = (chart) => chart.series.map((each) => `${chart.series.length > 1 ? `${each.label} ` : ""}${number(each.values.find((value) => value !== null))}`).join(", ");

function Charts({ run, curves, warnings }) {
  const validation = useView(runPath(run, "tasks"));
  const theme = useTheme();
  const [isOpen, open] = useState(false);
  const onPick = (step) => navigate(runPath(run, "steps", step));
  const draw = (constant) => curves.charts.filter((chart) => chart.constant === constant).map((chart) => {
      const isValidation = chart.name === "validation";
      const series = isValidation ? withIntervals(chart, validation.data?.modes, curves.steps) : chart.series;
      return html`<${Chart} key=${chart.name} title=${chart.title} unit=${chart.unit} steps=${curves.steps} series=${series} band=${chart.band} log=${chart.log}
        warnings=${warnings} onPick=${onPick} theme=${theme} note=${isValidation && validation.data ? "bars: 95% interval over tasks" : ""} />`;
    });
  const same = curves.charts.filter((chart) => chart.constant);
  return html`<div class="grid">${draw(false)}
    <${Others} steps=${curves.steps} others=${curves.others} onPick=${onPick} theme=${theme} /></div>
    ${same.length > 0 && html`<details class="panel" onToggle=${(event) => open(event.target.open)}><summary>The same at every step: ${same.map((chart) => `${chart.title} (${valuesOf(chart)})`).join("; ")}</summary>${isOpen && html`<div class="grid">${draw(true)}</div>`}</details>`}`;
}

function Store({ run, data, path }) {
  const rows = Object.entries(data.store);
  return html`<div class="head"><h1>${run}</h1><div class="right"><${Json} path=${path} /></div></div><${RunTabs} run=${run} here="" isStore />
    <div class="panel"><h2>What the store holds</h2><dl class="facts">${rows.map(([name, value]) => html`<${Fact} key=${name} name=${name}>${name === "bytes" ? bytes(value) : number(value)}<//>`)}</dl></div>`;
}

export function RunPage({ parts: [run], path }) {
  const view = useView(path, 5000);
  const { data } = view;
  const warnings = useMemo(() => data?.warnings || [], [JSON.stringify(data?.warnings)]);
  if (!data) return html`<${Loading} view=${view} />`;
  if (data.store) return html`<${Store} run=${run} data=${data} path=${path} />`;
  const { summary, report } = data;
  const spent = spendingOf(data.curves);
  const isSearch = summary.algorithm === "apo" || "evaluations" in spent;
  if (summary.error) return html`<div class="notice bad">${summary.error}</div>`;
  return html`<${Stale} view=${view} />
    <div class="head"><h1>${run}</h1><${Pill} kind=${summary.state} /><div class="right">
      <${Json} path=${path} name=${`${run}.json`} /></div></div>
    <${RunTabs} run=${run} here="" />
    <${HeldOut} found=${data.held_out} />
    <div class="panel"><dl class="facts">
      <${Fact} name="Algorithm" note=${isSearch ? "" : summary.model}>${summary.algorithm}<//>
      <${Fact} name="Agent">${breakable(summary.agent)}<//>
      <${Fact} name="Step" note=${summary.time_left !== null ? `${duration(summary.time_left)} left` : `${duration(summary.seconds)} in all`}>${number(summary.step)}${summary.steps ? ` of ${number(summary.steps)}` : ""}<//>
      ${summary.reward_now && html`<${Fact} name="Training reward, first 5 steps" note="mean, 95% interval over steps">${interval(summary.reward_start)}<//>
      <${Fact} name="Training reward, last 5 steps" note="mean, 95% interval over steps">${interval(summary.reward_now)}<//>`}
      <${Fact} name="Training rollouts" note=${`${number(summary.failed_rollouts)} failed`}>${number(summary.rollouts)}<//>
      ${summary.tokens_per_second > 0 && html`<${Fact} name="Tokens a second">${number(summary.tokens_per_second)}<//>`}
      ${report?.best_step > 0 && html`<${Fact} name="Best step">${report.best_step}<//>`}
    </dl></div>
    <${Warnings} warnings=${warnings} onPick=${(step) => navigate(runPath(run, "steps", step))} />
    ${(report?.warnings || []).map((text) => html`<div class="notice warn" key=${text}>${text}</div>`)}
    ${isSearch && html`<${Search} address=${`${path}/search`} spent=${spent} settings=${data.settings} live=${summary.state === "running"} />`}
    <p class="muted small">Click a point to see the step behind it${data.curves.thinned ? `; ${data.curves.thinned} steps between the points are not drawn` : ""}.</p>
    <h2 class="skip">Curves</h2><${Charts} run=${run} curves=${data.curves} warnings=${warnings} />
    ${data.changes.length > 0 && html`<details class="panel"><summary>Changed on resume (${data.changes.length})</summary><pre>${JSON.stringify(data.changes, null, 2)}</pre></details>`}
    <${Settings} settings=${data.settings} error=${data.settings_error} />
    <${Checkpoints} checkpoints=${data.checkpoints} />`;
}
