"""Published models: downloaded by name, read as our models, and written for other programs.

A family is a function of config.json and a row of a table, in `llama`, `gpt`, `moe` or `jamba`.
`load` also loads training runs; measurements of models belong to `analyses`.
"""
