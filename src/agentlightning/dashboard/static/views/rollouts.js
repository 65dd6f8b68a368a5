// The table of rollouts with its filters and actions, and one task across versions of the weights.
import { download, post, useView } from "../api.js";
import { ago, duration, interval, number, reward, shortId } from "../format.js";
import { useNews } from "../follow.js";
import { html, useEffect, useRef, useState } from "../lib.js";
import { useAsTable } from "../neighbours.js";
import { Json, Loading, Pill, Range, Rewards, RunTabs, Stale, scrolls } from "../parts.js";
import { Link, navigate, runPath, withQuery } from "../router.js";

// [name, title, values to choose from, whether it is narrow]
const FILTERS = [
  ["state", "State", ["succeeded", "failed", "running", "preparing", "queuing", "requeuing", "cancelled"]],
  ["mode", "Mode", ["train", "val", "test"]],
  ["task", "Task contains"], ["reward_min", "Reward from", null, true], ["reward_max", "to", null, true],
];
const MORE = [
  ["reward", "Reward", ["missing"]], ["tools", "Tools", ["failed"]], ["agent", "Agent"], ["group", "Group"], ["id", "Id contains"],
  ["failure", "Failure"], ["label", "Label"], ["step", "Step", null, true], ["version", "Weights", null, true],
];

function Filters({ query, apply }) {
  const form = useRef(null);
  const submit = (event) => {
    event.preventDefault();
    apply({ ...query, ...Object.fromEntries(new FormData(form.current)), after: "" });
  };
  const field = ([name, title, values, narrow]) => html`<label key=${name}>${title}${values
    ? html`<select name=${name} value=${query[name] || ""}><option value="">any</option>${values.map((value) => html`<option key=${value} value=${value} selected=${query[name] === value}>${value}</option>`)}</select>`
    : html`<input class=${narrow ? "narrow" : ""} name=${name} inputmode=${narrow ? "decimal" : undefined} value=${query[name] || ""} />`}</label>`;
  return html`<form class="filters" ref=${form} onSubmit=${submit} onChange=${(event) => event.target.tagName === "SELECT" && submit(event)}>
    ${FILTERS.map(field)}<button type="submit">Filter</button><button type="button" onClick=${() => { form.current.reset(); apply({}); }}>Clear</button>
    <details open=${MORE.some(([name]) => query[name])}><summary>More filters</summary><div class="fields">${MORE.map(field)}</div></details></form>`;
}

// [what it is sorted by, title, whether it holds numbers]
const COLUMNS = [
  ["created", "Rollout"], ["status", "State"], [null, "Task"], ["reward_number", "Reward", true], ["calls", "Calls", true], ["tool_errors", "Tool errors", true],
  ["sampled_tokens", "Tokens", true], ["seconds", "Time", true], [null, "Agents"], [null, "Weights", true],
];

function Heading({ name, title, query, apply, end, sorts = [] }) {
  if (!sorts.includes(name)) return html`<th class=${end ? "num" : ""}>${title}</th>`;
  const active = query.sort === name;
  const flip = () => apply({ ...query, sort: name, order: active && query.order !== "asc" ? "asc" : "desc", after: "" });
  return html`<th class=${end ? "num" : ""} aria-sort=${active ? (query.order === "asc" ? "ascending" : "descending") : undefined}><button type="button" onClick=${flip}>${title}${active ? (query.order === "asc" ? " ▲" : " ▼") : ""}</button></th>`;
}

