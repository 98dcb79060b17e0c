"""Queries through a frontend: RapidOCR's detector and recognizer on images with known text, and
errors."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from PIL import Image, ImageDraw, ImageFont

from support import CACHE, REPOSITORY, SCRIPTS, Server, retry_while_lost, serve, wait_for

sys.path.append(str(SCRIPTS))

from ocr import make_repository  # noqa: E402

LINES = ["Invoice 2047", "Total 318.50 EUR", "Harbour Street 12", "Thank you"]
OCR = REPOSITORY / "scenarios" / "ocr.toml"


def page(lines: list[str], columns: int = 1, angle: float = 0.0) -> bytes:
    """An image with lines of text, as a PNG file."""
    font = ImageFont.load_default(size=28)
    rows = -(-len(lines) // columns)
    image = Image.new("RGB", (60 + 420 * columns, 60 + 64 * rows), "white")
    draw = ImageDraw.Draw(image)
    for index, line in enumerate(lines):
        draw.text(
            (40 + 420 * (index % columns), 40 + 64 * (index // columns)),
            line,
            fill="black",
            font=font,
        )
    if angle:
        image = image.rotate(
            angle, expand=True, fillcolor="white", resample=Image.Resampling.BICUBIC
        )
    return png(image)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def ocr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ocr")
    # A large SLO, because a busy machine is no reason to fail.
    definition = folder / "ocr.toml"
    definition.write_text(OCR.read_text().replace("slo_ms = 3000", "slo_ms = 60000"))
    server = serve(
        make_repository(CACHE / "ocr-models"),
        folder / "server.log",
        "--cluster",
        "--query",
        str(definition),
    )
    yield server
    server.assert_alive()
    server.stop()


# Requests that were refused and repeated.
REFUSED: list[requests.Response] = []


def post(server: Server, **options: object) -> requests.Response:
    def once() -> requests.Response:
        reply = requests.post(f"{server.url}/v2/atoll/queries/ocr/infer", timeout=60, **options)
        if reply.status_code == 503:
            REFUSED.append(reply)
        return reply

    return retry_while_lost(once)


def read_page(server: Server, image: bytes) -> requests.Response:
    return post(server, data=image, headers={"Content-Type": "image/png"})


def texts(reply: requests.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    outputs = {output["name"]: output for output in reply.json()["outputs"]}
    count = outputs["text"]["shape"][0]
    assert outputs["score"]["shape"] == [count]
    assert count == 0 or outputs["corners"]["shape"] == [count, 4, 2]
    return outputs["text"]["data"]


def test_text_is_read_in_order(ocr: Server) -> None:
    reply = read_page(ocr, page(LINES))
    assert texts(reply) == LINES
    corners = next(output for output in reply.json()["outputs"] if output["name"] == "corners")[
        "data"
    ]
    # The first line is found near its position.
    assert abs(corners[0] - 40) < 15 and abs(corners[1] - 44) < 15, corners[:8]


def test_rotated_text_is_read(ocr: Server) -> None:
    assert sorted(texts(read_page(ocr, page(LINES, angle=12)))) == sorted(LINES)


@pytest.mark.parametrize("angle", [90, 180, 270])
def test_turned_text_is_read(ocr: Server, angle: int) -> None:
    reply = read_page(ocr, page(LINES, angle=angle))
    assert sorted(texts(reply)) == sorted(LINES)
    outputs = {output["name"]: output["data"] for output in reply.json()["outputs"]}
    # The first corner is the upper left of the text: the first line's, turned with the page.
    at = outputs["text"].index(LINES[0])
    image = Image.open(io.BytesIO(page(LINES, angle=angle)))
    left, top = {
        90: (44, image.height - 40),
        180: (image.width - 40, image.height - 44),
        270: (image.width - 44, 40),
    }[angle]
    corner = outputs["corners"][8 * at : 8 * at + 2]
    assert abs(corner[0] - left) < 20 and abs(corner[1] - top) < 20, (corner, left, top)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_text_of_transparent_pages_is_read(ocr: Server, mode: str) -> None:
    """Black text on a transparent page, whose hidden colour is black as well."""
    paper = Image.open(io.BytesIO(page(LINES))).convert("L")
    ink = Image.eval(paper, lambda value: 255 - value)
    image = Image.new("RGBA", paper.size)
    image.putalpha(ink)
    if mode == "P":
        image = Image.eval(ink, lambda value: int(value > 127)).convert("P")
        image.putpalette([0, 0, 0, 0, 0, 0])
        image.info["transparency"] = 0
    elif mode == "LA":
        image = image.convert("LA")
    assert texts(read_page(ocr, png(image))) == LINES


def test_an_empty_page_has_no_text(ocr: Server) -> None:
    assert texts(read_page(ocr, page([]))) == []


def test_twenty_lines_run_in_batches(ocr: Server) -> None:
    lines = [f"Entry {number} of 20" for number in range(20)]
    before = ocr.metric("nv_inference_request_success", model="rapidocr_rec")
    assert texts(read_page(ocr, page(lines, columns=2))) == lines
    assert ocr.metric("nv_inference_request_success", model="rapidocr_rec") - before == 20
    stats = requests.get(f"{ocr.url}/v2/models/rapidocr_rec/stats", timeout=60).json()[
        "model_stats"
    ][0]
    assert stats["execution_count"] < stats["inference_count"], stats


def test_an_image_may_be_a_tensor(ocr: Server) -> None:
    image = Image.open(io.BytesIO(page(LINES))).convert("RGB")
    tensor = {
        "name": "image",
        "shape": [image.height, image.width, 3],
        "datatype": "UINT8",
        "data": list(image.tobytes()),
    }
    body = {"id": "7", "inputs": [tensor], "outputs": [{"name": "text"}]}
    reply = post(ocr, json=body).json()
    assert (reply["id"], reply["model_name"]) == ("7", "ocr")
    assert [output["name"] for output in reply["outputs"]] == ["text"]
    assert reply["outputs"][0]["data"] == LINES


def test_the_slo_is_split_by_measurement(ocr: Server) -> None:
    """Under load the fan-out is measured, both models are profiled, and the SLO is split."""
    image = page(LINES)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda _: read_page(ocr, image), range(12)))
    assert all(texts(reply) == LINES for reply in replies)
    seen: list[dict] = []

    def is_split() -> bool:
        seen.append(requests.get(f"{ocr.url}/v2/atoll/queries/ocr", timeout=60).json())
        return seen[-1]["even_because"] is None

    # The split comes with the next plan, within half a minute.
    wait_for(is_split, 300)
    query = seen[-1]
    print(query)
    assert query["even_because"] is None and query["exact"], query
    budgets = {stage["name"]: stage["budget_ms"] for stage in query["stages"]}
    assert 0 < budgets["find"] and 0 < budgets["read"], query
    assert budgets["find"] + budgets["read"] <= query["slo_ms"] + 1e-3, query
    assert query["answered"] >= 12 and query["refused"] == len(REFUSED), query


def test_bad_requests_are_refused(ocr: Server) -> None:
    url = f"{ocr.url}/v2/atoll/queries"
    assert requests.post(f"{url}/none/infer", json={"inputs": []}, timeout=60).status_code == 404
    assert read_page(ocr, b"no image").status_code == 400
    empty = requests.post(f"{url}/ocr/infer", json={"inputs": []}, timeout=60)
    assert empty.status_code == 400 and "'image' is missing" in empty.text
    late = {
        "inputs": [{"name": "image", "shape": [8, 8, 3], "datatype": "UINT8", "data": [0] * 192}]
    }
    late["parameters"] = {"timeout": 1}
    assert requests.post(f"{url}/ocr/infer", json=late, timeout=60).status_code in (503, 504)
    bad = requests.put(f"{url}/bad", data="slo_ms = 5", timeout=60)
    assert bad.status_code == 400 and "stage" in bad.text


def test_queries_can_be_added_and_deleted(ocr: Server) -> None:
    url = f"{ocr.url}/v2/atoll/queries"
    text = OCR.read_text()
    wrong = text.replace("rapidocr_rec", "missing")
    refused = requests.put(f"{url}/more", data=wrong.encode(), timeout=60)
    assert refused.status_code == 400, refused.text
    assert "there is no model 'missing'" in refused.text
    kept = requests.put(f"{url}/more", data=text.encode(), timeout=60)
    assert kept.status_code == 200, kept.text
    assert [stage["ready"] for stage in kept.json()["stages"]] == [True, True]
    assert {query["name"] for query in requests.get(url, timeout=60).json()} == {"more", "ocr"}
    assert requests.delete(f"{url}/more", timeout=60).status_code == 200
    assert requests.get(f"{url}/more", timeout=60).status_code == 404


def test_a_single_server_refuses_queries(models: Path, tmp_path: Path) -> None:
    server = serve(models / "add_sub.onnx", tmp_path / "server.log")
    try:
        reply = requests.get(f"{server.url}/v2/atoll/queries", timeout=60)
        assert reply.status_code == 501 and "serve --cluster" in reply.text
    finally:
        server.stop()
