"""An owner of a store, which notes what it is asked and answers what it was given; "silent": it takes the lock only."""

import json
import sys

from kvstore.admin.control import ControlServer
from kvstore.disk.directory import StoreDirectory
from kvstore.errors import ConfigError, RequestError, StoreError

ANSWERS = json.loads(sys.argv[2])


def handle(command, arguments):
    print(json.dumps([command, arguments]), flush=True)
    answer = ANSWERS.get(command, {})
    if isinstance(answer, str):
        raise {"ConfigError": ConfigError, "RequestError": RequestError}.get(answer, StoreError)("it was " + answer)
    return answer


with StoreDirectory.open(sys.argv[1]) as directory:
    server = None if ANSWERS.get("silent") else ControlServer(directory, handle)
    print("ready", flush=True)
    sys.stdin.read()
    if server is not None:
        server.close()
