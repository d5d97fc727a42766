"""Where scores come from. A scorer returns a number or says that it couldn't; it never turns a failure into a 0."""
