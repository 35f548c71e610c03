"""A module's program at a terminal, or with limits of its open files: which, and what stands before the command."""

import os
import resource
import runpy
import signal
import sys

_, what, told, _, _, module, *arguments = sys.argv
if what == "terminal":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests were started with it ignored
    os.dup2(os.open(told, os.O_RDWR), 0)  # what the first process of a session opens becomes its terminal
else:
    soft, hard = map(int, told.split(","))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
sys.argv = [module, *arguments]
sys.modules.pop(module, None)  # where this was forked, it is loaded
runpy.run_module(module, run_name="__main__", alter_sys=True)
