"""Does the configured model compute here what it computes in its own library? Tried on a small copy of it before anything is trained."""
