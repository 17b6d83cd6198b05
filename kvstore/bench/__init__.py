"""`kvstore bench seed`: the runs of the bug report that this project began with, ours beside transformers' caches.

The parent process imports neither torch nor transformers; its workers do.

    cli        options, exit codes
    play       the order of the sections
    shapes     model shapes and runs
    stage      what sections share: services, workers, rows
    sections/  what is measured: runs, second worker, placement, fidelity, mappings
    worker     a worker process: holds one model, runs arms; arms: the caches; memory: bytes by process
    claims     rows -> claims (pure)
    report     tables; results: the JSON file
    capacity/  `kvstore bench capacity`: tokens that fit, computed

Rows are raw, so a reader can compute every claim again. What fails becomes a row with the error's text.
"""
