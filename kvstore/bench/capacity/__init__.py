"""`kvstore bench capacity`: how many tokens fit into a budget at each codec, with the codec's measured loss beside it.

Computed, not measured: by the layout of blocks and the service's own rule for slabs and ledger. Imports no torch.

    cli        options, exit codes
    models     shapes of K and V: named ones, or from a model's config.json
    rows       shape, codec and budget -> row; rows -> claims (pure)
    loss       what `kvstore fidelity` measured, the worst variant of each codec
    report     tables; the JSON file
"""
