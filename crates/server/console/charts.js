// Sparklines, and quantiles of counted times.

import { svg } from "./dom.js";

/** A line of at most `values.length` points, and a thin one below it; missing values are gaps. */
export class Spark {
  constructor(label, width = 120, height = 26) {
    this.width = width;
    this.height = height;
    this.area = svg("path", { fill: "currentColor", opacity: 0.16 });
    this.line = svg("path", { fill: "none", stroke: "currentColor", "stroke-width": 1.4 });
    this.low = svg("path", { fill: "none", stroke: "currentColor", "stroke-dasharray": "2 1" });
    this.node = svg(
      "svg",
      {
        class: "spark",
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        "aria-label": label,
      },
      this.area,
      this.line,
      this.low,
    );
  }

  update(values, most = 0, low = []) {
    const high = Math.max(most, ...values.filter(Number.isFinite)) || 1;
    const { line, area } = this.#paths(values, high);
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    this.low.setAttribute("d", this.#paths(low, high).line);
  }

  #paths(values, high) {
    const step = this.width / Math.max(values.length - 1, 1);
    let line = "";
    let area = "";
    let from = -1;
    values.forEach((value, index) => {
      if (!Number.isFinite(value)) {
        if (from >= 0) area += `L${((index - 1) * step).toFixed(1)} ${this.height}Z`;
        from = -1;
        return;
      }
      const x = (index * step).toFixed(1);
      const y = (this.height - 2 - (value / high) * (this.height - 4)).toFixed(1);
      line += `${from < 0 ? "M" : "L"}${x} ${y}`;
      area += from < 0 ? `M${x} ${this.height}L${x} ${y}` : `L${x} ${y}`;
      if (from < 0) from = index;
    });
    if (from >= 0) area += `L${this.width} ${this.height}Z`;
    return { line, area };
  }
}

/** Adds counts by bucket, `[[bucket, count], ...]`, to a map. */
export function addCounts(map, counts) {
  for (const [bucket, count] of counts) map.set(bucket, (map.get(bucket) || 0) + count);
}

/** The time in nanoseconds that `share` of the counts do not exceed. */
export function quantile(map, share) {
  const buckets = [...map.keys()].sort((a, b) => a - b);
  const total = buckets.reduce((sum, bucket) => sum + map.get(bucket), 0);
  if (!total) return NaN;
  let seen = 0;
  for (const bucket of buckets) {
    seen += map.get(bucket);
    // The middle of a bucket, which is an eighth of an octave wide.
    if (seen >= share * total) return 2 ** ((bucket + 0.5) / 8) * 1000;
  }
  return NaN;
}
