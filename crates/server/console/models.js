// The page Models: register, load, unload, settings, and a form that tries a model.

import { getJson, postJson, repeat, send } from "./api.js";
import { bytes, classTag, el, number, show, time } from "./dom.js";
import { BATCHING_POLICIES, SettingsForm } from "./settings.js";
import { StepsPanel } from "./steps.js";
import { TryForm } from "./try.js";

/** A name that the server takes, from the name of a file. */
export const modelName = (file) =>
  file
    .replace(/\.onnx$/i, "")
    .replace(/[^A-Za-z0-9_.-]+/g, "_")
    .replace(/^[.-]+/, "")
    .slice(0, 128) || "model";

/** How far the variants of a model's steps are measured. */
function tuningText(tuning) {
  if (!tuning) return "nothing to tune on this device";
  const { tuned, steps } = tuning;
  const share = steps ? (100 * tuned) / steps : 100;
  const bar = el("i", { class: "fill-good" });
  bar.style.width = `${share}%`;
  return [
    `${number(tuned)} of ${number(steps)} steps`,
    el(
      "div",
      { class: "meter", role: "img", "aria-label": `${Math.round(share)} % tuned` },
      bar,
    ),
  ];
}

/** Steps on the host that are named. */
const LISTED = 14;

export class Models {
  title = "Models";
  #node = null;
  #chosen = null;
  #stop = null;
  #file = null;

  open(node) {
    this.#node = node;
    this.key = null;
    this.#chosen = null;
    this.body = el("tbody");
    this.empty = el(
      "p",
      { class: "empty" },
      "No models. Drop an ONNX file above, or start the server with --model-repository.",
    );
    this.message = el("p", { role: "status", class: "dim" });
    this.error = el("p", { class: "error", role: "alert" });
    /** Why there is no list now; goes when there is one again. */
    this.lost = el("p", { class: "error", role: "status" });
    this.detail = el("div", { class: "grid wide-cells" });
    this.input = el("input", {
      type: "file",
      accept: ".onnx",
      "aria-label": "ONNX file to register",
      onchange: () => this.#take(this.input.files[0]),
    });
    this.drop = el(
      "div",
      {
        class: "drop",
        ondragover: (event) => {
          event.preventDefault();
          this.drop.classList.add("over");
        },
        ondragleave: () => this.drop.classList.remove("over"),
        ondrop: (event) => {
          event.preventDefault();
          this.drop.classList.remove("over");
          this.#take(event.dataTransfer.files[0]);
        },
      },
      el("span", {}, "Drop an ONNX file here to register it, or"),
      this.input,
    );
    this.form = this.#makeForm();
    show(
      node,
      el("div", { class: "head" }, el("h1", {}, "Models"), this.message),
      this.drop,
      this.form,
      this.error,
      this.lost,
      el(
        "section",
        { class: "panel", "aria-label": "Models" },
        el(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Models" },
          el(
            "table",
            {},
            el(
              "thead",
              {},
              el(
                "tr",
                {},
                ["Model", "Version", "State", "Reason", ""].map((text) =>
                  el("th", { scope: "col" }, text || el("span", { "aria-hidden": "true" }, "")),
                ),
              ),
            ),
            this.body,
          ),
          this.empty,
        ),
      ),
      this.detail,
    );
    this.#stop = repeat(3000, () => this.refresh());
  }

  close() {
    this.#stop();
    this.#node = null;
  }

