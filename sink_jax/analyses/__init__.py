"""What the paper finds in models: in those trained here (`training`), and in published ones.

`table` lists the analyses of published models; each is one module with `measure` and `draw`.
"""
