"""Two computing threads get one of two processors each; other threads keep both."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kernels import native
from kernels.threads import bind_threads

BOUND = """
import json, os, threading, torch
from kernels.threads import bind_threads
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
wait, started = threading.Event(), threading.Event()
other = threading.Thread(target=lambda: (started.set(), wait.wait()), daemon=True)
other.start(); started.wait()
torch.set_num_threads(int(os.environ["THREADS"]))
a = torch.ones(400, 400) @ torch.ones(400, 400)
done = bind_threads()
b = torch.ones(400, 400) @ torch.ones(400, 400)
at = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
print(json.dumps([done, at[os.getpid()], at[other.native_id], [cpus for cpus in at.values() if len(cpus) == 1]]))
assert torch.equal(a, b)
"""

needs_processors = pytest.mark.skipif(
    native.library() is None or not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs a compiler and two processors",
)


def bound(num_threads, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    env |= {"THREADS": str(num_threads), **environment}
    done = subprocess.run([sys.executable, "-c", BOUND], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@needs_processors
def test_two_threads_get_a_processor_each():
    cpus = sorted(os.sched_getaffinity(0))[:2]
    done, caller, other, alone = bound(2)
    assert done and caller == cpus[:1] and other == cpus
    assert sorted(alone) == [[cpu] for cpu in cpus]


@needs_processors
@pytest.mark.parametrize("environment", [{}, {"OMP_PROC_BIND": "false"}])
def test_nothing_is_bound_where_it_is_not_ours_to_choose(environment):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    done, caller, _, alone = bound(2 if environment else 3, **environment)
    assert not done and caller == cpus and not alone


def test_without_a_compiler_nothing_is_bound(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert not bind_threads({})
    assert torch.get_num_threads() >= 1
