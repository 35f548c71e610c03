"""Where values come from: flag, environment, file, default; what a file may say; and printing it all as such a file.

Refusals name what was given, and a misspelt variable is told.
"""

import tomllib

import pytest

from kvstore.config import COUNT, SIZE, SWITCH, TEXT
from kvstore.errors import ConfigError, ModelError, UnsupportedModelError
from kvstore.service.command import cli
from kvstore.service.command.cli import command_of, tell_misspelt
from kvstore.service.settings.config_file import as_toml, effective, read_config, told
from kvstore.service.settings.engine_options import engine_command, naming_flags
from kvstore.service.settings.options import (
    COMMANDS,
    JSON,
    REMOVED,
    STORE,
    Command,
    Option,
    flags_of,
    key_of,
    parse_arguments,
    variable_of,
)
from kvstore.service.settings.serve_options import ServeOptions

SEED = Option("--seed", COUNT, 1, "a number")
POLICY = Option("--policy", TEXT, "auto", "a text", aliases=("--eviction",))
KEY = Option("--api-key", TEXT, None, "a secret", secret=True)
HBM = Option("--hbm", SIZE, None, "a size")
OPTIONS = (SEED, POLICY, KEY, HBM, STORE)
READ = ["KVSTORE_CONFIG", "KVSTORE_FLEET_SECRET", "KVSTORE_REDIS_PASSWORD", "KVSTORE_PATH"]  # the last by an older name
OF_KUBERNETES = ["KVSTORE_SERVICE_HOST", "KVSTORE_PORT_8000_TCP"]


@pytest.fixture
def home(no_settings):
    """The directory of the default file."""
    folder = no_settings / ".config" / "kvstore"
    folder.mkdir(parents=True)
    return folder


def write(path, text):
    path.write_text(text)
    return str(path)


def option_values(command, options, given, environment):
    return {name: one.value for name, one in effective(command, options, given, environment).items()}


def values(given=(), environment=(), command="serve"):
    return option_values(command, OPTIONS, {"config": None, **dict(given)}, dict(environment))


def test_the_order_is_flag_environment_section_file_default(home):
    assert values()["seed"] == 1
    file = {"config": write(home / "any.toml", "seed = 2\n")}
    assert values(file)["seed"] == 2
    file = {"config": write(home / "any.toml", "seed = 2\n[serve]\nseed = 3\n[chat]\nseed = 4\n")}
    assert values(file)["seed"] == 3
    assert values(file, command="chat")["seed"] == 4
    assert values(file, command="stats")["seed"] == 2
    assert values(file, {"KVSTORE_SEED": "5"})["seed"] == 5
    assert values({**file, "seed": "6"}, {"KVSTORE_SEED": "5"})["seed"] == 6
    assert values(file, {"KVSTORE_SEED": ""})["seed"] == 3  # an empty variable is as good as none


PLACES = (
    "MODEL", "--tokenizer", "--chat-template", "--kv-events", "--session-store", "--store", "--remote", "--prefill-url",
    "--fleet-secret-file", "--api-key-file", "--config",
)  # fmt: skip


@pytest.mark.parametrize("flag", PLACES)
def test_a_place_whose_variable_was_not_set_is_not_taken_for_none(home, monkeypatch, capsys, flag):
    """Such as `--session-store "$SESSIONS"`, or a line `KVSTORE_SESSION_STORE=` of a unit's environment."""
    given = [""] if flag == "MODEL" else [flag, ""]
    assert refused(capsys, *given) == flag
    if flag != "--config":
        assert refused(capsys, "--config", write(home / "empty.toml", f'{key_of(flag)} = ""\n')) == key_of(flag)
    monkeypatch.setenv(variable_of(flag), "")
    assert refused(capsys) == variable_of(flag)


