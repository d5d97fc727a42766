"""The scorer `code`: a response's program against the tests of its prompt."""
