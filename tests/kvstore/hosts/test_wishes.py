"""What requests say about their conversations: in params or hints, and when it is wrong."""

from types import SimpleNamespace

import pytest

from kvstore.hosts.wishes import NONE, Wishes, read_wishes


def test_params_count_before_hints():
    hints = SimpleNamespace(
        actions=[
            SimpleNamespace(action_type="route", payload={"to": "b"}),
            SimpleNamespace(action_type="kvstore", payload={"session": "bert", "ttl_s": 60}),
        ]
    )
    assert read_wishes(None, hints) == (Wishes(session="bert", ttl_s=60.0), None)
    assert read_wishes({"kvstore": {"session": "anna", "pin_s": 5}}, hints) == (Wishes(session="anna", pin_s=5.0), None)
    assert read_wishes({"do_remote_decode": True}, None) == (NONE, None)


@pytest.mark.parametrize(
    "given", [7, {"pin_s": "long"}, {"pin_s": -1}, {"session": ""}, {"sesion": "a"}, {"ttl_s": float("nan")}]
)
def test_what_is_wrong_is_told_and_ignored(given):
    wishes, problem = read_wishes({"kvstore": given}, None)
    assert wishes is NONE
    assert problem is not None and "kvstore" in problem
