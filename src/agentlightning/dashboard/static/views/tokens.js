// Tokens, coloured by advantage, log-probability, ratio of new to old, version or weight in the loss.
import { useView } from "../api.js";
import { number, percent, reward, signed } from "../format.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { Fact, Json, Loading, Pill, RewardChip } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

export const COLOURS = [["advantage", "Advantage"], ["logprob", "Log-probability"], ["ratio", "Ratio of new to old"], ["rank", "Likeliest or not"], ["version", "Weights"], ["loss", "Carries loss"]];
const MOST_SHOWN = 6000;

// How far a log-ratio lies from 0, in the direction of its sign; beyond the clip range it is the third.
function ratioClass(value, clip) {
  if (value === undefined || value === null) return "";
  const [low, high] = clip || [0.2, 0.28];
  const beyond = Math.exp(value) > 1 + high || Math.exp(value) < 1 - low;
  const size = beyond ? "3 clipped" : Math.abs(value) < 0.02 ? 0 : Math.abs(value) < 0.1 ? 1 : 2;
  return size === 0 ? "z" : `${value > 0 ? "p" : "n"}${size}`;
}

// The place of a sampled token among the likeliest ones: 0 is the likeliest; null: none are recorded.
function rankOf(tokens, place) {
  const row = tokens.alternatives?.[place];
  if (!row?.length) return null;
  const found = row.findIndex(([id]) => id === tokens.ids[place]);
  return found < 0 ? row.length : found;
}

function classOf(by, tokens, place, versions, clip) {
  const advantage = tokens.advantages?.[place];
  const weight = tokens.weights?.[place];
  if (by === "advantage") {
    if (advantage === undefined || advantage === null) return "";
    if (Math.abs(advantage) < 1e-9 || weight === 0) return "z";
    const size = Math.abs(advantage) < 0.5 ? 1 : Math.abs(advantage) < 1.5 ? 2 : 3;
    return `${advantage > 0 ? "p" : "n"}${size}`;
  }
  if (by === "logprob") {
    const value = tokens.logprobs?.[place];
    if (value === undefined || value === null) return "";
    return `s${value > -0.05 ? 0 : value > -0.5 ? 1 : value > -1.5 ? 2 : value > -3 ? 3 : 4}`;
  }
  if (by === "rank") {
    const rank = rankOf(tokens, place);
    return rank === null ? "" : rank === 0 ? "z" : `n${Math.min(3, rank)}`;
  }
  if (by === "ratio") return ratioClass(tokens.log_ratios?.[place], clip);
  if (by === "version") return tokens.versions ? `v${versions.indexOf(tokens.versions[place]) % 6}` : "";
  if (by === "loss") return tokens.weights ? (weight > 0 && Math.abs(advantage) > 1e-9 ? "p2" : "z idle") : "idle";
  return "";
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "→");
const textOf = (tokens, place) => (tokens.texts ? tokens.texts[place] : `${tokens.ids[place]} `);

export function CallTokens({ call, index, by, versions, clip, chosen, choose, differsAt }) {
  const { prompt, tokens } = call;
  if (call.left_out) return html`<p class="muted">${number(call.sampled_tokens)} tokens are not shown: the rollout has too many.</p>`;
  if (!tokens && !prompt?.ids.length) return html`<p class="muted">No tokens are recorded for this call.</p>`;
  const shown = Math.min(tokens?.ids.length ?? 0, MOST_SHOWN);
  const given = prompt?.texts ? prompt.texts.join("") : (prompt?.ids || []).map((id) => `${id} `).join("");
  return html`<div class="tokens">${given && html`<span class="t given">${visible(given)}</span>`}${Array.from({ length: shown }, (_, place) => {
    const isChosen = chosen && chosen.call === index && chosen.token === place;
    const text = textOf(tokens, place);
    const special = /^<\|.*\|>$|^<\/?s>$/.test(text) ? "special" : "";
    return html`<span key=${place} class=${`t ${classOf(by, tokens, place, versions, clip)} ${special} ${isChosen ? "chosen" : ""} ${differsAt === place ? "differs" : ""}`}
      onMouseEnter=${() => choose({ call: index, token: place })} onClick=${() => choose({ call: index, token: place })}>${visible(text)}</span>`;
  })}${shown < (tokens?.ids.length ?? 0) && html`<p class="muted">… ${tokens.ids.length - shown} more</p>`}</div>`;
}

