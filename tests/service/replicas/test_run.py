"""`kvstore serve --replicas` as far as it goes without Ray: what it refuses, and what it is told."""

import pytest

from kvstore.errors import ConfigError
from kvstore.service.replicas.app import app, resources
from kvstore.service.settings.config_file import effective
from kvstore.service.settings.engine_options import arguments_of, engine_command, with_tiers
from kvstore.service.settings.serve_options import REPLICAS
from tests.support.service.server_process import ROOT, run_command
from tests.support.service.serving import serving
from tests.support.service.talking import SHORT

SESSIONS = ("--session-store", "redis://127.0.0.1:1/0")


@pytest.mark.parametrize(("text", "counts"), [("1", (1, 1)), ("16", (16, 16)), ("1-4", (1, 4)), ("3-3", (3, 3))])
def test_a_number_of_replicas_or_the_least_and_the_most(text, counts):
    assert REPLICAS.read("--replicas", text) == counts


@pytest.mark.parametrize("text", ["0", "-1", "two", "2-1", "1-", "1-2-3", "99999", " 2", ""])
def test_other_numbers_of_replicas_are_refused(text):
    with pytest.raises(ConfigError, match=r"--replicas is .*; give a number such as 2"):
        REPLICAS.read("--replicas", text)


def refused(*flags, **environment):
    found = run_command("serve", "--port", "0", *flags, **environment)
    assert (found.returncode, found.stderr.count("\n")) == (2, 1), found
    return found.stderr


def test_without_ray_replicas_are_refused_in_one_line(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError\n")  # stands before an installed one
    said = refused("--store", tmp_path / "store", "--replicas", "2", *SESSIONS, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "pip install 'ray[serve]'" in said
    assert not (tmp_path / "store").exists()


def test_an_application_s_arguments_are_flags():
    with pytest.raises(ConfigError, match=r"'sessions' is no flag of kvstore serve; did you mean"):
        app({"sessions": "redis://127.0.0.1/0"})
    with pytest.raises(ConfigError, match="--max-num-seqs is '-3'"):
        app({"max-num-seqs": -3})
    with pytest.raises(ConfigError, match="--replicas 4 without --session-store"):
        app({"replicas": 1, "disk": 0, "autoscaling_config": {"max_replicas": 4}})


def test_a_replica_has_a_gpu_for_each_process_that_computes():
    given = {"tensor_parallel_size": "2", "pipeline_parallel_size": "3"}
    settings = with_tiers(effective("serve", engine_command("serve").options, given, {}), keeps=True)
    assert resources(1, True, arguments_of("serve", settings)[0]) == {"num_cpus": 1, "num_gpus": 6}


@pytest.mark.parametrize(("path", "body"), [("/chat", {"message": "Hi."}), ("/v1/responses", {"input": "Hi."})])
def test_only_behind_a_front_does_a_header_name_a_new_session(path, body):
    body = {**body, **({"max_output_tokens": 3} if path == "/v1/responses" else SHORT)}
    for is_behind in (True, False):
        with serving(takes_session_names=is_behind) as server:
            assert server.post(path, body, **{"X-New-Session": "chosen"}).status == 200
            assert (server.get("/sessions/chosen").status == 200) is is_behind
