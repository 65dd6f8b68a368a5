// The rollouts before and after one: in the table that was looked at last, else in order of creation, the newest first.
import { useView } from "./api.js";
import { html, useEffect } from "./lib.js";
import { BASE, Link, runPath, withQuery } from "./router.js";

const KEY = "agl-table";

// Remembers the rows of a table, in this tab.
export function useAsTable(run, ids) {
  useEffect(() => {
    if (ids.length) sessionStorage.setItem(KEY, JSON.stringify({ run, ids, address: location.pathname.slice(BASE.length) + location.search }));
  }, [ids.join()]);
}

export function Neighbours({ run, rollout, query }) {
  const table = JSON.parse(sessionStorage.getItem(KEY) || "null");
  const at = table?.run === run ? table.ids.indexOf(rollout) : -1;
  const beside = (order) => (at < 0 ? withQuery(runPath(run, "rollouts"), { after: rollout, limit: 1, order }) : null);
  const [newer, older] = [useView(beside("asc")), useView(beside("desc"))];
  const [previous, next] = at < 0 ? [newer, older].map((view) => view.data?.rows[0]?.rollout_id) : [table.ids[at - 1], table.ids[at + 1]];
  const step = (id, rel, title) => (id
    ? html`<${Link} class="button" rel=${rel} title=${id} to=${withQuery(runPath(run, "rollouts", id), { tab: query.tab, find: query.find })}>${title}<//>`
    : html`<button type="button" disabled>${title}</button>`);
  return html`${step(previous, "prev", "← Previous")}${step(next, "next", "Next →")}${at >= 0 && html`<${Link} class="small" to=${table.address}>${at + 1} of ${table.ids.length}<span class="skip"> in the table</span><//>`}`;
}
