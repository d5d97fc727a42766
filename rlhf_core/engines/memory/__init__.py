"""Memory of a GPU that several engines share."""
