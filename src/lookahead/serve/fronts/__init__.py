"""Front processes: HTTP, JSON, templates and tokenizers have processes of their own, and the engine has one to itself.

    run      the engine's process: it starts the fronts, restarts one that dies, drains, and ends with its reason
    host     the engine's end of the links: requests come in, and what a step brought goes out in one message
    front    a front process: the same routes, keys and limits as a server in one process
    client   the front's end of its link, in place of the engine's client
    link     a link's messages

The engine's process listens to nobody but its fronts, over a pair of sockets each. All fronts accept connections from
the same listening sockets, which the engine's process bound before it loaded the model.
"""
