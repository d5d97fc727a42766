"""A plan for a cluster on paper: memory of each role, time of each phase, and a placement that fits (docs/planning.md).

Pure arithmetic on numbers: nothing here needs torch or a GPU. Command: python -m tools.planning --help.
"""
