#!/usr/bin/env python3
"""Try real ONNX files of public packages with atoll beside ONNX Runtime.

    python scripts/corpus.py collect                # download packages, unpack their models
    python scripts/corpus.py make                   # quantised and optimised variants, scikit-learn
    python scripts/corpus.py run --no-time          # check, compare, batch; resumes
    python scripts/corpus.py run                    # and time both, in turns; adds times
    python scripts/corpus.py run --only silero --show
    python scripts/corpus.py report                 # evidence/corpus.json and the book's table

No file of a model is part of the repository: scripts/modelcorpus/packages.tsv names packages and
versions, evidence/corpus_files.tsv the files in them by hash. A third of the files, drawn by hash,
is unseen: who changes atoll looks at their counts only. No code of a package runs.

Needs numpy, onnx and onnxruntime; scikit-learn and skl2onnx for its pipelines; npm for packages
of npm. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

try:
    import onnx
    import onnxruntime

    from modelcorpus import archive, report, trial, variants
except ImportError as error:
    sys.exit(f"{error.name} is missing; run: pip install numpy onnx onnxruntime")

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = REPOSITORY / "scripts" / "modelcorpus" / "packages.tsv"
RULES = REPOSITORY / "scripts" / "modelcorpus" / "inputs.json"
FILES = REPOSITORY / "evidence" / "corpus_files.tsv"
EVIDENCE = REPOSITORY / "evidence" / "corpus.json"
# Unseen files whose failures were looked into: the beginnings of their hashes. They count as seen.
LOOKED_AT = {"7bff1d494a36a01a", "21e662b00e8bf6d0", "10430a03235e3e03", "6decf1aa6f236a04"}
VARIANTS_PER_FILE = 2
MAKE_SECONDS = 180


@dataclass(frozen=True)
class File:
    """One file of the corpus: where it comes from and what it contains."""

    sha256: str
    part: str
    registry: str
    package: str
    version: str
    path: str
    bytes: int

    @property
    def label(self) -> str:
        return f"{self.registry}:{self.package}:{self.path}"


def part_of(digest: str) -> str:
    """One third of all contents is unseen, unless it was looked at."""
    unseen = int(digest[:8], 16) % 3 == 0 and digest[:16] not in LOOKED_AT
    return "unseen" if unseen else "seen"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_files() -> list[File]:
    if not FILES.exists():
        return []
    with FILES.open(newline="") as opened:
        rows = list(csv.DictReader(opened, delimiter="\t"))
    return [File(**(row | {"bytes": int(row["bytes"])})) for row in rows]


def write_files(files: list[File]) -> None:
    """One row for each content, in the order of where they come from."""
    unique: dict[str, File] = {}
    for file in sorted(files, key=lambda file: file.label):
        unique.setdefault(file.sha256, file)
    with FILES.open("w", newline="") as opened:
        names = [field.name for field in fields(File)]
        writer = csv.DictWriter(opened, names, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(file) for file in unique.values())
    say(f"{len(unique)} files in {FILES.relative_to(REPOSITORY)}")


def collect(args: argparse.Namespace) -> int:
    with PACKAGES.open(newline="") as opened:
        packages = [archive.Package(**row) for row in csv.DictReader(opened, delimiter="\t")]
    files, failed = [file for file in read_files() if file.registry == "made"], 0
    for number, package in enumerate(packages, 1):
        try:
            path = archive.archive_of(package, args.cache)
            found = archive.unpack(path, args.cache)
        except (archive.PackageError, OSError, EOFError, subprocess.TimeoutExpired) as error:
            failed += 1
            say(f"[{number}/{len(packages)}] {package.name} {package.version}: {error}")
            continue
        for name, digest, size in found:
            origin = (package.registry, package.name, package.version)
            files.append(File(digest, part_of(digest), *origin, name, size))
        say(f"[{number}/{len(packages)}] {package.name} {package.version}: {len(found)} files")
    write_files(files)
    return 1 if failed else 0


def tool(arguments: list[str], seconds: int) -> str | None:
    """Runs modelcorpus.variants in a process of its own; returns why it failed."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "scripts")}
    command = [sys.executable, "-W", "ignore", "-m", "modelcorpus.variants", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"longer than {seconds} s"
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["ended"])[-1]


