// A form that tries a model: draw a digit, send a picture, or paste JSON.

import { postJson, send } from "./api.js";
import { el, number, show, time } from "./dom.js";

const CLASSES = 5;
const DRAW_SIZE = 224;
/** How much wider a drawing may become. */
const WIDEN = 1.3;
const MAX_JSON_VALUES = 4096;
const INTEGERS = /^(u?int|bool)/i;

/** The size of a dimension: symbols are one. */
const size = (dimension) => (/^\d+$/.test(dimension) ? Number(dimension) : 1);

/** Channels, height and width of an input that takes pictures; `null` for others. */
export function pictureOf(details) {
  if (details.inputs.length !== 1) return null;
  const [input] = details.inputs;
  const shape = (input.shape || []).map((dimension) => (dimension === "-1" ? "1" : dimension));
  if (shape.length !== 4 || INTEGERS.test(input.datatype)) return null;
  const [, a, b, c] = shape.map(size);
  const known = (n) => n > 1 && n <= 1024;
  if ((a === 1 || a === 3) && known(b) && known(c))
    return { channels: a, height: b, width: c, first: true };
  if ((c === 1 || c === 3) && known(a) && known(b))
    return { channels: c, height: a, width: b, first: false };
  return null;
}

/** What was drawn, cut to its bounds and scaled to the whole height, as rows of 0..1. */
export function shrink(pixels, side, height, width) {
  let [left, right, top, bottom] = [side, -1, side, -1];
  for (let y = 0; y < side; y += 1) {
    for (let x = 0; x < side; x += 1) {
      if (pixels[(y * side + x) * 4] < 32) continue;
      left = Math.min(left, x);
      right = Math.max(right, x);
      top = Math.min(top, y);
      bottom = Math.max(bottom, y);
    }
  }
  const out = new Float32Array(height * width);
  if (right < 0) return out;
  const [tall, wide] = [bottom - top + 1, right - left + 1];
  const scale = Math.max(tall / height, wide / width);
  // Written digits are narrower than those that models learn, which fill their square.
  const scaleX = Math.max(scale / WIDEN, wide / width);
  const originX = (left + right + 1) / 2 - (width * scaleX) / 2;
  const originY = (top + bottom + 1) / 2 - (height * scale) / 2;
  const SAMPLES = 8;
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      let sum = 0;
      for (let i = 0; i < SAMPLES; i += 1) {
        for (let j = 0; j < SAMPLES; j += 1) {
          const px = Math.floor(originX + (x + (i + 0.5) / SAMPLES) * scaleX);
          const py = Math.floor(originY + (y + (j + 0.5) / SAMPLES) * scale);
          if (px >= 0 && py >= 0 && px < side && py < side)
            sum += pixels[(py * side + px) * 4] / 255;
        }
      }
      out[y * width + x] = sum / (SAMPLES * SAMPLES);
    }
  }
  return out;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`this is not JSON: ${error.message}`);
  }
}

