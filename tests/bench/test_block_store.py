"""bench.block_store runs, and what it shows is of both sizes."""

import json

from bench import block_store


def test_each_size_is_measured_beside_a_plain_file(tmp_path):
    file = tmp_path / "found.json"
    assert block_store.main(["--quick", "--repeats", "1", "--dir", str(tmp_path), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["state"].split(",")[0] for row in rows] == ["128 KiB"] * 5 + ["2 MiB"] * 5
    assert all(row["value"] > 0 for row in rows)
