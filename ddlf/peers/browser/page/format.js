// Numbers for people.

export const whole = (n) => Math.round(n).toLocaleString("en");
export const percent = (part) => (Number.isFinite(part) && part >= 0 ? `${(100 * part).toFixed(1)} %` : "none yet");
export const decimal = (n) => (Number.isFinite(n) && n >= 0 ? n.toFixed(n < 1 ? 4 : 3) : "none yet");
export const rate = (n) => (Number.isFinite(n) ? n.toLocaleString("en", { maximumSignificantDigits: 3 }) : "0");
export const plural = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; n >= 1000 && unit < units.length - 1; n /= 1000) unit += 1;
  return `${n.toLocaleString("en", { maximumFractionDigits: n < 10 && unit ? 1 : 0 })} ${units[unit]}`;
}

export function time(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