export function ToolResults({ call }) {
  return call.tool_results.map((each, place) => html`<div key=${place} class=${`part tool_result ${each.failed ? "failed" : ""}`}>
    <b>${each.failed ? "tool error" : "tool result"}${each.name ? ` · ${each.name}` : ""}</b><pre>${each.text}</pre></div>`);
}

const clipText = (clip) => (clip ? `underlined: beyond the clip range of the loss, ${number(1 - clip[0])} to ${number(1 + clip[1])}` : "underlined: below 0.8 or above 1.28");

const NO_ALTERNATIVES = "no likeliest tokens are recorded: a run records them with gateway.record_top_logprobs, and a call that asks for top_logprobs";

// Why a colour cannot be chosen; "" where it can.
function lacks(name, stream, ratios) {
  if (name === "ratio" && !ratios.known) return ratios.note;
  return name === "rank" && !stream.some((call) => call.tokens?.alternatives) ? NO_ALTERNATIVES : "";
}

export function Legend({ by, change, stream, credit, ratios }) {
  const lacking = lacks(by, stream, ratios);
  const notes = { rank: "grey: the likeliest token was sampled; orange: the second, the third, a less likely one", advantage: "blue: better than expected, orange: worse, grey: none", logprob: "darker: less likely when it was drawn", version: "a colour for each version of the weights", loss: "blue: carries loss; struck through: does not", ratio: `probability after the update over that when drawn: blue above 1, orange below, grey within 2%; ${clipText(ratios.clip)}` };
  return html`<div class="legend-row" role="group" aria-label="Colour of tokens">${COLOURS.map(([name, title]) => html`<button key=${name} type="button" aria-pressed=${by === name ? "true" : "false"} disabled=${lacks(name, stream, ratios) !== ""} title=${lacks(name, stream, ratios) || notes[name]} onClick=${() => change(name)}>${title}</button>`)}
    <span class="muted small">${notes[by]}. Text in grey was given, not sampled.</span></div>
    ${lacking && html`<div class="notice">${lacking}</div>`}
    ${credit.notes.map((note) => html`<div class="notice" key=${note}>${note}</div>`)}
    ${!stream.some((call) => call.tokens) && html`<div class="notice">No call of this rollout has recorded tokens.</div>`}`;
}

// The likeliest tokens at the place of a sampled one, each with its probability; the sampled one is framed.
function Alternatives({ tokens, at }) {
  const row = tokens.alternatives?.[at];
  if (!row) return html`<span>alternatives not recorded</span>`;
  return html`<ul class="alternatives" aria-label="Likeliest tokens here">${row.map(([id, text, logprob]) => html`<li key=${id} class=${id === tokens.ids[at] ? "sampled" : ""}>
    <span class="mono">${JSON.stringify(text ?? id)}</span> ${percent(Math.exp(logprob))}${id === tokens.ids[at] ? " sampled" : ""}</li>`)}</ul>`;
}

export function Inspector({ stream, chosen, first = 0 }) {
  const call = chosen && stream[chosen.call];
  if (!call?.tokens) return html`<div class="inspector muted">Point at a token, or move with the arrow keys.</div>`;
  const { tokens } = call;
  const at = chosen.token;
  const logprob = tokens.logprobs?.[at];
  return html`<div class="inspector" aria-live="polite">${tokens.texts && html`<b class="mono">${JSON.stringify(tokens.texts[at])}</b>`}<span>id ${tokens.ids[at]}</span><span>call ${first + chosen.call + 1}, token ${at + 1} of ${tokens.ids.length}</span>
    <span>log-probability ${number(logprob)}${logprob === undefined || logprob === null ? "" : ` (p ${number(Math.exp(logprob))})`}</span>
    <span>advantage ${tokens.advantages ? signed(tokens.advantages[at]) : "none"}</span><span>weight ${tokens.weights ? number(tokens.weights[at], 5) : "none"}</span><span>ratio ${tokens.log_ratios ? number(Math.exp(tokens.log_ratios[at])) : "not recorded"}</span><span>weights version ${tokens.versions?.[at] ?? "–"}</span><${Alternatives} tokens=${tokens} at=${at} /></div>`;
}

export const versionsOf = (stream) => [...new Set(stream.flatMap((call) => call.tokens?.versions || []))].sort((a, b) => a - b);