def keep(scratch: Path, kind: str, version: str, source: str, cache: Path) -> File:
    """Moves a made file to the folder of its hash."""
    digest, size = variants.digest_of(scratch), scratch.stat().st_size
    folder = cache / "files" / digest
    folder.mkdir(parents=True, exist_ok=True)
    scratch.rename(folder / "model.onnx")
    return File(digest, part_of(digest), "made", kind, version, source, size)


def make(args: argparse.Namespace) -> int:
    """Makes variants that the list or the cache does not have yet."""
    listed = read_files()
    files = [file for file in listed if file.registry != "made"]
    made = [file for file in listed if file.registry == "made"]
    known = {origin(file) for file in made if content(args.cache, file).exists()}
    rules = read_rules()
    for number, file in enumerate(files, 1):
        path = content(args.cache, file)
        if not path.exists() or not variants.wanted(path):
            continue
        say(f"[{number}/{len(files)}] {file.label}")
        for kind in variants.kinds_of(file.sha256, VARIANTS_PER_FILE):
            if (kind, file.sha256) not in known:
                new = make_one(kind, file, path, args.cache, rules_of(file, rules))
                made = replaced(made, new)
                write_files(files + made)
    made = replaced(made, make_pipelines(known, args.cache))
    write_files(files + made)
    return 0


def origin(file: File) -> tuple[str, str]:
    """What a made file is made of, and how."""
    return file.package, file.path


def content(cache: Path, file: File) -> Path:
    return cache / "files" / file.sha256 / "model.onnx"


def replaced(made: list[File], new: list[File]) -> list[File]:
    """A variant that was made again may differ: other versions of the tools write other bytes."""
    again = {origin(file) for file in new}
    for old in made:
        if origin(old) in again and old not in new:
            say(f"  {old.package} of {old.path[:16]} is not what the list has: replaced")
    return [file for file in made if origin(file) not in again] + new


def make_one(kind: str, file: File, path: Path, cache: Path, rules: dict) -> list[File]:
    scratch = cache / "made.onnx"
    scratch.unlink(missing_ok=True)
    arguments = [kind, str(path), str(scratch), file.sha256, json.dumps(rules)]
    failure = tool(arguments, MAKE_SECONDS)
    if failure or not scratch.exists():
        say(f"  {kind}: {(failure or 'no file')[:200]}")
        return []
    version = f"onnxruntime {onnxruntime.__version__}"
    return [keep(scratch, kind, version, file.sha256, cache)]


def make_pipelines(known: set, cache: Path) -> list[File]:
    """Pipelines of scikit-learn, all of them in one process."""
    folder = cache / "pipelines"
    folder.mkdir(exist_ok=True)
    failure = tool(["scikit-learn", "-", str(folder), "-", "{}"], 10 * MAKE_SECONDS)
    if failure:
        say(f"scikit-learn: {failure[:200]}")
        return []
    made = sorted(folder.glob("*.onnx"))
    new = [path for path in made if ("scikit-learn", path.stem) not in known]
    return [keep(path, "scikit-learn", sklearn_versions(), path.stem, cache) for path in new]


def sklearn_versions() -> str:
    import skl2onnx
    import sklearn

    return f"scikit-learn {sklearn.__version__}, skl2onnx {skl2onnx.__version__}"


def read_rules() -> dict:
    return json.loads(RULES.read_text()) if RULES.exists() else {}


def rules_of(file: File, rules: dict) -> dict:
    """What the inputs of a file have to be. A variant follows its source."""
    own = rules.get(file.path) or rules.get(f"{file.package}:{file.path}") or {}
    return {"seed": file.sha256, **own}


