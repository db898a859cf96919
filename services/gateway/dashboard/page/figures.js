// Figures, workers and distributions. Rates and distributions are of the last minute that this page has seen.

import { byId, count, duration, h, percent, svg, workerName } from "./dom.js";

const WINDOW_MS = 60_000;
let history = []; // {at, doc fields that only grow}

export function remember(doc) {
  const pools = Object.values(doc.pools);
  const sum = (name) => pools.reduce((total, pool) => total + pool[name], 0);
  if (history.length && doc.generated_tokens < history.at(-1).generated) history = []; // the gateway restarted
  history.push({ at: doc.now_ms, failed: failures(doc), generated: doc.generated_tokens, ttft: doc.ttft.counts, itl: doc.inter_token.counts, queries: sum("queries"), hits: sum("hits") });
  history = history.filter(({ at }) => at > doc.now_ms - WINDOW_MS);
}

const failures = (doc) => Object.values(doc.failures).reduce((sum, n) => sum + n, 0);
const firstAndLast = () => [history[0], history.at(-1)];

function rates() {
  return history.slice(1).map(({ at, generated }, i) => (1000 * (generated - history[i].generated)) / Math.max(1, at - history[i].at));
}

export function renderFigures(doc) {
  const [first, last] = firstAndLast();
  const recent = history.filter(({ at }) => at >= last.at - 5000);
  const seconds = (last.at - recent[0].at) / 1000;
  const rate = seconds ? (last.generated - recent[0].generated) / seconds : 0;
  const queries = last.queries - first.queries;
  const failed = last.failed - first.failed;
  const codes = Object.entries(doc.failures).map(([code, n]) => `${code} ${count(n)}`).join("\n");
  const items = [
    ["Running", count(doc.num_running), `of ${count(slots(doc))} slots`],
    ["Waiting for a token", count(doc.num_waiting), doc.num_waiting ? `oldest ${duration(doc.oldest_wait_ms / 1000)}` : ""],
    ["Tokens per second", count(rate), "", sparkline(rates())],
    ["TTFT p50", duration(quantile(windowed("ttft", doc.ttft.bounds), 0.5)), ""],
    ["Prefix hits", queries ? percent(last.hits - first.hits, queries) : percent(last.hits, last.queries), queries ? "last minute" : "since start"],
    ["Errors", count(failed || last.failed), failed ? "last minute" : "since start", null, codes && `since start:\n${codes}`, failed && "bad"],
    ["Preempted", count(doc.preemptions), `${count(doc.moves)} moved`],
  ];
  byId("figures").replaceChildren(...items.map(([label, value, note, extra, tip, tone]) =>
    h("div", { class: "panel figure", "data-tip": tip || undefined, tabindex: tip ? 0 : undefined }, extra, h("dl", null, h("dt", null, label), h("dd", { class: tone || undefined }, value, note && h("small", null, ` ${note}`))))));
}

const slots = (doc) => Object.values(doc.workers).filter(({ role, state }) => role === "decode" && state !== "gone").reduce((n, worker) => n + worker.slots, 0);

function sparkline(values) {
  const top = Math.max(1, ...values);
  const points = values.map((value, i) => `${(100 * (i + 1)) / values.length},${30 - (27 * value) / top}`);
  return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, points.length > 1 && svg("path", { d: `M${points.join("L")}` }));
}

// ── the last minutes, as the gateway has sampled them ─────────────────────────────────────────

const HISTORY_MS = 600_000;

export function renderHistory(doc) {
  const samples = doc.history;
  const perSecond = (column) => samples.slice(1).map((row, i) => [row[0], Math.max(0, (1000 * (row[column] - samples[i][column])) / Math.max(1, row[0] - samples[i][0]))]);
  const charts = [
    ["Running", samples.map((row) => [row[0], row[1]])],
    ["Waiting for a token", samples.map((row) => [row[0], row[2]])],
    ["Tokens per second", perSecond(3)],
    ["Errors per minute", perSecond(4).map(([at, n]) => [at, 60 * n])],
  ];
  byId("history").replaceChildren(...charts.map(([label, points]) => {
    const top = Math.max(0, ...points.map(([, value]) => value));
    const path = points.map(([at, value]) => `${100 * (1 - (doc.now_ms - at) / HISTORY_MS)},${38 - (top ? (34 * value) / top : 0)}`);
    return h("figure", { class: "past" }, h("figcaption", null, label, h("small", null, ` most ${count(top)}`)),
      svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": `${label}, most ${count(top)}` }, svg("line", { x1: 0, x2: 100, y1: 38, y2: 38 }), path.length > 1 && svg("path", { d: `M${path.join("L")}` })));
  }));
}

// ── distributions ──────────────────────────────────────────────────────────────────────────────

function windowed(name, bounds) {
  const [first, last] = firstAndLast();
  const before = first[name].length === last[name].length ? first[name] : last[name].map(() => 0);
  const recent = last[name].map((n, i) => n - before[i]);
  const isRecent = recent.some((n) => n > 0);
  return { bounds, counts: isRecent ? recent : last[name], isRecent };
}

/** Linear within a bucket; beyond the last bound, that bound. */
function quantile({ bounds, counts }, q) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total) return null;
  let left = q * total;
  for (let i = 0; i < counts.length; i += 1) {
    const low = i ? bounds[i - 1] : 0;
    if (counts[i] >= left && counts[i]) return low + ((bounds[i] ?? low) - low) * (left / counts[i]);
    left -= counts[i];
  }
  return bounds.at(-1);
}

