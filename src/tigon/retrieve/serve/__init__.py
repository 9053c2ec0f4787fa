"""An index behind HTTP: one process for a GPU, and as many in front of it as JSON needs.

Nothing here is imported by `tigon.retrieve`; the packages are those of the extra `tigon[serve]`.

    application.py   what is answered, and to whom: key, limits, drain; without torch
    app.py           an application that has the index
    front.py         an application that asks the process of the index, and that application's own process
    engine.py        the process of the index behind fronts
    frames.py        what these two say to each other
    messages.py      what a request may say, as JSON or as tensors, and how an answer is written
    pieces.py        large JSON, parsed while the event loop runs
    waiting.py       searches that wait for each other
    documented.py    /docs
    tally.py         requests that were answered, counted
    counters.py      what Prometheus reads
    connections.py   uvicorn with limits on connections, heads and time
    running.py       sockets, signals, end
"""
