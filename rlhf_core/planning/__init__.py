"""A resource estimate for a cluster: memory of each role, time of each phase, and a placement that fits (docs/planning.md).

Pure arithmetic, without torch or a GPU. Command: rlhf plan --help.
"""
