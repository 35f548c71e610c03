"""The dashboard: every query names metrics and labels that exist, no panel is empty, and no two lie on each other."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.engine.outputs import CachedTokensDetails, Choice, RequestOutput, Timings, Usage
from kvstore.service.api.metrics import Metrics
from tests.support.engines import ask, open_engine, save_model, tokens

FILE = Path(__file__).parents[2] / "service" / "grafana" / "kvstore.json"
DASHBOARD = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = sorted({target["expr"] for panel in PANELS for target in panel["targets"]})
WORDS = {"sum", "min", "max", "by", "rate", "histogram_quantile"}  # of PromQL, as far as the dashboard uses it
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
IDENTIFIER = r"[A-Za-z_:][A-Za-z0-9_:]*"


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> dict[str, set[str]]:
    """Labels of every sample of a server that has seen traffic, and failures of the disk."""
    folder, metrics = tmp_path_factory.mktemp("grafana"), Metrics()
    usage = Usage(10, 2, CachedTokensDetails())
    output = RequestOutput("request-1", [1], [Choice("a", [1, 2], "stop")], usage, 0.1, Timings(0, 0, 0.1, 0.1, 0.1))
    metrics.answer_ended(output, "/chat", [0.1])
    metrics.request_ended("/chat", "POST", 200, 0.1)
    metrics.refused("server_overloaded")
    with open_engine(save_model(folder / "model"), folder / "store") as engine:
        ask(engine, tokens(1, 40))
        stats = engine.stats()
    stats["disk"]["failures"] = {"write: no space": 1}
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render(stats).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def metrics_of(query: str) -> set[str]:
    """Every identifier that is neither a word of PromQL nor a label nor part of a text, a duration or a variable."""
    bare = re.sub(r'"[^"]*"|\[[^\]]*\]|\{[^}]*\}|by \([^)]*\)', " ", query)
    return set(re.findall(rf"(?<![\w.$]){IDENTIFIER}", bare)) - WORDS


def labels_of(query: str) -> set[str]:
    """Labels of selectors and of `by`."""
    grouped = [name.strip() for names in re.findall(r"by \(([^)]*)\)", query) for name in names.split(",")]
    return {*re.findall(rf"({IDENTIFIER})\s*(?:=~|=|!=|!~)\s*\"", query), *grouped}


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_what_exists(shown, query):
    names = metrics_of(query)
    assert names and names <= shown.keys(), names - shown.keys()
    known = set.union(*(shown[name] for name in names)) | SCRAPED
    assert labels_of(query) <= known, labels_of(query) - known
    assert all(query.count(opening) == query.count(closing) for opening, closing in ("()", "[]", "{}"))


def test_nothing_else_of_the_file_names_an_unknown_metric(shown):
    names = set(re.findall(r"kvstore:[A-Za-z0-9_:]+", FILE.read_text()))
    assert names and names <= shown.keys(), names - shown.keys()


def test_every_panel_asks_something_of_the_chosen_source():
    for panel in PANELS:
        assert panel["targets"] and panel["title"], panel["id"]
        for target in panel["targets"]:
            assert target["expr"].strip() and target["datasource"]["uid"] == "${datasource}", panel["title"]
            assert "$instance" in target["expr"], panel["title"]
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_no_panel_lies_on_another():
    def cells(panel: dict) -> set[tuple[int, int]]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        return {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}

    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
