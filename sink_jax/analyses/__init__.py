"""One file per analysis of models that the paper carries out beyond the probe.

A module measures one model and draws several; `registry` lists them with their options, and
`runner` carries them out. Reports of their results belong to `paper`. The files lm_eval_* hand
a model to lm-evaluation-harness, which is an optional package.
"""
