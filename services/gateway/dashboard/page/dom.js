// Builds elements. Text always becomes a text node: nothing that comes from a client is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const count = (n) => Number(n ?? 0).toLocaleString("en", { maximumFractionDigits: 0 });
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "–");

// decode-1 for decode-1-3fa85f64, as quire.worker_names has it: the id changes when the worker starts again.
export const workerName = (id) => id.replace(/^([a-z]+-\d+)-[0-9a-f]{8}$/, "$1");

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function ago(seconds) {
  return seconds < 1 ? "just now" : `${duration(seconds)} ago`;
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < 4) { n /= 1024; at += 1; }
  return `${n.toFixed(n < 10 && at ? 1 : 0)} ${units[at]}`;
}

export const legendItem = (swatch, label, value) =>
  h("li", null, h("span", { class: `swatch ${swatch}` }), label, value !== undefined && h("b", null, value));

// ── one tooltip for the page: of what has data-tip, by pointer and by keyboard ─────────────────

const tip = () => byId("tip");

export function showTip(text, x, y) {
  const box = tip();
  box.textContent = text;
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
}

export const hideTip = () => { tip().hidden = true; };

export function watchTips() {
  const find = (event) => event.target.closest?.("[data-tip]");
  document.addEventListener("pointermove", (event) => {
    const element = find(event);
    if (element) showTip(element.dataset.tip, event.clientX, event.clientY);
    else if (event.target.tagName !== "CANVAS") hideTip();
  });
  document.addEventListener("focusin", (event) => {
    const element = find(event);
    const { left, bottom } = event.target.getBoundingClientRect();
    if (element?.matches(":focus-visible")) showTip(element.dataset.tip, left, bottom - 10);
    else if (event.target.tagName !== "CANVAS") hideTip();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
}
