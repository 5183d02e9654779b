"""Caravan's router: HTTP in, a scheduler that decides every step, gRPC out to the shards.

One process with one event loop. What is decided is decided elsewhere: `caravan_scheduler` says what each shard
computes next, `caravan_dialects` what a request means and what its reply is. This package is what surrounds both:
sockets, tasks, clocks, files and metrics. `app` builds it of its configuration and is the only module that knows
every part.

A request, from the outside in
------------------------------

    http.server       a connection, TLS, the request id, the key (`auth`), the body's bytes
    http.<dialect>    the route: which body it takes, which answer it makes
    http.generation   the model, permits, counts; then `caravan_dialects` validates, and the engine is asked
    engine.batcher    one for each model: the only owner of its scheduler and of its requests' streams
    engine.link       one for each shard: connect, lease, commands, results, the end
    engine.client     gRPC; every failure of it is one type of error

and a token the same way back: `engine.streams` wakes the handler, which writes what the dialect made of it.

Who may do what
---------------

- Only `engine.batcher` calls its scheduler, in one task: events go in by methods that do not wait, and actions are
  executed in order. So no lock is needed, and a recording of these calls is complete.
- Only `engine.link` talks to its shard. Whatever ends it, the scheduler hears one event, that the shard is lost.
- Handlers wait for tokens, for a model that loads, or for a slow client, and for nothing else. Whatever blocks runs
  in a thread or a process: tests fail if the loop is blocked.
- `metrics` and `tracing` implement interfaces of `caravan_scheduler.core` and `engine.observer`. Whoever reports
  something calls a method with its name, and knows neither Prometheus nor OpenTelemetry.
- `engine.followers` are told what schedulers hear and decide (`caravan_studio`). Serving does not depend on them.
- A model by name that is not loaded is a question to `caravan_scheduler.core.catalogue`, which `caravan_serve` answers:
  this package never starts a shard.

The end
-------
SIGTERM stops accepting, lets running requests end within the graceful termination timeout, and gives the shards back
with what they keep of ended sequences. SIGHUP reads keys and certificates again.

Where a change goes
-------------------

    a path, a header, a limit of connections    `http`
    how shards are found                        `engine.discovery`, `kubernetes`
    how a shard is leased, watched or lost      `engine.link`
    a metric                                    `metrics.table`, and a method of `metrics.recorder`
    a flag                                      `config`
"""
