"""Another rank of a model, which is lost when it has loaded and would join the others. LOST_RANK says how."""

import os
import signal
import sys

from kvstore.engine import rank_process
from kvstore.engine.model.parallel.group import Group


def lose(*_: object) -> None:
    if os.environ["LOST_RANK"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError("no way to the others")


Group.join = lose
code = rank_process.main()
sys.stderr.flush()
os._exit(code)
