"""Tests of kvstore.remote.address."""

import pytest

from kvstore.errors import ConfigError
from kvstore.remote.address import RedisAddress, parse_prefill_url, parse_redis_url
from kvstore.remote.object_address import parse_remote_url


def test_parts_of_a_url():
    assert parse_redis_url("redis://cache", environment={}) == RedisAddress("cache")
    assert parse_redis_url("redis://10.0.0.1:7000/3", environment={}) == RedisAddress("10.0.0.1", 7000, 3)
    found = parse_redis_url("rediss://[::1]/?ca_file=ca.pem&cert_file=c.pem&key_file=k.pem", environment={})
    assert found == RedisAddress("::1", tls=True, ca_file="ca.pem", cert_file="c.pem", key_file="k.pem")
    assert str(found) == "rediss://[::1]:6379/0"


def test_who_signs_in_is_in_no_text(tmp_path):
    file = tmp_path / "password"
    file.touch(0o600)
    file.write_text("s3cret-one\nmore\n")
    found = parse_redis_url(f"redis://ann%40b@cache?password_file={file}", environment={})
    assert (found.user, found.password) == ("ann@b", "s3cret-one")
    assert parse_redis_url("redis://cache", environment={"KVSTORE_REDIS_PASSWORD": "two"}).password == "two"
    shown = f"{found} {found!r}"
    assert "s3cret" not in shown
    assert "ann" not in shown


@pytest.mark.parametrize("url", [
    "redis://", "cache:6379", "http://cache", "redis://cache:0", "redis://cache:99999", "redis://cache/x",
    "redis://cache/0/1", "redis://cache?timeout=3", "redis://cache#1", "redis://[::1", "redis://cache/²",
])  # fmt: skip
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="give redis://"):
        parse_redis_url(url, environment={})


def test_a_password_in_a_url_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="KVSTORE_REDIS_PASSWORD") as refused:
        parse_redis_url("redis://ann:s3cret@cache", "--remote", {})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("parse", [parse_redis_url, parse_prefill_url, parse_remote_url])
@pytest.mark.parametrize("url", [
    "redis:/ann:s3cret@cache", "ann:s3cret@cache", "redis://cache?password=s3cret", "http://cache?key=s3cret",
    "s3://bucket?aws_secret_access_key=s3cret", "http://ann:s3cret@cache?x=1",
])  # fmt: skip
def test_nor_is_one_that_is_where_none_is_expected(parse, url):
    with pytest.raises(ConfigError) as refused:
        parse(url)
    assert "s3cret" not in str(refused.value)


def test_a_password_that_is_missing(tmp_path):
    files = {"none": "No such file", "empty": "is empty", "binary": "not UTF-8", "public": "by everybody; chmod 600 it"}
    for file in ("empty", "binary"):
        (tmp_path / file).touch(0o600)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "public").write_text("s3cret-one\n")
    (tmp_path / "public").chmod(0o604)
    for file, why in files.items():
        with pytest.raises(ConfigError, match=f"password file .*{file}.* {why}") as refused:
            parse_redis_url(f"redis://cache?password_file={tmp_path / file}", environment={})
        assert "s3cret" not in str(refused.value)
    with pytest.raises(ConfigError, match="no password"):
        parse_redis_url("redis://ann@cache", environment={})
