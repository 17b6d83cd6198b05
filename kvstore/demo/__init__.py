"""`kvstore demo`: the whole idea with a real model, in processes of their own, measured beside the native cache.

The parent process imports neither torch nor transformers; its workers do.

    cli        options, exit codes
    play       the order of the scenes, progress
    stage      what the scenes share: settings, processes, prompts, rows
    scenes/    what happens: sharing, equality, speed, faults, outage
    processes  service and worker processes, deadlines
    worker     a worker process: native and shared generation (arms)
    claims     rows -> claims (pure)
    report     tables; results: the JSON file; plot: the picture

Rows are raw, so a reader can compute every claim again.
"""