export function renderDistribution(id, name, buckets, unit) {
  const data = windowed(name, buckets.bounds);
  const total = data.counts.reduce((a, b) => a + b, 0);
  if (!total) {
    byId(`${id}-sum`).textContent = "";
    byId(id).replaceChildren(h("p", { class: "empty" }, "Nothing measured yet."));
    return;
  }
  const q = [0.5, 0.9, 0.99].map((each) => `p${each * 100} ${duration(quantile(data, each))}`);
  byId(`${id}-sum`).textContent = `${q.join("  ·  ")}  ·  ${count(total)} ${unit}${data.isRecent ? ", last minute" : ", since start"}`;
  const [from, to] = [data.counts.findIndex((n) => n), data.counts.findLastIndex((n) => n)];
  const [low, high] = [Math.max(0, Math.min(from - 1, data.counts.length - 8)), Math.min(data.counts.length - 1, Math.max(to + 1, from + 6))];
  const shown = data.counts.slice(low, high + 1);
  const width = byId(id).clientWidth || 600;
  const step = width / shown.length;
  const top = Math.max(...shown);
  const bars = shown.flatMap((n, i) => {
    const bound = data.bounds[low + i];
    const label = bound === undefined ? `> ${duration(data.bounds.at(-1))}` : duration(bound);
    const height = n ? Math.max(2, (92 * n) / top) : 0;
    return [
      svg("rect", { x: i * step + 1, y: 96 - height, width: step - 2, height, rx: 2, "data-tip": `${bound === undefined ? "" : "up to "}${label}: ${count(n)} (${percent(n, total)})` }),
      step * 1 > 44 || i % 2 === 0 ? svg("text", { x: (i + 0.5) * step, y: 111, "text-anchor": "middle" }, label) : null,
    ];
  });
  byId(id).replaceChildren(svg("svg", { viewBox: `0 0 ${width} 116`, role: "img", "aria-label": q.join(", ") }, svg("line", { x1: 0, x2: width, y1: 96, y2: 96 }), ...bars));
}

// ── workers ────────────────────────────────────────────────────────────────────────────────────

const TONES = { serving: "ok", draining: "warn", unreachable: "bad", fenced: "bad", gone: "bad" };

export function renderWorkers(doc) {
  const workers = Object.entries(doc.workers).sort(([a, x], [b, y]) => y.role.localeCompare(x.role) || a.localeCompare(b));
  if (!workers.length) {
    byId("workers").replaceChildren(h("p", { class: "empty" }, "No worker serves yet."));
    return;
  }
  byId("workers").replaceChildren(...workers.map(([id, worker]) => {
    const isDecode = worker.role === "decode";
    const busy = isDecode ? worker.slots - Math.max(0, worker.free_slots) : worker.pending_tokens;
    const share = isDecode ? busy / Math.max(1, worker.slots) : Math.min(1, worker.pending_tokens / 2048);
    const load = isDecode ? `${count(worker.running)} ${worker.running === 1 ? "sequence" : "sequences"}, ${count(busy)} of ${count(worker.slots)} slots` : `${count(worker.pending_tokens)} prompt tokens to compute`;
    const engine = Object.entries(worker.engine).map(([name, value]) => `${name} ${value}`).join(", ");
    return h("div", { class: `worker ${worker.state === "gone" ? "gone" : ""}`, "data-tip": `${id}\n${engine}\nup for ${duration((doc.now_ms - worker.started_ms) / 1000)}`, tabindex: 0 },
      h("p", null, h("span", null, workerName(id)), h("span", { class: TONES[worker.state] ?? "muted" }, `${worker.state === "serving" ? "●" : "▲"} ${worker.state}`)),
      h("div", { class: `bar ${worker.role}` }, svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 100 * share, height: 6 }))),
      h("p", { class: "sub" }, h("span", null, load)));
  }));
}
