/* The live view: listens to /live while it is seen, and shows each snapshot. */

import { ask, events } from "./api.js";
import { drawPool, drawRates, drawSteps } from "./charts.js";
import { $, age, bytes, count, make, many, milliseconds, say } from "./dom.js";

const PATIENCE = [500, 8000]; // milliseconds before the first and before any later attempt to connect again

let connection = null; // AbortController, while somebody looks
let newest = null; // the last snapshot
let tellState = () => {};
let blockAt = () => -1; // what is where on the canvases
let stepAt = () => -1;

export function setUpLive(onState) {
  tellState = onState;
  for (const [id, read] of [["pool", readBlock], ["steps", readStep]]) {
    $(id).addEventListener("pointermove", (event) => read(event));
    $(id).addEventListener("pointerleave", () => newest && show(newest));
  }
  new ResizeObserver(redraw).observe($("pool"));
}

/** Connect or disconnect: nobody who does not look costs the engine anything. */
export function watchLive(wanted) {
  const seen = wanted && !document.hidden;
  if (seen && !connection) {
    connection = new AbortController();
    listen(connection.signal);
  } else if (!seen && connection) {
    connection.abort();
    connection = null;
  }
}

/** Draw again: the colours or the size have changed. */
export function redraw() {
  if (newest && !$("live-view").hidden) draw(newest);
}

async function listen(signal) {
  let wait = PATIENCE[0];
  while (!signal.aborted) {
    let sentence = "The server ended the live view.";
    try {
      for await (const data of events(await ask("/live", { signal }))) {
        wait = PATIENCE[0];
        newest = JSON.parse(data);
        show(newest);
        notice("");
      }
    } catch (problem) {
      if (problem.name === "AbortError") return;
      sentence = problem.message;
      if (problem.status === 401) {
        notice(sentence);
        connection = null; // begun again once there is a key
        return;
      }
      if (problem.status === 0) tellState("offline");
    }
    notice(`${sentence} Connecting again.`);
    await new Promise((wake) => setTimeout(wake, wait));
    wait = Math.min(wait * 2, PATIENCE[1]);
  }
}

function notice(text) {
  $("live-notice").hidden = text === "";
  say("live-notice", text);
}

function show(now) {
  tellState(now.state, now.stage);
  say("engine", now.state);
  say("engine-sub", now.degraded ? "a smaller model answers" : now.memory ? `${bytes(now.memory)} held` : "");
  say("running", count(now.running));
  say("running-sub", many(now.active, "open request"));
  say("waiting", count(now.waiting));
  say("waiting-sub", now.queued_tokens ? many(now.queued_tokens, "prompt token") : "");
  const [output, prefilled] = rates(now.rates.slice(-5));
  say("rate", count(output));
  say("rate-sub", `prefill ${count(prefilled)}`);
  say("hits", now.cache_queried ? `${Math.round((100 * now.cache_hit) / now.cache_queried)} %` : "-");
  const tiers = Object.entries(now.tiers ?? {}).map(([name, one]) => `, ${many(one.read, "block")} from ${name}`).join("");
  say("hits-sub", now.cache_queried ? `${count(now.cache_hit)} of ${many(now.cache_queried, "token")}${tiers}` : "");
  const drafts = Object.entries(now.drafts ?? {}).filter(([, [drafted]]) => drafted);
  const [drafted, held, rows] = drafts.reduce((sums, [, one]) => sums.map((sum, i) => sum + one[i]), [0, 0, 0]);
  say("drafts", drafted ? `${Math.round((100 * held) / drafted)} %` : "-");
  const names = drafts.map(([name, [some, right]]) => `${name} ${Math.round((100 * right) / some)} %`);
  say("drafts-sub", drafted ? `${(1 + held / rows).toFixed(1)} tokens a step; ${names.join(", ")}` : "");
  say("restarts", count(now.restarts));
  say("restarts-sub", `${many(now.preemptions, "preemption")}, ${many(now.evicted, "eviction")}`);
  for (const kind of ["ttft", "itl"]) {
    for (const part of ["p50", "p90", "p99"]) say(`${kind}-${part}`, now[kind] ? milliseconds(now[kind][part]) : "-");
  }
  say("ttft-n", now.ttft ? `last ${many(now.ttft.n, "request")}` : "");
  say("itl-n", now.itl ? `last ${many(now.itl.n, "gap")}` : "");
  showPool(now.pool);
  showTiers(now.tiers ?? {}, now.block_bytes);
  showSteps(now.steps);
  const most = Math.max(...now.rates.map(([one]) => one));
  say("rates-caption", `The last two minutes; most ${count(most)}`);
  $("rates").setAttribute("aria-label", `Output tokens per second: now ${count(output)}, at most ${count(most)} in the last two minutes`);
  showRows(now);
  draw(now);
}

