"""The other ranks of a model, each in a process of its own: starts them, sends them each step, watches and ends them.

The first rank is the process that has the scheduler and the store. Knows no request and no block id.

- `follower`: what another rank does with a step
- `on_ray`: ranks that Ray starts, on any number of machines
- `ranks`: the other ranks, as the first rank sees them: how they are started, let in and watched
- `wire`: the messages between the first rank and another one

Decisions:

Only the first rank has the control plane. Each step, the others get one message through a socket pair with what a
forward needs: token ids, positions, slots, the block table, the window slots of its blocks, and the arena blocks to
load and save. They have no batch, no sampler and no lock of the store, and they decide nothing. All ranks map one
arena, where each block is one record with all heads and layers. So only the first rank deals with the disk, splices and
deletion, and a store does not know how many ranks have written it.

On CUDA each rank pins that arena for its own device, and moves its part in queues of it. It tells the first rank of a
step's loads and saves when their events are reached, in the thread that waits for these; the next step waits for no
save. The first rank's step waits until all have loaded, as a load that fails makes its tokens wrong. A device that
waits for a lost rank waits for ever. So the groups are cut when one ends, and tokens count only if none has ended when
they have come.

A rank of another machine has no share of the arena. Its heads and layers of the blocks that a step loads come with
the step, and what it has saved goes back in a message when the step has ended, into the same records. So there is one
store, on the first rank's machine, and nothing else that a rank would have to own. Its channel is a TCP connection, and
it ends with that. Then the first rank asks Ray for another. When a rank of another machine has hung or vanished, its
sockets may be open for ever, so the first rank closes its own end of the sums. The proof of a connection is a secret
that the first rank makes and Ray brings to the others: whoever may talk to Ray may run any code there.

When a rank ends or hangs, all ranks end, because a step that one rank has not computed is of no use. An engine in a
process of its own is then started again with all its ranks. A rank dies with the first one (parent-death signal and end
of file), and gives signs of life as the engine's process does. If all are alive and a step of the first one does not
end, it ends the others, also where no process watches it (`kvstore.engine.process.Heart`).
"""
