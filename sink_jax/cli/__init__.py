"""The commands: `main` finds the one that is named, reads its options and says errors in one line.

Each command is a module of its name; `results` is what several have in common. Nothing imports this
room.
"""
