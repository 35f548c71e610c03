"""Another rank of a model, which is lost when it has loaded and would join the others. LOST_RANK says how."""

import os
import signal

from kvstore.engine.model.parallel.group import Group
from kvstore.engine.program import main


def lose(*_: object) -> None:
    if os.environ["LOST_RANK"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError("no way to the others")


Group.join = lose
main()
