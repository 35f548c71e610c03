"""The command: `kvstore`, or `python -m kvstore` where its script is not on the path."""

import os
import sys


def main() -> int:
    """Run the command and return its exit code. Ctrl-C may also come while its modules are still read."""
    open_closed_streams()
    try:
        from kvstore.service.command import cli
    except KeyboardInterrupt:
        print("kvstore: interrupted", file=sys.stderr)
        return 130
    return cli.main()


def open_closed_streams() -> None:
    """The null device as whichever of stdin, stdout and stderr is closed (`2>&-`): else the next file that is opened,
    maybe the store's, would be that, and messages would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        stream or os.fdopen(descriptor, mode)
        for descriptor, (stream, mode) in enumerate(((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w")))
    )


if __name__ == "__main__":
    sys.exit(main())