export function CallHead({ call, index, children }) {
  return html`<div class="who"><b>Call ${index + 1}</b>${call.agent && html`<span>${call.agent}</span>`}<span>${number(call.sampled_tokens)} sampled of ${number(call.prompt_tokens + call.sampled_tokens)} tokens</span>
    ${call.version !== null && html`<span>weights ${call.version}</span>`}${call.finish && html`<span>${call.finish}</span>`}${!call.counts && html`<${Pill} kind="failed">does not count<//>`}${call.drift && html`<${Pill} kind="warn">drift: ${call.drift}<//>`}
    ${call.reward !== null && call.reward !== undefined && html`<${RewardChip} value=${call.reward} />`}${children}</div>`;
}

export function move(event, stream, chosen, choose) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  let { call, token } = chosen || { call: 0, token: -1 };
  token += by;
  while (call >= 0 && call < stream.length) {
    const length = stream[call].tokens?.ids.length ?? 0;
    if (token >= 0 && token < length) return choose({ call, token });
    call += by;
    token = by > 0 ? 0 : (stream[call]?.tokens?.ids.length ?? 0) - 1;
  }
}

// Which calls of the rollout are shown, and the way to the others.
function Pages({ data: { stream, first_call: first, calls_total: total, next }, go }) {
  if (!first && next === null) return null;
  return html`<nav class="more" aria-label="Calls of this rollout"><button type="button" disabled=${!first} onClick=${() => go(Math.max(0, first - 20))}>← Earlier calls</button><button type="button" disabled=${next === null} onClick=${() => go(next)}>Later calls →</button>
    <span class="muted small">Calls ${number(first + 1)} to ${number(first + stream.length)}${total === null ? "" : ` of ${number(total)}`} are shown.</span></nav>`;
}

export function TokensPage({ parts: [run, rollout], query, path }) {
  const address = withQuery(path, { from: query.from, call: query.call });
  const view = useView(address);
  const [chosen, choose] = useState(null);
  const target = useRef(null);
  const by = query.by || "advantage";
  useEffect(() => target.current?.scrollIntoView({ block: "start" }), [view.data]);
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { stream, credit, ratios, summary, step, first_call: first } = view.data;
  const versions = versionsOf(stream);
  const wanted = query.call === undefined || query.from !== undefined ? null : Number(query.call) - first;
  const shown = chosen || (wanted === null ? null : { call: wanted, token: Number(query.token || 0) });
  return html`<div class="head"><h1>Tokens</h1><span class="muted mono">${rollout}</span><div class="right">
      <${Link} class="button" to=${runPath(run, "rollouts", rollout)}>Conversation<//><${Link} class="button" to=${runPath(run, "rollouts", rollout, "group")}>Group<//><${Json} path=${path} name="tokens.json" /></div></div>
    <div class="panel"><dl class="facts"><${Fact} name="Reward">${reward(summary.reward)}<//><${Fact} name="Credit rule">${credit.rule || "–"}<//>
      <${Fact} name="Learned from in">${step === null ? "no step" : html`<${Link} to=${runPath(run, "steps", step)}>step ${step}<//>`}<//><${Fact} name="Versions of weights">${versions.join(", ") || "–"}<//></dl><pre>${summary.task}</pre></div>
    ${!view.data.has_texts && html`<div class="notice">The run has no tokenizer.json that can be read: tokens are shown as their ids.</div>`}
    <${Legend} by=${by} change=${(name) => navigate(withQuery(path, { ...query, by: name }), { replace: true })} stream=${stream} credit=${credit} ratios=${ratios} />
    <div class="panel" tabindex="0" role="group" aria-label="Tokens; arrow keys move" onKeyDown=${(event) => move(event, stream, shown, choose)}>
      ${stream.map((call, index) => html`<section class="turn" key=${call.span_id} ref=${wanted === index ? target : undefined}><${CallHead} call=${call} index=${first + index} />
        ${call.error && html`<p class="error-text">${call.error}</p>`}
        <${CallTokens} call=${call} index=${index} by=${by} versions=${versions} clip=${ratios.clip} chosen=${shown} choose=${choose} />
        <${ToolResults} call=${call} /></section>`)}
      ${!stream.length && html`<p class="empty">${first ? "There are no calls from here on." : "This rollout made no model calls."}</p>`}</div>
    <${Pages} data=${view.data} go=${(from) => { choose(null); navigate(withQuery(path, { by: query.by, from })); }} />
    <${Inspector} stream=${stream} chosen=${shown} first=${first} />`;
}
