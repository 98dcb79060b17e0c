"""POST /register adds a model, POST /classify classifies images with it."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image

from support import ASSETS, CACHE, Server, fetch_wheel, make_models, serve

DIGITS_PREPROCESSING = {
    "width": 8,
    "height": 8,
    "mean": [0.0],
    "std": [255.0],
    "layout": "NCHW",
    "channels": "GRAY",
    "resize": "nearest",
    "crop": 1.0,
}
DIGIT_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for this file only: registered models stay."""
    folder = tmp_path_factory.mktemp("classify") / "models"
    folder.mkdir()
    shutil.copy(ASSETS / "digits.onnx", folder / "plain.onnx")
    server = serve(folder, folder.parent / "log")
    try:
        model = (ASSETS / "digits.onnx").read_bytes()
        reply = register(server, "digits", model, DIGIT_NAMES, DIGITS_PREPROCESSING)
        assert reply.status_code == 200, reply.text
        yield server
    finally:
        server.stop()


def register(
    server: Server, name: str, model: bytes, labels: list[str], preprocessing: dict[str, object]
) -> requests.Response:
    return requests.post(
        f"{server.url}/register",
        files={
            "name": (None, name),
            "model": ("model.onnx", model, "application/octet-stream"),
            "labels": ("labels.txt", "\n".join(labels) + "\n", "text/plain"),
            "preprocessing": (None, json.dumps(preprocessing), "application/json"),
        },
        timeout=60,
    )


def classify(
    server: Server, name: str, image: bytes, k: int | str | None = None
) -> requests.Response:
    files = {"name": (None, name), "image": ("picture", image, "application/octet-stream")}
    if k is not None:
        files["k"] = (None, str(k))
    return requests.post(f"{server.url}/classify", files=files, timeout=60)