  #makeForm() {
    this.name = el("input", {
      required: true,
      maxlength: 128,
      pattern: "[A-Za-z0-9_][A-Za-z0-9_.\\-]*",
      autocomplete: "off",
    });
    this.class = el(
      "select",
      {},
      el("option", { value: "" }, "best effort (default)"),
      el("option", { value: "rt" }, "real time"),
    );
    this.priority = el("input", { type: "number", min: 1, step: 1, placeholder: "100" });
    this.batching = el(
      "select",
      {},
      BATCHING_POLICIES.map((name) =>
        el("option", { value: name === "auto" ? "" : name }, name.replace("_", " ")),
      ),
    );
    this.slo = el("input", { type: "number", min: 1, step: 1, placeholder: "none" });
    this.labels = el("textarea", { rows: 3, placeholder: "one label per line" });
    this.submit = el("button", { class: "primary", type: "submit" }, "Register");
    const form = el(
      "form",
      {
        class: "panel",
        hidden: true,
        "aria-label": "Register a model",
        onsubmit: (event) => {
          event.preventDefault();
          this.#register();
        },
      },
      el(
        "div",
        { class: "bar" },
        el("h2", {}, "Register a model"),
        (this.fileText = el("span", { class: "dim" })),
      ),
      el(
        "div",
        { class: "body" },
        el(
          "div",
          { class: "fields" },
          el("label", {}, "Name", this.name),
          el("label", {}, "Class", this.class),
          el("label", {}, "Priority, 1 is the highest", this.priority),
          el("label", {}, "SLO in milliseconds", this.slo),
          el("label", {}, "Batching", this.batching),
          el("label", { class: "wide" }, "Labels of its classes", this.labels),
        ),
        el(
          "p",
          { class: "note" },
          "The file is checked in a process without rights before the server reads it; what the " +
            "check says is shown here.",
        ),
        el(
          "menu",
          {},
          el("button", { type: "button", onclick: () => this.#take(null) }, "Cancel"),
          this.submit,
        ),
      ),
    );
    return form;
  }

  /** Takes a file to register. */
  #take(file) {
    this.error.textContent = "";
    this.#file = file || null;
    this.form.hidden = !file;
    if (file?.size === 0) {
      this.#file = null;
      this.form.hidden = true;
      this.error.textContent = `${file.name} is empty`;
      file = null;
    }
    if (!file) {
      this.input.value = "";
      return;
    }
    this.fileText.textContent = `${file.name}, ${bytes(file.size)}`;
    this.name.value = modelName(file.name);
    this.name.focus();
  }

