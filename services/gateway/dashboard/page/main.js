// The page: its views, its theme, its connection, and one drawing for each update.

import { byId, watchTips } from "./dom.js";
import { follow, key } from "./feed.js";
import { remember, renderDistribution, renderFigures, renderHistory, renderWorkers } from "./figures.js";
import { showModels, startPlayground } from "./playground.js";
import { redrawPools, renderPools } from "./pools.js";
import { renderRequests, showPhases } from "./requests.js";

let latest = null;
let drawing = 0;

function render() {
  drawing = 0;
  const doc = latest;
  byId("model").textContent = doc.models.length ? `${doc.models.join(", ")} · ${doc.gateway}` : doc.gateway;
  showModels(doc.models);
  if (byId("overview").hidden) return;
  renderFigures(doc);
  renderPools(doc);
  renderRequests(doc);
  renderWorkers(doc);
  renderHistory(doc);
  renderDistribution("ttft", "ttft", doc.ttft, "requests");
  renderDistribution("itl", "itl", doc.inter_token, "tokens");
}

function onDocument(doc) {
  latest = doc;
  remember(doc);
  warn(doc.block_manager ? "" : "The block manager does not answer: the block maps, audits and reaping wait for it. Requests go on.");
  drawing ||= requestAnimationFrame(render);
}

function warn(text) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text;
}

function onStatus(state, why = "", needsKey = false) {
  const status = byId("status");
  const text = { live: "live", offline: "reconnecting", refused: "not permitted" }[state];
  if (status.dataset.state !== state) { status.dataset.state = state; status.textContent = text; }
  byId("overview").classList.toggle("stale", state !== "live" && latest !== null);
  const isRefused = state === "refused";
  byId("locked").hidden = !isRefused;
  for (const view of document.querySelectorAll("main")) view.classList.toggle("locked", isRefused);
  if (state === "offline") warn(`No connection: ${why}. What you see is ${latest ? "the last state" : "nothing yet"}; the page connects again by itself.`);
  if (!isRefused) return undefined;
  warn("");
  byId("why").textContent = needsKey && !key.get() ? "" : why; // without a key, the form says it all
  byId("key").hidden = !needsKey;
  return new Promise((resolve) => byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    key.set(event.target.elements.key.value.trim());
    event.target.reset();
    resolve();
  }, { once: true }));
}

function showView(name) {
  for (const view of ["overview", "playground"]) byId(view).hidden = view !== name;
  for (const tab of document.querySelectorAll(".tab")) {
    if (tab.dataset.view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  if (latest) render();
}

const THEMES = { auto: ["◐", "automatic"], light: ["☀", "light"], dark: ["☾", "dark"] };
const wantsDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  localStorage.setItem("quire-theme", name);
  document.documentElement.dataset.theme = name === "auto" ? (wantsDark.matches ? "dark" : "light") : name;
  byId("theme").textContent = `${THEMES[name][0]} ${name}`;
  byId("theme").setAttribute("aria-label", `Colour theme: ${THEMES[name][1]}`);
  redrawPools();
}

const theme = () => (localStorage.getItem("quire-theme") in THEMES ? localStorage.getItem("quire-theme") : "auto");
wantsDark.addEventListener("change", () => setTheme(theme()));
byId("theme").addEventListener("click", () => { const names = Object.keys(THEMES); setTheme(names[(names.indexOf(theme()) + 1) % names.length]); });
for (const tab of document.querySelectorAll(".tab")) tab.addEventListener("click", () => { location.hash = tab.dataset.view; });
addEventListener("hashchange", () => showView(location.hash === "#playground" ? "playground" : "overview"));

setTheme(theme());
showPhases();
watchTips();
startPlayground();
showView(location.hash === "#playground" ? "playground" : "overview");
follow(onDocument, onStatus);
