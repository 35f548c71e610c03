"""What tests of benchmarks share."""

import pytest


@pytest.fixture
def refused(capsys):
    """The last line that a benchmark says about flags with which it does not run."""

    def said(main, *flags):
        try:
            code = main([*map(str, flags), "--threads", "1"])
        except SystemExit as end:
            code = end.code
        assert code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return said
