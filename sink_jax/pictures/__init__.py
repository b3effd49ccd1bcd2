"""Pictures of plain rows in one style: lines, bars, intervals, grids of heads, attention maps.

Blocks go to the right and heads down; queries go down and keys to the right.
"""
