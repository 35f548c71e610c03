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


def check(access, route=USER, key=None, **headers):
    """The tenant, or (status, code)."""
    sent = {"Host": "localhost:8000", **headers}
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    try:
        return access.check(make_mocked_request("GET", "/", headers=sent), route)
    except ApiError as error:
        return error.status, error.code


def access_of(**options) -> Access:
    return Access(ServeOptions(**options))


# -- keys ------------------------------------------------------------------------------------------------------------
def test_each_key_brings_its_tenant(keys):
    access = access_of(api_key_file=keys, api_key="key-of-nobody", admin_key=BOSS)
    assert access.needs_key
    assert check(access, key=KEY_A) == "anna"
    assert check(access, key=KEY_B) == "bert.b_2-x"
    assert check(access, key="key-of-nobody") == ""
    assert access.tenants == ("", "anna", "bert.b_2-x")


@pytest.mark.parametrize("key", ["", "key-of-ann", "key-of-annaa", "KEY-OF-ANNA", KEY_A[::-1], "kéy-of-anna"])
def test_no_other_key_is_let_in(keys, key):
    assert check(access_of(api_key_file=keys), key=key) == (401, "invalid_api_key")


@pytest.mark.parametrize("header", [f"Basic {KEY_A}", KEY_A, f"Bearer{KEY_A}", f"Bearer {KEY_A} {KEY_A}", "Bearer"])
def test_the_key_comes_as_a_bearer(keys, header):
    assert check(access_of(api_key_file=keys), Authorization=header) == (401, "invalid_api_key")
    assert check(access_of(api_key_file=keys), Authorization=f"bearer  {KEY_A} ") == "anna"


def test_the_key_may_come_as_anthropic_s_clients_send_it(keys):
    access = access_of(api_key_file=keys, admin_key=BOSS)
    assert check(access, **{"x-api-key": KEY_A}) == "anna" == check(access, **{"X-Api-Key": f" {KEY_A} "})
    assert check(access, Authorization="Basic of-a-proxy", **{"x-api-key": KEY_A}) == "anna"
    assert check(access, key=KEY_B, **{"x-api-key": KEY_A}) == "bert.b_2-x"
    assert check(access, ADMIN, **{"x-api-key": BOSS}) == ""
    for wrong in ("", "key-of-ann", f"Bearer {KEY_A}"):
        assert check(access, **{"x-api-key": wrong}) == (401, "invalid_api_key")
    assert access.tenant_of({"x-api-key": KEY_A}) == "anna" and access.tenant_of({}) == ""


def test_without_keys_everybody_is_the_one_tenant():
    access = access_of()
    assert not access.needs_key
    assert access.tenants == ("",)
    assert check(access) == "" == check(access, key="whatever-it-is")


# -- the administrator -----------------------------------------------------------------------------------------------
def test_admin_routes_are_the_administrators(keys):
    access = access_of(api_key_file=keys, admin_key=BOSS)
    assert check(access, ADMIN, key=BOSS) == ""
    assert check(access, ADMIN, key=KEY_A) == (403, "admin_only")
    assert check(access, ADMIN) == (401, "invalid_api_key") == check(access, ADMIN, key="wrong-as-it-is")


def test_admin_routes_are_closed_without_an_administrator(keys):
    for access in (access_of(), access_of(api_key_file=keys)):
        for key in (None, KEY_A, "wrong-as-it-is"):
            assert check(access, ADMIN, key=key) == (403, "admin_closed")


def test_an_administrators_key_alone_locks_the_administrators_routes_only():
    access = access_of(admin_key=BOSS)
    assert not access.needs_key
    for key in (None, BOSS, "wrong-as-it-is"):
        assert check(access, key=key) == ""
    assert check(access, ADMIN) == (401, "invalid_api_key") == check(access, ADMIN, key="wrong-as-it-is")
    assert check(access, ADMIN, key=BOSS) == ""


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
])  # fmt: skip
def test_flags_refuse_what_is_out_of_bounds(flag, text):
    option = next(option for option in SERVE_OPTIONS if option.flag == flag)
    with pytest.raises(ConfigError, match=flag):
        option.reads.read(flag, text)


