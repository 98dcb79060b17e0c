"""Joins a run's files into one record and prints the tables of the kernels' README.

    report.py RUN_DIR EVIDENCE.json KERNELS_DIR COMMAND

RUN_DIR holds bench.json, torch.json, design.json and device.txt as run.sh leaves them.
"""

import collections
import datetime
import hashlib
import json
import pathlib
import sys

LAUNCH_FLOOR_US = 1.6  # a dependent step of 132 blocks that only loads and stores, launched programmatically


def load(folder, name):
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.cuh"))}


def network_table(bench, torch):
    theirs = {(n["net"], n["batch"]): n["torch_us"] for n in torch.get("networks", [])}
    print("| network | batch | steps | layers alone | graph | graph + PDL | no clusters, PDL | one launch | PyTorch graph | ratio |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for n in bench["networks"]:
        best = min(n["graph_us"], n["pdl_us"])
        mega = min((m for m in (n["mega1_us"], n["mega2_us"]) if m > 0), default=None)
        other = theirs.get((n["net"], n["batch"]))
        print(
            f"| {n['net']} | {n['batch']} | {n['steps']} | {n['layer_sum_us']:.0f} | {n['graph_us']:.0f} | {n['pdl_us']:.0f} "
            f"| {n['plain_pdl_us']:.0f} | {f'{mega:.0f}' if mega else '-'} | {f'{other:.0f}' if other else '-'} "
            f"| {f'{best / other:.2f}' if other else '-'} |"
        )


def layer_table(bench, torch, net, batch):
    theirs = {layer["key"]: layer for layer in torch.get("layers", [])}
    print(f"\n{net}, batch {batch}\n")
    print("| layer | times | variant | us | TFLOP/s | GB/s | of the limit | PyTorch conv | + its epilogue |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layer in bench["layers"]:
        if (layer["net"], layer["batch"]) != (net, batch):
            continue
        other = theirs.get(layer["key"])
        limit = max(layer["floor_us"], LAUNCH_FLOOR_US)
        shape = layer["key"].split(" ", 2)[2] if layer["key"].startswith("conv") else layer["key"].replace(f" b{batch}", "")
        print(
            f"| {layer['name']} {shape} | {layer['count']} | {layer['best']} | {layer['us']:.1f} | {layer['tflops']:.0f} "
            f"| {layer['gbs']:.0f} | {limit / layer['us']:.0%} | {other['torch_bare_us']:.1f} | {other['torch_fused_us']:.1f} |"
            if other
            else f"| {layer['name']} {shape} | {layer['count']} | {layer['best']} | {layer['us']:.1f} | {layer['tflops']:.0f} "
            f"| {layer['gbs']:.0f} | {limit / layer['us']:.0%} | - | - |"
        )


def winners(bench):
    """How many convolutions each variant wins, by batch."""
    print("\n| tile | batch 1 | batch 8 | batch 32 |\n|---|---|---|---|")
    count = collections.defaultdict(lambda: collections.Counter())
    for layer in bench["layers"]:
        if layer["kind"] == 0:
            how = layer["best"].split("/")
            count[how[0] + (" cluster" if "/c" in layer["best"] else " workspace" if "/w" in layer["best"] else "")][layer["batch"]] += layer["count"]
    for name, by in sorted(count.items(), key=lambda item: -sum(item[1].values())):
        print(f"| {name} | {by[1] or ''} | {by[8] or ''} | {by[32] or ''} |")


def main():
    folder, evidence, kernels = (pathlib.Path(a) for a in sys.argv[1:4])
    bench, torch, design = load(folder, "bench.json"), load(folder, "torch.json"), load(folder, "design.json")
    for layer in bench["layers"]:
        layer.pop("all", None)
    record = {
        "what": "tile kernels: correctness, time per layer and per network, launch methods, best-effort cost, eviction",
        "date": datetime.date.today().isoformat(),
        "device": (folder / "device.txt").read_text().strip(),
        "command": sys.argv[4],
        "sha256": hashes(kernels),
        "harness_sha256": hashes(pathlib.Path(__file__).parent),
        "design": design,
        "bench": bench,
        "torch": torch,
    }
    evidence.write_text(json.dumps(record, indent=None, separators=(",", ":")).replace("},{", "},\n{") + "\n")
    network_table(bench, torch)
    winners(bench)
    for net, batch in (("resnet50", 1), ("vgg19", 1), ("resnet50", 32), ("vgg19", 32)):
        layer_table(bench, torch, net, batch)


main()
