"""The command `caravan`: a router with its shards on one host, models on demand, and the small commands beside it.

This package stands above `caravan_router` and `caravan_shard`: it may know the flags of both. Shards are child
processes, so nothing here loads llama.cpp, and `commands` imports what a command needs when it is run.

    commands    which command is meant; `completion` makes the scripts of shells of their parsers
    cli         `caravan serve`: the router in this process, shards as its children
    serve_flags its command line; `peers` has what users of other programs type instead
    shard_flags what the shards are given: flags of the user, and shares of the host
    catalogue   models that are loaded and unloaded as requests ask for them
    servers     a server for the commands below: one that runs, or one that ends with the command
    talk        `caravan run`: a chat in the terminal
    batch       `caravan batch`: the requests of a file
    launch      `caravan launch`: coding agents, each with what `agents` knows of it
    operating   `caravan ps` and `stop`
    bench       `caravan bench`: a load generator for any server, which imports nothing else of ours

Models on demand
----------------
A router asks a `caravan_scheduler.core.catalogue.Catalogue` for a model that no shard serves. The one of `catalogue`
is a loop with three parts:

    what may be asked for    entries: names, files, places on a hub, and models made of others
    what should be loaded    `caravan_scheduler.residency`: a pure function of needs, sizes and room
    what is done             a slot for each model: fetch its file, start its shards, drain and end them

The pure function is asked after every change, so that a change of mind in between costs nothing: whatever is under
way is finished or ended by the next plan. Memory is counted by what a model needs (`catalogue.memory`) before it is
loaded, and by what the host has.

Child processes
---------------
`shard_process` starts one shard, which reports over a pipe that it listens, and starts it again when it dies, after a
pause that grows. Only a shard that has never listened is a failed start, which ends the command.
Meanwhile requests wait for it (`starting`) for as long as it loads its model.
"""
