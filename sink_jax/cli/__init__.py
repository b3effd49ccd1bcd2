"""The commands: `main` finds the one named, reads its options and prints errors in one line.

Each command is a module of its name; `results` holds what several share. Nothing imports this room.
"""
