"""The benchmark of edits runs, and its arms do what they say."""

import json

from bench import edits
from bench.truncation import Memory
from kvstore.engine.model.loading import load
from kvstore.engine.model.probe import intercept

SMALL = ("--conversations", 4, "--repeats", 1, "--turns", 3)


def test_it_runs_and_reports_each_arm(tmp_path):
    file = tmp_path / "found.json"
    assert edits.main([*map(str, SMALL), "--threads", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["results"]
    times = [row for row in rows if "ms" in row]
    assert [row["edit"] for row in times] == ["removed"] * 3 + ["replaced"] * 3 + ["moved"] * 3
    agents = [row["edit"] for row in rows if "read" in row]
    assert agents == ["agent, reencode", "agent, exact"] * 2
    asked = [row for row in rows if row["measure"] == "acts on the old value"]
    assert [row["edit"] for row in asked] == ["removed", "replaced"]
    assert all(set(edits.ARMS) <= set(row) for row in asked)
    moved = [row for row in rows if row["measure"].endswith("told in the document")]
    assert [row["measure"].split(",")[0] for row in moved] == ["right", "perplexity", "KL"]
    assert all(set(edits.DOCUMENT_ARMS) <= set(row) for row in moved)
    assert float(moved[2][edits.RECOMPUTED]) == 0 < float(moved[2]["spliced"])


def test_a_document_has_the_kv_that_it_was_read_with_alone():
    loaded = load(None, "cpu", "float32", None)
    model, ids = intercept(loaded.model, loaded.max_model_len, pack=True), [*range(5, 125)]
    computed = edits.with_document(model, ids, (20, 100), edits.RECOMPUTED)
    for arm, leader in (("spliced", [5]), ("alone", []), (edits.NAIVE, [5])):
        made, alone = edits.with_document(model, ids, (20, 100), arm), Memory(model)
        alone.read([*leader, *ids[20:100]])
        moved = 20 - len(leader)
        last = 32 + (moved + len(alone.token_ids) // 16 * 16 - 32) // 16 * 16
        assert made.token_ids == ids and len(computed.token_ids) == len(ids)
        assert made.layers[-1][0][32:last].equal(alone.layers[-1][0][32 - moved : last - moved])
        assert made.layers[-1][0][:32].allclose(computed.layers[-1][0][:32], atol=1e-3)
        assert not made.layers[-1][0][last:].allclose(computed.layers[-1][0][last:], atol=1e-3)
        positions = [*range(32, last)] if arm != edits.NAIVE else [*range(32 - moved, last - moved)]
        assert made.positions.tolist() == [*range(32), *positions, *range(last, 120)]
        key = model.rotations[0].at(made.positions).apply(made.layers[0][0])
        assert made.caches[0][0].view(-1, *key.shape[1:])[:120].allclose(key, atol=1e-5)


def test_what_is_kept_is_what_was_read_and_all_else_is_computed():
    loaded = load(None, "cpu", "float32", None)
    whole = Memory(intercept(loaded.model, loaded.max_model_len, pack=True))
    whole.read([*range(5, 65)])
    computed = edits.edited(whole, (20, 30), [7, 8], edits.RECOMPUTED)
    assert computed.token_ids == [*range(5, 25), 7, 8, *range(35, 65)]
    same = edits.edited(whole, (20, 20), [], "re-encoded 4")
    for layer, was in zip(same.layers, whole.layers, strict=True):
        assert all(one.allclose(other, atol=1e-3) for one, other in zip(layer, was, strict=True))
    naive = edits.edited(whole, (20, 30), [7, 8], edits.NAIVE)
    assert naive.token_ids == computed.token_ids and naive.positions.tolist() == [*range(22), *range(30, 60)]
    assert naive.layers[-1][0][22:].equal(whole.layers[-1][0][30:])
    for arm, first in (("re-encoded 0", 22), ("re-encoded 4", 26)):
        made = edits.edited(whole, (20, 30), [7, 8], arm)
        assert made.token_ids == computed.token_ids and made.positions.tolist() == [*range(52)]
        (key, value), (new_key, _), (old_key, old_value) = made.layers[-1], computed.layers[-1], whole.layers[-1]
        assert key[:first].allclose(new_key[:first], atol=1e-3)
        assert key[first:].equal(old_key[first + 8 :]) and value[first:].equal(old_value[first + 8 :])
        cache = made.caches[0][0].view(-1, *key.shape[1:])[:52]
        assert cache.allclose(computed.caches[0][0].view(-1, *key.shape[1:])[:52], atol=1e-3)  # the first layer's keys
