"""Check the installation: packages, versions, machine."""
