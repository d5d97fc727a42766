"""The library of the RLHF chain: data, models, algorithms, engines, trainers, evaluation, report."""
