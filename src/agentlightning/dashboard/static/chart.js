// A chart of uPlot: curves over steps, a band, intervals, warnings; a click or Enter opens the step.
import { number } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";

export const COLORS = 8;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const color = (index) => css(`--c${index % COLORS}`);

const tickText = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential() : String(Number(value.toPrecision(6))));

// Of a logarithmic axis the labels 1, 2 and 5 of each decade.
const logTickText = (value) => (/^[125]e/.test(value.toExponential()) ? tickText(value) : "");

function faded(paint, share) {
  return `${paint}${Math.round(255 * share).toString(16).padStart(2, "0")}`;
}

function drawWarnings(u, warnings) {
  u.ctx.save();
  u.ctx.strokeStyle = css("--warn");
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const each of warnings) {
    if (!each.since) continue;
    const x = u.valToPos(each.since, "x", true);
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
    u.ctx.fillStyle = css("--warn");
    u.ctx.font = `${11 * devicePixelRatio}px system-ui`;
    u.ctx.fillText("⚠", x + 3 * devicePixelRatio, u.bbox.top + 11 * devicePixelRatio);
  }
  u.ctx.restore();
}

function drawIntervals(u, series) {
  u.ctx.save();
  u.ctx.lineWidth = 1.5 * devicePixelRatio;
  series.forEach((each, index) => {
    u.ctx.strokeStyle = color(each.color ?? index);
    for (const found of each.intervals || []) {
      const x = u.valToPos(found.step, "x", true);
      const [low, high] = [u.valToPos(found.low, "y", true), u.valToPos(found.high, "y", true)];
      const cap = 4 * devicePixelRatio;
      u.ctx.beginPath();
      u.ctx.moveTo(x, low);
      u.ctx.lineTo(x, high);
      u.ctx.moveTo(x - cap, low);
      u.ctx.lineTo(x + cap, low);
      u.ctx.moveTo(x - cap, high);
      u.ctx.lineTo(x + cap, high);
      u.ctx.stroke();
    }
  });
  u.ctx.restore();
}

// The bands of a chart: its own, and those of its series.
function bandsOf({ series, band }) {
  const own = series.map((each, index) => ({ ...each, color: each.color ?? index })).filter((each) => each.low?.some((value) => value !== null));
  return [...(band ? [{ ...band, color: 0 }] : []), ...own];
}

function bounds(series, bands, log) {
  const values = [
    ...series.flatMap((each) => [...each.values, ...(each.intervals || []).flatMap((found) => [found.low, found.high])]),
    ...bands.flatMap((each) => [...each.low, ...each.high]),
  ].filter((value) => value !== null && value !== undefined && (!log || value > 0));
  if (!values.length) return log ? [0.1, 1] : [0, 1];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (log) return [low / 1.3, high * 1.3];
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - pad, high + pad];
}

function options(given, size, onCursor) {
  const { series, warnings, log } = given;
  const bands = bandsOf(given);
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const [low, high] = bounds(series, bands, log);
  const lines = series.map((each, index) => ({
    label: each.label,
    stroke: color(each.color ?? index),
    ...(each.apart ? { paths: () => null } : {}),
    width: 1.8,
    spanGaps: true,
    points: { show: each.apart || each.values.filter((value) => value !== null).length < 60, size: 5 },
    scale: "y",
  }));
  const edges = bands.flatMap(() => ["high", "low"].map((label) => ({ label, stroke: "transparent", points: { show: false } })));
  return {
    ...size,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: [low, high] } },
    axes: [{ ...axis, size: 28, space: 50, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }, { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : (log ? logTickText : tickText)(tick))) }],
    series: [{}, ...lines, ...edges],
    bands: bands.map((each, place) => ({ series: [lines.length + 2 * place + 1, lines.length + 2 * place + 2], fill: faded(color(each.color), 0.16) })),
    hooks: {
      setCursor: [(u) => onCursor(u.cursor.idx)],
      draw: [(u) => drawWarnings(u, warnings || []), (u) => drawIntervals(u, series)],
    },
  };
}

export function Chart(given) {
  const { title, unit, steps, series, band, onPick, tall, note, theme, axis = "step" } = given;
  const holder = useRef(null);
  const plot = useRef(null);
  const place = useRef(null);
  const [shown, setShown] = useState(null);
  useLayoutEffect(() => {
    const element = holder.current;
    const size = () => ({ width: Math.max(200, element.clientWidth), height: element.clientHeight || 190 });
    const data = [steps, ...series.map((each) => each.values), ...bandsOf(given).flatMap((each) => [each.high, each.low])];
    const cursor = (index) => {
      place.current = index;
      setShown(index ?? null);
    };
    plot.current = new uPlot(options(given, size(), cursor), data, element);
    const pick = () => onPick && place.current !== null && place.current !== undefined && onPick(steps[place.current]);
    plot.current.over.addEventListener("click", pick);
    const observer = new ResizeObserver(() => plot.current.setSize(size()));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [JSON.stringify([steps.length, steps.at(-1), series, band, given.warnings]), theme]);
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && place.current !== null) onPick?.(steps[place.current]);
    if (!by || !steps.length) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(steps.length - 1, (place.current ?? (by > 0 ? -1 : steps.length)) + by));
    place.current = next;
    plot.current.setCursor({ left: plot.current.valToPos(steps[next], "x"), top: 10 });
    setShown(next);
  };
  const at = shown ?? steps.length - 1;
  const valueOf = (each) => (shown === null ? each.values.findLast((value) => value !== null) : each.values[at]);
  return html`<figure class=${`chart panel ${tall ? "tall" : ""}`} style=${{ margin: 0 }}>
    <h3>${title} ${unit && html`<span class="muted small">${unit}</span>`}</h3>
    <div class="legend" aria-live="off">
      <span>${axis} ${steps[at] ?? "–"}</span>
      ${series.map((each, index) => html`<span class="key" key=${each.label}><span class="swatch" style=${{ background: `var(--c${(each.color ?? index) % COLORS})` }}></span>${each.label} ${number(valueOf(each))}</span>`)}
      ${band && html`<span class="muted">${band.label}</span>`}${note && html`<span class="muted">${note}</span>`}
    </div>
    <div class="plot" ref=${holder} tabindex="0" role="img" onKeyDown=${move}
      aria-label=${`${title}: ${series.map((each) => `${each.label} ${number(each.values.find((v) => v !== null))} at first, ${number(each.values.findLast((v) => v !== null))} at last`).join("; ")}. Arrow keys move, Enter opens the ${axis}.`}></div>
  </figure>`;
}

export function useTheme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme);
  useEffect(() => {
    const update = () => setTheme(document.documentElement.dataset.theme);
    addEventListener("agl-theme", update);
    return () => removeEventListener("agl-theme", update);
  }, []);
  return theme;
}
