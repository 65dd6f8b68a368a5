// Pages that follow what they show: a rollout until it has finished, a table of rollouts in place.
import { get } from "./api.js";
import { useEffect, useRef, useState } from "./lib.js";
import { withQuery } from "./router.js";

const OPEN = new Set(["queuing", "preparing", "running", "requeuing"]);
const EVERY = 2000;
const COUNTING = 300; // while the totals of a long attempt are still read
const TABLE = 3000;

export const isOpen = (status) => OPEN.has(status);
const follows = (data) => isOpen(data.rollout.status) || data.attempts.some((each) => each.attempt_id === data.attempt && isOpen(each.status));

// The spans and calls that a page has, with those of an answer after them. What may have changed of earlier calls, their rewards and results, comes with it.
function merged(before, answer) {
  const known = new Set(before.spans.map((span) => span.span_id));
  const calls = new Set(before.stream.map((call) => call.span_id));
  const changed = new Map(answer.context.map((call) => [call.span_id, call]));
  return {
    ...answer,
    spans: [...before.spans, ...answer.spans.filter((span) => !known.has(span.span_id))],
    stream: [...before.stream.map((call) => ({ ...call, ...changed.get(call.span_id) })), ...answer.stream.filter((call) => !calls.has(call.span_id))],
  };
}

// Repeats `step` while it gives a delay and the tab is visible.
function repeat(step) {
  let timer = 0;
  let stopped = false;
  const next = (delay) => {
    if (delay && !stopped) timer = setTimeout(run, delay, delay);
  };
  const run = (delay) => (document.hidden ? next(delay) : step().then(next));
  step().then(next);
  return () => {
    stopped = true;
    clearTimeout(timer);
  };
}

// The rollout of a page: read once, then only asked whether anything has changed, until it has finished. `more` reads the spans that follow those it has.
export function useRollout(path, attempt) {
  const address = withQuery(path, { attempt });
  const [found, setFound] = useState({ address: null, data: null, error: null });
  const [turn, setTurn] = useState(0);
  const held = useRef({ address: null, data: null });
  const put = (data) => {
    held.current = { address, data };
    setFound({ address, data, error: null });
  };
  const whole = async (signal) => put(await get(address, signal));
  const add = async (signal, query) => {
    const { data } = held.current;
    const answer = await get(withQuery(path, { attempt, start: data.spans.length, ...query }), signal);
    if (answer.unchanged) return held.current.data.mark === answer.mark && setFound((now) => (now.error ? { ...now, error: null } : now));
    if (held.current.data !== data) return undefined; // another answer came first; the next one is asked for again
    const next = merged(data, answer);
    const lacks = answer.attempt !== data.attempt || (answer.next === null && next.spans.length !== answer.spans_total);
    return lacks ? whole(signal) : put({ ...next, next: next.spans.length < next.spans_total ? next.spans.length : null });
  };
  useEffect(() => {
    const stop = new AbortController();
    const step = async () => {
      try {
        const { data } = held.current;
        if (held.current.address !== address || data === null) await whole(stop.signal);
        else await add(stop.signal, { mark: data.mark, limit: data.next === null ? undefined : 0 });
      } catch (error) {
        if (error.name === "AbortError") return 0;
        setFound((before) => ({ address, data: before.address === address ? before.data : null, error }));
        if (error.status === 401) dispatchEvent(new Event("agl-unauthorized"));
      }
      const { data } = held.current;
      if (held.current.address !== address || data === null) return 0;
      return data.calls_total === null ? COUNTING : follows(data) ? EVERY : 0;
    };
    const end = repeat(step);
    return () => {
      stop.abort();
      end();
    };
  }, [address, turn]);
  const more = () => add(undefined, {}).catch((error) => setFound((before) => ({ ...before, error })));
  const reload = () => setTurn((before) => before + 1);
  return found.address === address ? { ...found, reload, more } : { address, data: null, error: null, reload, more };
}

// What has happened to a table of rollouts since it was read: its open rows as they are now, and how many newer ones there are. No row moves.
export function useNews(path, query, data) {
  const [news, setNews] = useState({ data: null, rows: {}, newer: 0, more: false, error: null });
  const newest = data !== null && !query.after && (!query.sort || query.sort === "created") && query.order !== "asc";
  useEffect(() => {
    if (data === null) return undefined;
    const stop = new AbortController();
    let mark;
    let rows = {};
    const now = (row) => rows[row.rollout_id] || row;
    const step = async () => {
      const open = data.rows.map(now).filter((row) => isOpen(row.status)).map((row) => row.rollout_id);
      if (!newest && !open.length) return 0;
      const { after, sort, order, limit, ...filters } = query;
      const asked = { ...filters, rows: open.join(","), newest: newest ? data.rows[0]?.rollout_id : undefined, count: newest ? 1 : undefined, mark };
      try {
        const answer = await get(withQuery(path, asked), stop.signal);
        if (!answer.unchanged) {
          mark = answer.mark;
          const given = new Map(data.rows.map((row) => [row.rollout_id, row]));
          const kept = (row) => (row.spans_read || !given.get(row.rollout_id).spans_read ? row : { ...row, ...spansOf(given.get(row.rollout_id)) });
          rows = { ...rows, ...Object.fromEntries(answer.rows.map((row) => [row.rollout_id, kept(row)])) };
          setNews({ data, rows, newer: answer.newer, more: answer.more, error: null });
        } else setNews((before) => (before.error ? { ...before, error: null } : before));
      } catch (error) {
        if (error.name === "AbortError") return 0;
        if (error.status === 401) dispatchEvent(new Event("agl-unauthorized"));
        setNews((before) => ({ data, rows, newer: before.newer, more: before.more, error }));
      }
      return TABLE;
    };
    const timer = setTimeout(() => { end = repeat(step); }, TABLE);
    let end = () => clearTimeout(timer);
    return () => {
      clearTimeout(timer);
      stop.abort();
      end();
    };
  }, [path, data]);
  return news.data === data ? news : { rows: {}, newer: 0, more: false, error: null };
}

// What the spans of a row say, which are not read again while it runs.
const spansOf = ({ reward, reward_number, calls, tool_calls, tool_errors, sampled_tokens, prompt_tokens, agents, versions, labels, spans_read }) => ({ reward, reward_number, calls, tool_calls, tool_errors, sampled_tokens, prompt_tokens, agents, versions, labels, spans_read });