def run(args: argparse.Namespace) -> int:
    files = [file for file in read_files() if args.part in ("all", file.part)]
    sources = {file.sha256: file for file in read_files()}
    if args.only:
        files = [f for f in files if args.only in f.label or f.sha256.startswith(args.only)]
    binary = hashlib.sha256(args.atoll.read_bytes()).hexdigest()
    limits = trial.Limits(args.seconds, args.memory_mib, args.threads)
    results = args.cache / "results" / binary[:16]
    results.mkdir(parents=True, exist_ok=True)
    rules, counts = read_rules(), {}
    for number, file in enumerate(files, 1):
        path = content(args.cache, file)
        if not path.exists():
            command = "make" if file.registry == "made" else "collect"
            say(f"{file.label}: not in the cache; run: python scripts/corpus.py {command}")
            return 1
        rule = rules_of(sources.get(file.path, file), rules) | {"seed": file.sha256}
        outcome = cached(results / f"{file.sha256}.json", args, path, rule, limits)
        status = outcome["status"]
        counts[status] = counts.get(status, 0) + 1
        line = f"[{number}/{len(files)}] {file.label[:90]} {status}"
        # Failures of unseen files are counted, not shown.
        if file.part == "seen" or args.show:
            line += f" {report.why(outcome)}"
        say(line)
    say(json.dumps(counts))
    return 0


def cached(target: Path, args, path: Path, rules: dict, limits: trial.Limits) -> dict:
    if target.exists() and not args.again:
        known = json.loads(target.read_text())
        timed = known["status"] == "accepted" and known.get("compared")
        if not args.no_time and timed and "time" not in known:
            sizes = known["sizes"]
            known["time"] = trial.time_known(args.atoll.resolve(), path, rules, sizes, limits)
            target.write_text(json.dumps(known))
        return known
    start = time.monotonic()
    outcome = trial.try_file(args.atoll.resolve(), path, rules, limits, not args.no_time)
    outcome["seconds"] = round(time.monotonic() - start, 1)
    target.write_text(json.dumps(outcome))
    return outcome


def write_report(args: argparse.Namespace) -> int:
    binary = hashlib.sha256(args.atoll.read_bytes()).hexdigest()
    folder = args.cache / "results" / binary[:16]
    rows = []
    for file in read_files():
        target = folder / f"{file.sha256}.json"
        if target.exists():
            rows.append(asdict(file) | json.loads(target.read_text()))
    about = {
        "atoll_sha256": binary,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "listed": len(read_files()),
        "tried": len(rows),
    }
    summary = report.summary(rows)
    text = json.dumps({"about": about, "summary": summary, "files": rows}, indent=1)
    if not args.dry:
        EVIDENCE.write_text(text + "\n")
        report.write_page(REPOSITORY, about, summary, rows)
    print(json.dumps(summary, indent=1))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("ATOLL_BIN", str(REPOSITORY / "target" / "release" / "atoll"))
    cache = os.environ.get("ATOLL_CORPUS", str(Path.home() / ".cache" / "atoll-corpus"))
    parser.add_argument("command", choices=["collect", "make", "run", "report"])
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(cache),
        help="folder for packages, files and results (default: $ATOLL_CORPUS or ~/.cache/...)",
    )
    parser.add_argument(
        "--atoll",
        type=Path,
        default=Path(default),
        help="the binary (default: $ATOLL_BIN or target/release/atoll)",
    )
    parser.add_argument("--part", choices=["seen", "unseen", "all"], default="all")
    parser.add_argument("--only", metavar="TEXT", help="files whose origin has this, or a hash")
    parser.add_argument("--show", action="store_true", help="say why unseen files fail, too")
    parser.add_argument("--again", action="store_true", help="try again what is in the cache")
    parser.add_argument("--no-time", action="store_true", help="compare only")
    parser.add_argument("--threads", type=int, default=2, help="threads of both (default: 2)")
    parser.add_argument("--seconds", type=int, default=120, help="limit of one process")
    parser.add_argument("--memory-mib", type=int, default=8192, help="limit of one process")
    parser.add_argument("--dry", action="store_true", help="report: print, write nothing")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    if args.command in ("run", "report") and not args.atoll.exists():
        raise SystemExit(f"{args.atoll} is missing; build it with: cargo build --release")
    commands = {"collect": collect, "make": make, "run": run, "report": write_report}
    return commands[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
