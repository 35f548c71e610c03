"""Answers that were noted for a session are not known any more once it is deleted."""

from kvstore import Engine, SamplingParams
from kvstore.admin.offline import OfflineStore
from kvstore.engine.sessions.recall import Recall
from kvstore.engine.sessions.recall_ids import Keys
from kvstore.sessions.record import SessionKey


def test_a_deletion_by_whatever_way_forgets_the_answers(tmp_path):
    """By the library, by a time to live that is over, and on a store that nobody owns."""
    tiers = {"hbm": "16MiB", "cpu": "16MiB", "disk": "64MiB", "path": tmp_path}
    names = ("library", "ttl", "offline")
    with Engine(cache_tiers=tiers) as engine:
        recall, groups = Recall(engine), {}
        for name in names:
            chat = engine.chat(name)
            reply = chat.send(f"My name is {name}.", SamplingParams(temperature=0.0, max_tokens=8))
            recall.note("", "", chat.messages[:-1], reply, session_id=name)
            keys = Keys(engine.root(""), "")
            groups[name] = [keys.of(chat.messages).histories[-1]]
        engine.answers.flush()
        assert all(engine.answers.find(list(groups.values())))
        engine.admin.delete_session("library")
        engine.chat("ttl").set_ttl(1e-9)
        engine.chat("other")
        engine.admin.expire(SessionKey("", "ttl"))
        assert [ids is None for ids in engine.answers.find(list(groups.values()))] == [True, True, False]
    with OfflineStore(tmp_path) as store:
        store.delete_session(SessionKey("", "offline"))
    with Engine(cache_tiers=tiers) as engine:
        assert engine.answers.find(list(groups.values())) == [None, None, None]
