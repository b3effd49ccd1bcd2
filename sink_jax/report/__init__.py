"""Tables of runs, verdicts on the paper's claims, and pages with pictures.

`runs` reads runs, `validity` says which are evidence; `claims`, `compare` and `stats` judge;
`figures` and `pages` show. Nothing here trains; models are loaded only for attention maps.
"""
