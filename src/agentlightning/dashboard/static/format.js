// Numbers and times as text.
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size < 0.001 || size >= 1e6) return value.toExponential(2);
  if (size < 0.1) return value.toLocaleString("en", { maximumSignificantDigits: digits });
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 ? 0 : size >= 10 ? 1 : digits });
}

// A count of tokens, short.
export const tokens = (count) => (count >= 1e6 ? `${(count / 1e6).toFixed(1)}M` : count >= 1e4 ? `${Math.round(count / 1e3)}k` : number(count));

export const signed = (value) => (value === null || value === undefined ? "–" : value === 0 ? "0" : `${value > 0 ? "+" : "−"}${number(Math.abs(value))}`);

// A share as text: 0.0042 is 0.42%.
export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toLocaleString("en", { maximumSignificantDigits: share >= 0.0995 ? 3 : 2 })}%`);

export function interval(found) {
  if (!found) return "–";
  if (found.low === null || found.low === undefined) return number(found.mean);
  return `${number(found.mean)} (${number(found.low)} to ${number(found.high)})`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function time(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  return `${date.toISOString().slice(0, 10)} ${date.toTimeString().slice(0, 8)}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  return seconds ? `${duration(Math.max(0, now - seconds))} ago` : "–";
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = count;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit ? size.toFixed(1) : size} ${units[unit]}`;
}

export function reward(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return Object.entries(value).map(([name, each]) => `${name} ${number(each)}`).join(", ");
}

// The end of an id tells rollouts of a run apart.
export const shortId = (id) => (id.length <= 30 ? id : `…${id.slice(-28)}`);

export const words = (name) => name.replaceAll("_", " ");
