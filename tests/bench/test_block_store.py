"""bench.block_store runs, and what it shows is of both sizes."""

import json

from bench import block_store


def test_each_size_is_measured_beside_a_plain_file(tmp_path):
    file = tmp_path / "found.json"
    assert block_store.main(["--quick", "--repeats", "1", "--dir", str(tmp_path), "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [row["state"].split(",")[0] for row in rows] == ["128 KiB"] * 5 + ["2 MiB"] * 5
    assert all(row["value"] > 0 for row in rows)


def test_what_a_growing_store_costs_is_measured_in_processes_of_its_own(tmp_path):
    file = tmp_path / "found.json"
    assert block_store.main(["--part", "growth", "--quick", "--dir", str(tmp_path), "--json", str(file)]) == 0
    found = {row["measure"]: row["value"] for row in json.loads(file.read_text())["results"]}
    assert len(found) == 11 and all(found[f"writes/s, fifth {part}"] > 0 for part in range(1, 6))
    assert all(found[name] > 0 for name in ("open, us a block", "lookup, us", "evict, us a block"))
    assert not [place for place in tmp_path.iterdir() if place != file]
