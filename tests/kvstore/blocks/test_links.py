"""Which block builds on which: children by key, in whatever order blocks come and go."""

from kvstore.blocks.forest import Links


def linked(**parents: str) -> Links[str]:
    links: Links[str] = Links()
    links.keys |= parents.keys()
    for key, parent in parents.items():
        links.link(key, parent)
    links.check_integrity()
    return links


def test_children_come_one_by_one_and_go_again():
    links = linked(a="root", b="root", c="root")
    assert sorted(links.children("root")) == ["a", "b", "c"] and not links.children("a")
    for key, left in (("b", ["a", "c"]), ("a", ["c"]), ("c", [])):
        assert links.unlink(key) == "root"
        assert sorted(links.children("root")) == left
        links.check_integrity()
    assert links.unlink("c") is None and not links.children_of


def test_leaves_are_blocks_on_which_nothing_builds():
    links = linked(a="root", b="a", c="a", d="b")
    assert sorted(links.leaves()) == ["c", "d"]
    links.keys.discard("d")
    links.unlink("d")
    assert sorted(links.leaves()) == ["b", "c"] and "b" in links and "d" not in links


def test_descendants_come_after_what_they_build_on_and_each_once():
    links = linked(a="root", b="a", c="a", d="b", other="elsewhere")
    found = links.descendants("a")
    assert found[0] == "a" and sorted(found) == ["a", "b", "c", "d"] and found.index("b") < found.index("d")
    assert links.descendants("d") == ["d"]


def test_descendants_end_in_a_forged_loop():
    assert sorted(linked(a="b", b="a").descendants("a")) == ["a", "b"]
    assert linked(a="c", b="a", c="b").descendants("b") == ["b", "c", "a"]


def test_cleared_it_knows_nothing():
    links = linked(a="root", b="a")
    links.clear()
    assert not links.keys and not links.parents and not links.children_of and links.descendants("a") == ["a"]
