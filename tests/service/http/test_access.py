"""Keys, their tenants and files; what a browser may send; who is let in where."""

import pytest
from aiohttp.test_utils import make_mocked_request

from kvstore.errors import ConfigError
from kvstore.service.http.access import Access
from kvstore.service.http.errors import ApiError, Route
from kvstore.service.settings.options import flags_of
from kvstore.service.settings.serve_options import ServeOptions

SERVE_OPTIONS = flags_of(ServeOptions)

USER, ADMIN, PUBLIC = (Route("GET", "/", None, access, "") for access in ("user", "admin", "public"))
KEY_A, KEY_B, BOSS = "key-of-anna", "key-of-bert", "key-of-the-boss"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# who may come in\n\nanna:{KEY_A}\n  bert.b_2-x:{KEY_B}\n")
    path.chmod(0o600)
    return path


def access_of(**options) -> Access:
    return Access(ServeOptions(**options))


FILE = {"api_key_file": "KEYS"}  # the file above
ALL = {**FILE, "api_key": "key-of-nobody", "admin_key": BOSS}
LOCKED, OPEN = {"admin_key": BOSS}, {"host": "0.0.0.0", "allow_no_key": True}
NAMED = {"allowed_hosts": ("chat.example",), "allowed_origins": ("https://app.example:9",)}
NO_KEY, NO_HOST, NO_ORIGIN = (401, "invalid_api_key"), (403, "host_not_allowed"), (403, "origin_not_allowed")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


UNKNOWN = bearer("wrong-as-it-is")
CASES = [  # options, route, headers, and the tenant or what is told
    # Each key brings its tenant, and no other one is let in.
    (ALL, USER, bearer(KEY_A), "anna"),
    (ALL, USER, bearer(KEY_B), "bert.b_2-x"),
    (ALL, USER, bearer("key-of-nobody"), ""),
    *((FILE, USER, bearer(key), NO_KEY) for key in ("", "key-of-ann", "key-of-annaa", "KEY-OF-ANNA", "kéy-of-anna")),
    # It comes as a bearer, or as Anthropic's clients send it.
    *((FILE, USER, {"Authorization": sent}, NO_KEY) for sent in (f"Basic {KEY_A}", KEY_A, f"Bearer{KEY_A}", "Bearer")),
    (FILE, USER, bearer(f"{KEY_A} {KEY_A}"), NO_KEY),
    (FILE, USER, {"Authorization": f"bearer  {KEY_A} "}, "anna"),
    *((ALL, USER, {"x-api-key": sent}, "anna") for sent in (KEY_A, f" {KEY_A} ")),
    *((ALL, USER, {"x-api-key": sent}, NO_KEY) for sent in ("", "key-of-ann", f"Bearer {KEY_A}")),
    (ALL, USER, {"Authorization": "Basic of-a-proxy", "x-api-key": KEY_A}, "anna"),
    (ALL, USER, {**bearer(KEY_B), "x-api-key": KEY_A}, "bert.b_2-x"),
    (ALL, ADMIN, {"x-api-key": BOSS}, ""),
    # Without keys everybody is the one tenant.
    *(({}, USER, headers, "") for headers in ({}, UNKNOWN)),
    # The administrator's routes are the administrator's; closed without one; a key of theirs locks no others.
    (ALL, ADMIN, bearer(BOSS), ""),
    (ALL, ADMIN, bearer(KEY_A), (403, "admin_only")),
    *((ALL, ADMIN, headers, NO_KEY) for headers in ({}, UNKNOWN)),
    *((options, ADMIN, headers, (403, "admin_closed")) for options in ({}, FILE) for headers in ({}, bearer(KEY_A))),
    *((LOCKED, USER, headers, "") for headers in ({}, bearer(BOSS), UNKNOWN)),
    *((LOCKED, ADMIN, headers, NO_KEY) for headers in ({}, UNKNOWN)),
    (LOCKED, ADMIN, bearer(BOSS), ""),
    # A server on this machine answers for its names alone, a public one for all but those that a list leaves out.
    *(({"host": "127.5.0.1"}, USER, {"Host": host}, "") for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1")),
    *(({"host": "127.5.0.1"}, USER, {"Host": host}, "") for host in ("[::1]:8000", "[::1]", "127.5.0.1:80")),
    *(({}, USER, {"Host": host}, NO_HOST) for host in ("localhost.evil", "127.0.0.1.evil", "[::2]")),
    *(({}, route, {"Host": "evil.example:80"}, NO_HOST) for route in (USER, ADMIN, PUBLIC)),
    (OPEN, USER, {"Host": "chat.example"}, ""),
    *((NAMED, USER, {"Host": host}, "") for host in ("Chat.Example:8443", "localhost", "app.example:9")),
    *((NAMED | OPEN, USER, {"Host": host}, "") for host in ("chat.example", "127.0.0.1:8000")),
    *((options, USER, {"Host": "evil.example"}, NO_HOST) for options in (NAMED, NAMED | OPEN)),
    (OPEN | {"allowed_origins": ("https://chat.example",)}, USER, {"Host": "10.0.0.1:8000"}, ""),
    # Pages of its own origin are let in, and those of an allowed one, which is that one alone.
    *(({}, USER, {"Origin": origin}, "") for origin in ("http://localhost:8000", "HTTP://LocalHost:8000")),
    *((options, USER, {"Origin": origin}, NO_ORIGIN) for options in ({}, OPEN)
      for origin in ("http://evil.example", "null", "", "http://localhost:8001", "http://localhost")),
    (NAMED, USER, {"Origin": "https://app.example:9"}, ""),
    *((NAMED, USER, {"Origin": origin}, NO_ORIGIN) for origin in ("http://app.example:9", "null")),
    *((NAMED, USER, {"Origin": f"https://{name}"}, NO_ORIGIN) for name in ("app.example", "app.example:90")),
    (NAMED, USER, {"Origin": "https://a.app.example:9"}, NO_ORIGIN),
]  # fmt: skip


@pytest.mark.parametrize(("options", "route", "headers", "expected"), CASES)
def test_who_is_let_in_and_as_whom(keys, options, route, headers, expected):
    access = access_of(**{name: keys if value == "KEYS" else value for name, value in options.items()})
    try:
        found = access.check(make_mocked_request("GET", "/", headers={"Host": "localhost:8000", **headers}), route)
    except ApiError as error:
        found = error.status, error.code
    assert found == expected


def test_its_tenants_are_known(keys):
    access = access_of(api_key_file=keys, api_key="key-of-nobody", admin_key=BOSS)
    assert access.needs_key and access.tenants == ("", "anna", "bert.b_2-x")
    assert access.tenant_of({"x-api-key": KEY_A}) == "anna" and access.tenant_of({}) == ""
    for other in (access_of(), access_of(admin_key=BOSS)):
        assert not other.needs_key and other.tenants == ("",)


# -- files of keys ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "told"), [
    ("", "holds no key"),
    ("# nothing\n", "holds no key"),
    ("anna\n", "line 1"),
    ("anna:key-of-anna\nan na:key-of-ann2\n", "line 2"),
    (":key-of-anna\n", "tenant"),
    ("a" * 65 + ":key-of-anna\n", "tenant"),
    ("anna:short\n", "8 to 512"),
    ("anna:key of anna\n", "8 to 512"),
    ("anna:kéy-of-anna\n", "8 to 512"),
    ("anna:key-of-anna\nbert:key-of-anna\n", "twice"),
])  # fmt: skip
def test_a_file_that_is_wrong_is_refused_without_its_keys(tmp_path, text, told):
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        access_of(api_key_file=path)
    assert told in str(caught.value)
    assert "of-ann" not in str(caught.value)


