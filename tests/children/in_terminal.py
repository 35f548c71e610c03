"""A module's program at a terminal: what is told after the terminal's name is the command for it."""

import os
import runpy
import signal
import sys

_, terminal, _, _, module, *arguments = sys.argv
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests were started with it ignored
os.dup2(os.open(terminal, os.O_RDWR), 0)  # what the first process of a session opens becomes its terminal
sys.argv = [module, *arguments]
sys.modules.pop(module, None)  # where this was forked, it is loaded
runpy.run_module(module, run_name="__main__", alter_sys=True)