export function Row({ run, row, chosen, toggle }) {
  const known = (value) => (row.spans_read ? value : "–"); // by the spans, which some views do not read
  return html`<tr>${toggle && html`<td class="check"><input type="checkbox" checked=${chosen} onChange=${toggle} aria-label=${`Select ${row.rollout_id}`} /></td>`}
    <td class="nowrap whole"><${Link} class="mono" to=${runPath(run, "rollouts", row.rollout_id)} title=${row.rollout_id}>${shortId(row.rollout_id)}<//><div class="muted small">${ago(row.start_time)}${row.mode ? `, ${row.mode}` : ""}</div></td>
    <td><${Pill} kind=${row.status} />${row.attempts > 1 && html`<div class="muted small">attempt ${row.attempts}</div>`}</td>
    <td class="task">${row.task}${row.failure_kind && html`<div class="error-text small">${row.failure_kind}: ${row.failure}</div>`}${row.labels.map((label) => html` <${Pill} key=${label} kind="warn">${label}<//>`)}</td>
    <td class="num" data-label="Reward">${reward(row.reward)}</td><td class="num" data-label="Calls">${known(row.calls)}</td><td class="num" data-label="Tool errors">${known(html`${row.tool_errors ? html`<span class="error-text">${row.tool_errors}</span>` : "0"} / ${row.tool_calls}`)}</td>
    <td class="num" data-label="Tokens">${known(number(row.sampled_tokens))}</td><td class="num" data-label="Time">${duration(row.seconds)}</td><td data-label="Agents">${row.agents.join(", ") || html`<span class="muted">–</span>`}</td><td class="num" data-label="Weights">${row.versions.join(", ") || "–"}</td></tr>`;
}

const RowHead = ({ first, ...head }) => html`<thead><tr>${first}${COLUMNS.map(([name, title, end]) => html`<${Heading} key=${title} name=${name} title=${title} end=${end} ...${head} />`)}</tr></thead>`;

const FORMS = [["rollouts", "for agl store import"], ["sft", "conversations for agl sft --data"], ["dpo", "the best and the worst rollout of each task for agl dpo --data"]];

// Saves the chosen rollouts, or all that match the filters where none is chosen, and says what gave no record.
function Export({ run, ids, query, say }) {
  const { sort, order, after, limit, ...filters } = query;
  const save = async (form) => {
    say("exporting …");
    try {
      const response = await download(runPath(run, "export"), `${form}.jsonl`, { form, ...(ids.length ? { rollout_ids: ids } : { filters }) });
      const skipped = Object.entries(JSON.parse(response.headers.get("x-agl-skipped") || "{}")).map(([reason, count]) => `${count} ${reason}`);
      say(`exported ${response.headers.get("x-agl-records")} records${skipped.length ? `; left out: ${skipped.join(", ")}` : ""}`);
    } catch (error) {
      say(error.message);
    }
  };
  return html`<span class="muted">Export ${ids.length ? "selected" : "all that match"}:</span>${FORMS.map(([form, title]) => html`<button key=${form} type="button" title=${title} onClick=${() => save(form)}>${form === "rollouts" ? "JSONL" : form.toUpperCase()}</button>`)}`;
}

function Actions({ run, ids, query, writable, done }) {
  const [said, say] = useState("");
  const [score, setScore] = useState("");
  const [label, setLabel] = useState("");
  const none = !ids.length;
  const act = async (action, more = {}) => {
    try {
      const found = await (await post(`${runPath(run, "actions")}/${action}`, { rollout_ids: ids, ...more })).json();
      const errors = Object.values(found.results).filter((each) => !each.done).map((each) => each.error);
      say(`${action}: ${found.done} of ${ids.length} done${errors.length ? `; ${errors[0]}` : ""}`);
      done();
    } catch (error) {
      say(error.message);
    }
  };
  const annotate = () => act("annotate", { ...(score === "" ? {} : { score: Number(score) }), label });
  return html`<div class="actions"><b>${ids.length} selected</b><${Export} run=${run} ids=${ids} query=${query} say=${say} />
    ${writable && html`<button type="button" disabled=${none} onClick=${() => act("cancel")}>Cancel</button>
      <button type="button" disabled=${none} onClick=${() => act("requeue")} title="The same rollout waits again">Requeue</button>
      <button type="button" disabled=${none} onClick=${() => act("retry")} title="A new rollout of the same task">Retry</button>
      <input class="narrow" aria-label="Score" placeholder="score" size="5" value=${score} onInput=${(event) => setScore(event.target.value)} />
      <input aria-label="Label" placeholder="label" size="10" value=${label} onInput=${(event) => setLabel(event.target.value)} />
      <button type="button" disabled=${none || (score === "" && !label)} onClick=${annotate}>Annotate</button>`}
    ${!writable && html`<span class="muted small">read only</span>`}<span role="status" class="small">${said}</span></div>`;
}

export function RolloutsPage({ parts: [run], query, path }) {
  const address = withQuery(path, query);
  const view = useView(address);
  const [chosen, setChosen] = useState([]);
  useEffect(() => setChosen([]), [address]);
  const apply = (values) => navigate(withQuery(path, values));
  const { data } = view;
  useAsTable(run, data ? data.rows.map((row) => row.rollout_id) : []);
  const news = useNews(runPath(run, "changes"), query, data);
  useEffect(() => {
    if (news.newer && !data.rows.length) view.reload();
  }, [news]);
  const toggle = (id) => setChosen(chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id]);
  const every = data && chosen.length === data.rows.length && chosen.length > 0;
  const head = { query, apply, sorts: data ? data.sorts : [] };
  return html`<div class="head"><h1>Rollouts</h1>${data && data.total !== null && html`<span class="muted">${number(data.total)} match</span>`}<button type="button" class=${news.newer ? "newer" : "newer unseen"} onClick=${view.reload}>${number(news.newer)}${news.more ? "+" : ""} newer: show</button>
      <div class="right"><${Link} class="button" to=${runPath(run, "failures")}>Failures by cause<//><${Json} path=${address} name="rollouts.json" /></div></div>
    <${RunTabs} run=${run} here="rollouts" />
    <details class="panel" open=${!matchMedia("(max-width: 760px)").matches || Object.keys(query).length > 0}><summary>Filters</summary><${Filters} key=${address} query=${query} apply=${apply} /></details><${Stale} view=${news.error ? { ...view, error: news.error } : view} />
    ${!data ? html`<${Loading} view=${view} />` : html`<div class="panel tight" ...${scrolls}><${Actions} run=${run} ids=${chosen} query=${query} writable=${data.writable} done=${view.reload} />
      <table class="stack"><${RowHead} ...${head} first=${html`<th><input type="checkbox" checked=${every} aria-label="Select all of this page" onChange=${() => setChosen(every ? [] : data.rows.map((row) => row.rollout_id))} /></th>`} />
        <tbody>${data.rows.map((row) => html`<${Row} key=${row.rollout_id} run=${run} row=${news.rows[row.rollout_id] || row} chosen=${chosen.includes(row.rollout_id)} toggle=${() => toggle(row.rollout_id)} />`)}</tbody></table>
      ${!data.rows.length && html`<p class="empty">${data.next ? `None of ${number(data.scanned)} rollouts matches so far.` : "No rollout matches."}</p>`}</div>
    <div class="head">${query.after && html`<button type="button" onClick=${() => history.back()}>← Back</button>`}
      ${data.next && html`<button type="button" class="primary" onClick=${() => apply({ ...query, after: data.next })}>${data.rows.length ? "Next page" : "Look further"} →</button>`}
      <span class="muted small">${number(data.scanned)} rollouts read for this page. ${!data.sorts.includes("calls") && "All rollouts are sorted by creation or state; those of one step or group by every column."}</span></div>`}`;
}

export function TaskPage({ parts: [run], path }) {
  const view = useView(path);
  const { data } = view;
  useAsTable(run, data ? data.rollouts.map((row) => row.rollout_id) : []);
  if (!data) return html`<${Loading} view=${view} />`;
  return html`<div class="head"><h1>One task across versions of the weights</h1><div class="right"><${Json} path=${path} name="task.json" /></div></div>
    <div class="panel"><pre>${data.task}</pre></div>
    <div class="panel tight" ...${scrolls}><table><thead><tr><th class="num">Weights</th><th>Mode</th><th>Rewards</th><th>Mean, 95% interval</th><th><span class="skip">Interval</span></th><th>Side by side</th></tr></thead><tbody>
      ${data.versions.map((each) => html`<tr key=${`${each.version}${each.mode}`}><td class="num">${each.version ?? "–"}</td><td>${each.mode}</td><td><${Rewards} values=${each.rewards} /></td><td>${interval(each.reward)}</td><td><${Range} found=${each.reward} /></td>
        <td><${Link} to=${runPath(run, "rollouts", each.rollouts[0], "group")}>${each.rollouts.length} rollout${each.rollouts.length > 1 ? "s" : ""}<//></td></tr>`)}</tbody></table></div>
    ${!data.complete && html`<p class="muted">Among the ${number(data.scanned)} newest rollouts.</p>`}
    <div class="panel tight" ...${scrolls}><table class="stack"><${RowHead} /><tbody>${data.rollouts.map((row) => html`<${Row} key=${row.rollout_id} run=${run} row=${row} />`)}</tbody></table></div>`;
}
