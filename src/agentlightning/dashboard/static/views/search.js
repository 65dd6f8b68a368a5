// A prompt search: what it has spent, the curve of its candidates, and their tree with what each has changed.
import { useView } from "../api.js";
import { Chart, useTheme } from "../chart.js";
import { interval, number, tokens, words } from "../format.js";
import { html } from "../lib.js";
import { Copy, Fact, Loading, Pill, Progress } from "../parts.js";
import { Diff } from "./resources.js";

const PREFIX = "apo_";
const LIMITED = [["evaluations", "Evaluations", "calls"], ["tokens", "Tokens", "tokens"], ["money", "Money", "money"]];

// The search of a run as its metrics tell it: by name the last value. None where it is no search.
export function spendingOf(curves) {
  const own = curves.others.filter((each) => each.metric.startsWith(PREFIX));
  return Object.fromEntries(own.map((each) => [each.metric.slice(PREFIX.length), each.values.findLast((value) => value !== null) ?? 0]));
}

function Spending({ spent, settings }) {
  const { evaluations, model_calls: calls, tokens: _, money, ...counts } = spent;
  const became = Object.entries(counts).filter(([, count]) => count).map(([name, count]) => `${number(count)} ${words(name)}`).join(", ");
  const known = settings["algorithm.type"] === "apo"; // an algorithm object has settings of its own
  const limitOf = (name) => (known ? settings[`algorithm.budget.${name}`] : null);
  return html`<div class="panel"><h2>Spending</h2><dl class="facts">
    ${LIMITED.map(([name, title, limit]) => html`<${Fact} key=${name} name=${title} note=${limitOf(limit) ? "of the budget" : known ? "without a limit" : ""}><${Progress} done=${spent[name] ?? 0} total=${limitOf(limit)} /><//>`)}
    <${Fact} name="Calls of critic and editor">${number(calls ?? 0)}<//></dl>${became && html`<p class="muted">Proposals: ${became}.</p>`}</div>`;
}

// Children after their parent, with their depth.
function asTree(candidates) {
  const below = (parent, depth) => candidates.filter((each) => each.parent === parent).flatMap((each) => [{ ...each, depth }, ...below(each.number, depth + 1)]);
  return below(null, 0);
}

function Candidate({ each }) {
  const part = (name, title) => each[name] && html`<span><b>${number(each[name].mean)}</b> <span class="muted small">${title}, ${number(each[name].tasks)} rollouts</span></span>`;
  return html`<details class=${`candidate depth${Math.min(4, each.depth)}`} id=${`candidate-${each.at}`} open=${each.led && each.depth > 0}>
    <summary><span>${each.number === 0 ? "Start" : `Candidate ${each.number}`}</span> ${each.result && html`<${Pill} kind="promoted">result<//>`}${each.led && !each.result && html`<${Pill} kind="learned">led to it<//>`} ${part("train", "training tasks")} ${part("validation", "validation tasks")}</summary>
    ${each.changed.map((change) => html`<${Diff} key=${change.name} change=${change} />`)}
    ${Object.entries(each.texts).map(([name, text]) => html`<details key=${name}><summary>${name}, whole</summary><${Copy} text=${text} what=${name} /><pre>${text}</pre></details>`)}
    <p class="muted small">${each.train ? `Training tasks ${interval(each.train)}. ` : ""}${each.validation ? `Validation tasks ${interval(each.validation)}. ` : ""}${tokens(each.tokens)} tokens, from evaluation ${number(each.at)} on.</p></details>`;
}

export function Search({ address, spent, settings, live }) {
  const view = useView(address, live ? 10000 : 0);
  const theme = useTheme();
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { candidates } = view.data;
  const values = (name, admit) => candidates.map((each) => (admit(each) ? each[name]?.mean ?? null : null));
  const series = [
    { label: "led to the result, training tasks", values: values("train", (each) => each.led) },
    { label: "others", values: values("train", (each) => !each.led), apart: true, color: 6 },
    { label: "validation tasks", values: values("validation", () => true), apart: true, color: 1, intervals: candidates.filter((each) => each.validation).map((each) => ({ step: each.at, ...each.validation })) },
  ].filter((each) => each.values.some((value) => value !== null));
  const open = (at) => {
    const found = document.getElementById(`candidate-${at}`);
    found.open = true;
    found.scrollIntoView({ block: "center" });
  };
  return html`<${Spending} spent=${spent} settings=${settings} />
    ${!candidates.length && html`<p class="empty">The store has no evaluations of this search.</p>`}
    ${candidates.length > 0 && html`<${Chart} tall title="Reward of the candidates" axis="evaluation" steps=${candidates.map((each) => each.at)} series=${series} onPick=${open} theme=${theme} note=${candidates.some((each) => each.validation) ? "bars: 95% interval" : ""} />
    <p class="muted small">A candidate stands at its first evaluation. Candidates are tried on different tasks, first on those that failed before, so that means of a few rollouts say little; the held-out gain is what was won.</p>
    <h2>Candidates (${candidates.length})</h2><div class="panel">${asTree(candidates).map((each) => html`<${Candidate} key=${each.number} each=${each} />`)}
      <p class="muted small">Each stands below the one that it was made from.</p></div>`}`;
}
