"""bench.block_store runs, and what it shows is of both sizes."""

import json
import sys

from bench import block_store


def test_each_size_is_measured_beside_a_plain_file(monkeypatch, tmp_path):
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--quick", "--repeats", "1", "--dir", str(tmp_path), "--json", str(file)])
    assert block_store.main() == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["state"].split(",")[0] for row in rows] == ["128 KiB"] * 5 + ["2 MiB"] * 5
    assert all(row["value"] > 0 for row in rows)
