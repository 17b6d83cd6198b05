"""`kvstore fidelity`: what each codec costs a model, measured through the product beside other lossy caches.

Everything runs in one process; torch and transformers are imported by the first of these that needs them.

    cli        options, exit codes
    play       the order of what is measured, progress, deadline
    settings   what the options say
    models     the model, and windows of the text as token ids
    variants   plain, bias, scaled: the same model with keys that are harder to quantize
    measures   KL, top-1, perplexity (pure); passes over a window
    ours       a codec of ours, attached to an embedded store
    peers      other schemes as a rounding of K and V; caches: transformers' own quantized caches
    interpose  a model that runs with rounded K and V; error of each layer's attention output
    tasks      greedy continuation, needle retrieval
    claims     rows -> claims (pure)
    report     tables; results: the JSON file; plot: the picture

Rows are raw. What fails or is left out becomes a row with the reason.
"""
