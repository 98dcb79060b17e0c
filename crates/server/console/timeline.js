// The page Timeline: the latest runs and requests of each device, and why a request took its time.

import { getJson, send } from "./api.js";
import { detailOf, kindOf } from "./detail.js";
import { classTag, el, show, tick, time } from "./dom.js";
import { COPY, EVICTION, F, HeldSpans, LOAD, REQUEST, RUN, SpanStore } from "./spans.js";
import { wayOf } from "./way.js";

const LABEL_WIDTH = 132;
const RULER = 26;
const RUN_HEIGHT = 26;
const REQUEST_HEIGHT = 9;
const WEIGHTS_HEIGHT = 16;
const HEADER_HEIGHT = 24;
const GROUP_GAP = 6;
/** How far the view is behind the server, so that frames arrive before they are shown. */
const DELAY_NS = 600e6;
/** Pixels below which a span is a line. */
const THIN = 2;
/** Opacity of what has nothing to do with the selected span. */
const FADED = 0.35;
/** How long the hint is shown. */
const HINT_MS = 1500;
/** Least height of the lanes, and what of the window they leave to the rest of the page. */
const LANES_MIN = 260;
const LANES_MARGIN = 180;
const MIN_WIDTH_NS = 1e3;
const MAX_WIDTH_NS = 600e9;
const EMPTY = "No runs yet: send a request, or wait.";
const ZOOM_HINT = "Hold Ctrl to zoom with the wheel";
const FRONTEND =
  "A frontend runs no models. The console of each backend has a timeline; the page Now leads there.";
export class Timeline {
  title = "Timeline";
  spansWanted = true;
  store = new SpanStore();
  /** How long the last frame took to draw. */
  drawMs = 0;
  #names = new Map();
  #deviceNames = [];
  #clock = null;
  #view = { from: 0, width: 100e6 };
  #paused = false;
  /** Spans that came while paused. */
  #held = new HeldSpans(this.store.capacity);
  /** Whether the store has spans of an earlier process. */
  #stale = false;
  #selected = -1;
  #related = new Set();
  #hover = -1;
  #layout = [];
  #node = null;
  #dirty = true;
  #frame = 0;
  #pointers = new Map();
  #slowest = 0;
  #frontend = false;
  /** Labels as they fit, by their text. */
  #fitting = new Map();

  /** Spans that follow are of another process, or of a later time than what was kept. */
  restart() {
    this.#held.clear();
    // What is looked at stays until the user goes on.
    this.#stale = this.#paused;
    if (!this.#paused) this.#begin();
  }

  #begin() {
    this.store.clear();
    this.#stale = false;
    this.#unmark();
  }

