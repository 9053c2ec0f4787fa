"""Serve an index over HTTP: one process holds the index, and worker processes handle HTTP and JSON.

`tigon.retrieve` imports nothing from here; dependencies come with the extra `tigon[serve]`. A request passes
through these files in this order:

    run.py           sockets, signals, end
    connections.py   uvicorn with limits on connections, heads and time
    app.py           the ASGI application: key, Host, size, routes; without torch
    bodies.py        JSON or tensors of requests and responses; large_json.py: JSON parsed while the event loop runs
    requests.py      requests that were checked; nothing behind them checks again
    worker.py        with workers: the HTTP process, which passes requests on; frames.py: the socket between both
    worker_pool.py   with workers: the process of the index, which starts them
    service.py       the index: filters, encoder, updates, snapshots
    admission.py     searches in batches
    metrics.py       counters, for Prometheus
    openapi.py       /openapi.json and /docs
"""
