"""What stores share over the network (blocks in a Redis or a bucket), and what they tell others (KV events).

Knows no tier above it and no request. Works alone, without an arena or torch.

- `address`: a server's URL and what signs in there
- `kv_events`: routers are told which blocks this server holds
- `names`: the fleet's secret, and the names that it gives to blocks
- `object_address`: a bucket's or directory's URL, and what signs in there
- `object_blocks`: blocks in groups as objects; which object a block was seen in
- `object_client`: objects, many at once, with deadlines
- `owned_blocks`: blocks on a disk that another process of this machine owns
- `prefill`: another server that computes prompts for this one
- `redis_blocks`: blocks as values in a Redis
- `resp`: RESP2 over one socket, pipelined, values straight into the caller's memory
- `resp_replies`: answers in RESP2, parsed from what is received; many values of one size straight to where they go
- `spread`: a tier over several servers, by the ids of blocks
- `unix_server`: a thread for each connection to a Unix socket of this machine

Decisions:

A value is what the disk has: a header with identity and checksum, then the raw payload. The reader checks all of it
each time, whoever wrote it. Names are HMACs with the fleet's secret, behind a prefix of format and fingerprint: block
ids would reveal who says the same, and another model's blocks are never looked at.

Nobody waits for a server that does not answer. Each pipeline has a deadline; after one failure no thread asks it, until
a probe in the background has succeeded. Until then everything is recomputed at once.

In an object store every request costs, so blocks are stored in groups along their chain, each named by its last block.
Whoever knows the chain asks for a few names and finds all of it, without an index that could lag behind. A group never
changes: it is not merged with the next when a conversation grows, as others may share it or be reading it.

In a Redis, chains expire from the tail: a block's time to live is shorter than its parent's, and whenever a chain is
asked for or stored, all of it is refreshed, the tail first. When the server is full, it alone decides what to evict;
with `volatile-ttl` that is what expires soonest, which is a tail, too. Objects have an age: a chain lives as long as
its youngest group, and older ones are stored anew when it grows; a rule of the bucket removes what is left.

Another server computes prompts when it is given their token ids and the root of their chain: text would have to be
tokenized again there, and might not give the ids that a conversation has. As blocks are named by their content, it has
nothing to answer but how many of them are stored.

Engines of one machine share a disk in the same way: its owner answers in RESP2 at a Unix socket. LMDB would let
several processes open a file, but each would evict by what it alone knows, and promise what another has deleted.

Several Redis are told apart by a block's id alone, since whoever reads a block knows no more of it, and a chain has no
name before its end is known. So a chain lies on all of them: one that is away shortens every hit to what is before its
first block there, and is computed; in return all have the same load, however long a common beginning is.

The client for Redis is our own: in the logged runs it was at least as fast as `valkey-glide-sync`, and 2.5 to 4 times
as fast as redis-py, which makes bytes of each value before they can be copied to where they go.
"""
