"""Tests of kvstore.remote.names."""

import pytest

from kvstore.errors import ConfigError
from kvstore.remote.names import BlockNames, FleetSecret, fleet_secret

TEXT = "0123456789abcdef0123456789abcdef"


def test_a_secret_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "fleet"
    file.touch(0o600)
    file.write_text(TEXT + "\n")
    environment = {"KVSTORE_FLEET_SECRET": TEXT}
    assert fleet_secret(file, {}).root == fleet_secret(None, environment).root == FleetSecret(TEXT).root
    assert TEXT not in repr(vars(fleet_secret(file, {})))
    environment["KVSTORE_FLEET_SECRET"] += "x"
    assert fleet_secret(file, environment).root == FleetSecret(TEXT).root, "the file is what was asked for"
    assert fleet_secret(None, environment).root != FleetSecret(TEXT).root


def test_none_and_short_ones_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no secret of the fleet.*--fleet-secret-file"):
        fleet_secret(None, {})
    with pytest.raises(ConfigError, match=r"has 5 characters.*32 random") as refused:
        fleet_secret(None, {"KVSTORE_FLEET_SECRET": "short"})
    assert "short" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"fleet secret file .*none cannot be read"):
        fleet_secret(tmp_path / "none", {})


def test_a_file_that_everybody_can_read_is_refused(tmp_path):
    file = tmp_path / "fleet"
    file.write_text(TEXT + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"fleet secret file .*fleet can be read .* by everybody; chmod 600 it"):
        fleet_secret(file, {})
    file.chmod(0o640)  # of a group, as for the key file
    assert fleet_secret(file, {}).root == FleetSecret(TEXT).root


def test_names_differ_by_secret_model_and_block():
    secrets = [FleetSecret(TEXT), FleetSecret(TEXT[::-1])]
    names = {
        BlockNames(secret, fingerprint).of(block)
        for secret in secrets
        for fingerprint in (bytes(32), b"\1" * 32)
        for block in (b"a" * 32, b"b" * 32)
    }
    assert len(names) == 8
    assert all(name.startswith("kvstore/1/") for name in names)
    assert not any((b"a" * 32).hex()[:16] in name for name in names)