# -- browsers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]", "127.5.0.1:80"])
def test_a_server_on_this_machine_answers_for_its_names(host):
    assert check(access_of(host="127.5.0.1"), Host=host) == ""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil", "127.0.0.1.evil", "[::2]"])
def test_and_for_no_other_name(host):
    for route in (USER, ADMIN, PUBLIC):
        assert check(access_of(), route, Host=host) == (403, "host_not_allowed")


def test_a_public_server_answers_for_every_name():
    assert check(access_of(host="0.0.0.0", allow_no_key=True), Host="chat.example") == ""


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", "http://localhost:8001", "http://localhost"])
@pytest.mark.parametrize("options", [{}, {"host": "0.0.0.0", "allow_no_key": True}])
def test_pages_of_another_origin_are_refused(origin, options):
    assert check(access_of(**options), Origin=origin) == (403, "origin_not_allowed")


def test_pages_of_this_server_are_not():
    assert check(access_of(), Origin="http://localhost:8000") == ""
    assert check(access_of(), Origin="HTTP://LocalHost:8000") == ""


@pytest.mark.parametrize("host", ["chat.example", "Chat.Example:8443", "localhost", "app.example:9"])
def test_names_that_a_proxy_sends_can_be_allowed(host):
    access = access_of(allowed_hosts=("chat.example",), allowed_origins=("https://app.example:9",))
    assert check(access, Host=host) == ""
    assert check(access, Host="evil.example") == (403, "host_not_allowed")


def test_a_public_server_with_allowed_names_answers_for_those_alone():
    access = access_of(host="0.0.0.0", allow_no_key=True, allowed_hosts=("chat.example",))
    assert check(access, Host="chat.example") == "" == check(access, Host="127.0.0.1:8000")
    assert check(access, Host="evil.example") == (403, "host_not_allowed")
    any_name = access_of(host="0.0.0.0", allow_no_key=True, allowed_origins=("https://chat.example",))
    assert check(any_name, Host="10.0.0.1:8000") == ""


@pytest.mark.parametrize(
    "origin",
    ["http://chat.example", "https://chat.example:8443", "https://chat.example.evil", "https://a.chat.example", "null"],
)
def test_an_allowed_origin_is_that_one_alone(origin):
    access = access_of(allowed_origins=("https://chat.example",))
    assert check(access, Origin="https://chat.example") == ""
    assert check(access, Origin=origin) == (403, "origin_not_allowed")


@pytest.mark.parametrize(("flag", "text"), [
    ("--allowed-host", "*"), ("--allowed-host", ""), ("--allowed-host", "https://a.example"),
    ("--allowed-host", "a.example:80"), ("--allowed-host", "a.example,"), ("--allowed-origin", "*"),
    ("--allowed-origin", "null"), ("--allowed-origin", "a.example"), ("--allowed-origin", "https://a.example/"),
    ("--allowed-origin", "https://*.example"), ("--allowed-origin", "https://a.example:443"),
    ("--allowed-origin", "http://a@b.example"), ("--allowed-origin", "https://a.example:x"),
])  # fmt: skip
def test_what_is_no_host_or_origin_is_refused(flag, text):
    option = next(option for option in SERVE_OPTIONS if option.flag == flag)
    with pytest.raises(ConfigError, match=f"{flag} is"):
        option.reads.read(flag, text)


def test_hosts_and_origins_are_taken_as_browsers_write_them():
    parsed = {option.flag: option.reads.parse for option in SERVE_OPTIONS}
    assert parsed["--allowed-host"]("Chat.example, [::1]") == ("chat.example", "[::1]")
    given = "HTTPS://Chat.example,http://[::1]:8080,http://localhost:3000"
    assert parsed["--allowed-origin"](given) == tuple(given.lower().split(","))
