// The page Now: what models and devices did in the last minute.

import { Spark, addCounts, quantile } from "./charts.js";
import { bytes, classTag, el, number, percent, show, time } from "./dom.js";

const SECONDS = 60;
const FILLS = 8;
/** Width of a curve in the table. */
const SPARK = 100;
/** Models of a device that are listed with their memory. */
const LISTED = 12;

/** Watts of a device, and how much of the time a kernel ran. */
function power(device) {
  const watts = (milliwatts) => `${(milliwatts / 1000).toFixed(0)} W`;
  const limit = device.power_limit_milliwatts;
  const busy = device.utilization_percent;
  return (
    watts(device.power_milliwatts) +
    (limit ? ` of ${watts(limit)}` : "") +
    (busy === null ? "" : `, kernels ran ${busy} % of the time`)
  );
}

/** The share of requests that kept their SLO, rounded down: 100 % are all of them. */
function keptShare(kept, missed) {
  const tenths = Math.floor((kept / (kept + missed)) * 1000);
  return tenths === 1000 ? "100 %" : `${(tenths / 10).toFixed(1)} %`;
}

/** Bytes of a model's weights on a device, or on all of them. */
function memoryOf(model, device) {
  const held = (model?.resident || []).filter(([at]) => device === undefined || at === device);
  return held.reduce((sum, [, size]) => sum + size, 0);
}

/** Figures of one second. */
class Second {
  constructor() {
    this.ns = 0;
    this.done = 0;
    this.failed = 0;
    this.kept = 0;
    this.missed = 0;
    this.latency = new Map();
    this.wait = new Map();
    this.rows = new Map();
    this.rt = 0;
    this.be = 0;
    this.preemptions = 0;
    this.leaving = new Map();
  }
}

/** The last minute of a model and class, or of a device. */
class Minute {
  constructor() {
    this.seconds = [new Second()];
  }

  now() {
    return this.seconds[this.seconds.length - 1];
  }

  turn() {
    this.seconds.push(new Second());
    if (this.seconds.length > SECONDS) this.seconds.shift();
  }

  sum(field) {
    return this.seconds.reduce((sum, second) => sum + second[field], 0);
  }

  merged(field) {
    const all = new Map();
    for (const second of this.seconds) addCounts(all, second[field]);
    return all;
  }

  /** One value per second, oldest first. */
  series(value) {
    const missing = SECONDS - this.seconds.length;
    return [...Array(missing).fill(NaN), ...this.seconds.map(value)];
  }
}

export class Now {
  title = "Now";
  #flows = new Map();
  #devices = [];
  #backends = new Map();
  #figures = null;
  #elapsed = 0;
  #rows = new Map();
  #cards = [];
  #backendRows = new Map();
  #node = null;

  restart() {}

