"""Checks the installation: packages, versions, machine."""
