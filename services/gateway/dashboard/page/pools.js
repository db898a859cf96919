// The block map of each pool, on a canvas, and the pool's figures.

import { ago, byId, bytes, count, css, h, hideTip, legendItem, percent, showTip, workerName } from "./dom.js";
import { headers, problemOf } from "./feed.js";

const STATES = ["free", "cached", "held", "shared", "quarantined", "unread"];
const [UNREAD, CACHED, HELD, SHARED, QUARANTINED, SLOT, CHANGED] = [0, 1, 2, 3, 4, 5, 6]; // of a cell
const NUM_HUES = 8;
const panels = new Map();

export function renderPools(doc) {
  const ids = Object.keys(doc.pools).sort();
  for (const [id, panel] of panels) if (!doc.pools[id]) { panel.root.remove(); panels.delete(id); }
  for (const id of ids) {
    if (!panels.has(id)) panels.set(id, new PoolPanel(id));
    panels.get(id).update(doc.pools[id], doc);
  }
  const nothing = doc.block_manager ? "No pool yet: a worker makes one when it starts." : "The block manager does not answer: the pools are not known.";
  const wanted = ids.length ? ids.map((id) => panels.get(id).root) : [h("p", { class: "panel empty" }, nothing)];
  const box = byId("pools");
  // A canvas that is moved loses the focus: only what differs is replaced.
  if (!ids.length || wanted.length !== box.children.length || wanted.some((root, i) => root !== box.children[i])) box.replaceChildren(...wanted);
}

export const redrawPools = () => panels.forEach((panel) => panel.draw());

/** The tenants with the most blocks, and their share of the pool. */
const shares = (pool) => Object.entries(pool.shares).sort((a, b) => b[1] - a[1]).map(([tenant, blocks]) => `${tenant} ${percent(blocks, pool.num_blocks)}`);

