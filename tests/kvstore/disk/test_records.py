"""Records as bytes: decoders that were made at import, so that threads may use a type for the first time at once."""

import subprocess
import sys


def test_threads_that_use_a_type_for_the_first_time_at_once_end_no_process():
    child = [sys.executable, "-m", "tests.children.first_use_child"]
    done = subprocess.run(child, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "{'records': 0, 'bodies': 0, 'commands': 0}", done.stderr
