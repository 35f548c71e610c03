"""Administration of a store: through its owner's socket, or on the files of a store without an owner.

Knows sessions and disk; no engine.

- `commands`: arguments and results of the commands on a store
- `control`: the owner's Unix socket, and how other processes ask it
- `offline`: the same commands on a store that nobody owns
- `shared`: the commands on sessions that servers share in a Redis
- `private_folder`: folders for sockets; a killed owner's folder is removed by the next owner

Decisions:

The owner of a store listens on a Unix socket in its directory (0600), named in the lock file, and answers only its own
user. So commands of other processes cover HBM, CPU, disk and pending writes, and cannot disagree with the owner. A
store without an owner is opened for one command, under its lock; nothing new is created.
"""
