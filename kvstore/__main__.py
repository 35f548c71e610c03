"""The command: `kvstore`, or `python -m kvstore` where its script is not on the path."""

import sys


def main() -> int:
    """Run the command and return its exit code. Ctrl-C may also come while its modules are still read."""
    try:
        from kvstore.service.command import cli
    except KeyboardInterrupt:
        print("kvstore: interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
