"""The disk tier: a directory, LMDB environments in it, blocks as values.

Usable alone: without arena, without torch, without the CPU tier. Other engines use it through `kvstore.block_store`.

- `blocks_file`: the blocks' file over its life: opening, compaction, recovery, quarantine; its space
- `check`: whether a file may be handed to LMDB, and quarantine; small files, replaced as a whole
- `codec`: a block as one value: header, checksum, payload
- `directory`: the store's directory: owner, lock, secret; whether what was opened is still in its place
- `env`: an LMDB environment, opened once and safely; its tables that threads use: reopening, compaction, closing
- `format`: the databases of the blocks, index records and errors
- `index`: what is on disk: parents, sizes, last use
- `opening`: the tier while it is opened, in a thread, under whatever else loads
- `records`: the bytes of a store's records: msgspec structs as MessagePack; sealed, with a checksum that covers their
  place, too
- `tier`: blocks in LMDB: write, read, scan, check every one
- `walk`: the structural check, a program of its own
- `weights`: a model's weights as one digest

Decisions:

A value is a whole block with a header and a checksum over both (xxh3), compared with what the request wants: parent,
token ids, fingerprint. Values are raw unless configured otherwise: in measurements, compressing took more time than the
smaller values saved.

Lossy `int8` is MXINT8: bytes with a power of two for each 32 numbers that lie side by side. Keys by channel lose less,
but then a codec must know the model, and a block is not read alone. As the steps are powers of two, what comes back is
stored again without loss. A value in it is read only under an id that says so.

The index is read into memory before the store opens, under the loading of the model, so that nobody above has to ask
whether it is there: what is stored and what goes next is known from the first request. A start waits where that takes
longer than the model, and says how far it is.

LMDB's map size is the tier's size, so the file never exceeds it. Freed pages are used again two transactions later, so
a batch is at most 1/32 of the file, and eviction begins at 85 %.

Options by measurement: `sync=True, metasync=False, writemap=False` recovered 200 of 200 simulated power losses;
without `sync` 16 %, and wrong values silently; `writemap` dies of SIGBUS on a full disk; without read-ahead cold
reads were 15 to 30 times slower. Reads take views (`buffers=True`), as a copy in LMDB would hold the interpreter's
lock through page faults.

LMDB trusts its pages, and some flipped bits that its own verification passes make it crash later. So a separate process
checks a file before LMDB opens it. A file that fails is moved into quarantine, and the store goes on with an empty one.

A store's ownership is held twice and checked while it is open. An `flock` on the directory remains when the lock file
is removed, and a process that answers at the socket owns the store, too. Before a write, after each commit of turns and
twice a second, the lock and the data files are compared by device and inode with what was opened: a turn that could not
be found again is not acknowledged.
"""
