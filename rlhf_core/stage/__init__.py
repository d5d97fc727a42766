"""The frame of every stage: parameters, scratch folder, lock, atomic outputs."""