def refused(capsys, *flags):
    """The first word of the one line that says why."""
    assert cli.main(["serve", *flags, "--print-config"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and " is ''" in err
    return err.removeprefix("kvstore: ").split()[0]


def test_which_file_it_is(home):
    write(home / "config.toml", "seed = 2\n")
    assert values()["seed"] == 2
    other = write(home / "other.toml", "seed = 3\n")
    assert values({}, {"KVSTORE_CONFIG": other})["seed"] == 3
    named = write(home / "named.toml", "seed = 4\n")
    assert values({"config": named}, {"KVSTORE_CONFIG": other})["seed"] == 4
    elsewhere = home / "xdg" / "kvstore"
    elsewhere.mkdir(parents=True)
    write(elsewhere / "config.toml", "seed = 5\n")
    assert values({}, {"XDG_CONFIG_HOME": str(home / "xdg")})["seed"] == 5
    assert values({"config": "/dev/null"})["seed"] == 1


def test_older_names_work_and_the_newer_ones_win(home):
    assert values({}, {"KVSTORE_EVICTION": "lru"})["policy"] == "lru"
    assert values({}, {"KVSTORE_EVICTION": "lru", "KVSTORE_POLICY": "fifo"})["policy"] == "fifo"
    assert str(values({}, {"KVSTORE_PATH": "/a"})["store"]) == "/a"
    assert str(values({}, {"KVSTORE_PATH": "/a", "KVSTORE_STORE": "/b"})["store"]) == "/b"
    file = {"config": write(home / "any.toml", 'path = "/c"\neviction = "lru"\n')}
    assert (str(values(file)["store"]), values(file)["policy"]) == ("/c", "lru")
    file = {"config": write(home / "any.toml", 'path = "/c"\nstore = "/d"\n')}
    assert str(values(file)["store"]) == "/d"


def test_what_may_be_given_again_is_a_list_in_a_file_and_a_text_with_commas_elsewhere(home):
    option = next(option for option in flags_of(ServeOptions) if option.flag == "--allowed-host")
    command = Command("serve", {"flags": (option,)}, "")

    def found(*argv, environment=(), file=""):
        given = parse_arguments(command, [*argv, "--config", write(home / "any.toml", file)])
        return effective("serve", (option,), given, dict(environment))["allowed_host"]

    assert found().value == found(file="allowed_host = []\n").value == ()
    assert found("--allowed-host", "a", "--allowed-host", "b,c").value == ("a", "b", "c")
    assert found(environment={"KVSTORE_ALLOWED_HOST": "a,b"}).value == ("a", "b")
    for text in ('["a", "b"]', '"a,b"', '["a,b"]'):
        one = found(file=f"allowed_host = {text}\n")
        assert one.value == ("a", "b")
        assert found(file=as_toml([one])).value == ("a", "b")
    for text in ("[1]", "5", '[["a"]]', '[""]'):
        with pytest.raises(ConfigError, match=f"allowed_host in {home}/any"):
            found(file=f"allowed_host = {text}\n")


def test_keys_may_have_dashes_and_values_the_forms_of_flags(home):
    file = {"config": write(home / "any.toml", 'api-key = "x"\nhbm = 1e9\nseed = "7"\n')}
    assert (values(file)["api_key"], values(file)["hbm"], values(file)["seed"]) == ("x", 10**9, 7)


@pytest.mark.parametrize(("text", "words"), [
    ("sed = 1", "'sed' in FILE is unknown; did you mean 'seed'?"),
    ("[serve]\nprot = 1", "'prot' in FILE under [serve] is unknown; did you mean 'port'?"),
    ("[chat]\nport = 1", "'port' in FILE under [chat] is unknown to chat; put it under [serve]"),
    ("[serv]\nport = 1", "[serv] in FILE is unknown; did you mean 'serve'?"),
    ("print_config = true", "'print_config' in FILE is unknown"),
    ("api_key = 'a'\napi-key = 'b'", "'api-key' in FILE stands there twice"),
    ("seed = ", "FILE is no valid TOML"),
    ("seed = true", "seed in FILE is true; give a number"),
    ("seed = 1.5", "seed in FILE is '1.5'; give a whole number from 1"),
    ("seed = [1]", "seed in FILE is [1]; give one value"),
    ("[serve]\nseed = 'x'", "seed in FILE under [serve] is 'x'; give a whole number from 1"),
    ("policy = 5", "policy in FILE is 5; give a text in quotes"),
    ("hbm = -1", "hbm in FILE is '-1'; give a number of bytes"),
])  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_with_its_place(home, text, words):
    path = write(home / "wrong.toml", text)
    with pytest.raises(ConfigError) as caught:
        values({"config": path})
    assert words.replace("FILE", path) in str(caught.value)


def test_a_switch_in_a_file_is_a_bool(home):
    flag = Option("--allow-no-key", SWITCH, False, "a switch")
    for text, expected in (("true", True), ("false", False), ("'yes'", True)):
        given = {"config": write(home / "any.toml", f"allow_no_key = {text}\n")}
        assert option_values("serve", (flag,), given, {}) == {"allow_no_key": expected}
    given = {"config": write(home / "any.toml", "allow_no_key = 1\n")}
    with pytest.raises(ConfigError, match="is 1; give true or false"):
        option_values("serve", (flag,), given, {})


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read" if content is None else "no valid TOML"):
        read_config(path)


def test_the_printed_settings_are_a_file_that_says_the_same(home):
    given = {"config": write(home / "any.toml", 'hbm = "10GB"\n'), "policy": 'a "quoted"\\ \x7f\ttext\né'}
    first = effective("serve", OPTIONS, given, {"KVSTORE_SEED": "5", "KVSTORE_API_KEY": "hunter22hunter22"})
    text = as_toml(first.values())
    assert "hunter22" not in text
    assert "seed = 5" not in text and 'seed = "5"  # environment KVSTORE_SEED' in text
    assert f'hbm = "10GB"  # file {home}/any.toml' in text and "# flag --policy" in text
    assert "# store: not set" in text and "# api_key =" in text
    again = effective("serve", OPTIONS, {"config": write(home / "printed.toml", text)}, {})
    expected = {name: one.value for name, one in first.items()} | {"api_key": None}
    assert {name: one.value for name, one in again.items()} == expected
    assert again["seed"].origin == f"file {home}/printed.toml"


# -- in the commands -------------------------------------------------------------------------------------------------
def printed(capsys, *argv):
    assert cli.main([*argv, "--print-config"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_print_config_loads_nothing_and_can_be_read_again(home, capsys, command, monkeypatch):
    monkeypatch.setenv("KVSTORE_API_KEY", "hunter22hunter22")
    out = printed(capsys, command, "some/model", "--store", "/s", "--block-size", "32", "--ttl", "7d")
    assert "hunter22" not in out
    found = tomllib.loads(out)
    assert (found["model"], found["store"], found["block_size"], found["ttl"]) == ("some/model", "/s", "32", "7d")
    assert '# cpu = "1GiB"  # default' in out and '# disk = "8GiB"  # default' in out  # what follows from a store
    assert not {"cpu", "disk", "port", "hbm"} & set(found)
    assert "print_config" not in found and "config" not in found
    again = printed(capsys, command, "--config", write(home / "printed.toml", out))
    assert tomllib.loads(again) == found


def test_what_a_server_prints_hands_on_to_chat_what_was_set_and_no_default(home, capsys):
    out = printed(capsys, "serve", "--block-size", "32", "--port", "9000")
    assert '# store = "' in out
    chat = printed(capsys, "chat", "--config", write(home / "printed.toml", out))
    assert "# store: not set" in chat and 'block_size = "32"' in chat
    assert '# disk = "0"  # default' in chat


def test_a_store_in_a_file_is_that_of_every_command(home, tmp_path, capsys):
    write(home / "config.toml", f'store = "{tmp_path}/none"\n[serve]\nport = 1\n')
    for argv in (["stats"], ["sessions"], ["evict", "--all"], ["verify"], ["compact"], ["plan"]):
        assert cli.main(argv) == 1
        assert f"there is no store at {tmp_path}/none" in capsys.readouterr().err


@pytest.mark.parametrize("key", REMOVED)
def test_what_has_been_removed_is_refused_wherever_it_stands_and_says_what_to_use(home, capsys, monkeypatch, key):
    def refused(*argv: str) -> None:
        assert cli.main(["serve", *argv]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f" is unknown, as it has been removed: {REMOVED[key]}")

    flag, variable = f"--{key.replace('_', '-')}", variable_of(key)
    assert cli.main(["serve", flag, "1"]) == 2
    assert capsys.readouterr().err == f"kvstore: unknown flag {flag!r}, as it has been removed: {REMOVED[key]}\n"
    refused("--config", write(home / "any.toml", f"{key} = 1\n"))
    refused("--config", write(home / "any.toml", f"[serve]\n{key} = 1\n"))
    monkeypatch.setenv(variable, "1")
    refused()


def test_a_wrong_file_is_one_line_and_exit_2(home, capsys):
    write(home / "config.toml", "prot = 1\n")
    for command in ("serve", "chat", "stats", "plan"):
        assert cli.main([command]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and "did you mean 'port'?" in captured.err
    assert option_values("stats", (JSON,), {"config": "/dev/null"}, {}) == {"json": False}


@pytest.mark.parametrize("refusal, line", [
    (ConfigError("cpu", "1.0 KiB", "give more"), "--cpu is 1.0 KiB; give more"),
    (ConfigError("max_num_seqs", "2", "give more"), "KVSTORE_MAX_NUM_SEQS is 2; give more"),
    (ConfigError("dtype", "float16", {"device": "cpu"}), "dtype in FILE is float16; give --device cpu"),
    (ConfigError("eviction", "'x' in /a/max_model_len, not disk or seed=3", "give one=two"),
     "--policy is 'x' in /a/max_model_len, not disk or seed=3; give one=two"),
    (ConfigError("cpu is no model"), "cpu is no model"),
    (UnsupportedModelError("cpu has 4 heads", {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
     "cpu has 4 heads; give --tensor-parallel-size 1 and --pipeline-parallel-size 2"),
    (ModelError("cpu has no tokenizer; give --tokenizer (in Python, tokenizer=)"),  # a model of this name
     "cpu has no tokenizer; give --tokenizer (in Python, tokenizer=)"),
])  # fmt: skip
def test_refusals_name_what_was_given(tmp_path, refusal, line):
    file = tmp_path / "file.toml"
    file.write_text('dtype = "float16"\n')
    environment = {"KVSTORE_CONFIG": str(file), "KVSTORE_MAX_NUM_SEQS": "2"}
    settings = told(engine_command("serve"), ["--cpu", "1KiB"], environment).settings
    with pytest.raises(type(refusal)) as caught, naming_flags(settings):
        raise refusal
    assert str(caught.value) == line.replace("FILE", str(file))


def test_a_parser_that_is_unknown_is_refused_before_weights_are_read(home, capsys):
    assert cli.main(["serve", "--tool-call-parser", "hermis", "--print-config"]) == 2
    assert capsys.readouterr().err.startswith("kvstore: --tool-call-parser is 'hermis'; give one of deepseek_v3, ")


@pytest.mark.parametrize("command", ["chat", "serve", "stats", "plan", "vllm-config"])
def test_a_store_that_is_a_file_is_refused(tmp_path, no_settings, capsys, command):
    (tmp_path / "file").write_text("x")
    assert cli.main([command, "--store", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        f"kvstore: --store is '{tmp_path}/file', which is a file; give the directory of the store\n"
    )


def misspelt(capsys, *names):
    tell_misspelt(dict.fromkeys(names, "1"))
    return capsys.readouterr().err


def test_a_misspelt_variable_is_misspelt(capsys):
    options = [one for name in COMMANDS for one in command_of(name)[1].options]
    flags = [variable_of(one.flag) for one in options if one.mirrored]
    assert misspelt(capsys, *flags, *READ, *OF_KUBERNETES, "OTHER") == ""
    assert misspelt(capsys, "KVSTORE_MAX_MODL_LEN", "KVSTORE_PREFIL_RATE") == (
        "kvstore: nothing reads KVSTORE_MAX_MODL_LEN; did you mean KVSTORE_MAX_MODEL_LEN?\n"
        "kvstore: nothing reads KVSTORE_PREFIL_RATE; did you mean KVSTORE_PREFILL_RATE?\n"
    )


def test_commands_tell_it(capsys, no_settings, monkeypatch):
    monkeypatch.setenv("KVSTORE_STOR", "x")
    assert cli.main(["chat", "--print-config"]) == 0
    assert capsys.readouterr().err == "kvstore: nothing reads KVSTORE_STOR; did you mean KVSTORE_STORE?\n"
