// What the page says of a run, a copy, a load, or a request that the server no longer records.

import { bytes, classTag, el, time } from "./dom.js";
import { COPY, EVICTION, F, LOAD, REQUEST, RUN } from "./spans.js";

const ENDS = [
  "done",
  "failed",
  "deadline passed",
  "cancelled",
  "queue full",
  "not loaded",
  "shutting down",
];
const RUN_ENDS = ["done", "preempted", "failed"];
const COPIES = [
  "Staging of inputs",
  "Gathering of a batch",
  "Copy to the device",
  "Copy of outputs",
];
const KINDS = { [REQUEST]: "Request", [RUN]: "Run", [LOAD]: "Load", [EVICTION]: "Eviction" };
/** Requests of a run that are listed. */
const LISTED = 24;

/** What a span is, in a word or three. */
export function kindOf(store, slot) {
  const kind = store.at(slot, F.kind);
  return kind === COPY ? COPIES[store.at(slot, F.copyKind)] || "Copy" : KINDS[kind] || "Span";
}

const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];

/** The slots of the requests that a run computed. */
function requestsOf(store, run) {
  const found = [];
  store.forEach((other) => {
    if (
      store.at(other, F.kind) === REQUEST &&
      store.at(other, F.job) === store.at(run, F.runJob) &&
      store.at(other, F.device) === store.at(run, F.device)
    )
      found.push(other);
  });
  return found;
}

function runDetail({ store, slot, name, select, look }) {
  const s = (field) => store.at(slot, field);
  const requests = requestsOf(store, slot);
  const cause = s(F.preemptedFor) >= 0 ? `for ${name(s(F.preemptedFor))}, ` : "";
  return [
    el(
      "dl",
      { class: "pairs" },
      pair("Took", time(s(F.to) - s(F.from))),
      pair("Job", s(F.runJob)),
      pair("Rows", s(F.rows) || "no batch"),
      pair("Steps", `${s(F.firstStep)} to ${s(F.nextStep)}`),
      pair("End", RUN_ENDS[s(F.end)]),
      s(F.preemptAsked)
        ? pair("Preempted", `${cause}left after ${time(s(F.to) - s(F.preemptAsked))}`)
        : [],
    ),
    requests.length
      ? el("h3", {}, requests.length > 1 ? `Its ${requests.length} requests` : "Its request")
      : null,
    el(
      "div",
      { class: "head" },
      requests
        .slice(0, LISTED)
        .map((other) =>
          el(
            "button",
            { class: "link", onclick: () => select(other) },
            `#${store.at(other, F.number)}`,
          ),
        ),
    ),
    el(
      "div",
      { class: "head" },
      el("button", { onclick: () => look(s(F.from), s(F.to)) }, "Show it"),
    ),
  ];
}

function requestDetail({ store, slot }, problem) {
  const s = (field) => store.at(slot, field);
  return [
    problem ? el("p", { class: "note" }, `${problem}; this is what the page has.`) : null,
    el(
      "dl",
      { class: "pairs" },
      pair("Took", time(s(F.to) - s(F.from))),
      pair("Staging", time(s(F.staged) - s(F.from))),
      pair("Until started", s(F.started) ? time(s(F.started) - s(F.staged)) : "never started"),
      pair("End", ENDS[s(F.end)]),
    ),
  ];
}

function otherDetail({ store, slot }) {
  const s = (field) => store.at(slot, field);
  const kind = s(F.kind);
  return el(
    "dl",
    { class: "pairs" },
    pair("Took", time(s(F.to) - s(F.from))),
    kind === EVICTION ? [] : pair("Size", bytes(s(F.bytes))),
    kind === COPY ? pair("Job", `#${s(F.copyJob)}`) : [],
  );
}

/** Title, tag and content of what is said of the span at `slot`. */
export function detailOf(span, problem) {
  const { store, slot, name } = span;
  const s = (field) => store.at(slot, field);
  const kind = s(F.kind);
  const number = kind === REQUEST ? ` #${s(F.number)}` : "";
  const title = `${kindOf(store, slot)}${number} of ${name(s(F.model))}`;
  const tag = kind === RUN || kind === REQUEST ? classTag(s(F.class) ? "be" : "rt") : null;
  if (kind === RUN) return { title, tag, content: runDetail(span) };
  if (kind === REQUEST) return { title, tag, content: requestDetail(span, problem) };
  return { title, tag, content: otherDetail(span) };
}
