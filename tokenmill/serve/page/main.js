/* Starts the page: which view is shown, light or dark, the server's state, and the key where one is wanted. */

import { hasKey, useKey, whenKeyWanted } from "./api.js";
import { meetModel, setUpChat } from "./chat.js";
import { $, say } from "./dom.js";
import { redraw, setUpLive, watchLive } from "./live.js";

const LOOK_EVERY = 10_000; // milliseconds between two looks at the server's health, while the page is seen

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
  starting: "loading the model",
  restarting: "engine restarting",
  draining: "shutting down",
  stopped: "stopped",
  offline: "offline, reconnecting",
};

function showState(state) {
  $("status").dataset.state = state;
  say("status-text", STATES[state] ?? state);
}

let met = false;

async function look() {
  if (document.hidden) return;
  let state = "offline";
  try {
    const response = await fetch("/health/ready", { cache: "no-store" });
    state = (await response.json()).state;
  } catch {
    /* no server, or something else in its place */
  }
  showState(state);
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