  figures(figures) {
    this.#figures = figures;
    const ns = figures.interval_ns;
    this.#elapsed += ns;
    const turn = this.#elapsed >= 1e9;
    if (turn) this.#elapsed = 0;
    for (const flow of figures.flows) {
      const key = `${flow.model}\n${flow.class}`;
      if (!this.#flows.has(key)) this.#flows.set(key, new Minute());
    }
    const flows = new Map(figures.flows.map((flow) => [`${flow.model}\n${flow.class}`, flow]));
    for (const [key, minute] of this.#flows) {
      if (turn) minute.turn();
      const second = minute.now();
      second.ns += ns;
      const flow = flows.get(key);
      if (!flow) continue;
      for (const field of ["done", "failed", "kept", "missed"]) second[field] += flow[field];
      for (const field of ["latency", "wait", "rows"]) addCounts(second[field], flow[field]);
    }
    figures.devices.forEach((device, index) => {
      const minute = (this.#devices[index] ||= new Minute());
      if (turn) minute.turn();
      const second = minute.now();
      second.ns += ns;
      second.rt += device.busy_ns.rt;
      second.be += device.busy_ns.be;
      second.preemptions += device.preemptions;
      addCounts(second.leaving, device.leaving);
    });
    this.#countBackends(figures.backends || [], ns, turn);
    for (const [key, minute] of this.#flows) {
      if (minute.seconds.length === SECONDS && !minute.sum("done") && !minute.sum("failed")) {
        this.#flows.delete(key);
      }
    }
    if (this.#node) this.#draw();
  }

  /** The backends of a frontend, which has no devices. */
  #countBackends(backends, ns, turn) {
    const names = new Set(backends.map((backend) => backend.name));
    for (const name of this.#backends.keys()) if (!names.has(name)) this.#backends.delete(name);
    for (const backend of backends) {
      if (!this.#backends.has(backend.name)) this.#backends.set(backend.name, new Minute());
      const minute = this.#backends.get(backend.name);
      if (turn) minute.turn();
      const second = minute.now();
      second.ns += ns;
      for (const field of ["done", "failed"]) second[field] += backend[field];
      addCounts(second.latency, backend.latency);
    }
  }

  open(node) {
    this.#node = node;
    this.#rows.clear();
    this.#cards = [];
    this.#backendRows = new Map();
    this.backends = el("div");
    this.totals = el("dl", { class: "figures", "aria-label": "Totals of the last minute" });
    this.body = el("tbody");
    this.empty = el("p", { class: "empty" }, "No requests in the last minute.");
    this.cards = el("div", { class: "grid" });
    const header = [
      "Model",
      "Class",
      "Requests/s",
      "",
      "p50",
      "p99",
      "p50, p99",
      "Waiting",
      "Wait, p50",
      "Wait, p99",
      "Batch",
      "SLO kept",
      "Failed",
      "Memory",
    ];
    const numbers = new Set([2, 4, 5, 7, 8, 9, 10, 11, 12, 13]);
    show(
      node,
      el(
        "div",
        { class: "head" },
        el("h1", {}, "Now"),
        el("p", { class: "dim" }, "Rates of the last seconds, times of the last minute."),
      ),
      this.totals,
      el(
        "section",
        { class: "panel", "aria-label": "Models" },
        el("div", { class: "bar" }, el("h2", {}, "Requests by model and class")),
        el(
          "div",
          {
            class: "scroll",
            tabindex: 0,
            role: "region",
            "aria-label": "Requests by model and class",
          },
          el(
            "table",
            { class: "tight" },
            el(
              "thead",
              {},
              el(
                "tr",
                {},
                header.map((text, index) =>
                  el(
                    "th",
                    { scope: "col", class: numbers.has(index) ? "number" : null },
                    text || "last minute",
                  ),
                ),
              ),
            ),
            this.body,
          ),
          this.empty,
        ),
      ),
      this.backends,
      this.cards,
    );
    if (this.#figures) this.#draw();
  }

  close() {
    this.#node = null;
  }

  /** The rate of the last five seconds. */
  #rate(minute, field) {
    const last = minute.seconds.slice(-6);
    const ns = last.reduce((sum, second) => sum + second.ns, 0);
    return ns ? (last.reduce((sum, second) => sum + second[field], 0) / ns) * 1e9 : 0;
  }

  #draw() {
    this.#drawTotals();
    const order = (key) => (key.endsWith("rt") ? 0 : 1);
    const keys = [...this.#flows.keys()].sort(
      (a, b) => order(a) - order(b) || a.localeCompare(b, "en", { numeric: true }),
    );
    this.empty.hidden = keys.length > 0;
    for (const [key, row] of this.#rows) {
      if (this.#flows.has(key)) continue;
      row.node.remove();
      this.#rows.delete(key);
    }
    keys.forEach((key, index) => {
      const row = this.#row(key);
      this.#update(row, key, this.#flows.get(key));
      if (this.body.children[index] !== row.node)
        this.body.insertBefore(row.node, this.body.children[index] || null);
    });
    this.#figures.devices.forEach((device, index) => this.#drawDevice(device, index));
    if (this.#figures.backends) this.#drawBackends(this.#figures.backends);
  }

  #drawTotals() {
    const all = { rt: [], be: [] };
    for (const [key, minute] of this.#flows) all[key.endsWith("rt") ? "rt" : "be"].push(minute);
    const rate = (minutes) => minutes.reduce((sum, minute) => sum + this.#rate(minute, "done"), 0);
    const p99 = (minutes) => {
      const merged = new Map();
      for (const minute of minutes) addCounts(merged, minute.merged("latency"));
      return quantile(merged, 0.99);
    };
    const leaving = new Map();
    for (const minute of this.#devices) addCounts(leaving, minute.merged("leaving"));
    const preemptions = this.#devices.reduce(
      (sum, minute) => sum + this.#rate(minute, "preemptions"),
      0,
    );
    const pending = this.#figures.models.reduce((sum, model) => sum + model.pending, 0);
    const figure = (name, value, unit) =>
      el(
        "div",
        { class: "figure" },
        el("dt", {}, name),
        el("dd", {}, value, " ", unit ? el("small", {}, unit) : null),
      );
    const devices = this.#figures.devices.length > 0;
    show(
      this.totals,
      figure("Real time", number(rate(all.rt)), "requests/s"),
      figure("Real time, p99", time(p99(all.rt))),
      figure("Best effort", number(rate(all.be)), "requests/s"),
      figure("Best effort, p99", time(p99(all.be))),
      devices ? figure("Preemptions", number(preemptions), "a second") : null,
      devices ? figure("Leaving the device, p99", time(quantile(leaving, 0.99))) : null,
      figure("Waiting or running", number(pending), pending === 1 ? "request" : "requests"),
    );
  }

  #drawBackends(backends) {
    const names = backends.map((backend) => backend.name).join("\n");
    if (names !== this.backendNames || !this.backends.firstChild) {
      this.backendNames = names;
      this.#makeBackends(backends);
    }
    for (const backend of backends) {
      const row = this.#backendRows.get(backend.name);
      const minute = this.#backends.get(backend.name);
      const latency = minute.merged("latency");
      const failed = minute.sum("failed");
      const good = backend.state === "serving";
      row.state.className = `tag ${good ? "good" : backend.state === "ejected" ? "bad" : "plain"}`;
      const texts = {
        state: backend.state,
        device: backend.device || "–",
        rate: number(this.#rate(minute, "done")),
        p50: time(quantile(latency, 0.5)),
        p99: time(quantile(latency, 0.99)),
        flight: number(backend.in_flight),
        failed: number(failed),
        models: backend.models.join(", ") || "nothing",
      };
      for (const [field, text] of Object.entries(texts)) row[field].textContent = text;
      row.failed.className = failed ? "number bad" : "number";
      row.spark.update(
        minute.series((second) => (second.ns ? (second.done / second.ns) * 1e9 : NaN)),
      );
    }
  }

  #makeBackends(backends) {
    this.#backendRows.clear();
    const cell = () => el("td", { class: "number" });
    const rows = backends.map((backend) => {
      const spark = new Spark(`Requests a second to ${backend.name}`);
      spark.node.setAttribute("color", "var(--rt)");
      const row = {
        spark,
        state: el("span"),
        device: el("td"),
        rate: cell(),
        p50: cell(),
        p99: cell(),
        flight: cell(),
        failed: cell(),
        models: el("td", { class: "words" }),
      };
      this.#backendRows.set(backend.name, row);
      // Its own console has its devices and spans; it may be out of a browser's reach.
      const address = `${location.protocol}//${backend.http}/`;
      const name = backend.http
        ? el("a", { href: address, rel: "noreferrer" }, backend.name)
        : backend.name;
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, name),
        el("td", {}, row.state),
        row.device,
        row.rate,
        el("td", {}, spark.node),
        [row.p50, row.p99, row.flight, row.failed, row.models],
      );
    });
    const header = ["Backend", "State", "Device", "Requests/s", "", "p50", "p99", "In flight"];
    const numbers = new Set(["Requests/s", "p50", "p99", "In flight", "Failed"]);
    const titles = [...header, "Failed", "Serves"].map((text) =>
      el(
        "th",
        { scope: "col", class: numbers.has(text) ? "number" : null },
        text || "last minute",
      ),
    );
    const label = "Backends";
    const table = el("table", {}, el("thead", {}, el("tr", {}, titles)), el("tbody", {}, rows));
    const many = this.#figures.frontends;
    show(
      this.backends,
      el(
        "section",
        { class: "panel", "aria-label": label },
        el(
          "div",
          { class: "bar" },
          el("h2", {}, label),
          el(
            "p",
            { class: "dim" },
            many > 1
              ? `Requests of this frontend, one of ${many}. `
              : "Requests of this frontend. ",
            "Devices and spans are in the console of each backend.",
          ),
        ),
        backends.length
          ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table)
          : el("p", { class: "empty" }, "No backend has joined."),
      ),
    );
  }

  #row(key) {
    if (this.#rows.has(key)) return this.#rows.get(key);
    const [name, kind] = key.split("\n");
    const rate = new Spark(`Requests a second of ${name}`, SPARK);
    const p99 = new Spark(`p99 of ${name}, and below it p50`, SPARK);
    const cells = Array.from({ length: 10 }, () => el("td", { class: "number" }));
    const node = el(
      "tr",
      {},
      el("th", { scope: "row" }, name),
      el("td", {}, classTag(kind)),
      cells[0],
      el("td", {}, rate.node),
      cells[1],
      cells[2],
      el("td", {}, p99.node),
      cells.slice(3),
    );
    const row = { node, cells, rate, p99, name };
    rate.node.setAttribute("color", kind === "rt" ? "var(--rt)" : "var(--be)");
    p99.node.setAttribute("color", kind === "rt" ? "var(--rt)" : "var(--be)");
    this.#rows.set(key, row);
    return row;
  }

  #update(row, key, minute) {
    const kind = key.split("\n")[1];
    const latency = minute.merged("latency");
    const rows = minute.merged("rows");
    const count = [...rows.values()].reduce((sum, n) => sum + n, 0);
    const mean = [...rows].reduce((sum, [size, n]) => sum + size * n, 0) / count;
    const most = Math.max(0, ...rows.keys());
    const model = this.#figures.models.find((model) => model.name === row.name);
    const wait = minute.merged("wait");
    const [kept, missed] = [minute.sum("kept"), minute.sum("missed")];
    const failed = minute.sum("failed");
    row.cells[0].textContent = number(this.#rate(minute, "done"));
    row.cells[1].textContent = time(quantile(latency, 0.5));
    row.cells[2].textContent = time(quantile(latency, 0.99));
    // The server counts what waits by model.
    const other = kind === "rt" ? "be" : "rt";
    const both = this.#flows.has(`${row.name}\n${other}`) ? " of both" : "";
    row.cells[3].textContent = number(model?.pending) + both;
    row.cells[4].textContent = time(quantile(wait, 0.5));
    row.cells[5].textContent = time(quantile(wait, 0.99));
    row.cells[6].textContent = count ? (most > 1 ? `${number(mean)} (max ${most})` : "1") : "–";
    if (kept + missed) row.cells[7].textContent = keptShare(kept, missed);
    else row.cells[7].textContent = model?.slo_ms ? "–" : "no SLO";
    row.cells[8].textContent = failed ? number(failed) : "0";
    row.cells[8].className = failed ? "number bad" : "number";
    row.cells[9].textContent = bytes(memoryOf(model) || undefined);
    row.rate.update(minute.series((second) => (second.ns ? (second.done / second.ns) * 1e9 : NaN)));
    row.p99.update(
      minute.series((second) => quantile(second.latency, 0.99)),
      0,
      minute.series((second) => quantile(second.latency, 0.5)),
    );
  }

  #drawDevice(device, index) {
    let card = this.#cards[index];
    if (!card) {
      const rt = new Spark("Device time of real time", 160, 32);
      const be = new Spark("Device time of best effort", 160, 32);
      rt.node.setAttribute("color", "var(--rt)");
      be.node.setAttribute("color", "var(--be)");
      card = {
        rt,
        be,
        use: el(
          "div",
          { class: "meter tall" },
          el("i", { class: "fill-rt" }),
          el("i", { class: "fill-be" }),
        ),
        memory: el("div", { class: "meter tall" }),
        legend: el("ul", { class: "legend" }),
        pairs: el("dl", { class: "pairs" }),
        title: el("h2"),
        about: el("p", { class: "dim" }),
      };
      card.node = el(
        "section",
        { class: "panel", "aria-label": `Device ${device.name}` },
        el("div", { class: "bar" }, card.title, card.about),
        el(
          "div",
          { class: "body" },
          el(
            "div",
            { class: "head dim" },
            el("span", { class: "pair" }, "real time ", rt.node),
            el("span", { class: "pair" }, "best effort ", be.node),
          ),
          card.use,
          card.pairs,
          card.memory,
          card.legend,
        ),
      );
      this.#cards[index] = card;
      this.cards.append(card.node);
    }
    const minute = this.#devices[index];
    const share = (field) => {
      const last = minute.seconds.slice(-3);
      const ns = last.reduce((sum, second) => sum + second.ns, 0);
      return ns ? Math.min(1, last.reduce((sum, second) => sum + second[field], 0) / ns) : 0;
    };
    const [rt, be] = [share("rt"), share("be")];
    const over = Math.max(1, rt + be);
    card.title.textContent = device.name;
    card.about.textContent = device.description;
    card.use.children[0].style.width = `${(rt / over) * 100}%`;
    card.use.children[1].style.width = `${(be / over) * 100}%`;
    card.rt.update(
      minute.series((s) => (s.ns ? Math.min(1, s.rt / s.ns) : NaN)),
      1,
    );
    card.be.update(
      minute.series((s) => (s.ns ? Math.min(1, s.be / s.ns) : NaN)),
      1,
    );
    const leaving = minute.merged("leaving");
    const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
    show(
      card.pairs,
      pair("Device time", `${percent(rt)} real time, ${percent(be)} best effort`),
      pair("Preemptions", `${number(this.#rate(minute, "preemptions"))} a second`),
      pair(
        "Leaving",
        `${time(quantile(leaving, 0.5))} (p50), ${time(quantile(leaving, 0.99))} (p99); ` +
          `preempted ${device.preemption}`,
      ),
      device.power_milliwatts ? pair("Power", power(device)) : [],
      pair("Policy", device.policy),
      pair(
        "Weights",
        bytes(device.resident_bytes) +
          (device.budget_bytes ? ` of ${bytes(device.budget_bytes)}` : "") +
          (device.loads || device.evictions
            ? `, ${device.loads} loads, ${device.evictions} evictions`
            : "") +
          (device.pending_loads ? `, ${device.pending_loads} waiting` : ""),
      ),
      device.memory_bytes
        ? pair("Memory", `${bytes(device.used_bytes)} of ${bytes(device.memory_bytes)} in use`)
        : [],
      device.fault ? pair("Fault", el("span", { class: "bad" }, device.fault)) : [],
    );
    const models = this.#figures.models
      .map((model) => [model.name, memoryOf(model, index)])
      .filter(([, size]) => size > 0)
      .sort((a, b) => b[1] - a[1]);
    const whole =
      Math.max(
        device.budget_bytes || 0,
        models.reduce((sum, [, size]) => sum + size, 0),
      ) || 1;
    // A budget that is much larger than the weights would leave nothing to see.
    const shown =
      device.loads || device.evictions
        ? whole
        : models.reduce((sum, [, size]) => sum + size, 0) || 1;
    show(
      card.memory,
      models.map(([, size], at) => {
        const part = el("i", { class: `fill-${at % FILLS}` });
        part.style.width = `${(size / shown) * 100}%`;
        return part;
      }),
    );
    show(
      card.legend,
      models
        .slice(0, LISTED)
        .map(([name, size], at) =>
          el("li", {}, el("i", { class: `fill-${at % FILLS}` }), `${name} ${bytes(size)}`),
        ),
      models.length > LISTED ? el("li", {}, `and ${models.length - LISTED} more`) : null,
    );
  }
}
