"""Sessions that several servers share: the tables of `kvstore.sessions.tables` in a Redis, and which server may write.

Knows Redis by redis-py; no LMDB, no KV and no engine.

- `address`: one Redis, one that Sentinel names, or a Cluster
- `connection`: to the Redis that has the sessions, found again after it was lost
- `fleet`: the servers that share, as one of them sees the others, and which deletions each has still to carry through
- `leases`: one writer a session across servers
- `names`: what the keys are called
- `opening`: opens them, for a server or for a command
- `server`: connections, what a Redis must be for sessions to be kept in it, and its outages
- `storage`: transactions on the tables: what was read is compared when what is written is committed
- `view`: one transaction: what it has read, and what it will write

Decisions:

What a transaction does with sessions is written once, for LMDB and for Redis. Here it runs in the server that wants
it: it reads over the network and remembers what it read. One script then compares all of that with what is there and
writes everything or nothing; where something has changed, the transaction runs again. So two servers cannot both
append the same turn, and nobody holds a lock that a dead server would keep.

A turn takes minutes, so it also holds a lease: a key with an end, whose value is the turn's alone. The script compares
that too. A server that was stopped for longer than its lease cannot store the turn it had begun.

A commit whose answer did not come is looked up by its number when Redis is back: it is there, or it runs again.

A turn is acknowledged when Redis has said so, under the settings that are asked for and checked at every connection.
A Redis that may drop keys is refused, and one that came back without its sessions is never taken for a new one.

Where Sentinel or a Cluster lets another Redis take over, whoever loses a connection asks again who is the primary. A
commit waits for a replica there unless told otherwise, as a failover keeps only what a replica has. In a Cluster all
keys have one hash tag, so that the script can compare and write all of them: it has the room of one primary.

Of redis-py its connections are used, not its clients: each call has one connection and one deadline, `WAIT` is about
what its own connection has written, and nothing is sent a second time unless the commit's number is not there.

Every server has KV of its own, so a deletion stays until each of them has carried it out. A server that was away for
too long gives up all its KV when it comes back.
"""
