"""What is installed, whether it fits together, and what is missing."""