def test_a_file_that_everybody_can_read_is_refused(keys):
    keys.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        access_of(api_key_file=keys)


def test_a_file_that_is_not_there_or_no_file(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="--api-key-file"):
            access_of(api_key_file=path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes").chmod(0o600)
    with pytest.raises(ConfigError, match="UTF-8"):
        access_of(api_key_file=tmp_path / "bytes")


def test_one_key_has_one_owner(keys):
    with pytest.raises(ConfigError, match="twice"):
        access_of(api_key_file=keys, admin_key=KEY_A)


# -- where it listens ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_needs_no_key(host):
    assert ServeOptions(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.3", "example.com", "10.0.0.1"])
def test_another_address_needs_a_key_or_the_flag(host, keys):
    with pytest.raises(ConfigError, match="--allow-no-key"):
        ServeOptions(host=host)
    with pytest.raises(ConfigError, match="--allow-no-key"):
        ServeOptions(host=host, admin_key=BOSS)
    for given in ({"api_key": KEY_A}, {"api_key_file": keys}, {"allow_no_key": True}):
        assert not ServeOptions(host=host, **given).is_loopback


@pytest.mark.parametrize(
    "wrong",
    [{"host": ""}, {"host": "a b"}, {"api_key": "short"}, {"admin_key": "with spaces"}],
)
def test_options_that_are_wrong_are_refused(wrong):
    with pytest.raises(ConfigError) as caught:
        ServeOptions(**wrong)
    assert "with spaces" not in str(caught.value)


@pytest.mark.parametrize(("flag", "text"), [
    ("--port", "http"), ("--port", "65536"), ("--port", "-1"), ("--request-timeout", "0"), ("--max-queue", "0"),
    ("--request-timeout", "nan"), ("--max-body", "1"), ("--log-format", "xml"), ("--engine-restarts", "-1"),
    ("--allowed-host", "*"), ("--allowed-host", ""), ("--allowed-host", "https://a.example"),
    ("--allowed-host", "a.example:80"), ("--allowed-host", "a.example,"), ("--allowed-origin", "*"),
    ("--allowed-origin", "null"), ("--allowed-origin", "a.example"), ("--allowed-origin", "https://a.example/"),
    ("--allowed-origin", "https://*.example"), ("--allowed-origin", "https://a.example:443"),
    ("--allowed-origin", "http://a@b.example"), ("--allowed-origin", "https://a.example:x"),
])  # fmt: skip
def test_flags_refuse_what_they_cannot_be(flag, text):
    option = next(option for option in SERVE_OPTIONS if option.flag == flag)
    with pytest.raises(ConfigError, match=f"{flag} is"):
        option.reads.read(flag, text)


def test_hosts_and_origins_are_taken_as_browsers_write_them():
    parsed = {option.flag: option.reads.parse for option in SERVE_OPTIONS}
    assert parsed["--allowed-host"]("Chat.example, [::1]") == ("chat.example", "[::1]")
    given = "HTTPS://Chat.example,http://[::1]:8080,http://localhost:3000"
    assert parsed["--allowed-origin"](given) == tuple(given.lower().split(","))
