"""What a run would take on TPUs that are not here, counted in the compiled program.

The step is compiled for the topology, its memory and traffic are read from it, and a roofline
turns them into seconds. Nothing here runs on a device, and nothing here measures.
"""
