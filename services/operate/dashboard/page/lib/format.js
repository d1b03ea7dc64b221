// Numbers, times and sizes as short text. Absent values are a dash.

const DASH = "–";
export const absent = (value) => value === null || value === undefined || Number.isNaN(value);

export function number(value, digits = 3) {
  if (absent(value)) return DASH;
  if (value < 0) return `−${number(-value, digits)}`;
  if (Number.isInteger(value) || value >= 1000) return Math.round(value).toLocaleString("en-US");
  if (value < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function reward(value) {
  if (absent(value)) return DASH;
  return value.toFixed(Number.isInteger(value) ? 0 : 3).replace("-", "−");
}

export function signed(value) {
  return absent(value) ? DASH : (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value));
}

export function compact(value) {
  if (absent(value)) return DASH;
  if (Math.abs(value) < 10000) return number(value);
  return value.toLocaleString("en-US", { notation: "compact", maximumFractionDigits: 1 });
}

export function percent(value) {
  return absent(value) ? DASH : `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function duration(seconds) {
  if (absent(seconds)) return DASH;
  if (seconds < 0.0005) return "0 s";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 2 : 1))} s`;
  const whole = Math.floor(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function bytes(count) {
  if (absent(count)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 && power < 4) [count, power] = [count / 1024, power + 1];
  return `${Number(count.toFixed(power && count < 100 ? 1 : 0))} ${units[power]}`;
}

const pad = (value) => String(value).padStart(2, "0");

// The time of day, with the date if it is another day than today. `at` is in epoch seconds, or ISO.
export function clock(at) {
  if (absent(at)) return DASH;
  const day = new Date(typeof at === "string" ? at : at * 1000);
  const time = `${pad(day.getHours())}:${pad(day.getMinutes())}:${pad(day.getSeconds())}`;
  if (day.toDateString() === new Date().toDateString()) return time;
  return `${day.getFullYear()}-${pad(day.getMonth() + 1)}-${pad(day.getDate())} ${time}`;
}

export const words = (name) => String(name).replaceAll("_", " ");

export function range(low, high) {
  if (absent(low) && absent(high)) return DASH;
  return low === high || absent(high) ? String(low) : `${low}–${high}`;
}
