"""`python -m kvstore`: the command, where its script is not on the path."""

import sys

from kvstore.service.command.cli import main

sys.exit(main())
