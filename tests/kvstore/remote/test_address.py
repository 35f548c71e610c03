"""Addresses of a Redis, of objects and of other servers: what is taken, and that no secret is shown."""

import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.remote.address import RedisAddress, parse_prefill_url, parse_redis_url
from kvstore.remote.object_address import ObjectAddress, parse_object_url, parse_remote_url

pytest.importorskip("obstore")  # which addresses of objects need


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


REFUSED = {  # by what is said: who parses, and addresses that are none
    "give redis://": (parse_redis_url, [
        "redis://", "cache:6379", "http://cache", "redis://cache:0", "redis://cache:99999", "redis://cache/x",
        "redis://cache/0/1", "redis://cache?timeout=3", "redis://cache#1", "redis://[::1", "redis://cache/²",
    ]),
    "http://host:8000": (parse_prefill_url, [
        "", "host:8000", "redis://host", "http://", "http://host:99999", "http://host/?a=b",
    ]),
    "give s3://": (parse_object_url, [
        "s3://", "s3:bucket", "s3:///bucket", "file://host/dir", "file:///", "file:dir", "s3://b/a?region=x",
        "s3://b/a#x", "gs://b?credentials_file", "file:///d?credentials_file=x", "s3://[::1",
    ]),
}  # fmt: skip


@pytest.mark.parametrize(("parse", "url", "said"), [
    (parse, url, said) for said, (parse, urls) in REFUSED.items() for url in urls
])  # fmt: skip
def test_what_is_no_address_is_refused(parse, url, said):
    with pytest.raises(ConfigError, match=said):
        parse(url)


@pytest.mark.parametrize(("parse", "url", "remedy"), [
    (parse_redis_url, "redis://ann:s3cret@cache", "KVSTORE_REDIS_PASSWORD"),
    (parse_prefill_url, "http://ada:s3cret@host", "the fleet's secret"),
    (parse_object_url, "s3://AKIAEXAMPLE:s3cret@bucket/a", "credentials_file=FILE"),
])  # fmt: skip
def test_who_signs_in_is_not_taken_from_a_url_nor_shown(parse, url, remedy):
    with pytest.raises(ConfigError, match=remedy) as refused:
        parse(url)
    assert not any(word in str(refused.value) for word in ("s3cret", "AKIA"))


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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host", "http://host:80"),
        ("http://10.0.0.7:8000/", "http://10.0.0.7:8000"),
        ("https://host/base/", "https://host:443/base"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_of_servers(url, shown):
    assert str(parse_prefill_url(url)) == shown


# -- objects ---------------------------------------------------------------------------------------------------------
def test_parts_of_a_url_of_objects():
    assert parse_object_url("s3://bucket/a/b/") == ObjectAddress("s3", "bucket", "a/b")
    assert parse_object_url("gs://bucket") == ObjectAddress("gs", "bucket", "")
    assert parse_object_url("az://container/a") == ObjectAddress("az", "container", "a")
    assert parse_object_url("file:///mnt/kv%20x") == ObjectAddress("file", "", "/mnt/kv x")
    assert [str(parse_object_url(url)) for url in ("s3://b/a", "file:///mnt/kv")] == ["s3://b/a", "file:///mnt/kv"]


def test_what_remote_takes():
    assert parse_remote_url("redis://cache") == (RedisAddress("cache"),)
    assert parse_remote_url("redis://one,redis://two/3") == (RedisAddress("one"), RedisAddress("two", database=3))
    with pytest.raises(ConfigError, match="the same Redis twice"):
        parse_remote_url("redis://one,redis://one:6379/0")
    with pytest.raises(ConfigError, match=r"redis\+sentinel://, which only sessions follow.*redis://one,redis://other"):
        parse_remote_url("redis+sentinel://one,two/sessions")
    assert parse_remote_url("s3://bucket") == ObjectAddress("s3", "bucket", "")
    for url in ("http://x", "bucket", "S3:b"):
        with pytest.raises(ConfigError, match=r"give redis://.* s3://"):
            parse_remote_url(url)
    with pytest.raises(ConfigError) as refused:
        parse_remote_url("http://ann:s3cret@x")
    assert "s3cret" not in str(refused.value)


def test_who_signs_in_comes_from_a_file_and_is_in_no_text(tmp_path):
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text("# ours\nAWS_ACCESS_KEY_ID=AKIAEXAMPLE\n\nAWS_SECRET_ACCESS_KEY = s3cret=/+\n")
    found = parse_object_url(f"s3://bucket/a?credentials_file={tmp_path / 'keys'}")
    assert found.settings == {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "s3cret=/+"}
    assert not any(word in f"{found} {found!r}" for word in ("s3cret", "AKIA"))


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"s3cret\n", b"=s3cret\n", b"A=1\ns3cret\n"])
def test_a_bad_file_of_credentials_is_named_and_not_shown(tmp_path, content):
    if content is not None:
        (tmp_path / "keys").touch(0o600)
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=r"credentials file .*keys") as refused:
        parse_object_url(f"s3://bucket?credentials_file={tmp_path / 'keys'}")
    assert "s3cret" not in str(refused.value)


def test_without_obstore_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"s3://, which needs obstore; pip install obstore"):
        parse_object_url("s3://bucket")
