// The console: pages, and the live stream they share.

import { Live, askToken } from "./api.js";
import { Cluster } from "./cluster.js";
import { Models } from "./models.js";
import { Now } from "./now.js";
import { Plan } from "./plan.js";
import { Timeline } from "./timeline.js";

const status = document.getElementById("status");
const main = document.getElementById("page");

const problem = document.getElementById("problem");
const [problemText, tokenButton] = problem.children;
tokenButton.addEventListener("click", () => askToken(""));

/** Says how the stream is, and what is the matter where there is none. */
function setStatus(kind, text, error) {
  status.className = `status ${kind}`;
  if (status.textContent !== text) status.textContent = text;
  problem.hidden = kind !== "lost";
  const why = error?.status ? error.message : "no connection to the server";
  const said = `No live figures: ${why}. What is shown is old; the page tries again by itself.`;
  if (problemText.textContent !== said) problemText.textContent = said;
  tokenButton.hidden = ![401, 403].includes(error?.status);
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
    const backends = figures.backends?.length;
    const many = backends === 1 ? "" : "s";
    const frontend = `Live: frontend of ${backends} backend${many}`;
    setStatus("live", figures.backends ? frontend : `Live: ${names}`);
  },
});

let open = null;

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
  live.wantSpans(Boolean(page.spansWanted));
}

addEventListener("hashchange", () => {
  if (location.hash === "#page") return;
  go();
  main.focus({ preventScroll: true });
});

go();

/** A file that misses its box would replace the page. */
for (const type of ["dragover", "drop"]) {
  addEventListener(type, (event) => {
    const files = event.dataTransfer?.types.includes("Files");
    if (event.defaultPrevented || !files || event.target.type === "file") return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "none";
  });
}

/** For tests: the pages. */
window.atoll = { pages };
