"""Analyses of models, one decorated function each (Section 3 and Appendix B; StreamingLLM).

`runner` registers and carries them out; `trained` has what a sweep measures of its runs; `lm_eval`
registers the models with lm-evaluation-harness, an optional package.
"""
