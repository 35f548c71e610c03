"""Who stays and what comes early: conversations, the order of eviction, what was learned of returns, the waiting order.

Decides with names, counts and times alone; knows no tier and no tensor.

- `conversation`: which requests belong together; agents that work for one another, and which of them wait
- `planner`: load, compute, or both from two ends, from measured rates; the waiting order: what to read ahead, what to
  protect
- `policies`: the order of conversations: `fifo`, `lru`, `return`, `auto`; pins and times to live; all of it tied
  together for all tiers
- `prefixes`: what first prompts have in common, and when others come back to it
- `return_model`: when conversations return: their categories, life tables, and what an idle one is worth

Decisions:

Conversations are recognised without being told: a chain that extends the last block of an earlier prompt or answer goes
on with that conversation, whether it comes from a session or from a client that sends its history. In each tier a
conversation ends at the last of its blocks there, and owns it (see `kvstore.blocks`). The next block to evict is the
end of the least valuable conversation, then that block's parent. Where a prefix ends that is worth more than the owner,
the prefix owns the block from then on.

The order of conversations is the same on each tier: those whose time to live is over; the ordinary ones, by policy;
those that wait for sub-agents and pinned ones (a priority with an end, so pins cannot wedge a pool); those that a
waiting request needs, the one to be served last going first; last of all those with a request that runs. Without the
last class a conversation's copy on disk looked idle for as long as its request had been queued, and 0.675 of tokens
were hit instead of 0.775 (the experiment of CachedAttention at 2 TB, see the log).

No order is kept sorted, because values change while nobody asks. When a block must go, up to 512 conversations are
valued, a sample if there are more, and the lowest sixteenth of them go one after the other, each valued again before.
On the traces no hit rate differs by more than .001 from that of the exact order.

What waiting requests need is the look-ahead of CachedAttention: as many requests of the scheduler's queue as fit
into the CPU tier are prefetched, as many as fit into CPU and disk are protected. The windows are sums over the
requests that really wait, where the paper divides capacities by a mean size. A quarter of the CPU tier is left for
what is being computed: prefetching into all of it dropped saves, and hit less than LRU.

`return` evicts first what is worth least by the learned returns. A life table per category (how the last answer ended
and how long it was, the last gap, the number of turns) counts conversations that have not come back yet for as long as
they have been away, and is shrunk towards pooled tables where little is known; with nothing learned, the policy is LRU.
A conversation's worth is the largest P(return within h) / E[time until return or h] over all h: hits per block and
second. A fixed horizon was tried too, and none was better at all capacities.

An answer that calls a tool is recognised by whoever parses it, who tells the core as soon as a call has begun, or by a
stop string that ended it: after both a program usually goes on. In answers that nobody parses calls are unknown.

An agent that waits for its sub-agents is silent for as long as they take, which says nothing of its return. Where the
client gives them one name, those that rest after a call are kept as if pinned while another one has a request, or has
had one within a minute, but for an hour at most. Without a name only what they share stays: a block goes after all that
build on it. A beginning in common does not make a family: all users of one system prompt have it.

A block also has the value of its own reuse. The common beginning of two first prompts, a document or a system prompt,
is a prefix: it rests and returns as conversations do, in categories of its own. A first prompt that nobody shares yet
is a prefix, too, or no document would be kept for its second reader. Without this, `return` hit less than LRU where
documents stand under many conversations. An `auto` that chose between policies by caches of counts saw a conversation's
own blocks only, and so never chose what documents needed; `auto` is `return` now.

Load or recompute follows measured rates: what is stored is loaded unless computing saves more than 20 ms and 10 %. On a
slow or busy disk a request does both: reads are queued from the tail of its history while it computes the head, and
where the two meet, the rest is loaded. So the prediction need not be right: at equal speeds the turn takes 0.67 of
either way alone, and it was never more than 2 % slower than the better one. A disk that is too slow to be read is tried
with a few blocks now and then.
"""