def encode(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def digit_samples() -> list[tuple[int, bytes]]:
    file = json.loads((ASSETS / "digits_samples.json").read_text())
    result = []
    for sample in file["samples"]:
        pixels = np.array(sample["pixels"], np.float64).reshape(8, 8) * 255 / file["scale"]
        result.append((sample["label"], encode(np.rint(pixels).astype(np.uint8))))
    return result


def test_digits_are_classified(server: Server) -> None:
    right = 0
    for label, image in digit_samples():
        reply = classify(server, "digits", image, 1)
        assert reply.status_code == 200, reply.text
        (best,) = reply.json()["predictions"]
        assert best["label"] == DIGIT_NAMES[best["index"]]
        right += best["index"] == label
    assert right >= 0.95 * len(digit_samples())


def test_the_reply_lists_the_best_classes_in_order(server: Server) -> None:
    reply = classify(server, "digits", digit_samples()[0][1], 3).json()
    assert reply["model"] == "digits"
    scores = [prediction["score"] for prediction in reply["predictions"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert all(set(p) >= {"label", "index", "score"} for p in reply["predictions"])


def test_k_has_a_default_and_a_limit(server: Server) -> None:
    image = digit_samples()[0][1]
    assert 1 <= len(classify(server, "digits", image).json()["predictions"]) <= 10
    assert len(classify(server, "digits", image, 1000).json()["predictions"]) == 10


def test_registered_model_is_served_by_v2_too(server: Server) -> None:
    assert requests.get(f"{server.url}/v2/models/digits/ready", timeout=60).status_code == 200
    metadata = requests.get(f"{server.url}/v2/models/digits", timeout=60).json()
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]


def test_color_and_jpeg_images_are_accepted(server: Server) -> None:
    pixels = np.zeros((40, 60, 3), np.uint8)
    for kind in ("PNG", "JPEG"):
        assert classify(server, "digits", encode(pixels, kind), 1).status_code == 200


def assert_error(server: Server, reply: requests.Response, *codes: int) -> None:
    assert reply.status_code in codes, f"{reply.status_code}: {reply.text[:300]}"
    assert reply.json()["error"]
    server.assert_alive()


def test_an_unknown_model_is_not_found(server: Server) -> None:
    assert_error(server, classify(server, "no_such_model", digit_samples()[0][1]), 404)


@pytest.mark.parametrize("k", [0, -1, "many"])
def test_a_bad_k_is_refused(server: Server, k: int | str) -> None:
    assert_error(server, classify(server, "digits", digit_samples()[0][1], k), 400)


def bad_images() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    png, jpeg = encode(noise), encode(noise, "JPEG")
    # The header of this PNG claims 2 billion by 2 billion pixels.
    bomb = png[:16] + (0x7FFFFFFF).to_bytes(4, "big") * 2 + png[24:]
    return {
        "empty": b"",
        "text": b"this is no picture",
        "cut-png": png[: len(png) // 2],
        "png-header-only": png[:33],
        "jpeg-header-only": jpeg[:20],
        "bomb": bomb,
    }


@pytest.mark.parametrize("kind", list(bad_images()))
def test_a_bad_image_is_refused(server: Server, kind: str) -> None:
    assert_error(server, classify(server, "digits", bad_images()[kind]), 400, 413)


def test_missing_fields_are_refused(server: Server) -> None:
    image = digit_samples()[0][1]
    assert_error(
        server,
        requests.post(f"{server.url}/classify", files={"image": ("p", image)}, timeout=60),
        400,
    )
    assert_error(
        server,
        requests.post(f"{server.url}/classify", files={"name": (None, "digits")}, timeout=60),
        400,
    )
    assert_error(
        server,
        requests.post(f"{server.url}/register", files={"name": (None, "x")}, timeout=60),
        400,
    )
    assert_error(server, requests.post(f"{server.url}/classify", data=b"{}", timeout=60), 400, 415)


def test_a_broken_multipart_body_is_refused(server: Server) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    for body in (b"", b"--xyz\r\n", b"--abc--", b"--xyz\r\nContent-Disposition: form-data\r\n\r\n"):
        assert_error(
            server,
            requests.post(f"{server.url}/classify", data=body, headers=headers, timeout=60),
            400,
        )


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "x" * 5000, "a\x00b"])
def test_a_bad_name_is_refused(server: Server, name: str) -> None:
    reply = register(
        server, name, (ASSETS / "digits.onnx").read_bytes(), DIGIT_NAMES, DIGITS_PREPROCESSING
    )
    assert_error(server, reply, 400)


@pytest.mark.parametrize(
    "preprocessing",
    [
        {"width": 0, "height": 0},
        {"std": [0.0]},
        {"no_such_field": 1},
        {"width": 1 << 31, "height": 1 << 31},
        {"crop": -1},
    ],
    ids=["zero-size", "zero-std", "unknown", "huge", "crop"],
)
def test_bad_preprocessing_is_refused(server: Server, preprocessing: dict[str, object]) -> None:
    given = {**DIGITS_PREPROCESSING, **preprocessing}
    reply = register(server, "bad_pre", (ASSETS / "digits.onnx").read_bytes(), DIGIT_NAMES, given)
    assert_error(server, reply, 400)


def test_a_failed_registration_adds_no_model(server: Server) -> None:
    assert_error(
        server, register(server, "never", b"garbage", DIGIT_NAMES, DIGITS_PREPROCESSING), 400
    )
    assert requests.get(f"{server.url}/v2/models/never", timeout=60).status_code == 404


def foolbox_images() -> list[tuple[int, bytes]]:
    """The 20 labelled ImageNet images in the package: imagenet_NN_LABEL.jpg."""
    with zipfile.ZipFile(fetch_wheel("foolbox", "3.3.4")) as wheel:
        names = sorted(n for n in wheel.namelist() if n.startswith("foolbox/data/imagenet_"))
        return [(int(Path(name).stem.rsplit("_", 1)[1]), wheel.read(name)) for name in names]


def test_efficientnet_classifies_imagenet_images(server: Server) -> None:
    folder = CACHE / "test-models"
    make_models(folder, ["efficientnet_lite0"])
    labels = (folder / "efficientnet_lite0.labels.txt").read_text().splitlines()
    preprocessing = json.loads((folder / "efficientnet_lite0.preprocessing.json").read_text())
    model = (folder / "efficientnet_lite0.onnx").read_bytes()
    register(server, "efficientnet", model, labels, preprocessing).raise_for_status()
    images = foolbox_images()
    assert len(images) == 20
    wrong = []
    for label, image in images:
        reply = classify(server, "efficientnet", image, 5)
        assert reply.status_code == 200, reply.text
        best = reply.json()["predictions"][0]
        if best["index"] != label:
            wrong.append(f"{labels[label]} classified as {best['label']}")
    print(f"{20 - len(wrong)} of 20 right; {'; '.join(wrong)}")
    assert len(wrong) <= 3, wrong


def test_registered_models_survive_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    first = serve(folder, tmp_path / "log")
    try:
        model = (ASSETS / "digits.onnx").read_bytes()
        register(first, "kept", model, DIGIT_NAMES, DIGITS_PREPROCESSING).raise_for_status()
    finally:
        first.stop()
    second = serve(folder, tmp_path / "log")
    try:
        reply = classify(second, "kept", digit_samples()[0][1], 1)
        assert reply.status_code == 200, reply.text
        assert reply.json()["predictions"][0]["label"] in DIGIT_NAMES
    finally:
        second.stop()
