"""The disk tier: a directory, LMDB environments in it, blocks as values, and the threads that read and write them.

Usable alone: without arena, without torch, without the CPU tier.

- `check`: whether a file may be handed to LMDB, and quarantine
- `codec`: a block as one value: header, checksum, payload
- `directory`: the store's directory: owner, lock, secret
- `env`: an LMDB environment, opened once and safely
- `format`: its databases, index records and errors
- `index`: what is on disk: parents, sizes, last use
- `index_loader`: builds it from a scan, in a thread
- `io_queue`: one writer and two readers between CPU and disk; or who waits reads
- `records`: the bytes of a store's records: msgspec structs as MessagePack; sealed, with a checksum that covers their
  place, too
- `tier`: blocks in LMDB: write, read, scan, close
- `upkeep`: verify, compact, shrink
- `walk`: the structural check, a program of its own
"""
