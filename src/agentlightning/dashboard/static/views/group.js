// Two rollouts of a group side by side, the best beside the worst unless others are chosen.
import { useView } from "../api.js";
import { interval, number, reward, shortId } from "../format.js";
import { html, useState } from "../lib.js";
import { Json, Loading, Pill, Range, RewardChip } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";
import { CallHead, CallTokens, Inspector, Legend, ToolResults, move, versionsOf } from "./tokens.js";

function Side({ run, row, title, stream, by, versions, clip, difference, chosen, choose, rows, pick, more }) {
  let counted = -1;
  return html`<section class="panel" tabindex="0" role="group" aria-label=${`${title}; arrow keys move from token to token`} onKeyDown=${(event) => move(event, stream, chosen, choose)}>
    <div class="head"><h2>${title}</h2><${RewardChip} value=${row.reward} /><div class="right"><select aria-label=${`${title}: rollout`} value=${row.rollout_id} onChange=${(event) => pick(event.target.value)}>
      ${rows.map((each) => html`<option key=${each.rollout_id} value=${each.rollout_id} selected=${each.rollout_id === row.rollout_id}>${reward(each.reward)} · ${shortId(each.rollout_id)}</option>`)}</select></div></div>
    ${row.failure_kind && html`<p class="error-text">${row.failure_kind}: ${row.failure}</p>`}
    ${stream.map((call, index) => {
      if (call.counts) counted += 1;
      const here = call.counts && difference && difference.call === counted;
      return html`<div class="turn" key=${call.span_id}><${CallHead} call=${call} index=${index}>
          <${Link} to=${withQuery(runPath(run, "rollouts", row.rollout_id, "tokens"), { call: index })}>tokens<//>${here && html`<${Pill} kind="failed">differs here<//>`}<//>
        ${call.error && html`<p class="error-text">${call.error}</p>`}
        <${CallTokens} call=${call} index=${index} by=${by} versions=${versions} clip=${clip} chosen=${chosen} choose=${choose} differsAt=${here ? difference.token : -1} /><${ToolResults} call=${call} /></div>`;
    })}${!stream.length && html`<p class="empty">No model calls.</p>`}
    ${more && html`<p class="muted">Only the first ${stream.length} calls are shown and compared.</p><${Link} class="button" to=${withQuery(runPath(run, "rollouts", row.rollout_id, "tokens"), { from: stream.length })}>Tokens of the later calls<//> `}
    <${Link} to=${runPath(run, "rollouts", row.rollout_id)}>Whole rollout<//></section>`;
}

export function GroupPage({ parts: [run, rollout], query, path }) {
  const address = withQuery(path, { left: query.left, right: query.right });
  const view = useView(address);
  const [chosen, choose] = useState({ side: 0, at: null });
  const by = query.by || "advantage";
  if (!view.data) return html`<${Loading} view=${view} />`;
  const { data } = view;
  const change = (values) => navigate(withQuery(path, { ...query, ...values }), { replace: true });
  const rowOf = (id) => data.rollouts.find((row) => row.rollout_id === id) || data.rollouts[0];
  const versions = versionsOf(data.streams.flat());
  const names = [data.left, data.right];
  return html`<div class="head"><h1>Group, side by side</h1><div class="right">
      ${data.step !== null && html`<${Link} class="button" to=${runPath(run, "steps", data.step)}>Step ${data.step}<//>`}
      <${Link} class="button" to=${runPath(run, "tasks", data.task_key)}>This task across weights<//><${Json} path=${address} name="group.json" /></div></div>
    <div class="panel"><pre>${data.task}</pre><p class="muted small mono">${data.group}</p>
      <table><tbody>${data.versions.map((each) => html`<tr key=${`${each.version}${each.mode}`}><td>weights ${each.version ?? "–"}</td><td>${number(each.rollouts.length)} rollouts</td><td>${interval(each.reward)}</td><td><${Range} found=${each.reward} /></td></tr>`)}</tbody></table></div>
    <${Legend} by=${by} change=${(name) => change({ by: name })} stream=${data.streams.flat()} credit=${data.credit} ratios=${data.ratios} />
    <div class="cols">${data.streams.map((stream, side) => html`<${Side} key=${names[side]} run=${run} row=${rowOf(names[side])} title=${query.left || query.right ? (side ? "Right" : "Left") : side ? "Worst" : "Best"} stream=${stream} by=${by} versions=${versions} clip=${data.ratios.clip}
      more=${data.more_calls[side]} difference=${data.difference} rows=${data.rollouts} chosen=${chosen.side === side ? chosen.at : null} choose=${(at) => choose({ side, at })} pick=${(id) => change({ [side ? "right" : "left"]: id })} />`)}</div>
    ${data.left_out > 0 && html`<p class="muted">${data.left_out} further rollouts of the group are not listed.</p>`}
    <${Inspector} stream=${data.streams[chosen.side]} chosen=${chosen.at} />`;
}