class PoolPanel {
  constructor(id) {
    this.id = id;
    this.mode = "state";
    this.cursor = null;
    this.canvas = h("canvas", { class: "map", tabindex: 0, role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.title = h("h2");
    this.figures = h("div", { class: "below" });
    this.audit = h("span");
    this.button = h("button", { type: "button", onclick: () => this.runAudit() }, "Audit now");
    const choice = (mode) => h("button", { type: "button", class: "choice", "aria-pressed": String(mode === this.mode), onclick: (event) => this.choose(mode, event.target) }, mode);
    this.choices = h("div", { class: "choices", role: "group", "aria-label": "Colour by" }, h("span", { class: "muted" }, "colour by"), choice("state"), choice("age"), choice("holder"));
    this.root = h("section", { class: "panel", "aria-label": `KV pool ${id}` }, h("div", { class: "head" }, this.title, this.choices, this.legend), this.canvas, this.figures);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.select(null));
    this.canvas.addEventListener("blur", () => this.select(null));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  choose(mode, button) {
    this.mode = mode;
    for (const other of this.choices.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    this.draw();
  }

  update(pool, doc) {
    this.pool = pool;
    this.doc = doc;
    this.numCells = Math.ceil(pool.num_blocks / pool.blocks_per_cell);
    this.title.textContent = `KV pool · ${pool.model}`;
    this.draw();
    const audit = pool.audit;
    const verdict = !audit ? ["muted", "not audited yet"] : audit.violations.length ? ["bad", `✗ ${audit.violations.length} violations: ${audit.violations[0]}`]
      : audit.checked ? ["ok", `✓ audit found no violation, ${ago(audit.age_s)}`] : ["muted", `counters audited ${ago(audit.age_s)}; the pool changed too fast for the rest`];
    this.audit.className = verdict[0];
    this.audit.textContent = verdict[1];
    const per = pool.blocks_per_cell === 1 ? "a cell is a block" : `a cell is ${count(pool.blocks_per_cell)} blocks`;
    this.figures.replaceChildren(
      h("span", null, `${count(pool.num_blocks)} blocks of ${pool.block_size} tokens, ${bytes(pool.num_blocks * pool.block_bytes)}; ${per}`),
      h("span", null, `${count(pool.num_holders)} holders, ${count(pool.waiters)} waiters`),
      pool.retained ? h("span", { title: pool.names.join("\n") }, `${count(pool.retained)} blocks retained: ${pool.names.slice(0, 3).join(", ")}${pool.names.length > 3 ? " …" : ""}`) : "",
      Object.keys(pool.shares).length ? h("span", { title: shares(pool).join("\n") }, `used by ${shares(pool).slice(0, 3).join(", ")}${shares(pool).length > 3 ? " …" : ""}`) : "",
      pool.recovering ? h("span", { class: "warn" }, "recovering its ledger") : "", this.audit, headers().Authorization ? this.button : "");
  }

  async runAudit() {
    this.button.disabled = true;
    this.button.textContent = "Auditing …";
    try {
      const response = await fetch("/dashboard/audit", { method: "POST", headers: { ...headers(), "X-Quire-Dashboard": "1" } });
      this.button.textContent = response.ok ? "Audit now" : await problemOf(response);
    } catch { this.button.textContent = "no answer; again?"; }
    this.button.disabled = false;
  }

  // ── drawing ────────────────────────────────────────────────────────────────────────────────

  draw() {
    const { canvas, pool } = this;
    const width = canvas.clientWidth;
    if (!pool || !width) return;
    const pitch = Math.max(4, Math.min(16, Math.sqrt((width * (width < 600 ? 260 : 190)) / this.numCells)));
    this.columns = Math.min(this.numCells, Math.max(1, Math.floor(width / pitch)));
    this.pitch = Math.min(width / this.columns, 18);
    const height = Math.ceil(Math.ceil(this.numCells / this.columns) * this.pitch);
    const ratio = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.colours = Object.fromEntries([...STATES, "text", "accent"].map((name) => [name, css(`--${name}`)]));
    this.hues = Array.from({ length: NUM_HUES }, (_, i) => css(`--h${i + 1}`));
    const size = this.pitch - (this.pitch > 6 ? 1.5 : 1);
    for (let cell = 0; cell < this.numCells; cell += 1) this.drawCell(context, cell, size);
    if (this.cursor !== null) {
      const [x, y] = this.place(this.cursor);
      context.strokeStyle = this.colours.text;
      context.lineWidth = 2;
      context.strokeRect(x, y, size, size);
    }
    this.drawLegend();
  }

  drawCell(context, cell, size) {
    const [x, y] = this.place(cell);
    let top = y;
    for (const [colour, share, mark] of this.shares(cell)) {
      context.fillStyle = colour;
      context.fillRect(x, top, size, size * share);
      if (mark && size > 4) { // not by colour alone: quarantined cells have a diagonal
        context.strokeStyle = this.colours.text;
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(x, top + size * share);
        context.lineTo(x + size, top);
        context.stroke();
      }
      top += size * share;
    }
  }

  /** [colour, share of the cell, marked], from top to bottom. */
  shares(cell) {
    const values = this.pool.cells[cell];
    const { colours } = this;
    if (!values) return [[colours.free, 1]];
    const all = this.size(cell);
    const used = values[HELD] + values[SHARED] + values[QUARANTINED];
    if (this.mode === "holder") return [[this.hueOf(values[SLOT], used) ?? colours.free, used / all], [colours.free, 1 - used / all]];
    if (this.mode === "age") return [[this.ageColour(values, used), 1]];
    const free = all - used - values[CACHED] - values[UNREAD];
    return [[colours.quarantined, values[QUARANTINED] / all, true], [colours.shared, values[SHARED] / all], [colours.held, values[HELD] / all],
      [colours.cached, values[CACHED] / all], [colours.unread, values[UNREAD] / all], [colours.free, free / all]].filter(([, share]) => share > 0);
  }

  hueOf(slot, used) { return used && slot ? this.hues[(slot - 1) % NUM_HUES] : null; }

  ageColour(values, used) {
    if (!used && !values[CACHED] && !values[UNREAD]) return this.colours.free;
    if (!values[CHANGED]) return `color-mix(in srgb, ${this.colours.accent} 14%, ${this.colours.free})`;
    const age = Math.max(0, this.pool.age_s - values[CHANGED]);
    const share = Math.max(20, 100 - 26 * Math.log10(1 + age)); // 1 s: 92 %, 1 min: 54 %, 1 h: 20 %
    return `color-mix(in srgb, ${this.colours.accent} ${share}%, ${this.colours.free})`;
  }

  drawLegend() {
    const { pool } = this;
    const totals = { free: pool.free, cached: pool.cached, held: pool.held, shared: 0, quarantined: 0, unread: 0 };
    for (const cell of Object.values(pool.cells)) {
      totals.shared += cell[SHARED];
      totals.quarantined += cell[QUARANTINED];
      totals.unread += cell[UNREAD];
    }
    totals.held = Math.max(0, totals.held - totals.shared - totals.quarantined);
    const items = {
      state: () => STATES.filter((state) => state !== "unread" || totals.unread).map((state) => legendItem(`s-${state}`, state === "unread" ? "not read yet" : state, count(totals[state]))),
      age: () => [legendItem("s-new", "changed now"), legendItem("s-old", "an hour ago, or before anybody watched"), legendItem("s-free", "free")],
      holder: () => [h("li", null, "a colour for each holder: ", h("b", null, count(pool.num_holders))), legendItem("s-free", "no holder")],
    }[this.mode]();
    this.legend.replaceChildren(...items);
    this.canvas.setAttribute("aria-label", `Block map: ${STATES.slice(0, 5).map((state) => `${totals[state]} ${state}`).join(", ")}. Arrow keys move from cell to cell.`);
  }

  size(cell) { return Math.min(this.pool.blocks_per_cell, this.pool.num_blocks - cell * this.pool.blocks_per_cell); }
  place(cell) { return [(cell % this.columns) * this.pitch, Math.floor(cell / this.columns) * this.pitch]; }

  // ── hover and keyboard ─────────────────────────────────────────────────────────────────────

  point(event) {
    if (!this.pool) return;
    const { left, top } = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - left) / this.pitch);
    const cell = Math.floor((event.clientY - top) / this.pitch) * this.columns + column;
    this.select(column < this.columns && cell >= 0 && cell < this.numCells ? cell : null, event.clientX, event.clientY);
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (event.key === "Escape") this.select(null);
    if (!step) return;
    event.preventDefault();
    const cell = Math.min(this.numCells - 1, Math.max(0, (this.cursor ?? -step) + step));
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = this.place(cell);
    this.select(cell, left + x, top + y);
  }

  select(cell, x, y) {
    if (cell === null) hideTip();
    else showTip(this.tipOf(cell), x, y);
    if (cell === this.cursor) return;
    this.cursor = cell;
    clearTimeout(this.asking);
    if (cell !== null) this.asking = setTimeout(() => this.describe(cell, x, y), 200);
    this.facts = null;
    this.draw();
  }

  async describe(cell, x, y) {
    try {
      const response = await fetch(`/dashboard/blocks?pool=${encodeURIComponent(this.id)}&cell=${cell}`, { headers: headers() });
      if (!response.ok || this.cursor !== cell) return;
      this.facts = await response.json();
      if (this.cursor === cell) showTip(this.tipOf(cell), x, y);
    } catch { /* the tooltip keeps what the feed knows */ }
  }

  tipOf(cell) {
    const first = cell * this.pool.blocks_per_cell;
    const size = this.size(cell);
    const values = this.pool.cells[cell] ?? [0, 0, 0, 0, 0, 0, 0];
    const lines = [size === 1 ? `block ${first}` : `blocks ${count(first)} to ${count(first + size - 1)}`];
    if (size > 1) {
      const free = size - values.slice(0, 5).reduce((a, b) => a + b);
      lines.push(STATES.map((state) => [state, state === "free" ? free : values[{ unread: UNREAD, cached: CACHED, held: HELD, shared: SHARED, quarantined: QUARANTINED }[state]]]).filter(([, n]) => n).map(([state, n]) => `${n} ${state}`).join(", "));
      const holder = this.pool.holders[values[SLOT]];
      if (holder) lines.push(`last holder: ${holder.request || holder.id} on ${workerName(holder.worker)}`);
    } else if (this.facts) {
      const [block] = this.facts;
      lines.push(`${block.state}, ref count ${block.num_holders}`);
      for (const holder of block.holders) lines.push(`held by ${holder}`);
      lines.push(block.prefix_hash ? `prefix hash ${block.prefix_hash}` : "no prefix hash: not finished");
      if (block.cached_at !== null) lines.push(`evicted in order of last use: number ${count(block.cached_at)}`);
    }
    const age = this.pool.age_s - values[CHANGED];
    if (values[CHANGED]) lines.push(`changed ${ago(age)}`);
    return lines.join("\n");
  }
}
