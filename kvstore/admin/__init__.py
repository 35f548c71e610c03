"""What an administrator asks of a store: of its owner over a socket, or of files that nobody owns.

Knows sessions and disk; no engine.

- `commands`: arguments and results of the commands on a store
- `control`: the owner's Unix socket, and how other processes ask it
- `offline`: the same commands on a store that nobody owns
- `private_folder`: folders for sockets, removed by the next owner where the last one was killed
"""
