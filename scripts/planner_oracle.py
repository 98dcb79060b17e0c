"""Compares plans without sharing with the optimum that HiGHS finds.

    python -m venv VENV && VENV/bin/pip install highspy
    cargo run --release -p planner --example planner_instances -- 2000 PROFILES.csv > instances
    VENV/bin/python scripts/planner_oracle.py instances

The integer program is written from the geometry of the GPU alone: GPUs by pattern, and slices by
kind and service. It knows nothing of the planner. Fails if a plan is more than one GPU above the
optimum, above a baseline or illegal, if a bound is above the optimum, or if fewer than 99 % of the
plans are optimal.
"""

import collections
import functools
import json
import sys

import highspy
import numpy

# Seconds for one instance; a run past it counts as unknown and is printed.
TIME_LIMIT_S = 10.0
# Relative error up to which a rate counts as met, as in the planner.
MET = 1e-9


@functools.cache
def patterns(gpcs, memory_slices, slices):
    """Every multiset of slices that fits one GPU and that no slice can be added to."""
    found = set()

    def grow(counts, occupied, used):
        found.add(counts)
        for kind, (size, width, starts) in enumerate(slices):
            for start in starts:
                mask = ((1 << width) - 1) << start
                if used + size <= gpcs and not occupied & mask and start + width <= memory_slices:
                    more = counts[:kind] + (counts[kind] + 1,) + counts[kind + 1 :]
                    grow(more, occupied | mask, used + size)

    grow((0,) * len(slices), 0, 0)
    less = lambda a, b: a != b and all(x <= y for x, y in zip(a, b))
    return [a for a in found if not any(less(a, b) for b in found)]


def optimum(instance, at_most=None):
    """The fewest GPUs, or None if HiGHS does not finish. With `at_most`, any number up to it that
    suffices, or None: without an objective no node is cut off for its rounded bound."""
    slices = tuple((g, m, tuple(s)) for g, m, s in instance["slices"])
    columns = patterns(instance["gpcs"], instance["memory_slices"], slices)
    kinds = len(slices)
    model = highspy.Highs()
    model.silent()
    model.setOptionValue("time_limit", TIME_LIMIT_S)
    # The number of GPUs is whole: a gap below one is none.
    model.setOptionValue("mip_abs_gap", 0.999)
    model.setOptionValue("mip_rel_gap", 0.0)
    model.setOptionValue("mip_feasibility_tolerance", 1e-9)
    model.setOptionValue("primal_feasibility_tolerance", 1e-9)
    gpus = [model.addIntegral(obj=1.0 if at_most is None else 0.0) for _ in columns]
    if at_most is not None:
        model.addConstr(sum(gpus) <= at_most)
    supply = [
        sum(column[kind] * gpu for column, gpu in zip(columns, gpus) if column[kind])
        for kind in range(kinds)
    ]
    takes = [[] for _ in range(kinds)]
    for rate, throughput in zip(instance["rates"], instance["throughput"]):
        terms = []
        for kind, per_slice in enumerate(throughput):
            if per_slice > 0:
                count = model.addIntegral()
                takes[kind].append(count)
                # Scaled by the rate, so that tolerances are relative.
                terms.append(per_slice / rate * count)
        model.addConstr(sum(terms) >= 1.0 - MET)
    for kind in range(kinds):
        if takes[kind]:
            model.addConstr(supply[kind] - sum(takes[kind]) >= 0)
    model.minimize()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return round(sum(model.val(gpu) for gpu in gpus))


def main():
    with open(sys.argv[1]) as file:
        instances = [json.loads(line) for line in file]
    compared, unknown, optimal, bad = 0, 0, 0, 0
    by_shape = collections.defaultdict(lambda: [0, 0])
    proven, sizes, seconds = 0, [], []
    for instance in instances:
        best = optimum(instance)
        gpus, seed = instance["gpus"], instance["seed"]
        if best is not None and gpus < best:
            # HiGHS cut off the optimum, whose bound is a whole number but for rounding.
            repeated = optimum(instance, at_most=gpus)
            print(f"seed {seed}: HiGHS found {best}, and {repeated} when asked again", flush=True)
            best = best if repeated is None else repeated
        seconds.append(instance["seconds"])
        if best is None:
            unknown += 1
            print(f"seed {seed}: HiGHS did not finish", flush=True)
            continue
        compared += 1
        sizes.append(best)
        optimal += gpus == best
        proven += gpus == instance["lower_bound"]
        by_shape[instance["shape"]][0] += gpus == best
        by_shape[instance["shape"]][1] += 1
        wrong = []
        if not instance["legal"]:
            wrong.append("the checker rejects the plan")
        if gpus < best:
            wrong.append("fewer gpus than the optimum")
        if gpus > best + 1:
            wrong.append("more than one gpu above the optimum")
        if instance["bound"] > best + 1e-6:
            wrong.append("the bound is above the optimum")
        for name, other in instance["baselines"].items():
            # The last two divide a GPU without the geometry of MIG.
            if other < gpus and name not in ("gpulet-like", "igniter-like"):
                wrong.append(f"{name} has {other}")
        bad += bool(wrong)
        if wrong or gpus != best:
            services = len(instance["rates"])
            shape = instance["shape"]
            print(
                f"seed {seed} ({shape}, {services} services): {gpus} gpus, optimum {best}, "
                f"bound {instance['bound']:.3f} {'; '.join(wrong)}",
                flush=True,
            )
    print(f"{compared} compared ({unknown} unknown), optima {min(sizes)} to {max(sizes)} gpus")
    print(f"{optimal} optimal ({100 * optimal / compared:.2f} %), {proven} proven, {bad} wrong")
    for shape, (best, count) in sorted(by_shape.items()):
        print(f"  {shape}: {best} of {count} optimal")
    print(f"seconds of a plan: median {numpy.median(seconds):.4f}, most {max(seconds):.4f}")
    if bad or optimal < 0.99 * compared:
        sys.exit(1)


main()
