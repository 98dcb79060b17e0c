// The form that changes settings of a model while it is served.

import { patchJson } from "./api.js";
import { el } from "./dom.js";

export const BATCHING_POLICIES = [
  "auto",
  "elastic",
  "adaptive",
  "window",
  "early_drop",
  "lazy_drop",
  "deferred",
  "none",
];

/** A field: how it is shown, and its value as the server takes it. */
class Field {
  constructor(path, label, node, read) {
    Object.assign(this, { path, label, node, read });
    this.before = this.value;
  }

  get value() {
    return JSON.stringify(this.read(this.node));
  }

  get changed() {
    return this.value !== this.before;
  }
}

const numberField = (path, label, value, attributes) => {
  const node = el("input", { type: "number", step: 1, min: 1, value: value ?? "", ...attributes });
  return new Field(path, label, node, () => (node.value === "" ? null : Number(node.value)));
};

const choiceField = (path, label, value, choices) => {
  const option = ([name, text]) => el("option", { value: name, selected: name === value }, text);
  return new Field(path, label, el("select", {}, choices.map(option)), (node) => node.value);
};

function fieldsOf(settings, batched) {
  const { batching } = settings;
  const fields = [
    choiceField("class", "Class", settings.class, [
      ["rt", "real time"],
      ["be", "best effort"],
    ]),
    numberField("priority", "Priority, 1 is the highest", settings.priority, { required: true }),
    numberField("slo_ms", "SLO in milliseconds", settings.slo_ms, { placeholder: "none" }),
    numberField("timeout_ms", "Deadline in milliseconds", settings.timeout_ms, {
      placeholder: "none",
    }),
    numberField("queue_capacity", "Requests that may wait", settings.queue_capacity, {
      required: true,
    }),
  ];
  if (!batched) return fields;
  return [
    ...fields,
    choiceField(
      "batching.policy",
      "Batching",
      batching.policy,
      BATCHING_POLICIES.map((name) => [name, name.replace("_", " ")]),
    ),
    numberField("batching.max_batch", "Largest batch, 0 is the default", batching.max_batch, {
      required: true,
      min: 0,
      max: 1024,
    }),
    numberField("batching.max_wait_us", "Longest wait for others in µs", batching.max_wait_us, {
      required: true,
      min: 0,
    }),
  ];
}

/** A change as the server takes it: `batching.policy` is a part of `batching`. */
function changeOf(fields) {
  const change = {};
  for (const field of fields.filter((one) => one.changed)) {
    const [name, part] = field.path.split(".");
    const value = JSON.parse(field.value);
    if (part) change[name] = { ...change[name], [part]: value };
    else change[name] = value;
  }
  return change;
}

export class SettingsForm {
  /** `changed(reply)` is called when the server has changed them. */
  constructor(details, changed) {
    const fields = fieldsOf(details.settings, details.batching.possible);
    this.error = el("p", { class: "error", role: "alert" });
    const save = el("button", { class: "primary", type: "submit" }, "Change");
    this.node = el(
      "form",
      {
        class: "body",
        "aria-label": `Change settings of ${details.name}`,
        onsubmit: async (event) => {
          event.preventDefault();
          const change = changeOf(fields);
          this.error.textContent = "";
          if (!Object.keys(change).length) {
            this.error.textContent = "No setting is changed";
            return;
          }
          save.disabled = true;
          try {
            const path = `/v2/atoll/models/${encodeURIComponent(details.name)}`;
            changed(await patchJson(path, change));
          } catch (error) {
            this.error.textContent = error.message;
          } finally {
            save.disabled = false;
          }
        },
      },
      el(
        "div",
        { class: "fields" },
        fields.map((field) => el("label", {}, field.label, field.node)),
      ),
      el(
        "p",
        { class: "note" },
        "Requests that wait or run keep their place; those that follow have the new settings. " +
          "The files of a model repository stay as they are.",
      ),
      this.error,
      el("menu", {}, save),
    );
  }
}
