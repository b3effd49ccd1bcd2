"""The leaderboard of remedies against attention sinks, one protocol for all of them.

`axes` says what is compared and from where a difference counts, `standings` reads it off the runs
of configs/remedies.py and gives verdicts, `findings` has what each remedy's own paper reports,
`overview` answers first, and `page` writes the report. `grafts` and `graft_page` do the same for
remedies that a trained model is given (configs/graft.py). Runs that vary the paper's own trials
belong to the room `paper`.
"""
