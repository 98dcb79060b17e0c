"""The other commands of the binary."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import termios
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from support import ASSETS, BINARY, STOP_SECONDS

DIGITS = ASSETS / "digits.onnx"


def atoll(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BINARY), *map(str, args)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("command", [[], ["serve"], ["demo"], ["check"], ["run"], ["models"]])
def test_every_command_has_help(command: list[str]) -> None:
    done = atoll(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_version_is_printed() -> None:
    assert atoll("--version").stdout.startswith("atoll ")


@pytest.mark.parametrize("command", [["completions", "bash"], ["sim", "--help"]])
def test_a_closed_pipe_is_no_error(command: list[str]) -> None:
    with subprocess.Popen(
        [BINARY, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert "panicked" not in process.stderr.read()
        assert process.wait(60) == 0


def test_unknown_flag_is_a_usage_error() -> None:
    assert atoll("serve", "--no-such-flag").returncode == 2


def test_check_lists_inputs_and_outputs() -> None:
    done = atoll("check", DIGITS)
    assert done.returncode == 0, done.stderr
    for word in ("image", "logits", "batch"):
        assert word in done.stdout


@pytest.mark.parametrize(("flags", "kind"), [([], "rt"), (["--best-effort"], "be")])
def test_run_reports_latency(flags: list[str], kind: str) -> None:
    done = atoll(
        "run", DIGITS, "--repeat", "5", "--warmup", "1", "--threads", "2", "--json", *flags
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["class"] == kind
    assert 0 < report["latency_us"]["p50"] <= report["latency_us"]["p99"]
    assert report["latency_us"]["mean"] > 0
    times = [step["us"] for step in report["steps"]]
    assert times == sorted(times, reverse=True)
    assert all(step["name"] and step["op"] for step in report["steps"])
    assert sum(step["share"] for step in report["steps"]) == pytest.approx(1, abs=0.05)


def test_run_tells_the_share_of_the_limit() -> None:
    done = atoll("run", DIGITS, "--bind", "batch=64", "--limits", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    limits = report["limits"]
    rates = [cache["gb_per_s"] for cache in limits["caches"]] + [limits["memory_gb_per_s"]]
    assert rates == sorted(rates, reverse=True) and limits["gflops"] > 0
    convs = [step for step in report["steps"] if step["op"] == "Conv"]
    # 4 convolutions: each step says what it has to do, and how long the machine needs at least.
    assert len(convs) == 4
    for step in convs:
        least = step["flops"] / limits["gflops"] / 1e3
        assert step["gflops"] == pytest.approx(step["flops"] / step["us"] / 1e3)
        assert step["share_of_limit"] >= least / step["us"] * 0.999
    text = atoll("run", DIGITS, "--limits")
    assert "GFLOP/s" in text.stdout and "% of its" in text.stdout, text.stdout
    wrong = atoll("profile", DIGITS)
    assert wrong.returncode == 2 and "--limits" in wrong.stderr


@pytest.mark.parametrize("batch", [1, 3])
def test_run_saves_outputs(tmp_path: Path, batch: int) -> None:
    image = np.random.default_rng(0).random((batch, 1, 8, 8), np.float32)
    np.save(tmp_path / "image.npy", image)
    given = ["--input", f"image={tmp_path / 'image.npy'}"]
    done = atoll("run", DIGITS, *given, "--save", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    (wanted,) = onnxruntime.InferenceSession(DIGITS).run(None, {"image": image})
    np.testing.assert_allclose(
        np.load(tmp_path / "out" / "logits.npy"), wanted, rtol=1e-3, atol=1e-4
    )


def test_run_reports_bad_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", np.zeros((1, 2, 3), np.float32))
    (tmp_path / "text.npy").write_text("no array")
    for given in (
        "image=nowhere.npy",
        f"image={tmp_path / 'text.npy'}",
        f"image={tmp_path / 'bad.npy'}",
        f"WRONG={tmp_path / 'bad.npy'}",
    ):
        done = atoll("run", DIGITS, "--input", given)
        assert done.returncode not in (0, 101), given
        assert "panicked" not in done.stderr
        assert done.stderr.strip()
    assert atoll("run", tmp_path / "nowhere.onnx").returncode not in (0, 101)


def test_demo_ends_at_a_signal_while_clients_send() -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    # Which client notices the end of its server first is a race: several times.
    for _ in range(5):
        process = subprocess.Popen([str(BINARY), "demo", "--seconds", "4", *ports],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            # Best effort is sent in the second half.
            time.sleep(2.5)
            process.terminate()
            assert process.wait(timeout=STOP_SECONDS) == 0
        finally:
            process.kill()


def test_demo_ends_after_its_seconds() -> None:
    done = atoll(
        "demo", "--seconds", "2", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"
    )
    assert done.returncode == 0, done.stderr
    assert "preempt" in (done.stdout + done.stderr).lower()


def test_evicted_models_return_their_memory_to_the_system(tmp_path: Path) -> None:
    side, x = 1500, "x"
    layers, nodes = [], []
    for index in range(3):
        weight = np.random.default_rng(index).standard_normal((side, side), np.float32) / 40
        layers.append(onnx.numpy_helper.from_array(weight, f"w{index}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{index}"], [f"y{index}"]))
        x = f"y{index}"
    inputs, outputs = (
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", side])]
        for name in ("x", x)
    )
    graph = helper.make_graph(nodes, "layers", inputs, outputs, layers)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10),
        tmp_path / "layers.onnx",
    )
    report = tmp_path / "soak.json"
    options = ["--resident", "1", "--soak", "300", "--threads", "1", "--link", "20000"]
    done = atoll(
        "bench", "swap", "--models", tmp_path, "--network", "layers", *options, "--json", report
    )
    assert done.returncode == 0, done.stderr
    rests = json.loads(report.read_text())["rests"]
    # By default the C library keeps about ten times the size of the model here.
    model = (tmp_path / "layers.onnx").stat().st_size
    assert all(rest["process_bytes"] < 4 * model for rest in rests), rests


def test_bench_padding_explains_bad_flags() -> None:
    listed = atoll("bench", "padding", "--help").stdout
    for word in ("free", "partition", "--pairs", "Examples"):
        assert word in listed
    for args, word in [
        (["--pairs", "vgg19"], "vgg19+resnet152"),
        (["--methods", "free,sideways"], "sideways"),
        (["--partition-sms", "8,8"], "twice"),
        (["--partition-sms", "4"], "4"),
        (["--seconds", "0"], "seconds"),
        (["--device", "cpu"], "cuda:0"),
    ]:
        done = atoll("bench", "padding", *args)
        assert done.returncode == 2, done.stderr
        assert word in done.stderr


def on_a_terminal(*args: str | Path) -> str:
    """What a command writes to standard error if that is a terminal."""
    main, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [str(BINARY), *map(str, args)], stdin=follower, stdout=subprocess.DEVNULL, stderr=follower,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    seen = b""
    try:
        while process.poll() is None:
            if select.select([main], [], [], 0.1)[0]:
                seen += os.read(main, 65536)
        while select.select([main], [], [], 0)[0]:
            seen += os.read(main, 65536)
        assert process.wait() == 0, seen
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(follower)
    return seen.decode(errors="replace")


def test_long_work_shows_progress_on_a_terminal_and_nothing_in_a_pipe(tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    random = np.random.default_rng(1)
    for number in range(100):
        np.save(samples / f"{number}.npy", random.random((1, 1, 8, 8), np.float32))
    quantize = ["quantize", DIGITS, "--calibrate", samples, "--output", tmp_path / "q.onnx"]
    # A fast machine is done before anything can be estimated, so the work grows until it is shown.
    for count in [10_000, 100_000, 1_000_000]:
        run = ["run", DIGITS, "--repeat", str(count)]
        if "left" in (shown := on_a_terminal(*run)):
            break
    for command, shown, words in [
        (run, shown, [f"{count} runs", "left"]),
        (quantize, on_a_terminal(*quantize), ["ranges", "accuracy", "100 samples"]),
    ]:
        assert all(word in shown for word in words), shown[-2000:]
        done = atoll(*command)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stderr and words[0] not in done.stderr, done.stderr