  async #register() {
    const data = new FormData();
    data.set("name", this.name.value);
    data.set("model", this.#file);
    if (this.class.value) data.set("class", this.class.value);
    if (this.slo.value) data.set("slo_ms", this.slo.value);
    const settings = {};
    if (this.priority.value) settings.priority = Number(this.priority.value);
    if (this.batching.value) settings.batching = { policy: this.batching.value };
    if (Object.keys(settings).length) data.set("settings", JSON.stringify(settings));
    if (this.labels.value.trim()) data.set("labels", this.labels.value.trim());
    const name = this.name.value;
    await this.#work(`Checking and loading ${name}`, async () => {
      this.submit.disabled = true;
      try {
        const sent = send("/v2/atoll/register", { method: "POST", body: data });
        const response = await sent.catch((error) => {
          // A server that refuses a body because of its size closes the connection.
          if (error.status === 0)
            error.message += `; or it does not take files of ${bytes(this.#file.size)}`;
          throw error;
        });
        const registered = await response.json();
        this.#take(null);
        this.#chosen = registered.name;
        return `Registered ${registered.name}, version ${registered.version}`;
      } finally {
        this.submit.disabled = false;
      }
    });
    if (this.#chosen === name) this.#showDetail(name);
  }

  async #work(doing, work) {
    this.error.textContent = "";
    this.message.textContent = doing;
    try {
      this.message.textContent = await work();
    } catch (error) {
      this.message.textContent = "";
      this.error.textContent = error.message;
    }
    await this.refresh();
  }

  async refresh() {
    this.#followTuning();
    try {
      const index = await postJson("/v2/repository/index", {});
      if (!this.#node) return;
      if (this.lost.textContent) this.lost.textContent = "";
      this.#list(index);
    } catch (error) {
      if (this.#node && this.lost.textContent !== error.message)
        this.lost.textContent = error.message;
    }
  }

  #list(index) {
    const key = JSON.stringify([index, this.#chosen]);
    if (key === this.key) return;
    this.key = key;
    const focused = document.activeElement?.dataset?.key;
    this.empty.hidden = index.length > 0;
    const change = (what, name, doing, done) =>
      el(
        "button",
        {
          "data-key": `${what} ${name}`,
          "aria-label": `${what} ${name}`,
          onclick: () =>
            this.#work(`${doing} ${name}`, async () => {
              await postJson(
                `/v2/repository/models/${encodeURIComponent(name)}/${what.toLowerCase()}`,
                {},
              );
              return `${done} ${name}`;
            }),
        },
        what,
      );
    show(
      this.body,
      index.map((entry) => {
        const ready = entry.state === "READY";
        const failed = entry.state === "UNAVAILABLE" && entry.reason;
        return el(
          "tr",
          { class: entry.name === this.#chosen ? "chosen" : null },
          el(
            "th",
            { scope: "row" },
            ready
              ? el(
                  "button",
                  {
                    class: "link",
                    "data-key": `show ${entry.name}`,
                    onclick: async () => {
                      await this.#showDetail(entry.name);
                      this.detail.scrollIntoView({ block: "start" });
                    },
                  },
                  entry.name,
                )
              : entry.name,
          ),
          el("td", {}, entry.version || "–"),
          el(
            "td",
            {},
            el(
              "span",
              {
                class: `tag ${ready ? "good" : failed ? "bad" : "plain"}`,
              },
              (entry.state || "not loaded").toLowerCase(),
            ),
          ),
          el("td", { class: "dim words" }, entry.reason || ""),
          el(
            "td",
            { class: "actions" },
            ready
              ? change("Unload", entry.name, "Unloading", "Unloaded")
              : change("Load", entry.name, "Loading", "Loaded"),
          ),
        );
      }),
    );
    if (focused) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    if (!this.#chosen && index.length === 1 && index[0].state === "READY")
      this.#showDetail(index[0].name);
    if (
      this.#chosen &&
      !index.some((entry) => entry.name === this.#chosen && entry.state === "READY")
    ) {
      this.#chosen = null;
      this.shown = null;
      show(this.detail);
    }
  }

  async #showDetail(name) {
    this.#chosen = name;
    this.shown = name;
    const old = () => this.shown !== name || !this.#node;
    try {
      const details = await this.#read(name);
      if (old()) return;
      if (details.settings) this.#detail(details);
      else show(this.detail, this.#tryPanel(details));
    } catch (error) {
      if (old()) return;
      if ([0, 404, 503].includes(error.status)) {
        // The server stops or starts, or has unloaded it: the next list of models begins anew.
        this.lost.textContent = error.message;
        this.#chosen = null;
        this.key = null;
      } else {
        this.error.textContent = error.message;
      }
      return;
    }
    this.key = null;
    this.refresh();
  }

  /** What the server knows of a model; of a frontend, which has no settings, its tensors. */
  async #read(name) {
    const path = encodeURIComponent(name);
    try {
      return await getJson(`/v2/atoll/models/${path}`);
    } catch (error) {
      if (error.status !== 501) throw error;
    }
    const metadata = await getJson(`/v2/models/${path}`);
    const tensor = (t) => ({ ...t, shape: t.shape.map(String) });
    return {
      name,
      inputs: metadata.inputs.map(tensor),
      outputs: metadata.outputs.map(tensor),
    };
  }

  #tryPanel(details) {
    return el(
      "section",
      { class: "panel", "aria-label": `Try ${details.name}` },
      el("div", { class: "bar" }, el("h2", {}, `Try ${details.name}`)),
      el("div", { class: "body" }, new TryForm(details).node),
    );
  }

  /** Shows and hides the form that changes settings; it is above the settings. */
  #changeButton(details) {
    this.changing = el("div", { hidden: true });
    const button = el(
      "button",
      {
        "aria-expanded": "false",
        onclick: () => {
          const open = this.changing.hidden;
          this.changing.hidden = !open;
          button.setAttribute("aria-expanded", String(open));
          const changed = async (reply) => {
            this.message.textContent = `Changed ${reply.name}: ${reply.note}`;
            await this.#showDetail(reply.name);
          };
          show(this.changing, open ? new SettingsForm(details, changed).node : []);
          if (open) this.changing.querySelector("select").focus();
        },
      },
      "Change settings",
    );
    return button;
  }

  /** Reads how far the chosen model is tuned, while it is not. */
  async #followTuning() {
    const { shown, tuning } = this;
    if (!this.followed || !shown) return;
    try {
      const details = await getJson(`/v2/atoll/models/${encodeURIComponent(shown)}`);
      if (this.#node && this.shown === shown && this.tuning === tuning)
        this.#showTuning(details.tuning);
    } catch {
      // The list of models says what is the matter.
    }
  }

  #showTuning(tuning) {
    this.followed = Boolean(tuning && tuning.tuned < tuning.steps);
    const text = JSON.stringify(tuning);
    if (this.tuning.dataset.shown === text) return;
    this.tuning.dataset.shown = text;
    show(this.tuning, tuningText(tuning));
  }

  #detail(details) {
    const { settings } = details;
    this.tuning = el("div");
    this.#showTuning(details.tuning);
    const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
    const tensor = (t) =>
      el(
        "div",
        { class: "mono" },
        `${t.name}: ${t.datatype.toLowerCase()}[${t.shape ? t.shape.join(", ") : "?"}]`,
      );
    const operators = Object.entries(details.operators).sort((a, b) => b[1] - a[1]);
    show(
      this.detail,
      el(
        "section",
        { class: "panel", "aria-label": `Settings of ${details.name}` },
        el(
          "div",
          { class: "bar" },
          el("h2", {}, details.name),
          classTag(settings.class),
          el("div", { class: "end" }, this.#changeButton(details)),
        ),
        el(
          "div",
          { class: "body" },
          this.changing,
          el(
            "dl",
            { class: "pairs" },
            pair("Version", details.version),
            pair("Devices", details.devices.join(", ")),
            pair("Priority", settings.priority),
            pair("SLO", settings.slo_ms ? `${settings.slo_ms} ms` : "none"),
            pair("Deadline", settings.timeout_ms ? `${settings.timeout_ms} ms` : "none"),
            pair("Queue", `${number(settings.queue_capacity)} requests`),
            pair(
              "Batching",
              details.batching.possible
                ? `${settings.batching.policy}, along ${details.batching.symbol}`
                : `none: ${details.batching.reason}`,
            ),
            details.batch_times_us.length
              ? pair(
                  "Measured",
                  details.batch_times_us
                    .map(([rows, us]) => `${rows}: ${time(us * 1e3)}`)
                    .join(", "),
                )
              : [],
            pair("Inputs", details.inputs.map(tensor)),
            pair("Outputs", details.outputs.map(tensor)),
            pair("Weights", `${bytes(details.weight_bytes)}${settings.pinned ? ", pinned" : ""}`),
            pair("Tuning", this.tuning),
            details.warnings.length
              ? pair(
                  "Warnings",
                  el(
                    "ul",
                    { class: "plain" },
                    details.warnings.map((text) => el("li", {}, text)),
                  ),
                )
              : [],
            details.host_steps.length
              ? pair(
                  "On the host",
                  `no kernel of the device: ${details.host_steps
                    .slice(0, LISTED)
                    .map((step) => `${step.operator} (${step.step})`)
                    .join(", ")}${details.host_steps.length > LISTED ? " …" : ""}`,
                )
              : [],
            pair(
              "Steps",
              `${details.steps}: ${operators
                .slice(0, 14)
                .map(([op, count]) => (count > 1 ? `${count} ${op}` : op))
                .join(", ")}${operators.length > 14 ? " …" : ""}`,
            ),
          ),
        ),
      ),
      new StepsPanel(details).node,
      this.#tryPanel(details),
    );
  }
}
