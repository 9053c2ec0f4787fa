"""An index behind HTTP: one process for a GPU, and as many in front of it as JSON needs.

Nothing here is imported by `tigon.retrieve`; the packages are those of the extra `tigon[serve]`.

    app.py        what is answered, and to whom: key, limits, drain
    messages.py   what a request may say, as JSON or as tensors, and how an answer is written
    waiting.py    searches that wait for each other
    counters.py   what Prometheus reads
    running.py    the process: socket, signals, end
"""
