"""All that is the paper's: its numbers, the budgets of its trials, its claims, tables, figures.

`numbers.json` holds every number, and `numbers` is its one reader. How runs and analyses are made
does not belong here; here their numbers are compared with the paper's. `report` is the entry, and
`page` says what a report holds.
"""
