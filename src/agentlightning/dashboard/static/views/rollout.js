// One rollout: task, output and reward, then its conversation, spans as a timeline and a tree, raw JSON.
import { post } from "../api.js";
import { Find } from "../find.js";
import { useRollout } from "../follow.js";
import { duration, number, reward, time } from "../format.js";
import { html, useState } from "../lib.js";
import { Neighbours } from "../neighbours.js";
import { Copy, Fact, Json, Loading, Pill, RewardChip, Stale, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";
import { CallHead } from "./tokens.js";

function Part({ part }) {
  if (part.kind === "tool_call") return html`<div class="part tool_call"><b>calls ${part.name}</b><pre>${part.text}</pre></div>`;
  if (part.kind === "tool_result") return html`<div class=${`part tool_result ${part.failed ? "failed" : ""}`}><b>${part.failed ? "tool error" : "tool result"}</b><pre>${part.text}</pre></div>`;
  if (part.kind === "image") return part.source ? html`<div class="part"><img src=${part.source} alt="image in a message" /></div>` : html`<div class="part muted">image elsewhere, not loaded: <code>${part.text}</code></div>`;
  if (part.kind === "reasoning") return html`<details class="part reasoning" open><summary>reasoning</summary><pre>${part.text}</pre></details>`;
  if (part.kind === "other") return html`<div class="part"><b>${part.type}</b><pre>${part.text}</pre></div>`;
  return html`<div class="part"><pre>${part.text}</pre></div>`;
}

const ROLES = new Set(["assistant", "user", "system", "tool"]);

const textOf = (messages) => messages.flatMap((message) => message.parts.map((part) => part.text)).filter(Boolean).join("\n");

function Message({ message, note }) {
  return html`<div class=${`message ${ROLES.has(message.role) ? message.role : ""}`}><div class="who"><b>${message.role}</b>${note}<${Copy} text=${textOf([message])} what="message" /></div><div class="body">${message.parts.map((part, place) => html`<${Part} key=${place} part=${part} />`)}${!message.parts.length && html`<span class="muted">empty</span>`}</div></div>`;
}

function Conversation({ run, rollout, stream, summary, partial }) {
  return html`<div class="messages">${stream.map((call, index) => html`<div class="turn" key=${call.span_id}><${CallHead} call=${call} index=${index}><span>${duration(call.seconds)}</span>
      ${call.sampled_tokens > 0 && html`<${Link} to=${withQuery(runPath(run, "rollouts", rollout, "tokens"), { call: index })}>tokens<//>`}${call.starts && index > 0 && html`<${Pill}>new thread<//>`}<//>
    <div class="messages">${call.messages.map((message, place) => html`<${Message} key=${`q${place}`} message=${message} />`)}${call.answer.map((message, place) => html`<${Message} key=${`a${place}`} message=${message} note=${call.model} />`)}
      ${call.error && html`<p class="error-text">failed: ${call.error}</p>`}
      ${index === stream.length - 1 && call.tool_results.map((each, place) => html`<div key=${place} class=${`part tool_result ${each.failed ? "failed" : ""}`}><b>${each.failed ? "tool error" : "tool result"}</b><pre>${each.text}</pre></div>`)}</div></div>`)}
    ${!stream.length && html`<p class="empty">${summary.calls ? "None of these spans is a model call." : "No model calls are recorded."}</p>`}${!partial && summary.reward !== null && html`<${RewardChip} value=${summary.reward} />`}</div>`;
}

function depths(spans) {
  const parents = new Map(spans.map((span) => [span.span_id, span.parent_id]));
  const depth = (id, seen = 0) => (seen < 8 && parents.has(parents.get(id)) ? 1 + depth(parents.get(id), seen + 1) : 0);
  return new Map(spans.map((span) => [span.span_id, depth(span.span_id)]));
}

// Children after their parent, each level in the store's order.
function asTree(spans) {
  const known = new Set(spans.map((span) => span.span_id));
  const below = new Map();
  for (const span of spans) {
    const parent = known.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(span);
  }
  const found = [];
  const seen = new Set();
  const walk = (parent) => (below.get(parent) || []).forEach((span) => {
    if (seen.has(span.span_id)) return;
    seen.add(span.span_id);
    found.push(span);
    walk(span.span_id);
  });
  walk(null);
  return [...found, ...spans.filter((span) => !seen.has(span.span_id))];
}

const kindsText = (kinds) => Object.entries(kinds).map(([kind, count]) => `${number(count)} ${kind}`).join(", ");

// All spans of an attempt over its time, those that are shown in another colour.
function Overview({ data, from, until }) {
  const { density, time: whole } = data;
  const most = Math.max(...density, 1);
  const width = 1000 / density.length;
  const at = (value) => ((value - whole.start) / (whole.end - whole.start || 1)) * density.length;
  return html`<figure class="overview"><svg viewBox="0 0 1000 36" preserveAspectRatio="none" role="img" aria-label=${`${number(data.spans_total)} spans over ${duration(whole.end - whole.start)}; shown are those from ${duration(from - whole.start)} to ${duration(until - whole.start)}`}>
      ${density.map((count, place) => count > 0 && html`<rect key=${place} class=${place + 1 > at(from) && place <= at(until) ? "shown" : ""} x=${place * width} width=${width * 0.85} y=${36 - Math.max(3, (36 * count) / most)} height=${Math.max(3, (36 * count) / most)} />`)}</svg>
    <figcaption class="muted small">The whole attempt. The bars below are over its time from ${duration(from - whole.start)} to ${duration(until - whole.start)}, where the spans shown so far are.</figcaption></figure>`;
}

function Spans({ data }) {
  const { spans, kinds, spans_total: total } = data;
  const [open, setOpen] = useState(null);
  const [tree, setTree] = useState(true);
  if (!spans.length) return html`<p class="empty">No spans.</p>`;
  const start = spans.reduce((least, span) => Math.min(least, span.start_time), Infinity);
  const end = spans.reduce((most, span) => Math.max(most, span.end_time ?? span.start_time), start + 1e-6);
  const seconds = Math.max(data.time.end ?? end, end) - Math.min(data.time.start ?? start, start);
  const x = (value) => (1000 * (value - start)) / (end - start);
  const level = depths(spans);
  return html`<div class="legend-row"><button type="button" aria-pressed=${tree ? "true" : "false"} onClick=${() => setTree(true)}>Tree</button><button type="button" aria-pressed=${tree ? "false" : "true"} onClick=${() => setTree(false)}>In order</button><span class="muted small">${number(total)} spans over ${duration(seconds)}${kinds ? `: ${kindsText(kinds)}` : ""}</span></div>
    ${data.next !== null && data.density && html`<${Overview} data=${data} from=${start} until=${end} />`}
    <div class="timeline">${(tree ? asTree(spans) : spans).map((span) => {
      const width = Math.max(4, x(span.end_time ?? span.start_time) - x(span.start_time));
      const isOpen = open === span.span_id;
      return html`<div key=${span.span_id}><button type="button" class="row" aria-expanded=${isOpen ? "true" : "false"} onClick=${() => setOpen(isOpen ? null : span.span_id)}>
          <span class=${`name ${tree ? `depth${Math.min(4, level.get(span.span_id))}` : ""}`}>${span.sequence_id}. ${span.name}${span.reward !== null ? ` ${reward(span.reward)}` : ""}${span.counts ? "" : " (does not count)"}</span>
          <svg viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label=${`${span.kind}, ${duration((span.end_time ?? span.start_time) - span.start_time)}`}><rect class=${span.kind} x=${Math.min(996, x(span.start_time))} y="2" width=${width} height="10" rx="2" /></svg></button>
        ${isOpen && html`<pre class="panel">${JSON.stringify(span, null, 2)}</pre>`}</div>`;
    })}</div>`;
}

function Attempts({ attempts, chosen, path, query }) {
  const shown = attempts.find((each) => each.attempt_id === chosen);
  return html`<details class="panel" open=${attempts.length > 1 || Boolean(shown?.error)}><summary>Attempts (${attempts.length})</summary><div class="panel tight" ...${scrolls}><table class="stack"><thead><tr><th>Attempt</th><th>State</th><th>Started</th><th class="num">Time</th><th>Worker</th></tr></thead><tbody>
    ${attempts.map((each) => html`<tr key=${each.attempt_id}><td data-label="Attempt"><${Link} to=${withQuery(path, { ...query, attempt: each.attempt_id })} aria-current=${each.attempt_id === chosen ? "true" : undefined}>${each.sequence_id}${each.attempt_id === chosen ? " (shown)" : ""}<//></td><td data-label="State"><${Pill} kind=${each.status} /></td><td class="nowrap" data-label="Started">${time(each.start_time)}</td><td class="num" data-label="Time">${each.end_time ? duration(each.end_time - each.start_time) : "–"}</td><td data-label="Worker">${each.worker_id || "–"}</td></tr>`)}</tbody></table></div>
    ${shown?.error && html`<pre class="error-text">${shown.error.traceback || `${shown.error.type}: ${shown.error.message}`}</pre>`}</details>`;
}

// What an attempt gave: its output, why it failed, else the last answer of its model.
function outputOf(data) {
  const attempt = data.attempts.find((each) => each.attempt_id === data.attempt);
  if (attempt?.error) return ["Error", `${attempt.error.type}: ${attempt.error.message}`];
  if (attempt?.output) return ["Output", attempt.output];
  const last = data.next === null ? textOf(data.stream.at(-1)?.answer || []) : "";
  return last ? ["Last answer", last] : ["Output", ""];
}

const Text = ({ title, text, failed }) => html`<section><div class="head"><h2>${title}</h2>${text && html`<${Copy} text=${text} what=${title.toLowerCase()} />`}</div>
  ${text ? html`<pre class=${`boxed ${failed ? "error-text" : ""}`} tabindex="0" role="group" aria-label=${title}>${text}</pre>` : html`<p class="muted">None is recorded.</p>`}</section>`;

function Annotate({ run, rollout, done }) {
  const [values, setValues] = useState({ score: "", label: "", comment: "" });
  const [said, say] = useState("");
  const set = (name) => (event) => setValues({ ...values, [name]: event.target.value });
  const act = async (action, more = {}) => {
    try {
      const { results } = await (await post(`${runPath(run, "actions")}/${action}`, { rollout_ids: [rollout], ...more })).json();
      const result = results[rollout];
      say(result.done ? `${action}: done${result.rollout_id ? `, ${result.rollout_id}` : ""}` : result.error);
      done();
    } catch (error) {
      say(error.message);
    }
  };
  const submit = (event) => {
    event.preventDefault();
    act("annotate", { label: values.label, comment: values.comment, ...(values.score === "" ? {} : { score: Number(values.score) }) });
  };
  return html`<details class="panel"><summary>Annotate, cancel, retry</summary><form class="filters" onSubmit=${submit}><label>Score<input class="narrow" value=${values.score} onInput=${set("score")} inputmode="decimal" /></label><label>Label<input value=${values.label} onInput=${set("label")} /></label><label>Comment<input value=${values.comment} onInput=${set("comment")} /></label><button type="submit">Save</button>
    <button type="button" onClick=${() => act("cancel")}>Cancel rollout</button><button type="button" onClick=${() => act("requeue")}>Requeue</button><button type="button" onClick=${() => act("retry")}>Retry as new</button><span role="status">${said}</span></form>
    <p class="muted small">Kept as a span: a score becomes the final reward, a label can be filtered by.</p></details>`;
}

// Says what of an attempt is not shown yet, and reads on.
function More({ data, more }) {
  const [busy, setBusy] = useState(false);
  if (data.next === null) return null;
  const left = data.spans_total - data.spans.length;
  const go = () => {
    setBusy(true);
    more().finally(() => setBusy(false));
  };
  return html`<div class="more"><button type="button" disabled=${busy} onClick=${go}>${busy ? "Reading …" : `Show ${number(Math.min(300, left))} more spans`}</button>
    <span class="muted small">${number(data.spans.length)} of ${number(data.spans_total)} spans are shown${data.calls_total === null ? "" : `, with ${number(data.stream.length)} of ${number(data.calls_total)} calls`}; the totals above are those of all.</span></div>`;
}

export function RolloutPage({ parts: [run, rollout], query, path }) {
  const address = withQuery(path, { attempt: query.attempt });
  const view = useRollout(path, query.attempt);
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { data } = view;
  const tab = query.tab || "chat";
  const tabs = [["chat", "Conversation"], ["spans", `Spans (${number(data.spans_total)})`], ["raw", "Raw JSON"]];
  const [title, output] = outputOf(data);
  const find = (text) => navigate(withQuery(path, { ...query, find: text }), { replace: true });
  const counted = (value) => (data.summary.spans_read ? value : html`<span class="muted">counting …</span>`);
  return html`<${Stale} view=${view} /><div class="head"><h1 class="mono">${rollout}</h1><${Pill} kind=${data.rollout.status} /><${Copy} text=${rollout} what="id" /><div class="right"><${Neighbours} run=${run} rollout=${rollout} query=${query} />
      <${Link} class="button" to=${runPath(run, "rollouts", rollout, "tokens")}>Tokens<//><${Link} class="button" to=${runPath(run, "rollouts", rollout, "group")}>Group<//><${Json} path=${address} name="rollout.json" /></div></div>
    <div class="panel searched"><dl class="facts"><${Fact} name="Reward"><span class="gain">${counted(reward(data.summary.reward))}</span><//></dl>
      <div class="cols"><${Text} title="Task" text=${data.rollout.task} /><${Text} title=${title} text=${output} failed=${title === "Error"} /></div></div>
    <div class="panel"><dl class="facts"><${Fact} name="Mode, queue">${data.rollout.mode || "–"}, ${data.rollout.queue}<//><${Fact} name="Started">${time(data.rollout.start_time)}<//><${Fact} name="Calls" note=${data.summary.spans_read && `${number(data.summary.tool_errors)} of ${number(data.summary.tool_calls)} tool calls failed`}>${counted(number(data.summary.calls))}<//>
      <${Fact} name="Tokens" note=${data.summary.spans_read && `${number(data.summary.prompt_tokens)} in prompts`}>${counted(`${number(data.summary.sampled_tokens)} sampled`)}<//><${Fact} name="Learned from in">${data.step === null ? "no step" : html`<${Link} to=${runPath(run, "steps", data.step)}>step ${data.step}<//>`}<//>
      <${Fact} name="Labels">${counted(data.summary.labels.join(", ") || "–")}<//></dl></div>
    <${Attempts} attempts=${data.attempts} chosen=${data.attempt} path=${path} query=${query} />
    ${data.writable && html`<${Annotate} run=${run} rollout=${rollout} done=${view.reload} />`}
    <${Find} text=${query.find || ""} change=${find} note=${data.next === null ? "" : "in the spans shown"} />
    <nav class="tabs" aria-label="Views of this rollout">${tabs.map(([name, title]) => html`<${Link} key=${name} to=${withQuery(path, { ...query, tab: name })} aria-current=${tab === name ? "page" : undefined}>${title}<//>`)}</nav>
    <div class="panel searched">${tab === "chat" ? html`<${Conversation} run=${run} rollout=${rollout} stream=${data.stream} summary=${data.summary} partial=${data.next !== null} />` : tab === "spans" ? html`<${Spans} data=${data} />` : html`<pre>${JSON.stringify({ rollout: data.rollout, attempts: data.attempts, spans: data.spans }, null, 2)}</pre>`}
      <${More} data=${data} more=${view.more} /></div>`;
}
