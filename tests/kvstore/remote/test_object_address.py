"""Tests of kvstore.remote.object_address."""

import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.remote.address import RedisAddress
from kvstore.remote.object_address import ObjectAddress, parse_object_url, parse_remote_url
from tests.support.buckets import need_obstore

SECRETS = "# for this fleet\nAWS_ACCESS_KEY_ID=AKIAEXAMPLE\n\nAWS_SECRET_ACCESS_KEY = s3cret=/+\n"


@pytest.fixture(autouse=True)
def installed():
    need_obstore()


def test_parts_of_a_url():
    assert parse_object_url("s3://bucket/a/b/") == ObjectAddress("s3", "bucket", "a/b")
    assert parse_object_url("gs://bucket") == ObjectAddress("gs", "bucket", "")
    assert parse_object_url("az://container/a") == ObjectAddress("az", "container", "a")
    assert parse_object_url("file:///mnt/kv%20x") == ObjectAddress("file", "", "/mnt/kv x")
    assert [str(parse_object_url(url)) for url in ("s3://b/a", "file:///mnt/kv")] == ["s3://b/a", "file:///mnt/kv"]


def test_what_remote_takes():
    assert parse_remote_url("redis://cache") == RedisAddress("cache")
    assert parse_remote_url("s3://bucket") == ObjectAddress("s3", "bucket", "")
    for url in ("http://x", "bucket", "S3:b"):
        with pytest.raises(ConfigError, match=r"give redis://.* s3://"):
            parse_remote_url(url)
    with pytest.raises(ConfigError) as refused:
        parse_remote_url("http://ann:s3cret@x")
    assert "s3cret" not in str(refused.value)


def test_who_signs_in_comes_from_a_file_and_is_in_no_text(tmp_path):
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(SECRETS)
    found = parse_object_url(f"s3://bucket/a?credentials_file={tmp_path / 'keys'}")
    assert found.settings == {"aws_access_key_id": "AKIAEXAMPLE", "aws_secret_access_key": "s3cret=/+"}
    assert not any(word in f"{found} {found!r}" for word in ("s3cret", "AKIA"))


@pytest.mark.parametrize("url", [
    "s3://", "s3:bucket", "s3:///bucket", "file://host/dir", "file:///", "file:dir", "s3://b/a?region=x", "s3://b/a#x",
    "gs://b?credentials_file", "file:///d?credentials_file=x", "s3://[::1",
])  # fmt: skip
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="give s3://"):
        parse_object_url(url)


def test_credentials_in_a_url_are_refused_and_not_shown():
    with pytest.raises(ConfigError, match="credentials_file=FILE") as refused:
        parse_object_url("s3://AKIAEXAMPLE:s3cret@bucket/a", "--remote")
    assert not any(word in str(refused.value) for word in ("s3cret", "AKIA"))


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
