"""Tables of runs, verdicts on the paper's claims, and pages with pictures.

`runs` reads runs, `validity` says which are evidence; `claims`, `compare` and `stats` judge;
`figures` draws, and `pages` puts pages together from sections. Nothing here trains; models are
loaded only for attention maps.
"""
