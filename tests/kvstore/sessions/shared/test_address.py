"""Addresses of shared sessions: one Redis, Sentinel, a Cluster."""

import pytest

from kvstore.errors import ConfigError
from kvstore.remote.address import RedisAddress
from kvstore.sessions.shared.address import SessionAddress, parse_session_url


def test_one_redis_is_written_as_ever():
    found = parse_session_url(
        "rediss://ann@cache:7000/3?ca_file=ca.pem", environment={"KVSTORE_REDIS_PASSWORD": "s3cret"}
    )
    assert found == SessionAddress((RedisAddress("cache", 7000, 3, True, "ann", "s3cret", "ca.pem"),))
    assert not found.follows
    assert str(found) == "rediss://cache:7000/3"


def test_those_of_sentinel_and_of_a_cluster(tmp_path):
    file = tmp_path / "password"
    file.touch(0o600)
    file.write_text("0f s3ntinel\n")
    found = parse_session_url(
        f"redis+sentinel://one,[::1]:7000/sessions/2?sentinel_password_file={file}", environment={}
    )
    servers = (RedisAddress("one", 26379, 2), RedisAddress("::1", 7000, 2))
    assert found == SessionAddress(servers, "sessions", sentinel_password="0f s3ntinel")
    assert str(found) == "redis+sentinel://one:26379,[::1]:7000/sessions/2"
    assert "s3ntinel" not in repr(found)
    found = parse_session_url("rediss+cluster://ann@one,two:7000", environment={"KVSTORE_REDIS_PASSWORD": "p"})
    servers = tuple(RedisAddress(host, port, 0, True, "ann", "p") for host, port in (("one", 6379), ("two", 7000)))
    assert found == SessionAddress(servers, is_cluster=True)
    assert str(found) == "rediss+cluster://one:6379,two:7000"
    assert found.follows


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://one,two", "redis+sentinel:///sessions", "redis+cluster://one/3", "redis+cluster://one,,two",
        "redis+other://one/sessions", "http+cluster://one", "redis+sentinel://one/sessions/x",
        "redis+cluster://one?sentinel_password_file=x", "redis+sentinel://one:x/sessions", "redis+sentinel://one/s?x=1",
        "redis+cluster://ann:s3cret@one,two",
    ],
)  # fmt: skip
def test_what_is_no_such_address_is_refused(url):
    with pytest.raises(ConfigError, match="give ") as refused:
        parse_session_url(url, environment={})
    assert "s3cret" not in str(refused.value)
