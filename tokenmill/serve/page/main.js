/* Starts the page: which view is shown, light or dark, the server's state, and the key where one is wanted. */

import { hasKey, useKey, whenKeyWanted } from "./api.js";
import { meetModel, setUpChat } from "./chat.js";
import { $, say } from "./dom.js";
import { redraw, setUpLive, watchLive } from "./live.js";

const LOOK_EVERY = 10_000; // milliseconds between two looks at the server's health, while the page is seen
const LOOK_SOON = 1_000; // ... while its engine is being started

function showView() {
  const live = location.hash === "#live";
  $("chat-view").hidden = live;
  $("live-view").hidden = !live;
  for (const [id, here] of [["to-chat", !live], ["to-live", live]]) {
    if (here) $(id).setAttribute("aria-current", "page");
    else $(id).removeAttribute("aria-current");
  }
  watchLive(live);
}

// -- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

function nameTheme() {
  $("theme").setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  redraw();
}

function turnTheme() {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem("theme", chosen);
  } catch {
    /* it lasts as long as the page */
  }
  nameTheme();
}

// -- the server's state

const STATES = {
  ready: "ready",
  starting: "starting",
  restarting: "engine restarting",
  draining: "shutting down",
  stopped: "stopped",
  offline: "offline, reconnecting",
};
const WAITING = ["starting", "restarting"];

function showState(state, stage) {
  $("status").dataset.state = state;
  const said = STATES[state] ?? state;
  say("status-text", stage && WAITING.includes(state) ? `${said}: ${stage}` : said);
}

let met = false;
let soon = 0;

async function look() {
  if (document.hidden) return;
  let health = { state: "offline" };
  try {
    const response = await fetch("/health/ready", { cache: "no-store" });
    health = await response.json();
  } catch {
    /* no server, or something else in its place */
  }
  const { state } = health;
  showState(state, health.message);
  clearTimeout(soon);
  if (WAITING.includes(state)) soon = setTimeout(look, LOOK_SOON);
  if (!met && state === "ready") {
    met = true;
    meetModel().catch(() => (met = false));
  }
}

// -- the key

function wantKey(sentence) {
  met = false;
  $("key-form").hidden = false;
  say("key-note", hasKey() ? sentence : "This server wants an API key. It is kept in this tab only.");
  $("key").focus();
}

async function takeKey(event) {
  event.preventDefault();
  useKey($("key").value.trim());
  try {
    await meetModel();
    met = true;
    $("key-form").hidden = true;
    $("prompt").focus();
    showView();
  } catch (problem) {
    say("key-note", problem.message);
  }
}

whenKeyWanted(wantKey);
setUpChat();
setUpLive(showState);
$("theme").addEventListener("click", turnTheme);
$("key-form").addEventListener("submit", takeKey);
dark.addEventListener("change", nameTheme);
addEventListener("hashchange", showView);
addEventListener("online", look);
document.addEventListener("visibilitychange", look);
document.addEventListener("visibilitychange", showView);
nameTheme();
showView();
look();
setInterval(look, LOOK_EVERY);
if (matchMedia("(hover: hover)").matches && location.hash !== "#live") $("prompt").focus();
