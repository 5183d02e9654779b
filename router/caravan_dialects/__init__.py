"""The APIs that clients speak, as values: a body becomes a request that needs no further checks, tokens become a reply.

Nothing here reads a socket. A caller brings the bytes of a body and an engine (`caravan_scheduler.core.engine`), and
gets the bytes of a reply. `caravan_router.http` is such a caller, with HTTP around it, and so is the Python package
`caravan`, without. The package imports `caravan_scheduler.core`, and of `caravan_proto` the messages and limits.

Terms
-----
A *dialect* is the API of one family of clients: TGI, OpenAI, Anthropic, Ollama, llama-server. Its folder in `api` has
the bodies it accepts, its own rules, its replies and the form of its errors. A *rule* is a function that returns the
error of a request that breaks it. A *generation* is one answer to one prompt; a request for `n` choices has `n` of
them.

From a body to a reply
----------------------

    bytes --- api.body: the type of the body, which forbids unknown fields ---> body
    body  --- the dialect's validation, api.generation, `rules` --------------> Asked, then prompts and GenerationSpecs
          --- chat: the model's template, in a process of its own
          --- media: files of pictures and sounds, in a process of their own
          --- engine: a shard tokenizes
    spec  --- engine ---------------------------------------------------------> tokens, as they are made
    token --- text: UTF-8, stop strings ----- chat: thoughts, tool calls -----> pieces
    piece --- the dialect's reply, api.stream --------------------------------> bytes of a whole reply or of an event

A dialect that sends conversations is translated into a chat request, whatever it is called there, and gets the checks
of all chats. So a rule of sampling or of tools stands once. `api.error_table` is the one table of errors, of which each
dialect makes its own form.

What belongs to whom
--------------------

    package          what it knows                                     what it must not know
    api              fields, rules, errors, replies                    sockets, connections, Prometheus
    auth             keys as values: priority, tenant, rates, permits  where keys are kept (`caravan_router.auth`)
    chat             templates, tool calls, thoughts                   dialects; which bytes a client gets
    text             bytes of tokens, stop strings                     chats
    media            files of pictures and sounds, their limits        messages that contain them
    conversations    chains of nodes in SQLite, exact tokens           cells, which are found by prefix
    guarded_process  a child process that may be killed                what it computes
    guarded_child    messages and limits in such a process             who asks it

What a client controls the cost of runs in a child process with limits on time and memory: rendering templates
(jinja2) and decoding files (Pillow, miniaudio). Each of these is imported by one module, in that process.

Where a new rule goes
---------------------

    a field of one dialect                 its `schema`, and its `validation` or `plan`
    a check that all dialects make alike   `api.generation`
    an error, its status and words         `api.errors`, `api.error_table`
    a whole dialect                        a folder of `api`, and its routes in `caravan_router.http`
    how a family writes tool calls         `chat.tool_derivation`, or a row of the table in `chat.tool_format`
    a kind of file                         `media.file`, and its decoder in `media.decoder_process`
"""
