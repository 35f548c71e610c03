"""The keys of a request of vLLM in their order, by its own record of them. Needs vLLM."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def test_each_key_is_behind_the_one_before_it_in_its_group_while_the_request_grows():
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from kvstore.hosts.vllm_keys import RequestKeys, chain_of

    context, groups = ReqContext("request"), ([], [])
    keys = RequestKeys(context)
    for end in range(1, 13):
        for number, tokens in enumerate((16, 32)):
            if 16 * end % tokens == 0:
                groups[number].append(make_offload_key(b"%032d" % end, number))
                context.set_offload_key_position(groups[number][-1], 16 * end)
        if end % 4:
            continue
        asked = {groups[0][-1], groups[0][-3], groups[1][-1], groups[1][0]}
        found = keys.before(asked)
        assert found == {
            groups[0][-1]: groups[0][-2],
            groups[0][-3]: groups[0][-4],
            groups[1][-1]: groups[1][-2],
            groups[1][0]: None,
        }
        assert list(map(context.get_offload_key_position, found)) == sorted(
            map(context.get_offload_key_position, found)
        )
    assert [chain_of(context, number) for number in (0, 1)] == list(groups)
