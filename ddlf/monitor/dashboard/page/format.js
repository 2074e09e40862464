// Numbers and times as people read them.

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const [h, m] = [Math.floor(s / 3600), Math.floor(s / 60) % 60];
  const two = (n) => String(n).padStart(2, "0");
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0 s";
  if (value >= 100) return duration(value);
  if (value >= 1) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value >= 0.001 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : "< 1 ms";
}

export function metric(value) {
  if (value === undefined) return "none";
  if (value === null) return "NaN"; // JSON has none
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return value.toFixed(size < 10 ? 4 : size < 1000 ? 2 : 0);
}

const count = new Intl.NumberFormat("en");

export function whole(value) {
  return count.format(Math.round(value));
}

export function scaled(value, unit = "") {
  if (value === null || value === undefined) return "none";
  for (const [name, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= factor) {
      const n = value / factor;
      return `${n.toFixed(Math.abs(n) < 10 ? 2 : Math.abs(n) < 100 ? 1 : 0)} ${name}${unit}`;
    }
  }
  const digits = value !== 0 && Math.abs(value) < 10 && !Number.isInteger(value) ? 1 : 0;
  return `${value.toFixed(digits)}${unit ? ` ${unit}` : ""}`;
}

export function bytes(value) {
  return scaled(value, "B");
}

export function rate(value) {
  return value >= 1e5 ? `${scaled(value)}/s` : `${value >= 10 ? whole(value) : value.toFixed(1)}/s`;
}

// A number beside an axis: as few digits as tell it from its neighbours.
export function tick(value) {
  if (value === 0) return "0";
  for (const [name, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= 10 * factor) return `${Number((value / factor).toPrecision(4))} ${name}`;
  }
  return String(Number(value.toPrecision(Math.abs(value) < 1e-3 ? 2 : 4)));
}

export function secondsTick(value) {
  if (value >= 100) return duration(value);
  return value >= 1 || value === 0 ? `${tick(value)} s` : `${tick(value * 1000)} ms`;
}

export function clock(at) {
  return new Date(at * 1000).toTimeString().slice(0, 8);
}
