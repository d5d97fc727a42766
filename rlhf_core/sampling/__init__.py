"""Drawing responses and scoring them."""
