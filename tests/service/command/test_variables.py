"""A misspelt variable is told; those that something reads, or that others set, are not."""

from kvstore.service.command import cli
from kvstore.service.command.cli import command_of, tell_misspelt
from kvstore.service.settings.options import COMMANDS, variable_of

READ = ["KVSTORE_CONFIG", "KVSTORE_FLEET_SECRET", "KVSTORE_REDIS_PASSWORD", "KVSTORE_PATH"]  # the last by an older name
OF_KUBERNETES = ["KVSTORE_SERVICE_HOST", "KVSTORE_PORT_8000_TCP"]


def told(capsys, *names):
    tell_misspelt(dict.fromkeys(names, "1"))
    return capsys.readouterr().err


def test_a_misspelt_variable_is_told(capsys):
    options = [one for name in COMMANDS for one in command_of(name)[1].options]
    flags = [variable_of(one.flag) for one in options if one.mirrored]
    assert told(capsys, *flags, *READ, *OF_KUBERNETES, "OTHER") == ""
    assert told(capsys, "KVSTORE_MAX_MODL_LEN", "KVSTORE_PREFIL_RATE") == (
        "kvstore: nothing reads KVSTORE_MAX_MODL_LEN; did you mean KVSTORE_MAX_MODEL_LEN?\n"
        "kvstore: nothing reads KVSTORE_PREFIL_RATE; did you mean KVSTORE_PREFILL_RATE?\n"
    )


def test_commands_tell_it(capsys, no_settings, monkeypatch):
    monkeypatch.setenv("KVSTORE_STOR", "x")
    assert cli.main(["chat", "--print-config"]) == 0
    assert capsys.readouterr().err == "kvstore: nothing reads KVSTORE_STOR; did you mean KVSTORE_STORE?\n"
