"""The report is made of what the run wrote, and shows it safely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perilune.errors import Error
from perilune.train.log import MetricsFile, read_metrics
from perilune.train.report import Section, write_report


def row(step: int) -> dict[str, object]:
    return {
        "step": step,
        "tokens": 100,
        "loss": 5.0 / step,
        "lr": 0.1,
        "grad_norm": 1.0,
        "flops": 10**9,
        "seconds": 0.5,
        "imbalance": {"1": 1.5, "2": 1.2},
        "load": {"1": [3, 1], "2": [2, 2]},
    }


def fill(out: Path) -> None:
    file = MetricsFile(out / "metrics.jsonl", 0)
    for step in range(1, 21):
        file.write(row(step))
    file.write({"step": 20, "eval": {"loss": 1.0, "nats": 693.147, "tokens": 693, "bytes": 500}})
    file.close()


def test_report(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"note": "<script>"}))
    page = write_report(tmp_path, [Section("Own <part>", "a note", [["a", "b"], [1, "x & y"]], "text")]).read_text()
    assert "2.0000" in page  # 693.147 nats over 500 bytes are 2 bits a byte
    assert "<script>" not in page
    assert "Own &lt;part&gt;" in page
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched
    for name in ("loss.png", "expert-load.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_report_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(Error, match="holds no step"):
        write_report(tmp_path)


def test_metrics_are_exact_and_cut_back_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    values = [0.1, 1 / 3, 2.0**-1074, 1e308]
    for step, value in enumerate(values, start=1):
        file.write({"step": step, "loss": value})
    file.close()
    with path.open("a") as broken:
        broken.write('{"step": 5, "lo')
    assert [r["loss"] for r in read_metrics(path)] == values
    MetricsFile(path, 2).close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
