"""What people look at: the page in the browser, the timeline of a scheduler, recordings of it, and what-ifs.

Everything here follows schedulers and decides nothing: a router serves the same without it. It imports
`caravan_scheduler` and the messages. What happens in a router reaches it through `engine.followers` of
`caravan_router`, which are told what a scheduler hears and decides, in order.

The parts
---------

    part       what it makes of events and actions                     who uses it
    timeline   messages for those who watch: steps, queue, cells       `engine.viewers`, which the page reads over HTTP
    recording  a file of all that a scheduler heard and decided        `--record`; bug reports
    replay     the same calls again, or the same demand otherwise      `caravan replay`
    page       the HTML, styles and modules that browsers run          `http.page` of the router, which serves the files

Why a recording can be played
-----------------------------
The scheduler is pure: the same events at the same times give the same actions. So a recording has the events, with
the time of each call, and the actions, which are only compared. `replay.player` plays it again and shows the first
call that differs, by default without any token: prefixes are known by other names (`recording.names`), and equality
is all that decisions depend on. A recording begins with the process, so the state of a scheduler is never written.

`caravan replay --with FLAG=VALUE` asks what would have happened otherwise. Then the recorded actions do not hold, so
what is played is the demand (`replay.demand`): who asked when for how much, and how long steps of such a shape took. It
runs in virtual time against shards that only keep time (`replay.played_shard`).

What a recording contains comes from anybody. It becomes plain values, and events made of them.

Where a change goes
-------------------

    what watchers are told of a step       `timeline.messages`, and `page/watch`, which draws it
    what a scheduler hears anew            `recording.events`, with its writer and its reader
    what it decides anew                   `recording.write_actions`
    a flag that what-ifs may change        `replay.changes`
    a view of the page                     a folder of modules in `page/`, see docs/page.md
"""
