"""What a fence waits for."""

from kvstore.store.parts import Fence


def test_a_later_stage_is_looked_at_when_the_earlier_ones_have_ended():
    saving, writing = {1}, set()
    fence = Fence((lambda: saving, lambda: writing))
    assert not fence.has_ended()
    saving.clear()
    writing.add("of 1")
    assert not fence.has_ended()
    writing.clear()
    assert fence.has_ended() and Fence(()).has_ended()


def test_what_comes_again_after_it_has_ended_is_not_waited_for():
    writing = {1, 2}
    fence = Fence((lambda: writing,))
    assert not fence.has_ended()
    writing.remove(1)
    assert not fence.has_ended()
    writing |= {1}
    assert not fence.has_ended()
    writing.remove(2)
    assert fence.has_ended()
