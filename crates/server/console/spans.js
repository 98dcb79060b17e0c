// The latest spans in lanes, and how they are found and drawn quickly.

export const NUMBERS = 14;
export const REQUEST = 0;
export const RUN = 1;
export const LOAD = 2;
export const EVICTION = 3;
export const COPY = 4;

// Fields of a span. The last two are the same for every kind.
export const F = {
  kind: 0,
  device: 1,
  model: 2,
  class: 3,
  // Requests.
  number: 4,
  job: 5,
  rows: 6,
  priority: 7,
  deadline: 8,
  end: 9,
  staged: 10,
  started: 11,
  // Runs.
  runJob: 4,
  queue: 5,
  firstStep: 7,
  nextStep: 8,
  preemptAsked: 10,
  preemptedFor: 11,
  // Loads.
  bytes: 4,
  urgent: 5,
  // Copies, with bytes as loads.
  copyKind: 5,
  copyJob: 6,
  from: 12,
  to: 13,
};

/** Rows in which the requests of one model and class are drawn. */
const REQUEST_ROWS = 6;
/** Rows in which the copies of a device are drawn: clients copy at the same time. */
const COPY_ROWS = 3;

/** A row of the timeline: spans that do not overlap, in the order of their ends. */
class Lane {
  constructor(key, label, kind, device, group) {
    Object.assign(this, { key, label, kind, device, group });
    this.slots = [];
    this.head = 0;
    this.last = -Infinity;
  }

  push(slot) {
    this.slots.push(slot);
  }

  /** Drops the oldest span. */
  shift() {
    this.head += 1;
    if (this.head > 4096 && this.head * 2 > this.slots.length) {
      this.slots = this.slots.slice(this.head);
      this.head = 0;
    }
  }

  get length() {
    return this.slots.length - this.head;
  }
}

/** The latest spans: a ring that drops the oldest. */
export class SpanStore {
  constructor(capacity = 150000) {
    this.capacity = capacity;
    this.data = new Float64Array(0);
    this.clear();
  }

  clear() {
    this.count = 0;
    this.lanes = new Map();
    this.order = null;
    this.laneOf = [];
    this.lost = 0;
    this.newest = 0;
  }

  get size() {
    return Math.min(this.count, this.capacity);
  }

  /** The oldest time that is kept. */
  get oldest() {
    if (!this.count) return 0;
    const slot = this.count > this.capacity ? this.count % this.capacity : 0;
    return this.data[slot * NUMBERS + F.to];
  }

  at(slot, field) {
    return this.data[slot * NUMBERS + field];
  }

  add(numbers) {
    const count = Math.floor(numbers.length / NUMBERS);
    for (let index = 0; index < count; index += 1) this.#push(numbers, index * NUMBERS);
  }

  #push(numbers, at) {
    const slot = this.count % this.capacity;
    if (this.count >= this.capacity) {
      const lane = this.laneOf[slot];
      lane.shift();
      if (!lane.length) {
        this.lanes.delete(lane.key);
        this.order = null;
      }
    }
    const needed = (slot + 1) * NUMBERS;
    if (this.data.length < needed) {
      const grown = new Float64Array(
        Math.min(Math.max(needed * 2, 1 << 16), this.capacity * NUMBERS),
      );
      grown.set(this.data);
      this.data = grown;
    }
    for (let field = 0; field < NUMBERS; field += 1)
      this.data[slot * NUMBERS + field] = numbers[at + field];
    const lane = this.#laneFor(slot);
    lane.push(slot);
    lane.last = Math.max(lane.last, this.at(slot, F.to));
    this.laneOf[slot] = lane;
    this.newest = Math.max(this.newest, this.at(slot, F.to));
    this.count += 1;
  }

  #lane(key, label, kind, device, group) {
    let lane = this.lanes.get(key);
    if (!lane) {
      lane = new Lane(key, label, kind, device, group);
      this.lanes.set(key, lane);
      this.order = null;
    }
    return lane;
  }

  #laneFor(slot) {
    const device = this.at(slot, F.device);
    const kind = this.at(slot, F.kind);
    if (kind === RUN) {
      const queue = this.at(slot, F.queue);
      return this.#lane(
        `${device}/1/${String(queue).padStart(4, "0")}`,
        `queue ${queue}`,
        RUN,
        device,
        "",
      );
    }
    if (kind === COPY) {
      const row = this.#row(`${device}/2c`, COPY_ROWS, this.at(slot, F.from));
      return this.#lane(`${device}/2c/${row}`, row ? "" : "copies", COPY, device, "");
    }
    if (kind !== REQUEST) return this.#lane(`${device}/2`, "weights", LOAD, device, "");
    const [model, kindOf] = [this.at(slot, F.model), this.at(slot, F.class)];
    const group = `${device}/3/${kindOf}/${String(model).padStart(8, "0")}`;
    const row = this.#row(group, REQUEST_ROWS, this.at(slot, F.from));
    return this.#lane(`${group}/${row}`, "", REQUEST, device, group);
  }

  /** The first row of a group that is free at `from`; the last one takes what overlaps more. */
  #row(group, rows, from) {
    let row = 0;
    while (row < rows - 1 && (this.lanes.get(`${group}/${row}`)?.last ?? -Infinity) > from)
      row += 1;
    return row;
  }

  /** Lanes from top to bottom. */
  ordered() {
    this.order ||= [...this.lanes.values()].sort((a, b) => (a.key < b.key ? -1 : 1));
    return this.order;
  }

  /** Position in `lane.slots` of the first span that ends at `time` or later. */
  first(lane, time) {
    let low = lane.head;
    let high = lane.slots.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.at(lane.slots[middle], F.to) < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The span of a lane at a time, or within `slack` of it; -1 without one. */
  find(lane, time, slack) {
    let best = -1;
    let distance = Infinity;
    for (let at = this.first(lane, time - slack); at < lane.slots.length; at += 1) {
      const slot = lane.slots[at];
      const [from, to] = [this.at(slot, F.from), this.at(slot, F.to)];
      if (from > time + slack && lane.kind === RUN) break;
      const away = time < from ? from - time : time > to ? time - to : 0;
      if (away < distance && away <= slack) {
        best = slot;
        distance = away;
      }
      if (from > time + slack * 50 && from > time + 1e9) break;
    }
    return best;
  }

  /** Calls `each(slot)` for every span. */
  forEach(each) {
    for (let index = 0; index < this.size; index += 1) each(index);
  }
}

/** Spans that wait to be added: the latest ones, and how many were dropped for them. */
export class HeldSpans {
  constructor(capacity) {
    this.capacity = capacity;
    this.clear();
  }

  clear() {
    this.chunks = [];
    this.size = 0;
    this.dropped = 0;
  }

  add(numbers) {
    this.chunks.push(numbers);
    this.size += numbers.length / NUMBERS;
    while (this.size > this.capacity && this.chunks.length) {
      const count = this.chunks.shift().length / NUMBERS;
      this.size -= count;
      this.dropped += count;
    }
  }
}
