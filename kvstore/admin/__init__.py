"""What an administrator asks of a store: of its owner over a socket, or of files that nobody owns.

Knows sessions and disk; no engine.

- `commands`: arguments and results of the commands on a store
- `control`: the owner's Unix socket, and how other processes ask it
- `offline`: the same commands on a store that nobody owns
- `private_folder`: folders for sockets, removed by the next owner where the last one was killed

Decisions:

The owner of a store listens on a Unix socket in its directory (0600), named in the lock file, and answers only its
own user. So commands of other processes cover HBM, CPU, disk and pending writes, and cannot disagree with the
owner. A store that nobody owns is opened for one command, under its lock; nothing is made that was not there.
"""
