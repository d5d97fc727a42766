"""Programs of untrusted origin, run without network, without the machine's files and within limits."""