  #unmark() {
    this.#selected = -1;
    this.#hover = -1;
    this.#related = new Set();
  }

  figures(figures) {
    for (const [device, number, name] of figures.names)
      this.#names.set(`${device}/${number}`, name);
    this.#deviceNames = figures.devices.map((device) => device.name);
    this.#clock = { now: figures.now_ns, at: performance.now() };
    this.store.lost += figures.lost;
    this.#frontend = Boolean(figures.backends);
    this.#dirty = true;
  }

  spans(numbers) {
    if (!numbers.length) return;
    // While paused nothing may push out what is looked at.
    if (this.#paused) this.#held.add(numbers);
    else this.store.add(numbers);
    this.#dirty = true;
  }

  name(device, number) {
    return this.#names.get(`${device}/${number}`) || `model ${number}`;
  }

  #nameOf(slot) {
    return this.name(this.store.at(slot, F.device), this.store.at(slot, F.model));
  }

  open(node) {
    this.#node = node;
    this.slowKey = null;
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-label":
        "Timeline of runs and requests. Arrow keys move, plus and minus zoom, space pauses. " +
        "The slowest requests in view are in the table below.",
      onwheel: (event) => this.#wheel(event),
      onpointerdown: (event) => this.#down(event),
      onpointermove: (event) => this.#move(event),
      onpointerup: (event) => this.#up(event),
      onpointercancel: (event) => {
        this.#pointers.delete(event.pointerId);
        this.canvas.classList.remove("moving");
      },
      onpointerleave: () => {
        this.#hover = -1;
        this.#dirty = true;
      },
      onkeydown: (event) => this.#key(event),
    });
    // More lanes than fit are scrolled to: the canvas stays where it is, and draws what is there.
    this.space = el("div");
    this.lanes = el(
      "div",
      {
        class: "lanes",
        onscroll: () => {
          this.#dirty = true;
        },
      },
      this.canvas,
      this.space,
    );
    this.hint = el("p", { class: "hint", hidden: true, "aria-hidden": "true" }, ZOOM_HINT);
    this.pause = el(
      "button",
      { onclick: () => this.setPaused(!this.#paused) },
    );
    this.#showPaused();
    this.seconds = el(
      "select",
      { "aria-label": "Length of the exported trace" },
      [1, 5, 30, 120].map((seconds) =>
        el("option", { value: seconds, selected: seconds === 5 }, `last ${seconds} s`),
      ),
    );
    this.detail = el("section", {
      class: "panel",
      "aria-label": "Selected",
      "aria-live": "polite",
    });
    this.info = el("p", { class: "dim" });
    this.slow = el("tbody");
    this.empty = el("p", { class: "empty", role: "status", hidden: true });
    this.error = el("p", { class: "error", role: "alert" });
    show(
      node,
      el(
        "div",
        { class: "head" },
        el("h1", {}, "Timeline"),
        this.info,
        el(
          "div",
          { class: "end" },
          this.pause,
          el("button", { onclick: () => this.#zoom(0.5, 0.5), "aria-label": "Zoom in" }, "+"),
          el("button", { onclick: () => this.#zoom(2, 0.5), "aria-label": "Zoom out" }, "−"),
          el("button", { onclick: () => this.#fit() }, "Fit"),
          this.seconds,
          el("button", { onclick: () => this.#export() }, "Export trace"),
        ),
      ),
      this.error,
      el(
        "div",
        { class: "split" },
        el(
          "div",
          { class: "panel timeline" },
          this.empty,
          this.lanes,
          this.hint,
          el(
            "div",
            { class: "bar" },
            el(
              "ul",
              { class: "legend" },
              [
                ["fill-rt", "real time"],
                ["fill-be", "best effort"],
                ["fill-cut", "preempted; from the request to leaving"],
                ["fill-load", "loads"],
                ["fill-copy", "copies"],
                ["fill-dim", "waiting"],
              ].map(([fill, text]) => el("li", {}, el("i", { class: fill }), text)),
            ),
            el(
              "p",
              { class: "keys" },
              el("kbd", {}, "space"),
              " pause ",
              el("kbd", {}, "←"),
              el("kbd", {}, "→"),
              " move ",
              el("kbd", {}, "+"),
              el("kbd", {}, "−"),
              " or ",
              el("kbd", {}, "Ctrl"),
              " with the wheel, or two fingers, zoom ",
              el("kbd", {}, "0"),
              " fit",
            ),
          ),
        ),
        el(
          "div",
          { class: "grid" },
          this.detail,
          el(
            "section",
            { class: "panel", "aria-label": "Slowest requests in view" },
            el("div", { class: "bar" }, el("h2", {}, "Slowest requests in view")),
            el(
              "table",
              { class: "slow" },
              el(
                "thead",
                {},
                el(
                  "tr",
                  {},
                  el("th", { scope: "col" }, "Request"),
                  el("th", { scope: "col" }, "Class"),
                  el("th", { scope: "col", class: "number" }, "Took"),
                ),
              ),
              this.slow,
            ),
          ),
        ),
      ),
    );
    this.#showDetail(null);
    this.observer = new ResizeObserver(() => {
      this.#dirty = true;
    });
    this.observer.observe(this.canvas);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.#colours();
    this.schemeChanged = () => {
      this.#colours();
      this.#dirty = true;
    };
    this.scheme.addEventListener("change", this.schemeChanged);
    const loop = () => {
      if (!this.#node) return;
      this.#tick();
      this.#frame = requestAnimationFrame(loop);
    };
    loop();
  }

  close() {
    this.#node = null;
    cancelAnimationFrame(this.#frame);
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.schemeChanged);
  }

  #colours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(
      [
        "panel",
        "text",
        "dim",
        "line",
        "line-soft",
        "rt",
        "be",
        "cut",
        "load",
        "copy",
        "bad",
        "ground",
        "focus",
      ].map((name) => [name, colour(name)]),
    );
    this.dark = this.scheme.matches;
  }

  // ---- view

  #now() {
    if (!this.#clock) return this.store.newest;
    return this.#clock.now + (performance.now() - this.#clock.at) * 1e6 - DELAY_NS;
  }

  setPaused(paused) {
    if (this.#paused && !paused) this.#release();
    this.#paused = paused;
    this.#showPaused();
    this.#dirty = true;
  }

  #showPaused() {
    this.pause.setAttribute("aria-pressed", String(this.#paused));
    this.pause.textContent = this.#paused ? "Go on" : "Pause";
  }

  /** Takes what came while paused. */
  #release() {
    if (this.#stale) this.#begin();
    // Slots are used again: what was marked may become another span.
    this.#unmark();
    this.store.lost += this.#held.dropped;
    this.#held.chunks.forEach((chunk) => this.store.add(chunk));
    this.#held.clear();
  }

  #zoom(factor, share) {
    const view = this.#view;
    const width = Math.min(MAX_WIDTH_NS, Math.max(MIN_WIDTH_NS, view.width * factor));
    if (this.#paused) view.from += (view.width - width) * share;
    else view.from += view.width - width;
    view.width = width;
    this.#dirty = true;
  }

  #pan(share) {
    this.setPaused(true);
    this.#view.from += this.#view.width * share;
    this.#dirty = true;
  }

  #fit() {
    if (!this.store.size) return;
    this.setPaused(true);
    const [from, to] = [this.store.oldest, this.store.newest];
    this.#view = {
      from: from - (to - from) * 0.01,
      width: Math.max((to - from) * 1.02, MIN_WIDTH_NS),
    };
    this.#dirty = true;
  }

  /** Shows a time range, paused. */
  look(from, to) {
    this.setPaused(true);
    const space = Math.max((to - from) * 0.25, 2e3);
    this.#view = { from: from - space, width: to - from + 2 * space };
    this.#dirty = true;
  }

  get view() {
    return { ...this.#view };
  }

  get selected() {
    return this.#selected;
  }

  /** What is drawn, from top to bottom. */
  get rows() {
    return this.#layout;
  }

  #x(at) {
    return LABEL_WIDTH + ((at - this.#view.from) / this.#view.width) * (this.width - LABEL_WIDTH);
  }

  #timeAt(x) {
    return this.#view.from + ((x - LABEL_WIDTH) / (this.width - LABEL_WIDTH)) * this.#view.width;
  }

  // ---- input

  #wheel(event) {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // A pinch on a touchpad is a wheel with Ctrl. Without it the page scrolls.
    if (!sideways && !event.ctrlKey && !event.metaKey) {
      this.#showHint();
      return;
    }
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    if (sideways) {
      this.#pan((event.deltaX || event.deltaY) / (this.width - LABEL_WIDTH));
      return;
    }
    const share = Math.min(
      1,
      Math.max(0, (event.clientX - box.left - LABEL_WIDTH) / (this.width - LABEL_WIDTH)),
    );
    this.#zoom(2 ** (event.deltaY / 240), share);
  }

  /** Says how to zoom, for a moment. */
  #showHint() {
    this.hint.hidden = false;
    clearTimeout(this.hintTimer);
    this.hintTimer = setTimeout(() => {
      this.hint.hidden = true;
    }, HINT_MS);
  }

  #down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.#pointers.set(event.pointerId, { x: event.clientX, y: event.clientY, moved: 0 });
  }

  #move(event) {
    const box = this.canvas.getBoundingClientRect();
    const pointer = this.#pointers.get(event.pointerId);
    if (!pointer) {
      const hover = this.#hit(event.clientX - box.left, event.clientY - box.top);
      if (hover !== this.#hover) this.#dirty = true;
      this.#hover = hover;
      return;
    }
    const pointers = [...this.#pointers.values()];
    const spread = () => Math.abs(pointers[0].x - pointers[1].x) || 1;
    const before = pointers.length === 2 ? spread() : 0;
    const moved = event.clientX - pointer.x;
    // A finger that moves up or down scrolls the page; the browser then cancels the pointer.
    const upright = event.pointerType === "touch" ? 0 : Math.abs(event.clientY - pointer.y);
    pointer.moved += Math.abs(moved) + upright;
    pointer.x = event.clientX;
    pointer.y = event.clientY;
    if (pointers.length === 2) {
      const middle = (pointers[0].x + pointers[1].x) / 2 - box.left - LABEL_WIDTH;
      this.#zoom(before / spread(), middle / (this.width - LABEL_WIDTH));
    } else if (pointer.moved > 4) {
      this.canvas.classList.add("moving");
      this.#pan(-moved / (this.width - LABEL_WIDTH));
    }
  }

  #up(event) {
    const pointer = this.#pointers.get(event.pointerId);
    this.#pointers.delete(event.pointerId);
    this.canvas.classList.remove("moving");
    if (!pointer || pointer.moved > 4) return;
    const box = this.canvas.getBoundingClientRect();
    this.select(this.#hit(event.clientX - box.left, event.clientY - box.top));
  }

  #key(event) {
    const keys = {
      " ": () => this.setPaused(!this.#paused),
      ArrowLeft: () => this.#pan(-0.1),
      ArrowRight: () => this.#pan(0.1),
      a: () => this.#pan(-0.1),
      d: () => this.#pan(0.1),
      "+": () => this.#zoom(0.7, 0.5),
      "=": () => this.#zoom(0.7, 0.5),
      w: () => this.#zoom(0.7, 0.5),
      "-": () => this.#zoom(1.4, 0.5),
      s: () => this.#zoom(1.4, 0.5),
      0: () => this.#fit(),
      Escape: () => this.select(-1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }

  /** The span at a point of the canvas; -1 without one. */
  #hit(x, y) {
    if (x < LABEL_WIDTH || y < RULER) return -1;
    const at = y + this.lanes.scrollTop;
    const row = this.#layout.find((row) => row.lane && at >= row.y && at < row.y + row.height);
    if (!row) return -1;
    const slack = (this.#view.width / (this.width - LABEL_WIDTH)) * 3;
    return this.store.find(row.lane, this.#timeAt(x), slack);
  }

  // ---- selection

  select(slot) {
    this.#selected = slot;
    this.#related = new Set();
    this.#dirty = true;
    if (slot < 0) return this.#showDetail(null);
    this.setPaused(true);
    this.#reveal(slot);
    if (this.store.at(slot, F.kind) === REQUEST) return this.#explain(slot);
    return this.#showSpan(slot);
  }

  async #explain(slot) {
    const [device, number, job] = [
      this.store.at(slot, F.device),
      this.store.at(slot, F.number),
      this.store.at(slot, F.job),
    ];
    this.#relate(device, job, slot);
    if (this.#stale) return this.#showSpan(slot, "The server has restarted");
    this.#showDetail(el("p", { class: "dim" }, "Reading"));
    try {
      const why = await getJson(`/v2/atoll/trace/devices/${device}/requests/${number}`);
      if (this.#selected !== slot) return;
      for (const { job: other } of why.preempted) this.#relate(device, other, -1);
      this.#showWhy(why);
    } catch (error) {
      if (this.#selected !== slot) return;
      this.#showSpan(slot, error.message);
    }
    this.#dirty = true;
  }

  /** Moves the view if a span has left it since it was listed. */
  #reveal(slot) {
    const { from, width } = this.#view;
    const [begin, end] = [this.store.at(slot, F.from), this.store.at(slot, F.to)];
    if (end < from || begin > from + width) this.#view.from = end - width * 0.9;
  }

  /** Marks the runs of a job. */
  #relate(device, job, slot) {
    if (slot >= 0) this.#related.add(slot);
    if (!job) return;
    this.store.forEach((other) => {
      if (
        this.store.at(other, F.kind) === RUN &&
        this.store.at(other, F.runJob) === job &&
        this.store.at(other, F.device) === device
      )
        this.#related.add(other);
    });
  }

  #showDetail(content, title = "Nothing selected", tag = null) {
    show(
      this.detail,
      el("div", { class: "bar" }, el("h2", {}, title), tag),
      el(
        "div",
        { class: "body" },
        content ||
          el(
            "p",
            { class: "note" },
            "Click a request (the thin bars) to see its whole way and why it took as long as it " +
              "did, or a run to see what was preempted.",
          ),
      ),
    );
  }

  #showWhy(why) {
    this.#showDetail(
      wayOf(why, (from, to) => this.look(from, to)),
      `Request #${why.request} of ${why.model}`,
      classTag(why.class),
    );
  }

  #showSpan(slot, problem) {
    const s = (field) => this.store.at(slot, field);
    if (s(F.kind) === RUN) this.#relate(s(F.device), s(F.runJob), slot);
    const { content, title, tag } = detailOf(
      {
        store: this.store,
        slot,
        name: (model) => this.name(s(F.device), model),
        select: (other) => this.select(other),
        look: (from, to) => this.look(from, to),
      },
      problem,
    );
    this.#showDetail(content, title, tag);
  }

  async #export() {
    this.error.textContent = "";
    try {
      const response = await send(`/v2/atoll/trace?seconds=${this.seconds.value}`);
      const link = el("a", {
        href: URL.createObjectURL(await response.blob()),
        download: "atoll-trace.json",
      });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    } catch (error) {
      this.error.textContent = error.message;
    }
  }

  // ---- drawing

  #tick() {
    if (!this.#paused) {
      this.#view.from = this.#now() - this.#view.width;
      this.#dirty = true;
    }
    if (!this.#dirty || !this.canvas.clientWidth || document.hidden) return;
    this.#dirty = false;
    const began = performance.now();
    this.#draw();
    const now = performance.now();
    this.drawMs = now - began;
    if (now - this.#slowest > 500) {
      this.#slowest = now;
      this.#listSlowest();
    }
  }

  #rows() {
    const rows = [];
    let y = RULER;
    let device = -1;
    let group = null;
    for (const lane of this.store.ordered()) {
      if (lane.device !== device) {
        device = lane.device;
        rows.push({
          y,
          height: HEADER_HEIGHT,
          header: this.#deviceNames[device] || `device ${device}`,
        });
        y += HEADER_HEIGHT;
        group = null;
      }
      const first = lane.kind === REQUEST && lane.group !== group;
      if (first) {
        group = lane.group;
        y += GROUP_GAP;
        const [, , kind, model] = group.split("/");
        rows.push({ y, height: 0, label: this.name(device, Number(model)), kind: Number(kind) });
      }
      const height =
        lane.kind === RUN ? RUN_HEIGHT : lane.kind === REQUEST ? REQUEST_HEIGHT : WEIGHTS_HEIGHT;
      rows.push({ y, height, lane, label: lane.label });
      y += height + 2;
      // A group of one row still needs room for its name.
      if (first) y += 6;
    }
    return { rows, height: y + 8 };
  }

  /** Height of the canvas for lanes of `height`: all of them, or a part of the window. */
  #shownHeight(height) {
    // Room for a tooltip below the last lane.
    const wanted = Math.max(height + 40, LANES_MIN);
    return Math.min(wanted, Math.max(innerHeight - LANES_MARGIN, LANES_MIN));
  }

  #draw() {
    const ratio = devicePixelRatio || 1;
    const { rows, height: needed } = this.#rows();
    const height = this.#shownHeight(needed);
    this.#layout = rows;
    for (const [part, pixels] of [
      [this.lanes, height],
      [this.space, Math.max(0, needed - height)],
    ]) {
      const wanted = `${pixels}px`;
      if (part.style.height !== wanted) part.style.height = wanted;
    }
    const width = this.canvas.clientWidth;
    this.width = width;
    const top = this.lanes.scrollTop;
    const seen = rows.filter((row) => row.y + row.height + 14 > top + RULER && row.y < top + height);
    if (
      this.canvas.width !== Math.round(width * ratio) ||
      this.canvas.height !== Math.round(height * ratio)
    ) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const c = this.canvas.getContext("2d", { alpha: false });
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = this.colours.panel;
    c.fillRect(0, 0, width, height);
    this.#ruler(c, height);
    c.save();
    c.beginPath();
    c.rect(LABEL_WIDTH, RULER, width - LABEL_WIDTH, height - RULER);
    c.clip();
    c.translate(0, -top);
    for (const row of seen) if (row.lane) this.#lane(c, row);
    c.restore();
    this.#labels(c, seen, width, top);
    if (this.#hover >= 0) this.#tooltip(c, seen, top);
    const empty = this.store.size ? "" : this.#frontend ? FRONTEND : EMPTY;
    if (this.empty.textContent !== empty) {
      this.empty.textContent = empty;
      this.empty.hidden = !empty;
    }
  }

  #ruler(c, height) {
    const { from, width } = this.#view;
    const space = this.width - LABEL_WIDTH;
    const rough = (width / space) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    const zero = this.#paused ? this.#zero() : from + width;
    for (let at = Math.ceil((from - zero) / step) * step; at <= from - zero + width; at += step) {
      const x = Math.round(this.#x(at + zero)) + 0.5;
      if (x < LABEL_WIDTH) continue;
      c.strokeStyle = this.colours["line-soft"];
      c.beginPath();
      c.moveTo(x, RULER - 4);
      c.lineTo(x, height);
      c.stroke();
      c.fillStyle = this.colours.dim;
      c.fillText(Math.abs(at) < step / 2 ? "0" : tick(at, step), x + 4, RULER / 2 + 1);
    }
    c.strokeStyle = this.colours.line;
    c.beginPath();
    c.moveTo(0, RULER - 0.5);
    c.lineTo(this.width, RULER - 0.5);
    c.moveTo(LABEL_WIDTH - 0.5, RULER);
    c.lineTo(LABEL_WIDTH - 0.5, height);
    c.stroke();
    const count = (spans) => spans.toLocaleString("en");
    const lost = this.store.lost + this.#held.dropped;
    const info =
      `${time(width)} shown, ${count(this.store.size)} spans kept` +
      (this.#held.size ? `, ${count(this.#held.size)} since the pause` : "") +
      (lost ? `, ${count(lost)} not kept` : "");
    if (this.info.textContent !== info) this.info.textContent = info;
  }

  /** The zero of the ruler while paused: the selected span, else the middle of the view. */
  #zero() {
    if (this.#selected >= 0) return this.store.at(this.#selected, F.from);
    const step = 10 ** Math.floor(Math.log10(this.#view.width));
    return Math.floor((this.#view.from + this.#view.width / 2) / step) * step;
  }

  #lane(c, row) {
    const { store, colours } = this;
    const { lane, y, height } = row;
    const { from, width } = this.#view;
    const scale = (this.width - LABEL_WIDTH) / width;
    const to = from + width;
    let merged = -Infinity;
    const data = store.data;
    // Spans of a pixel or two that touch and have one colour become one rectangle.
    const thin = { colour: null, x: 0, right: 0 };
    const flush = () => {
      if (!thin.colour) return;
      c.fillStyle = thin.colour;
      c.fillRect(thin.x, y, Math.max(thin.right - thin.x, 0.8), height);
      thin.colour = null;
    };
    c.globalAlpha = this.#selected >= 0 ? FADED : 1;
    for (let at = store.first(lane, from); at < lane.slots.length; at += 1) {
      const slot = lane.slots[at];
      const base = slot * 14;
      const begin = data[base + 12];
      const end = data[base + 13];
      if (begin > to) {
        if (lane.kind === RUN) break;
        continue;
      }
      const x = LABEL_WIDTH + (begin - from) * scale;
      const right = LABEL_WIDTH + (end - from) * scale;
      const marked = slot === this.#selected || slot === this.#hover || this.#related.has(slot);
      // What is narrower than a pixel is drawn once for all spans of that pixel.
      if (right - merged < 0.7 && !marked) continue;
      merged = right;
      const wide = Math.max(right - x, 0.8);
      if (wide < THIN && !marked) {
        const colour = this.#thinColour(base);
        if (colour === thin.colour && x - thin.right < 0.7) {
          thin.right = right;
          continue;
        }
        flush();
        Object.assign(thin, { colour, x, right });
        continue;
      }
      flush();
      if (marked) c.globalAlpha = 1;
      const best = data[base + 3] === 1;
      const kind = data[base];
      const colour =
        kind === COPY
          ? colours.copy
          : kind === LOAD || kind === EVICTION
            ? colours.load
            : best
              ? colours.be
              : colours.rt;
      if (kind === REQUEST) this.#request(c, base, x, wide, y, height, colour, scale);
      else this.#run(c, slot, base, x, wide, y, height, colour, scale);
      if (slot === this.#selected || slot === this.#hover) {
        c.strokeStyle = colours.text;
        c.lineWidth = 1.5;
        c.strokeRect(x - 1, y - 0.5, wide + 2, height + 1);
        c.lineWidth = 1;
      }
      if (marked) c.globalAlpha = this.#selected >= 0 ? FADED : 1;
    }
    flush();
    c.globalAlpha = 1;
  }

  /** The colour of a span that is too narrow for more: the one that matters most. */
  #thinColour(base) {
    const { data } = this.store;
    const { colours } = this;
    const kind = data[base];
    if (kind === COPY) return colours.copy;
    if (kind === LOAD || kind === EVICTION) return colours.load;
    if (kind === REQUEST && data[base + F.end] !== 0) return colours.bad;
    if (kind === RUN && data[base + F.preemptAsked]) return colours.cut;
    return data[base + 3] === 1 ? colours.be : colours.rt;
  }

  #request(c, base, x, wide, y, height, colour, scale) {
    const data = this.store.data;
    const started = data[base + F.started];
    const waited = started ? Math.min((started - data[base + F.from]) * scale, wide) : wide;
    c.fillStyle = this.dark ? "#5a6674" : "#a9b2bd";
    if (waited > 0.3) c.fillRect(x, y + 2, waited, height - 4);
    c.fillStyle = data[base + F.end] === 0 ? colour : this.colours.bad;
    c.fillRect(x + waited, y, Math.max(wide - waited, 0.8), height);
  }

  #run(c, slot, base, x, wide, y, height, colour, scale) {
    const data = this.store.data;
    c.fillStyle = colour;
    c.fillRect(x, y, wide, height);
    if (data[base] === RUN) {
      const asked = data[base + F.preemptAsked];
      if (asked) {
        // From the request to leave until the device is free.
        const cut = Math.min((data[base + F.to] - asked) * scale, wide);
        c.fillStyle = this.colours.cut;
        c.fillRect(x + wide - Math.max(cut, 1.2), y, Math.max(cut, 1.2), height);
      }
      if (data[base + F.end] === 1 && wide > 14) {
        // A jagged end: it was cut here and resumes later.
        c.fillStyle = this.colours.panel;
        for (let tooth = 0; tooth < height; tooth += 6) {
          c.beginPath();
          c.moveTo(x + wide + 0.5, y + tooth);
          c.lineTo(x + wide - 2.5, y + tooth + 3);
          c.lineTo(x + wide + 0.5, y + tooth + 6);
          c.fill();
        }
      }
    }
    if (wide > 34) {
      const rows = data[base] === RUN ? data[base + F.rows] : 0;
      const text = this.#nameOf(slot) + (rows > 1 ? ` ×${rows}` : "");
      c.fillStyle = this.dark ? "#0b0e12" : "#ffffff";
      c.font = "600 11px system-ui, sans-serif";
      c.textBaseline = "middle";
      c.save();
      c.beginPath();
      c.rect(x, y, wide - 2, height);
      c.clip();
      c.fillText(text, Math.max(x, LABEL_WIDTH) + 5, y + height / 2 + 0.5);
      c.restore();
    }
  }

  #labels(c, rows, width, top) {
    c.fillStyle = this.colours.panel;
    c.fillRect(0, RULER, LABEL_WIDTH - 1, 1e5);
    c.save();
    c.beginPath();
    c.rect(0, RULER, width, 1e5);
    c.clip();
    c.translate(0, -top);
    c.textBaseline = "middle";
    for (const row of rows) {
      if (row.header) {
        c.fillStyle = this.colours.ground;
        c.fillRect(0, row.y, width, row.height - 2);
        c.fillStyle = this.colours.text;
        c.font = "600 12px system-ui, sans-serif";
        c.fillText(row.header, 10, row.y + row.height / 2);
      } else if (row.label) {
        c.font = "12px system-ui, sans-serif";
        c.fillStyle =
          row.kind === undefined ? this.colours.dim : row.kind ? this.colours.be : this.colours.rt;
        c.fillText(this.#short(c, row.label), 10, row.y + (row.height || 12) / 2 + 0.5);
      }
    }
    c.restore();
  }

  /** A label that fits, without its middle: names differ at their ends. */
  #short(c, text) {
    const known = this.#fitting.get(text);
    if (known) return known;
    let [short, left] = [text, text.length];
    while (left > 4 && c.measureText(short).width > LABEL_WIDTH - 20) {
      left -= 1;
      short = `${text.slice(0, Math.ceil(left / 2))}…${text.slice(-Math.floor(left / 2))}`;
    }
    if (this.#fitting.size > 5000) this.#fitting.clear();
    this.#fitting.set(text, short);
    return short;
  }

  #tooltip(c, rows, top) {
    const slot = this.#hover;
    const row = rows.find((row) => row.lane && row.lane === this.store.laneOf[slot]);
    if (!row) return;
    const took = this.store.at(slot, F.to) - this.store.at(slot, F.from);
    const text = `${kindOf(this.store, slot)} of ${this.#nameOf(slot)}: ${time(took)}`;
    this.tooltip = text;
    c.font = "12px system-ui, sans-serif";
    const wide = c.measureText(text).width + 16;
    const x = Math.max(
      LABEL_WIDTH,
      Math.min(this.#x(this.store.at(slot, F.from)), this.width - wide - 6),
    );
    const below = row.y - top + row.height + 6;
    const y = below + 24 > this.lanes.clientHeight ? row.y - top - 30 : below;
    c.fillStyle = this.colours.text;
    c.fillRect(x, y, wide, 24);
    c.fillStyle = this.colours.panel;
    c.textBaseline = "middle";
    c.fillText(text, x + 8, y + 12.5);
  }

  #listSlowest() {
    const { store } = this;
    const { from, width } = this.#view;
    const found = [];
    store.forEach((slot) => {
      if (store.at(slot, F.kind) !== REQUEST) return;
      const end = store.at(slot, F.to);
      if (end < from || store.at(slot, F.from) > from + width) return;
      const took = end - store.at(slot, F.from);
      if (found.length < 8 || took > found[found.length - 1].took) {
        found.push({ slot, took });
        found.sort((a, b) => b.took - a.took);
        if (found.length > 8) found.pop();
      }
    });
    // Rows stay while a key or a pointer is on them.
    if (this.slow.contains(document.activeElement) && !this.#paused) return;
    const key = found.map(({ slot }) => slot).join();
    if (key === this.slowKey) return;
    this.slowKey = key;
    show(
      this.slow,
      found.map(({ slot, took }) =>
        el(
          "tr",
          {},
          el(
            "td",
            {},
            el(
              "button",
              {
                class: "link",
                title: this.#nameOf(slot),
                onclick: () => this.select(slot),
              },
              `#${store.at(slot, F.number)} ${this.#nameOf(slot)}`,
            ),
          ),
          el("td", {}, classTag(store.at(slot, F.class) ? "be" : "rt")),
          el("td", { class: "number" }, time(took)),
        ),
      ),
    );
    if (!found.length)
      show(this.slow, el("tr", {}, el("td", { colspan: 3, class: "dim" }, "None")));
  }
}
