/* Small helpers to build and find elements. Text only ever becomes text. */

export const $ = (id) => document.getElementById(id);

/** An element with properties (or attributes, where there is no such property) and children: elements or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set text only where it changes: what does not change is not read out again. */
export function say(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");
export const count = (number) => whole.format(Math.round(number));
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

/** Milliseconds in three digits or so. */
export function milliseconds(value) {
  if (value >= 100) return count(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

export function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min`;
}

export function bytes(number) {
  return number >= 1e9 ? `${(number / 1e9).toFixed(1)} GB` : `${Math.round(number / 1e6)} MB`;
}
