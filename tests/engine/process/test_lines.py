"""What a process without a log of its own says on stderr."""

import re

from kvstore import CacheTiers, Engine


def test_a_warning_of_the_engines_process_is_one_line(model, capfd):
    with Engine(model, CacheTiers(hbm="64KiB"), device="cpu", process="own"):
        pass
    said = r"kvstore: the HBM pool holds \d+ tokens, fewer than max_model_len \d+: longer requests will be refused\n"
    assert re.fullmatch(said, capfd.readouterr().err)
