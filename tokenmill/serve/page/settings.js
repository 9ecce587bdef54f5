/* The settings beside the chat: an empty field is not sent. Kept in this tab. */

import { store } from "./api.js";
import { $ } from "./dom.js";

const form = $("settings-form");
const opener = $("show-settings");
const wide = matchMedia("(min-width: 68rem)");

export function setUpSettings() {
  const kept = store.get("settings") ?? {};
  for (const field of form.elements) if (field.name && kept[field.name] !== undefined) field.value = kept[field.name];
  form.addEventListener("input", keep);
  form.addEventListener("submit", (event) => event.preventDefault());
  $("reset").addEventListener("click", () => {
    form.reset();
    keep();
  });
  opener.addEventListener("click", () => show(!document.body.classList.contains("with-settings"), true));
  $("hide-settings").addEventListener("click", () => show(false, true));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !wide.matches) show(false, true);
  });
  wide.addEventListener("change", () => show(wide.matches));
  show(wide.matches);
}

/** What was filled in: numbers, and the system prompt as text. */
export function readSettings() {
  const found = {};
  for (const field of form.elements) {
    if (!field.name || field.value.trim() === "") continue;
    found[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return found;
}

function keep() {
  const filled = [...form.elements].filter((field) => field.name).map((field) => [field.name, field.value]);
  store.set("settings", Object.fromEntries(filled));
}

function show(open, byHand = false) {
  document.body.classList.toggle("with-settings", open);
  $("settings").hidden = !open;
  opener.setAttribute("aria-expanded", String(open));
  if (byHand) (open ? $("system") : opener).focus();
}
