"""What a forked child finds of its parent's."""

import os
import warnings
from collections.abc import Callable


def in_fork(work: Callable[[], object]) -> str:
    """What this returns in a forked child, or the error that it raises. The child ends without any clean-up."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # this process has threads
        child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, str(answer).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        found = file.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return found