export class TryForm {
  constructor(details) {
    this.details = details;
    this.result = el("div", { class: "body", role: "status" });
    this.error = el("p", { class: "error", role: "alert" });
    this.pane = el("div");
    const picture = pictureOf(details);
    const ways = [];
    if (picture) {
      ways.push(["Draw", () => this.#draw(picture)]);
      ways.push(["Picture", () => this.#picture()]);
    }
    ways.push(["JSON", () => this.#json()]);
    this.buttons = ways.map(([name, make]) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": "false",
          onclick: (event) => this.#way(event.currentTarget, make),
        },
        name,
      ),
    );
    this.node = el(
      "div",
      { class: "grid" },
      el(
        "div",
        { class: "body" },
        el("div", { class: "tabs", role: "group", "aria-label": "Kind of input" }, this.buttons),
        this.pane,
        this.error,
      ),
      this.result,
    );
    this.#way(this.buttons[0], ways[0][1]);
  }

  #way(button, make) {
    for (const other of this.buttons) other.setAttribute("aria-pressed", String(other === button));
    show(this.result);
    this.error.textContent = "";
    show(this.pane, make());
  }

  async #run(work) {
    this.error.textContent = "";
    const began = performance.now();
    try {
      const shown = await work();
      const took = (performance.now() - began) * 1e6;
      show(
        this.result,
        shown,
        el("p", { class: "dim" }, `${time(took)} from click to answer, network and page included`),
      );
    } catch (error) {
      show(this.result);
      this.error.textContent = error.message;
    }
  }

  #infer(body) {
    return postJson(`/v2/models/${encodeURIComponent(this.details.name)}/infer`, body);
  }

  // ---- draw

  #draw({ channels, height, width, first }) {
    const canvas = el("canvas", {
      class: "draw",
      width: DRAW_SIZE,
      height: DRAW_SIZE,
      tabindex: 0,
      "aria-label":
        "Drawing area, white on black, for a pointer. Picture and JSON work without one.",
    });
    const c = canvas.getContext("2d", { willReadFrequently: true });
    const clear = () => {
      c.fillStyle = "#000";
      c.fillRect(0, 0, DRAW_SIZE, DRAW_SIZE);
      show(this.result);
    };
    clear();
    c.strokeStyle = "#fff";
    c.lineWidth = DRAW_SIZE / 6;
    c.lineCap = "round";
    c.lineJoin = "round";
    let last = null;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [
        ((event.clientX - box.left) / box.width) * DRAW_SIZE,
        ((event.clientY - box.top) / box.height) * DRAW_SIZE,
      ];
    };
    const line = (to) => {
      c.beginPath();
      c.moveTo(...last);
      c.lineTo(...to);
      c.stroke();
      last = to;
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      last = at(event);
      line([last[0] + 0.1, last[1]]);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (last) line(at(event));
    });
    const done = () => {
      if (!last) return;
      last = null;
      classify();
    };
    canvas.addEventListener("pointerup", done);
    canvas.addEventListener("pointercancel", done);
    const range = el(
      "select",
      {},
      el("option", { value: 1 }, "0 to 1"),
      el("option", { value: 255 }, "0 to 255"),
    );
    const classify = () =>
      this.#run(async () => {
        const { data } = c.getImageData(0, 0, DRAW_SIZE, DRAW_SIZE);
        const small = shrink(data, DRAW_SIZE, height, width);
        const most = Number(range.value);
        const values = [];
        const pixels = Array.from(small, (value) => value * most);
        if (first) for (let channel = 0; channel < channels; channel += 1) values.push(...pixels);
        else
          for (const pixel of pixels)
            for (let channel = 0; channel < channels; channel += 1) values.push(pixel);
        const [input] = this.details.inputs;
        const [output] = this.details.outputs;
        const shape = first ? [1, channels, height, width] : [1, height, width, channels];
        const answer = await this.#infer({
          inputs: [
            { name: input.name, datatype: input.datatype.toUpperCase(), shape, data: values },
          ],
          outputs: [{ name: output.name, parameters: { classification: CLASSES } }],
        });
        return this.#scores(
          answer.outputs[0].data.map((text) => {
            const [score, index, ...label] = text.split(":");
            return { score: Number(score), label: label.join(":") || `class ${index}` };
          }),
        );
      });
    return el(
      "div",
      { class: "try" },
      canvas,
      el(
        "div",
        { class: "body" },
        el("label", {}, "Values of a pixel", range),
        el(
          "p",
          { class: "note" },
          `It is cut to what you drew and scaled to ${width} × ${height}.`,
        ),
        el("div", { class: "head" }, el("button", { type: "button", onclick: clear }, "Clear")),
      ),
    );
  }

  /** The best classes. Scores that are no probabilities are made into such. */
  #scores(classes) {
    const sum = classes.reduce((sum, { score }) => sum + score, 0);
    const plain = classes.every(({ score }) => score >= 0 && score <= 1.001) && sum <= 1.01;
    const top = Math.max(...classes.map(({ score }) => score));
    const weights = classes.map(({ score }) => (plain ? score : Math.exp(score - top)));
    const total = plain ? 1 : weights.reduce((sum, weight) => sum + weight, 0);
    return el(
      "ol",
      { class: "scores", "aria-label": "Best classes" },
      classes.map(({ label }, index) => {
        const share = weights[index] / total;
        const bar = el("i", { class: "fill-rt" });
        bar.style.width = `${share * 100}%`;
        return el(
          "li",
          {},
          el("span", { class: "label" }, label),
          el("div", { class: "meter" }, bar),
          el("span", { class: "number" }, `${(share * 100).toFixed(1)} %`),
        );
      }),
    );
  }

  // ---- picture

  #picture() {
    const image = el("img", { alt: "The chosen picture", hidden: true, width: 160 });
    const take = (file) => {
      if (!file) return;
      URL.revokeObjectURL(image.src);
      image.src = URL.createObjectURL(file);
      image.hidden = false;
      this.#run(async () => {
        const data = new FormData();
        data.set("name", this.details.name);
        data.set("k", String(CLASSES));
        data.set("image", file);
        const response = await send("/v2/atoll/classify", { method: "POST", body: data });
        const { predictions } = await response.json();
        return this.#scores(predictions);
      });
    };
    const input = el("input", {
      type: "file",
      accept: "image/png,image/jpeg",
      "aria-label": "Picture, PNG or JPEG",
      onchange: () => take(input.files[0]),
    });
    const drop = el(
      "div",
      {
        class: "drop",
        ondragover: (event) => {
          event.preventDefault();
          drop.classList.add("over");
        },
        ondragleave: () => drop.classList.remove("over"),
        ondrop: (event) => {
          event.preventDefault();
          drop.classList.remove("over");
          take(event.dataTransfer.files[0]);
        },
      },
      el("span", {}, "Drop a PNG or JPEG, or"),
      input,
      image,
    );
    return drop;
  }

  // ---- JSON

  #template() {
    const inputs = this.details.inputs.map((input) => {
      const shape = (input.shape || ["1"]).map(size);
      const count = shape.reduce((product, n) => product * n, 1);
      const data = count <= MAX_JSON_VALUES ? Array(count).fill(0) : [];
      return { name: input.name, datatype: input.datatype.toUpperCase(), shape, data };
    });
    return { inputs };
  }

  #json() {
    const text = el("textarea", { rows: 12, spellcheck: "false", "aria-label": "Request as JSON" });
    text.value = JSON.stringify(
      this.#template(),
      (key, value) => (key === "inputs" ? value : value),
      1,
    ).replace(/\n\s+(-?[\d.e]+,?)(?=\n)/g, " $1");
    const kind = el(
      "select",
      {},
      el("option", { value: "" }, "as the model's settings say"),
      el("option", { value: "rt" }, "real time"),
      el("option", { value: "be" }, "best effort"),
    );
    const go = () =>
      this.#run(async () => {
        const body = parse(text.value);
        if (kind.value) body.parameters = { ...body.parameters, atoll_class: kind.value };
        const answer = await this.#infer(body);
        return answer.outputs.map((output) => {
          const shown = output.data
            .slice(0, 200)
            .map((value) => (typeof value === "number" ? Number(value.toPrecision(6)) : value));
          const more = output.data.length - shown.length;
          return [
            el("h3", {}, `${output.name}: ${output.datatype}[${output.shape.join(", ")}]`),
            el(
              "pre",
              { tabindex: 0 },
              shown.join("  ") + (more > 0 ? `  … ${number(more)} more` : ""),
            ),
          ];
        });
      });
    return el(
      "div",
      { class: "body" },
      text,
      el("div", { class: "fields" }, el("label", {}, "Class", kind)),
      el("menu", {}, el("button", { class: "primary", type: "button", onclick: go }, "Send")),
    );
  }
}
