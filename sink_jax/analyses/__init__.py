"""Analyses of models, one decorated function each (Section 3 and Appendix B; StreamingLLM).

`runner` registers and carries them out; `trained` has the measurements that a sweep makes of its
runs; `lm_eval` registers the models with lm-evaluation-harness, an optional package.
"""
