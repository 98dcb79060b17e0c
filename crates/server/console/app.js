// The console: pages, and the live stream they share.

import { Live, getJson } from "./api.js";
import { Cluster } from "./cluster.js";
import { Models } from "./models.js";
import { Now } from "./now.js";
import { Plan } from "./plan.js";
import { Timeline } from "./timeline.js";

const status = document.getElementById("status");
const main = document.getElementById("page");

function setStatus(kind, text) {
  status.className = `status ${kind}`;
  if (status.textContent !== text) status.textContent = text;
}

const live = new Live(setStatus);
const pages = {
  now: new Now(),
  timeline: new Timeline(),
  models: new Models(),
  plan: new Plan(),
  cluster: new Cluster(),
};

live.listen(pages.now);
live.listen(pages.timeline);
live.listen({
  figures(figures) {
    const names = figures.devices.map((device) => device.name).join(", ");
    setStatus("live", `Live: ${names}`);
  },
});

let open = null;
let watch = (spans) => live.wantSpans(spans);

function go() {
  const name = location.hash.slice(1);
  const page = pages[name] || pages.now;
  const current = pages[name] ? name : "now";
  if (page === open) return;
  open?.close();
  open = page;
  document.title = `${page.title} · Atoll`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${current}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.replaceChildren();
  page.open(main);
  watch(Boolean(page.spansWanted));
}

addEventListener("hashchange", () => {
  if (location.hash === "#page") return;
  go();
  main.focus({ preventScroll: true });
});

/** A frontend of a cluster has no devices of its own to watch. */
async function begin() {
  const cluster = await getJson("/v2/atoll/cluster").catch(() => null);
  if (cluster) {
    setStatus(
      "live",
      `Frontend of ${cluster.backends.length} backend${cluster.backends.length === 1 ? "" : "s"}`,
    );
    watch = () => {};
    if (!location.hash) location.hash = "#cluster";
  }
  go();
}

begin();

/** For tests: the pages. */
window.atoll = { pages };
