// The timeline: a row for each request, a bar for each phase.

import { byId, count, duration, h, legendItem, svg, workerName } from "./dom.js";
import { headers, problemOf } from "./feed.js";

const PHASES = ["waiting", "prefill", "hand-off", "decode", "preempted", "moving", "lost"];
const NUM_TICKS = 4;
const SPANS_S = [4, 8, 20, 40, 60, 120, 240, 480]; // whole seconds between ticks
const MAX_ROWS = 60;
const rows = new Map();
const axis = h("div", { class: "row axis", "aria-hidden": "true" }, h("span", null, "request"), h("div"), h("span", null, "tokens"));

export const showPhases = () => byId("phases").replaceChildren(...PHASES.map((phase) => legendItem(`s-${phase}`, phase)));

export function renderRequests(doc) {
  const requests = Object.entries(doc.requests).map(([key, request]) => ({ key, ...request }));
  requests.sort((a, b) => Boolean(a.ended_ms) - Boolean(b.ended_ms) || (a.ended_ms ? b.ended_ms - a.ended_ms : a.spans[0][1] - b.spans[0][1]));
  const shown = requests.slice(0, MAX_ROWS);
  const now = doc.now_ms;
  const oldest = Math.min(now - 4000, ...shown.slice(0, 10).map((request) => request.spans[0][1]));
  const spanMs = 1000 * (SPANS_S.find((s) => 1000 * s >= now - oldest) ?? SPANS_S.at(-1));
  for (const [key, row] of rows) if (!doc.requests[key]) { row.root.remove(); rows.delete(key); }
  if (!shown.length) {
    byId("timeline").replaceChildren(h("p", { class: "empty" }, "No request yet. Send one from the playground, or with `quire generate`."));
    return;
  }
  if (axis.dataset.span !== String(spanMs)) showAxis(spanMs);
  const wanted = [axis, ...shown.map((request) => rowOf(request, now, spanMs))];
  const box = byId("timeline");
  wanted.forEach((row, i) => { if (box.children[i] !== row) box.insertBefore(row, box.children[i] ?? null); });
  while (box.children.length > wanted.length) box.lastChild.remove();
}

function showAxis(spanMs) {
  axis.dataset.span = spanMs;
  const ago = (seconds) => (seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`);
  const ticks = Array.from({ length: NUM_TICKS }, (_, i) => h("span", null, ago((spanMs / 1000) * (1 - i / NUM_TICKS))));
  axis.children[1].replaceChildren(...ticks, h("span", null, "now"));
}

function rowOf(request, now, spanMs) {
  if (!rows.has(request.key)) {
    const parts = { name: h("span"), track: svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }), tokens: h("span") };
    const explain = (event) => { if (event.type === "click" || event.key === "Enter") showStory(request.id); };
    parts.root = h("div", { class: "row", tabindex: 0, role: "listitem", onclick: explain, onkeydown: explain }, parts.name, parts.track, parts.tokens);
    rows.set(request.key, parts);
  }
  const { root, name, track, tokens } = rows.get(request.key);
  const end = request.ended_ms ?? now;
  const bars = request.spans.map(([phase, from, worker], i) => ({ phase, worker, from, to: request.spans[i + 1]?.[1] ?? end }));
  const x = (ms) => 1000 * (1 - (now - ms) / spanMs);
  track.replaceChildren(...bars.filter(({ to }) => x(to) >= 0).map(({ phase, from, to }) => {
    const left = Math.max(0, x(from));
    return svg("rect", { class: `p-${phase}`, x: left, y: 0, height: 10, width: Math.max(1.5, x(to) - left) });
  }));
  name.textContent = request.id;
  const failed = request.outcome && !["stop", "length"].includes(request.outcome);
  tokens.textContent = failed ? request.outcome : `${count(request.prompt)} → ${count(request.tokens)}`;
  tokens.className = failed ? "bad" : "";
  root.classList.toggle("ended", Boolean(request.ended_ms));
  root.dataset.tip = [
    request.id,
    `${count(request.prompt)} prompt tokens (${count(request.cached)} cached), ${count(request.tokens)} generated${request.sequences > 1 ? ` in ${request.sequences} sequences` : ""}`,
    ...bars.slice(-12).map(({ phase, worker, from, to }) => `${phase} ${duration((to - from) / 1000)}${worker ? ` on ${workerName(worker)}` : ""}`),
    request.outcome ? `ended: ${request.outcome}` : "running",
  ].join("\n");
  root.setAttribute("aria-label", root.dataset.tip.replaceAll("\n", "; "));
  return root;
}

/** What happened to the request, in the sentences of `quire explain`. */
async function showStory(id) {
  const response = await fetch(`/dashboard/explain?id=${encodeURIComponent(id)}`, { headers: headers() });
  const sentences = response.ok ? await response.json() : [await problemOf(response)];
  const close = h("button", { type: "button", class: "quiet", onclick: () => byId("story").close() }, "Close");
  byId("story").replaceChildren(h("h2", null, id), h("ol", null, ...sentences.map((text) => h("li", null, text))), close);
  if (!byId("story").open) byId("story").showModal();
}
