"""Queries through a frontend: RapidOCR's detector and recogniser on pictures with known text, and what can go wrong."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from PIL import Image, ImageDraw, ImageFont

from support import CACHE, REPOSITORY, SCRIPTS, Server, patiently, serve, wait_for

sys.path.append(str(SCRIPTS))

from ocr import lay_out  # noqa: E402

LINES = ["Invoice 2047", "Total 318.50 EUR", "Harbour Street 12", "Thank you"]
OCR = REPOSITORY / "scenarios" / "ocr.toml"


def page(lines: list[str], columns: int = 1, angle: float = 0.0) -> bytes:
    """A picture with lines of text, as a PNG file."""
    font = ImageFont.load_default(size=28)
    rows = -(-len(lines) // columns)
    picture = Image.new("RGB", (60 + 420 * columns, 60 + 64 * rows), "white")
    draw = ImageDraw.Draw(picture)
    for index, line in enumerate(lines):
        draw.text(
            (40 + 420 * (index % columns), 40 + 64 * (index // columns)),
            line,
            fill="black",
            font=font,
        )
    if angle:
        picture = picture.rotate(
            angle, expand=True, fillcolor="white", resample=Image.Resampling.BICUBIC
        )
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def ocr(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ocr")
    # A busy machine is no reason to fail: the objective is of the example, not of these tests.
    patient = folder / "ocr.toml"
    patient.write_text(OCR.read_text().replace("slo_ms = 3000", "slo_ms = 60000"))
    server = serve(
        lay_out(CACHE / "ocr-models"), folder / "server.log", "--cluster", "--query", str(patient)
    )
    yield server
    server.assert_alive()
    server.stop()


# Questions that were refused and asked again.
REFUSED: list[requests.Response] = []


def post(server: Server, **what: object) -> requests.Response:
    def once() -> requests.Response:
        answer = requests.post(f"{server.url}/v2/atoll/queries/ocr/infer", timeout=60, **what)
        if answer.status_code == 503:
            REFUSED.append(answer)
        return answer

    return patiently(once)


def ask(server: Server, picture: bytes) -> requests.Response:
    return post(server, data=picture, headers={"Content-Type": "image/png"})


def texts(answer: requests.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    count = outputs["text"]["shape"][0]
    assert outputs["score"]["shape"] == [count]
    assert count == 0 or outputs["corners"]["shape"] == [count, 4, 2]
    return outputs["text"]["data"]


def test_text_is_read_in_order(ocr: Server) -> None:
    answer = ask(ocr, page(LINES))
    assert texts(answer) == LINES
    corners = next(output for output in answer.json()["outputs"] if output["name"] == "corners")[
        "data"
    ]
    # The first line begins near where it was written.
    assert abs(corners[0] - 40) < 15 and abs(corners[1] - 44) < 15, corners[:8]


def test_turned_text_is_read(ocr: Server) -> None:
    assert sorted(texts(ask(ocr, page(LINES, angle=12)))) == sorted(LINES)


def test_an_empty_page_has_no_text(ocr: Server) -> None:
    assert texts(ask(ocr, page([]))) == []


def test_twenty_lines_travel_in_batches(ocr: Server) -> None:
    lines = [f"Entry {number} of 20" for number in range(20)]
    before = ocr.metric("nv_inference_request_success", model="rapidocr_rec")
    assert texts(ask(ocr, page(lines, columns=2))) == lines
    assert ocr.metric("nv_inference_request_success", model="rapidocr_rec") - before == 20
    stats = requests.get(f"{ocr.url}/v2/models/rapidocr_rec/stats", timeout=60).json()[
        "model_stats"
    ][0]
    assert stats["execution_count"] < stats["inference_count"], stats


def test_tensors_work_as_pictures_do(ocr: Server) -> None:
    picture = Image.open(io.BytesIO(page(LINES))).convert("RGB")
    tensor = {
        "name": "image",
        "shape": [picture.height, picture.width, 3],
        "datatype": "UINT8",
        "data": list(picture.tobytes()),
    }
    body = {"id": "7", "inputs": [tensor], "outputs": [{"name": "text"}]}
    answer = post(ocr, json=body).json()
    assert (answer["id"], answer["model_name"]) == ("7", "ocr")
    assert [output["name"] for output in answer["outputs"]] == ["text"]
    assert answer["outputs"][0]["data"] == LINES


def test_the_split_follows_what_is_measured(ocr: Server) -> None:
    """Under load the fan-out is measured, both models are profiled, and the objective is split and kept."""
    picture = page(LINES)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(ocr, picture), range(12)))
    assert all(texts(answer) == LINES for answer in answers)
    seen: list[dict] = []

    def is_split() -> bool:
        seen.append(requests.get(f"{ocr.url}/v2/atoll/queries/ocr", timeout=60).json())
        return seen[-1]["even_because"] is None

    # It comes with a plan, and there is one every half minute.
    wait_for(is_split, 300)
    query = seen[-1]
    print(query)
    assert query["even_because"] is None and query["exact"], query
    budgets = {stage["name"]: stage["budget_ms"] for stage in query["stages"]}
    assert 0 < budgets["find"] and 0 < budgets["read"], query
    assert budgets["find"] + budgets["read"] <= query["slo_ms"] + 1e-3, query
    assert query["answered"] >= 12 and query["refused"] == len(REFUSED), query


def test_what_is_wrong_is_said(ocr: Server) -> None:
    url = f"{ocr.url}/v2/atoll/queries"
    assert requests.post(f"{url}/none/infer", json={"inputs": []}, timeout=60).status_code == 404
    assert ask(ocr, b"no picture").status_code == 400
    empty = requests.post(f"{url}/ocr/infer", json={"inputs": []}, timeout=60)
    assert empty.status_code == 400 and "'image' is missing" in empty.text
    late = {
        "inputs": [{"name": "image", "shape": [8, 8, 3], "datatype": "UINT8", "data": [0] * 192}]
    }
    late["parameters"] = {"timeout": 1}
    assert requests.post(f"{url}/ocr/infer", json=late, timeout=60).status_code in (503, 504)
    bad = requests.put(f"{url}/bad", data="slo_ms = 5", timeout=60)
    assert bad.status_code == 400 and "stage" in bad.text


def test_queries_come_and_go(ocr: Server) -> None:
    url = f"{ocr.url}/v2/atoll/queries"
    text = OCR.read_text().replace("rapidocr_rec", "nobody")
    kept = requests.put(f"{url}/lost", data=text.encode(), timeout=60)
    assert kept.status_code == 200, kept.text
    assert [stage["ready"] for stage in kept.json()["stages"]] == [True, False]
    answer = requests.post(
        f"{url}/lost/infer", data=page([]), headers={"Content-Type": "image/png"}, timeout=60
    )
    assert answer.status_code == 404 and "nobody" in answer.text
    assert {query["name"] for query in requests.get(url, timeout=60).json()} == {"lost", "ocr"}
    assert requests.delete(f"{url}/lost", timeout=60).status_code == 200
    assert requests.get(f"{url}/lost", timeout=60).status_code == 404


def test_one_node_says_who_answers_queries(models: Path, tmp_path: Path) -> None:
    server = serve(models / "add_sub.onnx", tmp_path / "server.log")
    try:
        answer = requests.get(f"{server.url}/v2/atoll/queries", timeout=60)
        assert answer.status_code == 501 and "serve --cluster" in answer.text
    finally:
        server.stop()
