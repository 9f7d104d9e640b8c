"""The training loop and what builds its parts."""