function draw(now) {
  if (now.pool) blockAt = drawPool($("pool"), now.pool.cells);
  stepAt = drawSteps($("steps"), now.steps);
  drawRates($("rates"), now.rates.map(([output]) => output));
}

function rates(seconds) {
  return [0, 1].map((which) => seconds.reduce((sum, one) => sum + one[which], 0) / Math.max(1, seconds.length));
}

function showPool(pool) {
  if (!pool) return;
  const each = pool.each === 1 ? "a square is a block" : `a square is ${pool.each} blocks`;
  const size = pool.block_size ? ` of ${pool.block_size} tokens` : "";
  say("pool-caption", `${count(pool.blocks)} blocks${size}; ${each}`);
  for (const state of ["free", "cached", "used", "shared"]) say(`pool-${state}`, count(pool[state]));
  const parts = ["free", "cached", "used", "shared"].map((state) => `${pool[state]} ${state}`);
  $("pool").setAttribute("aria-label", `Map of ${pool.blocks} blocks: ${parts.join(", ")}`);
}

/** What is held beside the device: a row for each place. */
function showTiers(tiers, blockBytes) {
  const names = Object.keys(tiers);
  $("tiers").hidden = names.length === 0;
  $("tier-rows").replaceChildren(...names.map((name) => {
    const one = tiers[name];
    const held = one.room ? `${count(one.held)} of ${count(one.room)}` : "-";
    const size = one.room ? bytes(one.held * blockBytes) : "-";
    const speed = one.bandwidth ? `${bytes(one.bandwidth)}/s` : "-";
    const cells = [held, size, count(one.read), count(one.written), count(one.waiting), speed];
    return make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((text) => make("td", {}, text)));
  }));
}

function showSteps(steps) {
  if (!steps.length) return;
  const [number, decodes, prefilled, ms] = steps.at(-1);
  say("steps-caption", stepText(number, decodes, prefilled, ms));
  $("steps").setAttribute("aria-label", `Composition of the last ${steps.length} steps. ${stepText(number, decodes, prefilled, ms)}`);
}

const stepText = (number, decodes, prefilled, ms) =>
  `Step ${count(number)}: ${many(decodes, "decode row")}, ${many(prefilled, "prefill token")}, ${milliseconds(ms)} ms`;

function showRows(now) {
  const total = now.running + now.waiting;
  const hidden = total - now.rows.length;
  const finished = Object.values(now.finished).reduce((sum, one) => sum + one, 0);
  const past = `${count(finished)} finished, ${count(now.refused)} refused`;
  say("rows-caption", total ? `${many(total, "sequence")}${hidden > 0 ? `, ${count(hidden)} not listed` : ""}; ${past}` : `None now; ${past}`);
  $("rows-table").hidden = total === 0;
  const cells = now.rows.map((row) => [row.id, row.state, count(row.prompt), count(row.cached), count(row.output), count(row.blocks), age(row.age)]);
  const body = $("rows");
  while (body.children.length > cells.length) body.lastElementChild.remove();
  cells.forEach((texts, at) => {
    if (!body.children[at]) {
      body.append(make("tr", {}, ...texts.map((_, column) => make("td", { className: [3, 5].includes(column) ? "spare" : "" }))));
    }
    const row = body.children[at];
    row.className = now.rows[at].state;
    texts.forEach((text, column) => {
      if (row.children[column].textContent !== text) row.children[column].textContent = text;
    });
  });
}

// What is under the pointer is told in the caption.

function readBlock(event) {
  const at = blockAt(event.offsetX, event.offsetY);
  const { pool } = newest ?? {};
  if (at < 0 || !pool || at >= pool.cells.length) return;
  const state = ["free", "cached", "used", "shared"][pool.cells[at]];
  const from = at * pool.each;
  say("pool-caption", pool.each === 1 ? `Block ${from}: ${state}` : `Blocks ${from} to ${Math.min(from + pool.each, pool.blocks) - 1}: mostly ${state}`);
}

function readStep(event) {
  const step = newest?.steps[stepAt(event.offsetX)];
  if (step) say("steps-caption", stepText(...step));
}
