"""The built-in data set: a clerk who answers about digits."""
