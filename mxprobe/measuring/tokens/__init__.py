"""Log-probabilities of both sides, token by token."""
