"""The pure core of the router: a scheduler that turns events into actions.

`Scheduler.handle(events, now)` reads no clock, draws no random number and does no I/O: the same calls return the same
actions. This package imports `caravan_proto.messages` and the standard library's data types only; `core` has the
types that all packages of the router share. The engine (`caravan_router.engine`) turns what happens into events
(`events`) and executes the actions (`actions`) in order.

Terms
-----
A *step* is one forward pass of a shard. A *cell* is the KV memory of one token. A *request* is what a client waits for;
its *sequence* is its tokens so far. A *stay* is the time that a sequence spends on one shard, under one sequence id;
`Resident` describes it. A request has one stay after another until it has ended.

Life of a request
-----------------

    Submitted --> waiting --- a shard has room, see "The plan" ---> stay --- its last token ---> ended
                   ^  |                                             |  |
                   |  |                                             |  +--- Cancelled; deadline ---> ended
                   |  +--- Cancelled; deadline; no shard; no shard  |
                   |       is large enough --------------> ended    |
                   +------ preempted; shard lost; cache full; failed step; not loaded; not moved
                           (ended if such failures repeat without a token in between)

A request that ends without its last token gets a `Fail`, unless it was cancelled.

Life of a stay
--------------
`shard.resident.TRANSITIONS` is the table of what may follow what. "Live": the request waits for results.

    status     live  the sequence id and its cells             next
    STARTING   yes   taken; the shard is to start it           RUNNING, LOADED, RELEASING
    LOADED     yes   held: cells that were saved before        RUNNING, RELEASING
    RUNNING    yes   held by the shard                         LEAVING, PARKED, RELEASING
    LEAVING    yes   being saved, then released                GONE, or DROPPED if the request ends
    DROPPED    no    the same, for nobody                      GONE
    PARKED     no    kept for others to start from             RELEASING if evicted, DROPPED if saved before that,
                                                               GONE if another takes it over
    RELEASING  no    released by the next command              GONE
    GONE       no    the id is free, or another's              -

Replies come late: a command knows its residents, not only their ids (`shard.command.InFlight`), and a result for a
resident that is not live is ignored.

Beam searches
-------------
The members of a beam search are requests that are submitted together, each with a sequence (`beams.BeamGroup`). Only
the first one waits in the queue. It needs as many ids as the search is wide and starts alone; the others branch off
from its prompt. Beams are residents that never decode: an Evaluate computes one token of each and returns the likeliest
next tokens, of which the scheduler chooses the next beams. The stay of a beam that is dropped ends, and its sequence
starts another, as a branch of a beam that continues. Evaluates and the other steps of a shard take turns. A member that
loses its cells takes the whole search with it, and the leader waits again.

What outlives a stay
--------------------
The cells of a sequence can be saved as *runs* in the shard's host memory, and move on to its disk. A run is named by a
hash of all tokens up to its end (`prefix_keys`), so a prefix is found wherever it was saved, and a common one is saved
once. `shard.saved_runs` knows the runs of a shard and says which make way for others. A sequence that is preempted, or
that ended and should no longer take cells, is saved; a request that begins like it loads what was saved, where that is
faster than computing. Where cells are shared, it loads only what no sequence has in cells, and waits for another that
loads its prefix. A shard can fetch the runs of another one into its own memory (`transfers`). So a request
continues elsewhere when its shard drains, or starts where there is room.

Cells of pictures and sounds are numbers in a prompt, as tokens are (`core.prompt_media`). A shard encodes what a
request needs of them before the request starts there (`encodings`): it waits for that as for a prefix. If the shard has
dropped it meanwhile, the step changes nothing and the request waits again. Where a medium must not be cut, chunks and
shared prefixes end at its borders (`Sequence.border`).

When a request starts, `recomputed` says why the tokens of its prompt that are not cached have to be computed:
`known_prompts` has hashes of the prompts that each tenant sent before, and what became of their cells. Nothing else
depends on it.

Requests that continue each other are a job (`jobs`). What a job has in cells is held for its next request against
others that wait, as long as that is worth more than their waiting: see `jobs.expected_return`. The rest makes way by
last use, from its end if that suffices.

Operators pin prefixes (`pins`). The runs that hold them do not make way for others; cells do.

Who writes what
---------------
Everybody may read everything. One owner writes; others call the owner's operations. Types help: what only reads a
shard takes a `shard.account.ShardAccount`, of which the ledger is the writable form. The account is made of parts, each
with a question of its own: `capacity`, `stays`, `commands`, `cells`, `header`, `runs`, `saves`, `checkpoints`, `costs`,
`claims`, `media` and `drain`.

    what                                                        owner
    ids, cells, stays, commands under way and costs of a shard  shard.ledger.ShardLedger
    what a shard has saved                                      shard.saved_runs.SavedRuns, called by the ledger,
                                                                shard.saves and planning.moving
    where prompts of a shard pause                              shard.checkpoints.Checkpoints, called by the ledger and
                                                                the planner
    whether a shard drains                                      shard.stays.Drain, which the scheduler begins and
                                                                planning.moving ends
    runs on their way from shard to shard                       transfers.Transfers, called by planning.moving and
                                                                the scheduler
    media that shards encode, and on which they were lost       encodings.Encodings, called by planning.admission, the
                                                                state and results.EncodingResults
    which media a shard has encoded                             shard.account.ShardMedia, called by
                                                                EncodingResults
    which requests exist, wait or stay; what is charged         state.SchedulerState
    order of waiting requests, who was bypassed, whether due    waiting.queue.WaitingQueue
    which shards could take a request, and hold its prefix      planning.shard_index.ShardIndex and its parts, updated
                                                                by the planner
    what a request waits for; how long it waits for its prefix  planning.admission.Admission, by what placement returns
    which requests are a job, and how soon it comes back        jobs.jobs.Jobs, called by the state and the scheduler
    for how long cells were held for a job                      jobs.expected_return.ExpectedReturn
    prompt logprobs of sequences, for others that begin alike   known_logprobs.KnownLogprobs
    which prompts were started, and what became of them         known_prompts.KnownPrompts, called by the state and
                                                                the scheduler
    which prefixes are pinned                                   pins.Pins, called by the state and the scheduler
    the leased shards; a sequence's tokens, feedback and losses scheduler.Scheduler
    what the next command of a shard carries                    planning.step_plan.StepPlan
    the beams of a search                                       beams.BeamGroup, called by the scheduler; the step plan
                                                                tells it who has a place
    actions of this call, in order                              outbox.Outbox

Two caches have two: placement fills `Sequence.common`, and `shard.prefix_reuse` fills `Sequence.matches`. The state
empties both when the sequence has a place.

The plan
--------
After events, for the shards that have changed and have nothing under way, or only a Decode:

    for each shard:  if its decodes lack cells: preempt the lowest priority, the newest first
                     else if it drains: preempt those that have room elsewhere
                     else if a sequence is too long for the layout, or fits the faster one again: change the layout
                     else if prompts are where others will continue, and cannot be cut back to that: save them there
                     else save ended sequences whose cells or ids are in the way, or while it is idle
    if that preempted nobody, for each waiting request in the queue's order:
        choose the shard where it starts soonest: cells by forecast, a free id, what is cached or saved there,
                                                  token budget, the adapter's turn
        it has a place:            the shard's step plan takes it, with a first chunk of its prompt, unless it is
                                   faster to fetch what another shard has saved of it: then it waits for that
        its media are not encoded: it is passed over until they are
        its prefix is on its way:  it is passed over
        a busy shard has its prefix, and waiting for that costs less than computing it: it is deferred until then
        it has none, and is first: preempt lower priorities where that helps; then admit nobody else
        it has none:               lower priorities wait too; others go before it at most `max_bypass` times, which
                                   do not count while cells are held against it
    for each shard that has changed or got a request:
                     send a Load for those that were saved; else a Prefill of chunks, with decodes riding; else a
                     Decode of many steps, which the next command cuts short; else a FilterBatch that only releases.
                     After a change of the layout or long copies, a Decode of one step goes first.
                     Beam searches have every second step, an Evaluate

What a plan looks at
--------------------
A plan looks at what changed, so that its cost grows little with the number of shards and the length of the queue
(`tests/bench/plan_cost.py`). A request that can start is compared with what several shards hold of it and compute.

Costs are seconds, by what was measured of each shard: computing what is not cached, sharing the shard with others, and
waiting. A request waits for the shard that has its prefix (`planning.shard_index.ShardQueues`) while that costs less
than computing the prefix elsewhere, which delays everybody there. So a prefix stays where it is, moves when its shard
is full, and is on several shards when many ask for it.

- Events note which shards changed, and where a request may start by that (`SchedulerState.note_change`). `ShardIndex`
  keeps the shards that can take a request, those that will after the step under way, and, by hashes of beginnings, the
  prompts under way and the shards that hold a prefix.
- The queue merges its order from buckets that are sorted, as far as it is read. `Admission` reads it while a shard is
  open, and stops after 64 requests without a place. `placement.choose` changes nothing: it returns a place or what the
  request waits for, which the admission notes.
- What was found stays known until it changes: the match of a prompt until the shard's tree changes, that a shard has no
  cells until it gets some, that a prefix is on its way until the shard that computes it has done another step.

Time alone changes a shard only where it saves when it is idle or may return to the faster layout: a Tick looks at all.

Where a new rule goes
---------------------

    who goes first; who gets how much       waiting.queue.WaitingQueue.in_order; waiting.fair_share
    when a request is too late              waiting.queue
    when one ends without its last token    failures
    whether there is room for one more      planning.forecast; output_lengths
    which shard takes a request, and what   planning.placement; planning.shard_index
    waiting costs
    which shards and requests are looked at planning.shard_index; planning.admission
    what one step carries, and how much     planning.step_plan; planning.chunking
    who may claim the target of streams     shard.account.Claims
    who gives way to whom, and how          planning.preemption
    what is saved, and when                 planning.planner; shard.saved_runs; shard.checkpoints
    what is encoded, and when               planning.admission
    which layout the cells have             planning.layout
    which cells and ids are given up        shard.ledger; jobs.expected_return
    what is copied or loaded, not computed  shard.prefix_reuse
    which id a sequence gets                shard.ledger
    why a prompt is computed again          recomputed
    what a shard can report or must do      events or actions, then Scheduler._apply or StepPlan.send, engine's codecs

`invariants.check` says what holds between any two calls; the property tests check it after every event.

An exception is a bug. `fault` tells for which request the scheduler worked, and `recovery` goes on without that
request, or anew with all others: decision 60.
"""
